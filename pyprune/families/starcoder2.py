"""StarCoder2: LayerNorm, a plain MLP and biases (all of them, or none) around grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Axis, Family, Row, StockClasses, StockTarget
from pyprune.families.llama import LAYER, uniform_or_why
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_starcoder2(config: PretrainedConfig, plan: PrunePlan) -> str:
    if config.tie_word_embeddings and len(plan.hidden) != plan.dense.hidden_size:
        return "a tied head reads what the LayerNorm gauge shifts"
    return uniform_or_why(plan)


def _bias_switch(config: PretrainedConfig) -> dict[str, Any]:
    return {"use_bias": config.use_bias or getattr(config, "output_bias", False)}


def _zero_biases(config: PretrainedConfig) -> tuple[tuple[str, Axis], ...]:
    """The one switch stands for all projections; compensation brings biases on the output projections only."""
    if config.use_bias or not getattr(config, "output_bias", False):
        return ()
    return (
        (LAYER + "self_attn.q_proj.bias", "heads"),
        (LAYER + "self_attn.k_proj.bias", "kv_heads"),
        (LAYER + "self_attn.v_proj.bias", "kv_heads"),
        (LAYER + "mlp.c_fc.bias", "ffn"),
    )


_ROWS = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    Row(LAYER + "input_layernorm.weight", ("hidden",), "pre_norm", "attention"),
    Row(LAYER + "input_layernorm.bias", ("hidden",), "pre_norm", "attention"),
    Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention"),
    Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.o_proj.weight", ("hidden", "heads"), "writer", "attention"),
    Row(LAYER + "self_attn.o_proj.bias", ("hidden",), "writer", "attention"),
    Row(LAYER + "post_attention_layernorm.weight", ("hidden",), "pre_norm", "mlp"),
    Row(LAYER + "post_attention_layernorm.bias", ("hidden",), "pre_norm", "mlp"),
    Row(LAYER + "mlp.c_fc.weight", ("ffn", "hidden"), "reader", "mlp"),
    Row(LAYER + "mlp.c_fc.bias", ("ffn",), "inner", "mlp"),
    Row(LAYER + "mlp.c_proj.weight", ("hidden", "ffn"), "writer", "mlp"),
    Row(LAYER + "mlp.c_proj.bias", ("hidden",), "writer", "mlp"),
    Row("model.norm.weight", ("hidden",), "final_norm"),
    Row("model.norm.bias", ("hidden",), "final_norm"),
    Row("lm_head.weight", ("vocab", "hidden"), "head"),
)

FAMILIES = (
    Family(
        model_type="starcoder2",
        classes=StockClasses.of_transformers("starcoder2", "Starcoder2"),
        rows=_ROWS,
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(StockTarget("starcoder2", _why_not_starcoder2, _bias_switch, _zero_biases),),
        norm="layer",
        gauge=True,
    ),
)
