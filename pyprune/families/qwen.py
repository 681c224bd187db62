"""Qwen2 (q/k/v biases) and Qwen3 (RMSNorm on every query and key head)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    HEAD_NORMS,
    biased_target,
    decoder_rows,
    first_obstacle,
    heads_obstacle,
    output_bias_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_forms import DECI, GgufForm, GgufSizes
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _head_dim_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    hidden, heads = len(plan.hidden), len(plan.layers[0].query_heads)
    if plan.dense.head_dim * heads == hidden:
        return None
    return f"serving engines derive Qwen2's head_dim as {hidden} / {heads}, not {plan.dense.head_dim}"


def _window_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    return "LLaMA has no sliding-window layers" if "sliding_attention" in config.layer_types else None


def _partial_window_obstacle(config: Mapping[str, Any]) -> str | None:
    """Explain which assertion of vLLM's classes fails, or None."""
    layers, first = config.get("num_hidden_layers", 0), config.get("max_window_layers", 28)
    kinds = len(set(config.get("layer_types") or ()))
    if not kinds and config.get("use_sliding_window"):
        kinds = 2 if 0 < first < layers else 1
    if kinds < 2 or first == layers:
        return None
    return "vLLM's stock classes of Qwen take a sliding window in every layer or in none, and this model has both."


def _openelm_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if not sizes.tied:
        return "it has no head of its own, so that the embedding must be tied"
    if not all(all(layer) for layer in sizes.layers):
        return "none of its sub-blocks can be skipped"
    return None


FAMILIES = (
    Family(
        model_type="qwen2",
        classes=StockClasses.locate("qwen2", "Qwen2"),
        vllm_layer="pyprune.serving.vllm.layers:BiasedDecoderLayer",
        unserved=_partial_window_obstacle,
        gguf=(GgufForm("qwen2", square=True, yarn=True), DECI),
        rows=decoder_rows(attention_bias=True),
        stock_targets=(
            StockTarget("qwen2", first_obstacle(_head_dim_obstacle, output_bias_obstacle("Qwen2"), width_obstacle)),
            biased_target("llama", first_obstacle(_window_obstacle, width_obstacle, heads_obstacle), qkv_biases=True),
        ),
    ),
    Family(
        model_type="qwen3",
        classes=StockClasses.locate("qwen3", "Qwen3"),
        vllm_layer="pyprune.serving.vllm.layers:NormedDecoderLayer",
        unserved=_partial_window_obstacle,
        gguf=(
            GgufForm("qwen3", (), yarn=True),
            GgufForm("openelm", (), per_layer=True, fused_qkv=True, obstacle=_openelm_obstacle),
        ),
        rows=(*decoder_rows(attention_bias=True), *HEAD_NORMS),
        stock_targets=(StockTarget("qwen3", first_obstacle(output_bias_obstacle("Qwen3's MLP"), width_obstacle)),),
    ),
)
