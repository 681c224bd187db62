"""Phi-3 and Phi-4: LLaMA's layout with fused projections, one matrix for q, k and v and one for gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    LAYER,
    decoder_rows,
    first_obstacle,
    input_rows,
    output_bias_obstacle,
    output_rows,
    width_obstacle,
)
from pyprune.families.gguf_types import gguf_forms
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _longrope_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why the stock configuration refuses the longrope factors; None if it takes them, or has none."""
    rope = config.rope_parameters
    if rope.get("short_factor") is None:
        return None
    hidden, heads, factors = len(plan.hidden), len(plan.layers[0].query_heads), len(rope["short_factor"])
    counted = int(hidden // heads * rope["partial_rotary_factor"]) // 2
    if counted == factors:
        return None
    return (
        f"Phi-3's configuration counts {counted} longrope factors from hidden {hidden} / {heads} heads, not {factors}"
    )


FAMILIES = (
    Family(
        model_type="phi3",
        classes=StockClasses.locate("phi3", "Phi3"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=gguf_forms("phi3"),
        rows=decoder_rows(
            (
                *input_rows(LAYER + "self_attn.qkv_proj", ("heads", "kv_heads", "kv_heads"), "attention"),
                *output_rows(LAYER + "self_attn.o_proj", "heads", "attention"),
            ),
            (
                *input_rows(LAYER + "mlp.gate_up_proj", ("ffn", "ffn"), "mlp"),
                *output_rows(LAYER + "mlp.down_proj", "ffn", "mlp"),
            ),
        ),
        stock_targets=(
            StockTarget("phi3", first_obstacle(output_bias_obstacle("Phi-3"), width_obstacle, _longrope_obstacle)),
        ),
    ),
)
