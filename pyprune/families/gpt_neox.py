"""GPT-NeoX and Pythia: attention and MLP in parallel, each after its own LayerNorm; q, k and v fused head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.common import (
    HEAD,
    first_obstacle,
    input_rows,
    norm_rows,
    output_bias_obstacle,
    output_rows,
    plain_mlp_rows,
    square_obstacle,
    tied_head_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_types import gguf_forms
from pyprune.plan import BlockSizes, attention_and_mlp

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_DECODER = "gpt_neox."
_LAYER = _DECODER + "layers.{i}."
_QKV = input_rows(_LAYER + "attention.query_key_value", ("heads", "kv_heads", "kv_heads"), "attention", bias=True)


def _refuse(config: PretrainedConfig) -> str | None:
    if config.use_parallel_residual:
        return None
    return "use_parallel_residual is False; only attention and MLP that read the same stream are known. Use a Pythia."


def _build_layer(layer_class: type[nn.Module], config: Any, index: int) -> nn.Module:
    """Build a stock layer; its attention derives head_dim from the hidden size, so that is set afterwards."""
    from torch import nn

    layer: Any = layer_class(config, index)
    attention, width = layer.attention, config.num_attention_heads * config.head_dim
    attention.head_size, attention.scaling = config.head_dim, config.head_dim**-0.5
    attention.query_key_value = nn.Linear(config.hidden_size, 3 * width, bias=config.attention_bias)
    attention.dense = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
    return layer  # type: ignore[no-any-return]


def _block_sizes(family: Family, config: PretrainedConfig, kind: str) -> dict[str, BlockSizes]:
    """Every query head has a key and a value of its own, whatever else the configuration names."""
    heads = config.num_attention_heads
    return attention_and_mlp(heads, heads, config.hidden_size // heads, config.intermediate_size)


_ROWS = (
    Row(_DECODER + "embed_in.weight", ("vocab", "hidden"), "embedding"),
    *norm_rows(_LAYER + "input_layernorm", "pre_norm", "attention", bias=True),
    *(replace(row, by_group=True) for row in _QKV),
    *output_rows(_LAYER + "attention.dense", "heads", "attention"),
    *norm_rows(_LAYER + "post_attention_layernorm", "pre_norm", "mlp", bias=True),
    *plain_mlp_rows(_LAYER + "mlp.dense_h_to_4h", _LAYER + "mlp.dense_4h_to_h"),
    *norm_rows(_DECODER + "final_layer_norm", "final_norm", bias=True),
    HEAD,
)
_MODELLING = "transformers.models.gpt_neox.modeling_gpt_neox"

FAMILIES = (
    Family(
        model_type="gpt_neox",
        classes=StockClasses(
            "transformers:GPTNeoXConfig", "transformers:GPTNeoXForCausalLM", f"{_MODELLING}:GPTNeoXLayer"
        ),
        gguf=gguf_forms("gpt_neox"),
        rows=_ROWS,
        stock_targets=(
            StockTarget(
                "gpt_neox",
                first_obstacle(output_bias_obstacle("GPT-NeoX"), tied_head_obstacle, width_obstacle, square_obstacle),
            ),
        ),
        layers_path="gpt_neox.layers",
        attention_module="attention",
        norm="layer",
        gauge=True,
        parallel=True,
        has_head_dim_field=False,
        block_sizes=_block_sizes,
        build_layer=_build_layer,
        refuse=_refuse,
    ),
)
