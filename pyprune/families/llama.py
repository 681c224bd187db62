"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import biased_target, decoder_rows, heads_obstacle, output_bias_obstacle, width_obstacle
from pyprune.families.gguf_forms import DECI, LLAMA
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _llama_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    return width_obstacle(plan) or heads_obstacle(plan)


def _mistral_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "Mistral has no biases"
    return output_bias_obstacle(config, "Mistral") or width_obstacle(plan)


def _llama_obstacle_of_mistral(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    if getattr(config, "sliding_window", None) is not None:
        return "LLaMA has no sliding window"
    return _llama_obstacle(config, plan)


def _no_window(config: PretrainedConfig) -> dict[str, Any]:
    return {"sliding_window": None}


FAMILIES = (
    Family(
        model_type="llama",
        classes=StockClasses.of_transformers("llama", "Llama"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=(LLAMA, DECI),
        rows=decoder_rows(attention_bias=True, mlp_bias=True),
        stock_targets=(
            biased_target("llama", _llama_obstacle),
            StockTarget("mistral", _mistral_obstacle, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        classes=StockClasses.of_transformers("mistral", "Mistral"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=(LLAMA, DECI),
        rows=decoder_rows(),
        stock_targets=(
            StockTarget("mistral", _mistral_obstacle),
            biased_target("llama", _llama_obstacle_of_mistral),
        ),
    ),
)
