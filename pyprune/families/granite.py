"""Granite 3: LLaMA's layout with constant factors on the embedding, attention scores, sub-block outputs and logits.

None of the factors is derived from a size, so all of them keep their dense values in every cut.
"""

from __future__ import annotations

from dataclasses import replace

from pyprune.families.base import Family, StockClasses
from pyprune.families.common import biased_target, decoder_rows, width_obstacle
from pyprune.families.gguf_forms import LLAMA

FAMILIES = (
    Family(
        model_type="granite",
        classes=StockClasses.locate("granite", "Granite"),
        vllm_layer="pyprune.serving.vllm.layers:ScaledDecoderLayer",
        gguf=(replace(LLAMA, architecture="granite"),),
        rows=decoder_rows(attention_bias=True, mlp_bias=True),
        stock_targets=(biased_target("granite", width_obstacle),),
    ),
)
