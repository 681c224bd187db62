"""Phi-1/1.5/2: attention and MLP in parallel after one LayerNorm, partial rotary positions, biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.llama import LAYER, uniform_or_why
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _refuse(config: PretrainedConfig) -> str:
    if config.qk_layernorm:
        return "qk_layernorm is True; its size is derived from hidden_size and cannot be sliced."
    return ""


def _why_not_phi(config: PretrainedConfig, plan: PrunePlan) -> str:
    if config.tie_word_embeddings and len(plan.hidden) != plan.dense.hidden_size:
        return "a tied head reads what the LayerNorm gauge shifts"
    return uniform_or_why(plan)


_ROWS = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    Row(LAYER + "input_layernorm.weight", ("hidden",), "pre_norm"),
    Row(LAYER + "input_layernorm.bias", ("hidden",), "pre_norm"),
    Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention"),
    Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.dense.weight", ("hidden", "heads"), "writer", "attention"),
    Row(LAYER + "self_attn.dense.bias", ("hidden",), "writer", "attention"),
    Row(LAYER + "mlp.fc1.weight", ("ffn", "hidden"), "reader", "mlp"),
    Row(LAYER + "mlp.fc1.bias", ("ffn",), "inner", "mlp"),
    Row(LAYER + "mlp.fc2.weight", ("hidden", "ffn"), "writer", "mlp"),
    Row(LAYER + "mlp.fc2.bias", ("hidden",), "writer", "mlp"),
    Row("model.final_layernorm.weight", ("hidden",), "final_norm"),
    Row("model.final_layernorm.bias", ("hidden",), "final_norm"),
    Row("lm_head.weight", ("vocab", "hidden"), "head"),
    Row("lm_head.bias", ("vocab",), "inner"),
)

FAMILIES = (
    Family(
        model_type="phi",
        classes=StockClasses.of_transformers("phi", "Phi"),
        rows=_ROWS,
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(StockTarget("phi", _why_not_phi),),
        norm="layer",
        gauge=True,
        carries_output_bias=False,
        refuse=_refuse,
    ),
)
