"""The two halves of a causal LM: the hidden states that its head reads, and the logits that it makes of them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def causal_lm(model: nn.Module) -> PreTrainedModel | None:
    """The model itself, or the one inside PEFT's wrapper, whose layers hold the adapters; None for anything else."""
    unwrap = getattr(model, "get_base_model", None)
    found = unwrap() if unwrap is not None else model
    return found if isinstance(found, PreTrainedModel) else None


def last_hidden(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """What the head reads, [B, T, H], of token ids int64 [B, T]."""
    decoder = getattr(model, model.base_model_prefix)
    return cast(Tensor, decoder(input_ids=inputs, use_cache=False).last_hidden_state)


def output_head(model: PreTrainedModel) -> nn.Module:
    """The module that makes logits."""
    return cast(nn.Module, model.get_output_embeddings())


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H], as the model's own forward makes them (Granite divides them)."""
    logits = cast(Tensor, output_head(model)(states))
    scale = getattr(model.config, "logits_scaling", None)
    logits = logits if scale is None else logits / scale
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def at_rows(states: Tensor, rows: Tensor | None) -> Tensor:
    """Some of the first T - 1 positions of states [B, T, H], [n, H]; None for all of them."""
    return picked(states[:, :-1].flatten(0, 1), rows)


def picked(flat: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows of [B (T - 1), ...]; None for all of them."""
    return flat if rows is None else flat.index_select(0, rows.to(flat.device))
