"""OLMo 2: no norms before a sub-block, one after each, and RMSNorm over all queries and over all keys of a layer.

The readers read the residual stream as it is. The norms of queries and keys divide by the root mean square over the
whole projection, so that removing heads rescales the rest (``width_norm`` in the table).
"""

from __future__ import annotations

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    EMBEDDING,
    HEAD,
    LAYER,
    attention_rows,
    first_obstacle,
    gated_mlp_rows,
    norm_rows,
    output_bias_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_types import gguf_forms

_ROWS = (
    EMBEDDING,
    *attention_rows(biases=True, width_norm=True),
    *norm_rows(LAYER + "post_attention_layernorm", "post_norm", "attention"),
    *gated_mlp_rows(),
    *norm_rows(LAYER + "post_feedforward_layernorm", "post_norm", "mlp"),
    *norm_rows("model.norm", "final_norm"),
    HEAD,
)

FAMILIES = (
    Family(
        model_type="olmo2",
        classes=StockClasses.locate("olmo2", "Olmo2"),
        gguf=gguf_forms("olmo2"),
        rows=_ROWS,
        stock_targets=(StockTarget("olmo2", first_obstacle(output_bias_obstacle("OLMo 2's MLP"), width_obstacle)),),
        vllm_layer="pyprune.serving.vllm.layers:Olmo2DecoderLayer",
    ),
)
