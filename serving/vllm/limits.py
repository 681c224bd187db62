"""What vLLM does not serve of a checkpoint, or runs slowly, read from config.json as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyprune.families import why_unserved
from pyprune.serving.checkpoints import architecture_of
from pyprune.serving.stats import cpu_flags
from pyprune.serving.vllm.plugin import architectures
from pyprune.serving.widths import (
    ffn_field,
    head_channels,
    layer_widths,
    named_layers,
    off_multiples,
    quantised_layout,
)

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention accepts."""

ON_TRANSFORMERS = ("PhiForCausalLM", "Starcoder2ForCausalLM", "Olmo2ForCausalLM")
"""Stock architectures that vLLM 0.32 has no layers of its own for: it runs those of Transformers. The plugin has layers
for the pruned architectures of these families."""

AMX_INPUTS = 32
"""Of a block that vLLM's int8 product for AMX reads at once; layers of other sizes take the one for all CPUs."""

WIDTH_MULTIPLE = 8
"""Widths that are no multiple of it leave a part of every vector register or tensor core tile empty."""


def serving_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM will refuse or run slowly, read from config.json as plain data."""
    hidden = config.get("hidden_size") or 0
    architecture = architecture_of(config)
    reasons = (_why_not_heads(config), why_not_stock(config), *_rounding_reasons(config, architecture))
    found = [reason for reason in reasons if reason]
    if architecture.startswith("Pruned") and architecture not in architectures():
        found.append(
            f"{architecture} loads in Transformers; the vLLM plugin serves {', '.join(sorted(architectures()))}."
        )
    slow = "matrix products run slower than they could."
    if isinstance(hidden, int) and hidden % WIDTH_MULTIPLE:
        found.append(f"hidden_size is {hidden}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    ffn = [width for _, _, width in layer_widths(config)]
    for width, layers in off_multiples(ffn, WIDTH_MULTIPLE).items():
        where = f"{ffn_field(config)} of {named_layers(layers)}"
        found.append(f"{where} is {width}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    return tuple(found)


def why_not_stock(config: Mapping[str, Any]) -> str:
    """Why vLLM's own class ends at its start with a stock checkpoint; empty where it does not, or is not that."""
    reason = why_unserved(config)
    return reason and f"{reason} Write it with `pyprune export --target pruned`, which pyprune's plugin serves."


def why_not_rounded(config: Mapping[str, Any], architecture: str) -> str:
    """Why vLLM on a CPU ends with quantised weights, at its start or the first request; empty where it does not."""
    return next(filter(None, _rounding_reasons(config, architecture)), "")


def why_not_adapted(config: Mapping[str, Any], ranks: int) -> str:
    """Why vLLM 0.32 on this CPU ends at its start where adapters (LoRA) lie on quantised weights; empty where not.

    Its int8 product keeps its own copy of a weight and None in the weight's place, whose device vLLM asks for. With AMX
    it is another product, which keeps the weight, where every layer reads whole blocks of inputs.

    Args:
        config: config.json as plain data.
        ranks: of tensor parallelism.
    """
    if quantised_layout(config) != "int-quantized":
        return ""
    head_dim, shares = head_channels(config), max(1, ranks)  # vLLM itself refuses fewer than one rank
    read = {config.get("hidden_size") or 0}
    read |= {size // shares for heads, _, ffn in layer_widths(config) for size in (heads * head_dim, ffn)}
    if "amx_tile" in cpu_flags() and not any(size % AMX_INPUTS for size in read):
        return ""
    return (
        "vLLM 0.32's int8 product on this CPU takes no adapters (--enable-lora). Serve it without, merge the adapter "
        "and export again, or export with --quantise w4a16."
    )


def _rounding_reasons(config: Mapping[str, Any], architecture: str) -> tuple[str, ...]:
    return _why_not_int8(config, architecture), _why_not_w8a16(config)


def _why_not_heads(config: Mapping[str, Any]) -> str:
    head_dim = head_channels(config)
    is_said = (config.get("head_dim") or config.get("num_attention_heads")) and not config.get("kv_lora_rank")
    if not is_said or head_dim in VLLM_CPU_HEAD_DIMS:
        return ""
    allowed = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
    return f"head_dim is {head_dim}; vLLM's CPU backend serves only {allowed}."


def _why_not_w8a16(config: Mapping[str, Any]) -> str:
    if quantised_layout(config) != "pack-quantized" or _bits(config["quantization_config"]) != 8:
        return ""
    return (
        "vLLM's CPU backend has no kernel for 8-bit weights with inputs that are not rounded (w8a16), and refuses "
        "them; there, export with --quantise w8a8-int8 or w4a16."
    )


def _bits(rounding: Mapping[str, Any]) -> int | None:
    """Of the weights, as compressed-tensors describes them; None where it does not say."""
    groups = rounding.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights.get("num_bits") if isinstance(weights, Mapping) else None


def _why_not_int8(config: Mapping[str, Any], architecture: str) -> str:
    """Why vLLM on a CPU ends at the first request to an int8 model; empty where it does not."""
    if architecture not in ON_TRANSFORMERS or quantised_layout(config) != "int-quantized":
        return ""
    return (
        f"vLLM runs {architecture} through Transformers' layers, which its int8 product on a CPU does not take "
        '("mat1 must be a 2D tensor"). Export with --target pruned.'
    )
