"""OPT: learned positions, LayerNorm, biases everywhere, ReLU MLP without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.common import HEAD, attention_rows, norm_rows, plain_mlp_rows, width_obstacle
from pyprune.families.gguf_types import gguf_forms
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_DECODER = "model.decoder."
_LAYER = _DECODER + "layers.{i}."


def _refuse(config: PretrainedConfig) -> str | None:
    if config.word_embed_proj_dim != config.hidden_size:
        return (
            f"word_embed_proj_dim {config.word_embed_proj_dim} differs from hidden_size {config.hidden_size} "
            "(the 350M layout with project_in/project_out). Use another OPT size."
        )
    if not config.do_layer_norm_before:
        return "do_layer_norm_before is False (the 350M post-norm layout). Use another OPT size."
    if config._remove_final_layer_norm:
        return "_remove_final_layer_norm is True; pyprune needs the final LayerNorm. Re-convert the checkpoint."
    return None


def _opt_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    heads = len(plan.layers[0].query_heads)
    if len(plan.hidden) != plan.dense.hidden_size:
        return "OPT's stock LayerNorm cannot divide by the original hidden size"
    if heads != plan.dense.num_attention_heads:
        return "OPT's stock attention has no explicit head_dim"
    return width_obstacle(config, plan)


def _build_layer(layer_class: type[nn.Module], config: Any, index: int) -> nn.Module:
    """Build a stock layer; its attention derives head_dim from the hidden size, so that is set afterwards."""
    heads = config.num_attention_heads
    config.num_attention_heads = 1  # always divides; the stock check knows no explicit head_dim
    layer = layer_class(config, index)
    _set_heads(layer.self_attn, config.hidden_size, heads, config.head_dim)
    return layer


def _set_heads(attention: Any, hidden_size: int, heads: int, head_dim: int) -> None:
    from torch import nn

    width, bias = heads * head_dim, attention.enable_bias
    attention.num_heads, attention.head_dim, attention.scaling = heads, head_dim, head_dim**-0.5
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(hidden_size, width, bias=bias))
    attention.out_proj = nn.Linear(width, hidden_size, bias=bias)


_ROWS = (
    Row(_DECODER + "embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    Row(_DECODER + "embed_positions.weight", ("positions", "hidden"), "embedding"),
    *norm_rows(_LAYER + "self_attn_layer_norm", "pre_norm", "attention", bias=True),
    *attention_rows(_LAYER, output="out_proj", biases=True),
    *norm_rows(_LAYER + "final_layer_norm", "pre_norm", "mlp", bias=True),
    *plain_mlp_rows(_LAYER + "fc1", _LAYER + "fc2"),
    *norm_rows(_DECODER + "final_layer_norm", "final_norm", bias=True),
    HEAD,
)

FAMILIES = (
    Family(
        model_type="opt",
        classes=StockClasses.locate("opt", "OPT"),
        vllm="pyprune.serving.vllm.opt:PrunedOPTForCausalLM",
        gguf=gguf_forms("opt"),
        rows=_ROWS,
        layers_path="model.decoder.layers",
        mlp_modules=("fc1", "fc2"),
        stock_targets=(StockTarget("opt", _opt_obstacle),),
        norm="layer",
        intermediate_field="ffn_dim",
        has_head_dim_field=False,
        carries_output_bias=False,
        hidden_fields=("hidden_size", "word_embed_proj_dim"),
        build_layer=_build_layer,
        refuse=_refuse,
    ),
)
