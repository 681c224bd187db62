"""StarCoder2: LayerNorm, a plain MLP and biases (all of them, or none) around grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Axis, Family, StockClasses, StockTarget
from pyprune.families.common import (
    LAYER,
    QKV_BIASES,
    decoder_rows,
    first_obstacle,
    plain_mlp_rows,
    tied_head_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_types import gguf_forms

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _bias_switch(config: PretrainedConfig) -> dict[str, Any]:
    return {"use_bias": config.use_bias or getattr(config, "output_bias", False)}


def _zero_biases(config: PretrainedConfig) -> tuple[tuple[str, Axis], ...]:
    """The one switch stands for all projections; compensation brings biases on the output projections only."""
    if config.use_bias or not getattr(config, "output_bias", False):
        return ()
    return (*QKV_BIASES, (LAYER + "mlp.c_fc.bias", "ffn"))


FAMILIES = (
    Family(
        model_type="starcoder2",
        classes=StockClasses.locate("starcoder2", "Starcoder2"),
        vllm_layer="pyprune.serving.vllm.layers:Starcoder2DecoderLayer",
        gguf=gguf_forms("starcoder2"),
        rows=decoder_rows(
            mlp=plain_mlp_rows(LAYER + "mlp.c_fc", LAYER + "mlp.c_proj"), attention_bias=True, norm_bias=True
        ),
        stock_targets=(
            StockTarget("starcoder2", first_obstacle(tied_head_obstacle, width_obstacle), _bias_switch, _zero_biases),
        ),
        norm="layer",
        gauge=True,
    ),
)
