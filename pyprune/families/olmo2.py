"""OLMo 2: no norms before a sub-block, one after each, and RMSNorm over all queries and over all keys of a layer.

The readers read the residual stream as it is. The norms of queries and keys divide by the root mean square over the
whole projection, so that removing heads rescales what is left (``width_norm`` in the table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.llama import LAYER, output_bias_or_why, uniform_or_why
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_olmo2(config: PretrainedConfig, plan: PrunePlan) -> str:
    return output_bias_or_why(config, "OLMo 2's MLP") or uniform_or_why(plan)


_ROWS = (
    Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention", width_norm="input"),
    Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention", width_norm="input"),
    Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
    Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention", width_norm="input"),
    Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention", width_norm="input"),
    Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
    Row(LAYER + "self_attn.q_norm.weight", ("heads",), "inner", "attention", width_norm="weight"),
    Row(LAYER + "self_attn.k_norm.weight", ("kv_heads",), "inner", "attention", width_norm="weight"),
    Row(LAYER + "self_attn.o_proj.weight", ("hidden", "heads"), "writer", "attention"),
    Row(LAYER + "self_attn.o_proj.bias", ("hidden",), "writer", "attention"),
    Row(LAYER + "post_attention_layernorm.weight", ("hidden",), "post_norm", "attention"),
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
        model_type="olmo2",
        classes=StockClasses.of_transformers("olmo2", "Olmo2"),
        rows=_ROWS,
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(StockTarget("olmo2", _why_not_olmo2),),
    ),
)
