"""Phi-3 and Phi-4: LLaMA's layout with fused projections, one matrix for q, k and v and one for gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    EMBEDDING,
    HEAD,
    LAYER,
    input_rows,
    norm_rows,
    output_bias_or_why,
    output_rows,
    uniform_or_why,
)
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_phi3(config: PretrainedConfig, plan: PrunePlan) -> str:
    return output_bias_or_why(config, "Phi-3") or uniform_or_why(plan) or _longrope_or_why(config, plan)


def _longrope_or_why(config: PretrainedConfig, plan: PrunePlan) -> str:
    """Why the stock configuration refuses the longrope factors; empty when it takes them, or there are none."""
    rope = config.rope_parameters
    if rope.get("short_factor") is None:
        return ""
    hidden, heads, factors = len(plan.hidden), len(plan.layers[0].query_heads), len(rope["short_factor"])
    counted = int(hidden // heads * rope["partial_rotary_factor"]) // 2
    if counted == factors:
        return ""
    return (
        f"Phi-3's configuration counts {counted} longrope factors from hidden {hidden} / {heads} heads, not {factors}"
    )


FAMILIES = (
    Family(
        model_type="phi3",
        classes=StockClasses.of_transformers("phi3", "Phi3"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        rows=(
            EMBEDDING,
            *norm_rows(LAYER + "input_layernorm", "pre_norm", "attention"),
            *input_rows(LAYER + "self_attn.qkv_proj", ("heads", "kv_heads", "kv_heads"), "attention"),
            *output_rows(LAYER + "self_attn.o_proj", "heads", "attention"),
            *norm_rows(LAYER + "post_attention_layernorm", "pre_norm", "mlp"),
            *input_rows(LAYER + "mlp.gate_up_proj", ("ffn", "ffn"), "mlp"),
            *output_rows(LAYER + "mlp.down_proj", "ffn", "mlp"),
            *norm_rows("model.norm", "final_norm"),
            HEAD,
        ),
        stock_targets=(StockTarget("phi3", _why_not_phi3),),
    ),
)
