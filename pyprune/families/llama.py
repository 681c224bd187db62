"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, Row, StockTarget
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "model.layers.{i}."


def decoder_rows(*, attention_bias: bool = False, output_bias: bool = False, mlp_bias: bool = False) -> tuple[Row, ...]:
    """The table shared by every LLaMA-like decoder (gated MLP, two pre-norms a layer)."""
    rows = [
        Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
        Row(LAYER + "input_layernorm.weight", ("hidden",), "pre_norm", "attention"),
        Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.o_proj.weight", ("hidden", "heads"), "writer", "attention"),
        Row(LAYER + "post_attention_layernorm.weight", ("hidden",), "pre_norm", "mlp"),
        Row(LAYER + "mlp.gate_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
        Row(LAYER + "mlp.up_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
        Row(LAYER + "mlp.down_proj.weight", ("hidden", "ffn"), "writer", "mlp"),
        Row("model.norm.weight", ("hidden",), "final_norm"),
        Row("lm_head.weight", ("vocab", "hidden"), "head"),
    ]
    if attention_bias:
        rows += [
            Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention"),
            Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention"),
            Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
        ]
    if output_bias:
        rows.append(Row(LAYER + "self_attn.o_proj.bias", ("hidden",), "writer", "attention"))
    if mlp_bias:
        rows += [
            Row(LAYER + "mlp.gate_proj.bias", ("ffn",), "inner", "mlp"),
            Row(LAYER + "mlp.up_proj.bias", ("ffn",), "inner", "mlp"),
            Row(LAYER + "mlp.down_proj.bias", ("hidden",), "writer", "mlp"),
        ]
    return tuple(rows)


def uniform_or_why(plan: PrunePlan) -> str:
    """Why no stock architecture can hold the plan's widths; empty when one can."""
    return "" if plan.is_uniform else "widths differ between layers or a sub-block is skipped"


def divisible_or_why(plan: PrunePlan) -> str:
    """Why the sliced hidden size breaks the rule that heads divide it; empty when it does not."""
    hidden, heads = len(plan.hidden), len(plan.layers[0].query_heads)
    return "" if hidden % heads == 0 else f"hidden {hidden} is not a multiple of {heads} heads"


def _why_not_llama(config: PretrainedConfig, plan: PrunePlan) -> str:
    return uniform_or_why(plan) or divisible_or_why(plan)


def _why_not_mistral(config: PretrainedConfig, plan: PrunePlan) -> str:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "Mistral has no biases"
    return uniform_or_why(plan)


def _no_window(config: PretrainedConfig) -> dict[str, Any]:
    return {"sliding_window": None}


FAMILIES = (
    Family(
        model_type="llama",
        rows=decoder_rows(attention_bias=True, output_bias=True, mlp_bias=True),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(
            StockTarget("llama", _why_not_llama),
            StockTarget("mistral", _why_not_mistral, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        rows=decoder_rows(),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(StockTarget("mistral", lambda config, plan: uniform_or_why(plan)),),
    ),
)
