"""Tiny random models for servers, of every family, and a cut that gives each layer separate sizes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from pyprune.families import NamedParam, family_for, named_axes
from pyprune.plan import PrunePlan

VOCAB = 384
"""Rows of the embedding; more than :func:`byte_tokenizer` needs."""
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_WINDOW = 200
"""Tokens: not a whole number of blocks of vLLM's cache, and less than a long prompt."""
_VALUES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    },
    "mistral": {"sliding_window": _WINDOW},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 128, "dropout": 0.0, "activation_function": "relu"},
    "phi": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": _WINDOW},
}
"""Model type -> what its configuration has besides, so that each rule of its own matters."""


def tiny_served_model(model_type: str, positions: int) -> PreTrainedModel:
    """A model of 4 layers with heads that vLLM serves on a CPU.

    It is damped, and its head once more, which all differences go through: in float32 the log probabilities of 3,000
    tokens are about 5e-6 away from those in float64 at most. One matrix that is 2 % too large makes 8e-5 (queries of
    OPT) to 5e-2, except where a norm takes the factor out again.

    Args:
        model_type: of Transformers.
        positions: tokens of the longest sequence.
    """
    values = {**_SIZES, "max_position_embeddings": positions, **_VALUES.get(model_type, {})}
    if model_type == "opt":  # has a KV head for each query head, and no name for either size
        del values["num_key_value_heads"], values["head_dim"]
    model = random_model(model_type, **values)
    damp_(model)
    damp_(model.get_output_embeddings())
    return model


def random_model(model_type: str, *, seed: int = 0, **values: Any) -> PreTrainedModel:
    """A randomised float32 model in eval mode; norms and biases are random as well.

    Args:
        model_type: of Transformers.
        seed: of the parameters.
        values: of its configuration.
    """
    config = AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise_(model, seed)
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def randomise_(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter values that a wrong rule cannot hide behind (norm weights far from 1 or 0)."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            p.add_(0.3 * noise)
        else:
            p.copy_(noise * (0.6 if p.dim() == 1 else 1.5 * p.shape[-1] ** -0.5))


@torch.no_grad()
def damp_(model: nn.Module) -> None:
    """Halve the matrices. Randomised models are harsh on purpose: over 150 tokens Transformers' own float32 logits are
    2e-5 away from float64. Damped, rounding stays far below the tolerance and a wrong rule does not.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.5)


@torch.no_grad()
def weaken_(model: PreTrainedModel, blocks: Collection[tuple[int, str]]) -> None:
    """Take from blocks most of what they add to the stream, so that a model without them is nearly the same.

    Args:
        model: of a family.
        blocks: (layer, "attention" or "mlp").
    """
    family = family_for(model)
    for p in last_of(model, blocks):
        offset = family.offset(p.row)
        p.parameter.copy_((p.parameter + offset) * 0.01 - offset)


def last_of(model: PreTrainedModel, blocks: Collection[tuple[int, str]]) -> list[NamedParam]:
    """The parameters that scale what blocks add to the stream.

    Args:
        model: of a family.
        blocks: (layer, "attention" or "mlp").
    """
    rows = [p for p in named_axes(model) if (p.layer, p.row.block) in blocks]
    return [p for p in rows if p.row.role == "post_norm"] or [p for p in rows if p.row.role == "writer"]


def shareable(plan: PrunePlan) -> PrunePlan:
    """Cut a model of 4 layers, 4 query heads of 32 channels and 128 hidden channels for two ranks.

    Other heads and FFN widths in every layer, and two blocks missing. Two ranks can share all of it: one KV head of two
    twice, and where each query head has one KV head, an even number of those.
    """
    plan = plan.keep_hidden(range(104)).with_layer(0, ffn=range(24)).with_layer(1, query_heads=[], kv_heads=[])
    if plan.dense.group_size == 1:
        plan = plan.with_layer(2, query_heads=[1, 3], kv_heads=[1, 3], ffn=range(8, 40))
        return plan.with_layer(3, ffn=[])
    plan = plan.with_layer(2, query_heads=[2, 3], kv_heads=[1], ffn=range(8, 40))
    return plan.with_layer(3, query_heads=[1, 3], ffn=[])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, without merges, after <s> and </s>: 258 in all."""
    words = {word: index for index, word in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **ends)
