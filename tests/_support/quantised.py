"""Quantised checkpoints of tiny models, and what they compute, written down without compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from tests._support.models import tiny_model
from tests._support.served import OPT_SIZES, SIZES, damp_
from tests._support.tokenizer import tiny_tokenizer

WIDE = 96
"""An FFN width that has narrower multiples of 32."""


def in_32s(plan: PrunePlan) -> PrunePlan:
    """Other query heads here, a KV group less there, narrower FFNs and a narrower stream, all in 32s."""
    plan = plan.drop_layers([3]).keep_hidden(range(96))
    grouped = plan.dense.num_key_value_heads < plan.dense.num_attention_heads
    plan = plan.with_layer(0, query_heads=[0, 2], kv_heads=[0, 1] if grouped else [0, 2], ffn=range(64))
    return plan.with_layer(2, query_heads=[2, 3], kv_heads=[1] if grouped else [2, 3], ffn=range(8, 40))


def cut_model(name: str, cut: Callable[[PrunePlan], PrunePlan], **sizes: Any) -> tuple[PreTrainedModel, PrunePlan]:
    """A tiny model at sizes that vLLM serves, cut, and its plan."""
    ffn = {"ffn_dim": WIDE} if name.startswith("opt") else {"intermediate_size": WIDE}
    model = tiny_model(name, **(OPT_SIZES if name.startswith("opt") else SIZES), **(ffn | sizes))
    damp_(model)
    plan = cut(family_for(model).plan(model.config))
    compact_(model, plan)
    return model, plan


def write_pair(
    out: Path, name: str, cut: Callable[[PrunePlan], PrunePlan], quantise: str, dtype: str | None = None
) -> None:
    """Export the same cut model plain (``out/plain``) and quantised (``out/quantised``)."""
    model, plan = cut_model(name, cut)
    given: dict[str, Any] = {"plan": plan, "tokenizer": tiny_tokenizer(), "provenance": {"method": "by hand"}}
    given["dtype"] = dtype
    export(model, out / "plain", **given)
    export(model, out / "quantised", quantise=quantise, **given)


def rounded(weight: Tensor, bits: int, group: int | None = None) -> Tensor:
    """[output, input] float32: the nearest multiples of each group's largest weight / (2^bits - 1) * 2."""
    parts = weight.unflatten(-1, (-1, group or weight.shape[-1]))
    scale = parts.abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return ((parts / scale).round().clamp(low, high) * scale).flatten(-2)
