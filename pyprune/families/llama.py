"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyprune.families.base import Axis, Family, Row, StockTarget
from pyprune.plan import PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "model.layers.{i}."


def decoder_rows(*, attention_bias: bool = False, mlp_bias: bool = False) -> tuple[Row, ...]:
    """The table shared by every LLaMA-like decoder (gated MLP, two pre-norms a layer).

    Every one of them may have biases on its output projections: bias compensation adds them.
    """
    rows = [
        Row("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
        Row(LAYER + "input_layernorm.weight", ("hidden",), "pre_norm", "attention"),
        Row(LAYER + "self_attn.q_proj.weight", ("heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.k_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.v_proj.weight", ("kv_heads", "hidden"), "reader", "attention"),
        Row(LAYER + "self_attn.o_proj.weight", ("hidden", "heads"), "writer", "attention"),
        Row(LAYER + "post_attention_layernorm.weight", ("hidden",), "pre_norm", "mlp"),
        Row(LAYER + "mlp.gate_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
        Row(LAYER + "mlp.up_proj.weight", ("ffn", "hidden"), "reader", "mlp"),
        Row(LAYER + "mlp.down_proj.weight", ("hidden", "ffn"), "writer", "mlp"),
        Row(LAYER + "self_attn.o_proj.bias", ("hidden",), "writer", "attention"),
        Row(LAYER + "mlp.down_proj.bias", ("hidden",), "writer", "mlp"),
        Row("model.norm.weight", ("hidden",), "final_norm"),
        Row("lm_head.weight", ("vocab", "hidden"), "head"),
    ]
    if attention_bias:
        rows += [
            Row(LAYER + "self_attn.q_proj.bias", ("heads",), "inner", "attention"),
            Row(LAYER + "self_attn.k_proj.bias", ("kv_heads",), "inner", "attention"),
            Row(LAYER + "self_attn.v_proj.bias", ("kv_heads",), "inner", "attention"),
        ]
    if mlp_bias:
        rows += [
            Row(LAYER + "mlp.gate_proj.bias", ("ffn",), "inner", "mlp"),
            Row(LAYER + "mlp.up_proj.bias", ("ffn",), "inner", "mlp"),
        ]
    return tuple(rows)


def uniform_or_why(plan: PrunePlan) -> str:
    """Why no stock architecture can hold the plan's widths; empty when one can."""
    return "" if plan.is_uniform else "widths differ between layers or a sub-block is skipped"


def divisible_or_why(plan: PrunePlan) -> str:
    """Why the sliced hidden size breaks the rule that heads divide it; empty when it does not."""
    hidden, heads = len(plan.hidden), len(plan.layers[0].query_heads)
    return "" if hidden % heads == 0 else f"hidden {hidden} is not a multiple of {heads} heads"


def output_bias_or_why(config: PretrainedConfig, name: str) -> str:
    """Why an architecture without biases on its output projections cannot hold a compensated model; else empty."""
    return f"{name} has no biases on its output projections" if getattr(config, "output_bias", False) else ""


_QKV_BIASES: tuple[tuple[str, Axis], ...] = (
    (LAYER + "self_attn.q_proj.bias", "heads"),
    (LAYER + "self_attn.k_proj.bias", "kv_heads"),
    (LAYER + "self_attn.v_proj.bias", "kv_heads"),
)
_UP_BIASES: tuple[tuple[str, Axis], ...] = (
    (LAYER + "mlp.gate_proj.bias", "ffn"),
    (LAYER + "mlp.up_proj.bias", "ffn"),
)


def llama_bias_flags(config: PretrainedConfig) -> dict[str, Any]:
    """LLaMA's switches for biases, each for all projections of a block, that hold those of a LLaMA-like source."""
    qkv, output, up = _biases_of(config)
    return {"attention_bias": qkv or output, "mlp_bias": up or output}


def llama_zero_biases(config: PretrainedConfig) -> tuple[tuple[str, Axis], ...]:
    """Biases that LLaMA's switches bring although the source lacks them."""
    qkv, output, up = _biases_of(config)
    found = _QKV_BIASES if output and not qkv else ()
    found += _UP_BIASES if output and not up else ()
    # A source that has no more than q/k/v biases (Qwen2) leaves the output projection without.
    if qkv and not output and not getattr(config, "attention_bias", False):
        found += ((LAYER + "self_attn.o_proj.bias", "hidden"),)
    return found


def _biases_of(config: PretrainedConfig) -> tuple[bool, bool, bool]:
    """Whether a LLaMA-like source has biases on (q, k and v; output projections by compensation; gate and up)."""
    qkv = bool(getattr(config, "attention_bias", False)) or config.model_type == "qwen2"
    return qkv, bool(getattr(config, "output_bias", False)), bool(getattr(config, "mlp_bias", False))


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
        rows=decoder_rows(attention_bias=True, mlp_bias=True),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(
            StockTarget("llama", _why_not_llama, llama_bias_flags, llama_zero_biases),
            StockTarget("mistral", _why_not_mistral, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        rows=decoder_rows(),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(
            StockTarget("mistral", _why_not_mistral),
            StockTarget("llama", _why_mistral_is_not_llama, llama_bias_flags, llama_zero_biases),
        ),
    ),
)
