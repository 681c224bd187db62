"""Gemma 3 text: four (1 + w) norms a layer, an embedding scaled by sqrt(hidden_size), two kinds of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.llama import LAYER, divisible_or_why, output_bias_or_why, uniform_or_why
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_gemma3(config: PretrainedConfig, plan: PrunePlan) -> str:
    return output_bias_or_why(config, "Gemma 3's MLP") or uniform_or_why(plan) or divisible_or_why(plan)


_ROWS = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    Row(LAYER + "input_layernorm.weight", ("hidden",), "pre_norm", "attention"),
    Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.o_proj.weight", ("hidden", "heads"), "writer", "attention"),
    Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention"),
    Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.o_proj.bias", ("hidden",), "writer", "attention"),
    Row(LAYER + "self_attn.q_norm.weight", ("head_dim",), "inner", "attention"),
    Row(LAYER + "self_attn.k_norm.weight", ("head_dim",), "inner", "attention"),
    Row(LAYER + "post_attention_layernorm.weight", ("hidden",), "post_norm", "attention"),
    Row(LAYER + "pre_feedforward_layernorm.weight", ("hidden",), "pre_norm", "mlp"),
    Row(LAYER + "mlp.gate_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
    Row(LAYER + "mlp.up_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
    Row(LAYER + "mlp.down_proj.weight", ("hidden", "ffn"), "writer", "mlp"),
    Row(LAYER + "mlp.down_proj.bias", ("hidden",), "writer", "mlp"),
    Row(LAYER + "post_feedforward_layernorm.weight", ("hidden",), "post_norm", "mlp"),
    Row("model.norm.weight", ("hidden",), "final_norm"),
    Row("lm_head.weight", ("vocab", "hidden"), "head"),
)

FAMILIES = (
    Family(
        model_type="gemma3_text",
        classes=StockClasses.of_transformers("gemma3", "Gemma3", config="Gemma3TextConfig"),
        rows=_ROWS,
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(StockTarget("gemma3_text", _why_not_gemma3),),
        unit_offset_norm=True,
        scaled_embedding=True,
    ),
)
