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
from pyprune.families.gguf_forms import ATTENTION, BLOCK, DECODER_BIASES, OUTER, GgufForm, GgufSizes, square_obstacle

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


def _phi2_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    return "it has a head of its own; the model's is tied" if sizes.tied else square_obstacle(config, sizes)


_PHI2 = GgufForm(
    "phi2",
    {
        **OUTER,
        **ATTENTION,
        "model.final_layernorm": "output_norm",
        LAYER + "input_layernorm": BLOCK + "attn_norm",
        LAYER + "self_attn.dense": BLOCK + "attn_output",
        LAYER + "mlp.fc1": BLOCK + "ffn_up",
        LAYER + "mlp.fc2": BLOCK + "ffn_down",
    },
    (*DECODER_BIASES, "attn_norm", "output_norm", "output"),
    activation="gelu_new",
    obstacle=_phi2_obstacle,
)

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
