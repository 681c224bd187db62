"""LLaMA 1/2/3 (and models that share its layout, SmolLM2 among them) and Mistral."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pyprune.families.base import Axis, Family, Row, StockClasses, StockTarget
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


def biased_target(
    model_type: str, why_not: Callable[[PretrainedConfig, PrunePlan], str], *, qkv_biases: bool = False
) -> StockTarget:
    """A target with LLaMA's two switches for biases, ``attention_bias`` and ``mlp_bias``.

    Each switch stands for all projections of a block, so biases that the source lacks become zeros.

    Args:
        model_type: of the target.
        why_not: see :class:`StockTarget`.
        qkv_biases: the source always has biases on q, k and v, whatever its configuration says (Qwen2).
    """
    flags, zeros = partial(_bias_flags, qkv_biases), partial(_zero_biases, qkv_biases)
    return StockTarget(model_type, why_not, flags, zeros)


def _bias_flags(always_qkv: bool, config: PretrainedConfig) -> dict[str, Any]:
    qkv, output, up = _biases_of(always_qkv, config)
    return {"attention_bias": qkv or output, "mlp_bias": up or output}


def _zero_biases(always_qkv: bool, config: PretrainedConfig) -> tuple[tuple[str, Axis], ...]:
    qkv, output, up = _biases_of(always_qkv, config)
    found = _QKV_BIASES if output and not qkv else ()
    found += _UP_BIASES if output and not up else ()
    # A source that has no more than q/k/v biases (Qwen2) leaves the output projection without.
    if qkv and not output and not getattr(config, "attention_bias", False):
        found += ((LAYER + "self_attn.o_proj.bias", "hidden"),)
    return found


def _biases_of(always_qkv: bool, config: PretrainedConfig) -> tuple[bool, bool, bool]:
    """Whether a LLaMA-like source has biases on (q, k and v; output projections by compensation; gate and up)."""
    qkv = always_qkv or bool(getattr(config, "attention_bias", False))
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
        classes=StockClasses.of_transformers("llama", "Llama"),
        vllm="pyprune.serving.vllm_model:PrunedLlamaForCausalLM",
        rows=decoder_rows(attention_bias=True, mlp_bias=True),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(
            biased_target("llama", _why_not_llama),
            StockTarget("mistral", _why_not_mistral, _no_window),
        ),
    ),
    Family(
        model_type="mistral",
        classes=StockClasses.of_transformers("mistral", "Mistral"),
        vllm="pyprune.serving.vllm_model:PrunedMistralForCausalLM",
        rows=decoder_rows(),
        layers_path="model.layers",
        attention_module="self_attn",
        mlp_modules=("mlp",),
        stock_targets=(
            StockTarget("mistral", _why_not_mistral),
            biased_target("llama", _why_mistral_is_not_llama),
        ),
    ),
)
