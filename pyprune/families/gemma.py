"""Gemma 3 text: four (1 + w) norms a layer, an embedding scaled by sqrt(hidden_size), two kinds of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from pyprune.families.gguf_forms import GgufForm, GgufSizes, has_windows

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


def gguf_obstacle(layers_of_27b: int, config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    """Return why llama.cpp's gemma2 or gemma3 cannot hold a model, or None.

    Args:
        layers_of_27b: llama.cpp knows the 27B by its number of layers and scales its scores in another way.
        config: of the model.
        sizes: of the model.
    """
    whole = len(sizes.layers) == layers_of_27b
    divided_by = sizes.hidden // sizes.layers[0][0] if whole else sizes.head_dim
    if config.query_pre_attn_scalar != divided_by:
        return (
            f"it divides the scores of {len(sizes.layers)} layers by the root of {divided_by:g}, the model by that of "
            f"{config.query_pre_attn_scalar}"
        )
    return "it looks back only" if config.use_bidirectional_attention else None


def _gemma3_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.final_logit_softcapping or config.attn_logit_softcapping:
        return "it has no soft limits of scores or logits"
    windows = config.rope_parameters.get("sliding_attention", {})
    if has_windows(config) and windows.get("rope_type", "default") != "default":
        return "its layers with windows have plain rotary positions"
    return gguf_obstacle(62, config, sizes)


FAMILIES = (
    Family(
        model_type="gemma3_text",
        classes=StockClasses.locate("gemma3", "Gemma3", config="Gemma3TextConfig"),
        vllm_layer="pyprune.serving.vllm.layers:GemmaDecoderLayer",
        gguf=(GgufForm("gemma3", (), "gelu_pytorch_tanh", windows="some", obstacle=_gemma3_obstacle),),
        rows=ROWS,
        stock_targets=(StockTarget("gemma3_text", _STOCK_OBSTACLE),),
        unit_offset_norm=True,
        scaled_embedding=True,
        begins_with_bos=True,
    ),
)
