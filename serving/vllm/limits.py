"""Find what vLLM does not serve of a checkpoint, or runs slowly, in config.json as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyprune.families import all_families, serving_obstacle
from pyprune.serving.checkpoints import architecture_of
from pyprune.serving.stats import cpu_flags
from pyprune.serving.vllm.plugin import architectures
from pyprune.serving.widths import (
    ffn_fields,
    head_channels,
    layer_widths,
    named_layers,
    off_multiples,
    quantised_layout,
)

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM 0.32's CPU attention accepts."""

ON_TRANSFORMERS = ("PhiForCausalLM", "Starcoder2ForCausalLM", "Olmo2ForCausalLM")
"""Stock architectures that vLLM 0.32 runs with layers of Transformers. The plugin has layers of vLLM for the
pruned architectures of these families."""

AMX_INPUTS = 32
"""Inputs that vLLM's int8 product for AMX reads at once; layers of other sizes use the product for all CPUs."""

WIDTH_MULTIPLE = 8
"""Other widths than multiples of this leave a part of every vector register or tensor core tile empty."""


def serving_warnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each thing that vLLM will refuse or run slowly.

    Args:
        config: config.json as plain data.
    """
    hidden = config.get("hidden_size") or 0
    architecture = architecture_of(config)
    obstacles = (_head_obstacle(config), stock_obstacle(config), *_rounding_obstacles(config, architecture))
    warnings = list(filter(None, obstacles))
    if reason := architecture_obstacle(architecture):
        warnings.append(reason)
    slow = "matrix products run slower than they could."
    if isinstance(hidden, int) and hidden % WIDTH_MULTIPLE:
        warnings.append(f"hidden_size is {hidden}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    fields, widths = ffn_fields(config), layer_widths(config)
    for field in dict.fromkeys(fields):
        ffn = [width if name == field else 0 for name, (_, _, width) in zip(fields, widths, strict=False)]
        for width, layers in off_multiples(ffn, WIDTH_MULTIPLE).items():
            where = f"{field} of {named_layers(layers)}"
            warnings.append(f"{where} is {width}, not a multiple of {WIDTH_MULTIPLE}: {slow}")
    return tuple(warnings)


def architecture_obstacle(architecture: str) -> str | None:
    """Explain why the plugin does not serve a pruned architecture; None if it does, and for a stock one."""
    if not architecture.startswith("Pruned") or architecture in architectures():
        return None
    if architecture.endswith("ForCausalLM"):
        advice = "The types that it serves have 'per layer' in the table of pyprune families"
    else:
        advice = "It serves multimodal models whose layers have equal widths (pyprune prune --uniform)"
    return f"{architecture} loads in Transformers, and the vLLM plugin does not serve it. {advice}."


def stock_obstacle(config: Mapping[str, Any]) -> str | None:
    """Explain why vLLM's own class does not serve a stock checkpoint; None for all others."""
    reason = serving_obstacle(config)
    family = all_families().get(str(config.get("model_type")))
    if reason is None or family is None or not family.served_by:
        return reason
    return f"{reason} Write it with `pyprune export --target pruned`, which pyprune's plugin serves."


def rounding_obstacle(config: Mapping[str, Any], architecture: str) -> str | None:
    """Explain why these quantised weights end vLLM on a CPU, at its start or first request; None where they do not."""
    return next(filter(None, _rounding_obstacles(config, architecture)), None)


def adapter_obstacle(config: Mapping[str, Any], ranks: int) -> str | None:
    """Explain why vLLM 0.32 on this CPU cannot start with adapters (LoRA) on quantised weights; None where it can.

    Its int8 product puts None in the place of a weight, whose device vLLM then asks for. The product for AMX keeps the
    weight; vLLM uses that one where every layer reads whole blocks of inputs.

    Args:
        config: config.json as plain data.
        ranks: of tensor parallelism.
    """
    if quantised_layout(config) != "int-quantized":
        return None
    head_dim, shares = head_channels(config), max(1, ranks)  # vLLM itself refuses fewer than one rank
    read = {config.get("hidden_size") or 0}
    read |= {size // shares for heads, _, ffn in layer_widths(config) for size in (heads * head_dim, ffn)}
    if "amx_tile" in cpu_flags() and not any(size % AMX_INPUTS for size in read):
        return None
    return (
        "vLLM 0.32's int8 product on this CPU takes no adapters (--enable-lora). Serve it without, merge the adapter "
        "and export again, or export with --quantise w4a16."
    )


def _rounding_obstacles(config: Mapping[str, Any], architecture: str) -> tuple[str | None, ...]:
    return _int8_obstacle(config, architecture), _w8a16_obstacle(config)


def _head_obstacle(config: Mapping[str, Any]) -> str | None:
    head_dim = head_channels(config)
    is_stated = (config.get("head_dim") or config.get("num_attention_heads")) and not config.get("kv_lora_rank")
    if not is_stated or head_dim in VLLM_CPU_HEAD_DIMS:
        return None
    allowed = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
    return f"head_dim is {head_dim}; vLLM's CPU backend serves only {allowed}."


def _w8a16_obstacle(config: Mapping[str, Any]) -> str | None:
    if quantised_layout(config) != "pack-quantized" or _bits(config["quantization_config"]) != 8:
        return None
    return (
        "vLLM's CPU backend has no kernel for 8-bit weights with inputs that are not rounded (w8a16), and refuses "
        "them; there, export with --quantise w8a8-int8 or w4a16."
    )


def _bits(rounding: Mapping[str, Any]) -> int | None:
    """Return the bits of a weight, as compressed-tensors describes them; None without a number."""
    groups = rounding.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights.get("num_bits") if isinstance(weights, Mapping) else None


def _int8_obstacle(config: Mapping[str, Any], architecture: str) -> str | None:
    """Explain why vLLM on a CPU ends at the first request to an int8 model; None where it does not."""
    if architecture not in ON_TRANSFORMERS or quantised_layout(config) != "int-quantized":
        return None
    return (
        f"vLLM runs {architecture} through Transformers' layers, which its int8 product on a CPU does not take "
        '("mat1 must be a 2D tensor"). Export with --target pruned.'
    )
