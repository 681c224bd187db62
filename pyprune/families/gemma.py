"""Gemma 3 text: four (1 + w) norms a layer, an embedding scaled by sqrt(hidden_size), two kinds of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    EMBEDDING,
    HEAD,
    HEAD_NORMS,
    LAYER,
    attention_rows,
    first_obstacle,
    gated_mlp_rows,
    heads_obstacle,
    norm_rows,
    output_bias_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_forms import BLOCK, NORMED_DECODER, GgufForm, GgufSizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_STOCK_OBSTACLE = first_obstacle(output_bias_obstacle("Gemma 3's MLP"), width_obstacle, heads_obstacle)
ROWS = (
    EMBEDDING,
    *norm_rows(LAYER + "input_layernorm", "pre_norm", "attention"),
    *attention_rows(biases=True),
    *HEAD_NORMS,
    *norm_rows(LAYER + "post_attention_layernorm", "post_norm", "attention"),
    *norm_rows(LAYER + "pre_feedforward_layernorm", "pre_norm", "mlp"),
    *gated_mlp_rows(),
    *norm_rows(LAYER + "post_feedforward_layernorm", "post_norm", "mlp"),
    *norm_rows("model.norm", "final_norm"),
    HEAD,
)

LAYERS_OF_27B = 62
"""llama.cpp knows Gemma 3 27B by its number of layers and scales its scores in another way."""


def _gguf_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    whole = len(sizes.layers) == LAYERS_OF_27B
    divided_by = sizes.hidden / sizes.layers[0][0] if whole else sizes.head_dim
    if config.query_pre_attn_scalar != divided_by:
        return (
            f"it divides the scores of {len(sizes.layers)} layers by the root of {divided_by:g}, the model by that of "
            f"{config.query_pre_attn_scalar}"
        )
    if config.final_logit_softcapping or config.attn_logit_softcapping or config.use_bidirectional_attention:
        return "it has no soft limits of scores or logits and looks back only"
    if "sliding_attention" not in config.layer_types:
        return None
    if config.rope_parameters["sliding_attention"].get("rope_type", "default") != "default":
        return "its layers with windows have plain rotary positions"
    if not _period(config):
        return "its layers without a window must come at equal distances, the last of each group"
    return None


def _period(config: PretrainedConfig) -> int:
    """Return the distance of layers without a window; 0 = not at equal distances."""
    kinds = list(config.layer_types)
    if "full_attention" not in kinds:
        return 0
    period = kinds.index("full_attention") + 1
    regular = all((kind == "full_attention") == (i % period == period - 1) for i, kind in enumerate(kinds))
    return period if regular else 0


def _gguf_metadata(config: PretrainedConfig) -> dict[str, Any]:
    if "sliding_attention" not in config.layer_types:
        return {}
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _period(config),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


_GGUF = GgufForm(
    "gemma3",
    {
        **NORMED_DECODER,
        LAYER + "post_attention_layernorm": BLOCK + "post_attention_norm",
        LAYER + "pre_feedforward_layernorm": BLOCK + "ffn_norm",
        LAYER + "post_feedforward_layernorm": BLOCK + "post_ffw_norm",
    },
    activation="gelu_pytorch_tanh",
    windows=True,
    obstacle=_gguf_obstacle,
    metadata=_gguf_metadata,
)

FAMILIES = (
    Family(
        model_type="gemma3_text",
        classes=StockClasses.locate("gemma3", "Gemma3", config="Gemma3TextConfig"),
        vllm_layer="pyprune.serving.vllm.layers:GemmaDecoderLayer",
        gguf=(_GGUF,),
        rows=ROWS,
        stock_targets=(StockTarget("gemma3_text", _STOCK_OBSTACLE),),
        unit_offset_norm=True,
        scaled_embedding=True,
        begins_with_bos=True,
    ),
)
