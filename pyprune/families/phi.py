"""Phi-1/1.5/2: attention and MLP in parallel after one LayerNorm, partial rotary positions, biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.families.base import Family, Row, StockClasses, StockTarget
from pyprune.families.common import (
    EMBEDDING,
    HEAD,
    LAYER,
    attention_rows,
    first_obstacle,
    norm_rows,
    plain_mlp_rows,
    tied_head_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_forms import DECODER_BIASES, LAYER_NORM_BIASES, GgufForm

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _refuse(config: PretrainedConfig) -> str | None:
    reason = "qk_layernorm is True; its size is derived from hidden_size and cannot be sliced."
    return reason if config.qk_layernorm else None


_ROWS = (
    EMBEDDING,
    *norm_rows(LAYER + "input_layernorm", "pre_norm", bias=True),
    *attention_rows(output="dense", biases=True),
    *plain_mlp_rows(LAYER + "mlp.fc1", LAYER + "mlp.fc2"),
    *norm_rows("model.final_layernorm", "final_norm", bias=True),
    HEAD,
    Row("lm_head.bias", ("vocab",), "inner"),
)


_PHI2 = GgufForm("phi2", (*DECODER_BIASES, *LAYER_NORM_BIASES, "output"), "gelu_new", square=True, own_head=True)

FAMILIES = (
    Family(
        model_type="phi",
        classes=StockClasses.locate("phi", "Phi"),
        vllm_layer="pyprune.serving.vllm.layers:PhiDecoderLayer",
        gguf=(_PHI2,),
        rows=_ROWS,
        stock_targets=(StockTarget("phi", first_obstacle(tied_head_obstacle, width_obstacle)),),
        norm="layer",
        gauge=True,
        carries_output_bias=False,
        refuse=_refuse,
    ),
)
