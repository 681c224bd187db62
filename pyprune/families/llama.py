"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Family, StockClasses, StockTarget
from pyprune.families.common import biased_target, decoder_rows, divisible_or_why, output_bias_or_why, uniform_or_why
from pyprune.families.gguf_forms import DECI, LLAMA
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _why_not_llama(config: PretrainedConfig, plan: PrunePlan) -> str:
    return uniform_or_why(plan) or divisible_or_why(plan)


def _why_not_mistral(config: PretrainedConfig, plan: PrunePlan) -> str:
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "Mistral has no biases"
    return output_bias_or_why(config, "Mistral") or uniform_or_why(plan)


def _why_mistral_is_not_llama(config: PretrainedConfig, plan: PrunePlan) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "LLaMA has no sliding window"
    return _why_not_llama(config, plan)


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
            biased_target("llama", _why_not_llama),
            StockTarget("mistral", _why_not_mistral, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        classes=StockClasses.of_transformers("mistral", "Mistral"),
        vllm_layer="pyprune.serving.vllm.layers:PrunedDecoderLayer",
        gguf=(LLAMA, DECI),
        rows=decoder_rows(),
        stock_targets=(
            StockTarget("mistral", _why_not_mistral),
            biased_target("llama", _why_mistral_is_not_llama),
        ),
    ),
)
