"""The two halves of a causal LM: the hidden states that its head reads, and the logits that it returns."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def causal_lm(model: nn.Module) -> PreTrainedModel | None:
    """Return the model itself, or the one inside PEFT's wrapper, with the adapters; None for anything else."""
    unwrap = getattr(model, "get_base_model", None)
    base = unwrap() if unwrap is not None else model
    return base if isinstance(base, PreTrainedModel) else None


def last_hidden(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Return the head's input, [B, T, H], for token ids int64 [B, T]."""
    decoder = getattr(model, model.base_model_prefix)
    return cast(Tensor, decoder(input_ids=inputs, use_cache=False).last_hidden_state)


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes logits."""
    return cast(nn.Module, model.get_output_embeddings())


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Return logits [..., V] of hidden states [..., H], scaled as in the model's own forward (Granite divides them)."""
    logits = cast(Tensor, output_head(model)(states))
    scale = getattr(model.config, "logits_scaling", None)
    logits = logits if scale is None else logits / scale
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def select_positions(states: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows [n, H] of the first T - 1 positions of states [B, T, H]; None for all of them."""
    return select_rows(states[:, :-1].flatten(0, 1), rows)


def select_rows(flat: Tensor, rows: Tensor | None) -> Tensor:
    """Select rows of [B (T - 1), ...]; None for all of them."""
    return flat if rows is None else flat.index_select(0, rows.to(flat.device))
