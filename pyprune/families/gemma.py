"""Gemma 3 text: four (1 + w) norms a layer, an embedding scaled by sqrt(hidden_size), two kinds of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    EMBEDDING,
    HEAD,
    HEAD_NORMS,
    LAYER,
    attention_rows,
    divisible_or_why,
    gated_mlp_rows,
    norm_rows,
    output_bias_or_why,
    uniform_or_why,
)
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_gemma3(config: PretrainedConfig, plan: PrunePlan) -> str:
    return output_bias_or_why(config, "Gemma 3's MLP") or uniform_or_why(plan) or divisible_or_why(plan)


_ROWS = (
    EMBEDDING,
    *norm_rows(LAYER + "input_layernorm", "pre_norm", "attention"),
    *attention_rows(biases=True),
    *HEAD_NORMS,
    *norm_rows(LAYER + "post_attention_layernorm", "post_norm", "attention"),
    *norm_rows(LAYER + "pre_feedforward_layernorm", "pre_norm", "mlp"),
    *gated_mlp_rows(),
    *norm_rows(LAYER + "post_feedforward_layernorm", "post_norm", "mlp"),
    *norm_rows("model.norm", "final_norm"),
    HEAD,
)

FAMILIES = (
    Family(
        model_type="gemma3_text",
        classes=StockClasses.of_transformers("gemma3", "Gemma3", config="Gemma3TextConfig"),
        rows=_ROWS,
        stock_targets=(StockTarget("gemma3_text", _why_not_gemma3),),
        unit_offset_norm=True,
        scaled_embedding=True,
    ),
)
