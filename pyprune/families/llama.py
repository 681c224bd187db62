"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import (
    biased_target,
    decoder_rows,
    first_obstacle,
    heads_obstacle,
    output_bias_obstacle,
    width_obstacle,
)
from pyprune.families.gguf_forms import DECI, LLAMA
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _bias_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    return "Mistral has no biases" if biased else None


def _window_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    return None if getattr(config, "sliding_window", None) is None else "LLaMA has no sliding window"


def _no_window(config: PretrainedConfig) -> dict[str, Any]:
    return {"sliding_window": None}


_MISTRAL_OBSTACLE = first_obstacle(_bias_obstacle, output_bias_obstacle("Mistral"), width_obstacle)

FAMILIES = (
    Family(
        model_type="llama",
        classes=StockClasses.locate("llama", "Llama"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=(LLAMA, DECI),
        rows=decoder_rows(attention_bias=True, mlp_bias=True),
        stock_targets=(
            biased_target("llama", first_obstacle(width_obstacle, heads_obstacle)),
            StockTarget("mistral", _MISTRAL_OBSTACLE, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        classes=StockClasses.locate("mistral", "Mistral"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=(LLAMA, DECI),
        rows=decoder_rows(),
        stock_targets=(
            StockTarget("mistral", _MISTRAL_OBSTACLE),
            biased_target("llama", first_obstacle(_window_obstacle, width_obstacle, heads_obstacle)),
        ),
    ),
)
