"""Write the facts of a model in addition to its tensors into a GGUF file: sizes, norms, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from pyprune.errors import CheckpointError
from pyprune.families.gguf_forms import FACTORS, GgufForm, has_windows, norm_epsilon, window_period
from pyprune.families.mixtures import CHOSEN_COUNTS, SHARED_COUNTS, expert_groups
from pyprune.serving.checkpoints import scaled_positions
from pyprune.serving.gguf.blocks import Array
from pyprune.serving.gguf.layout import ZERO_FFN, Model, rope_parameters, rope_type

USED = (*CHOSEN_COUNTS, "moe_k")
UNLIMITED = 1 << 20
"""Tokens of the longest sequence of models without a limit, such as those without positions."""
UNROTATED = 1e30
"""Divisor of the rotary frequency of channels that are not turned."""
SCALES = ("routed_scaling_factor", "route_scale")
"""Fields of configurations: experts that a token is sent to, and the factor on what they add."""


def add_metadata(writer: Any, model: Model) -> list[str]:
    """Add the sizes, norms and rotary positions of a model.

    Args:
        writer: a ``gguf.GGUFWriter`` of the model's architecture.
        model: what is written.

    Returns:
        Notes for the user, one sentence each.
    """
    config, sizes = model.config, model.sizes
    length, notes = context_length(config, model.form)
    heads, kv_heads, ffn = (list(column) for column in zip(*sizes.layers, strict=True))
    skipped = [has and not n for n, (_, has) in zip(ffn, sizes.has_blocks, strict=True)]
    rope = rope_parameters(config)
    values = {
        "context_length": length,
        "embedding_length": sizes.hidden,
        "block_count": len(sizes.layers),
        "vocab_size": config.vocab_size,
        "attention.head_count": _one_or_all(
            [n if attention else max(heads) for n, (attention, _) in zip(heads, sizes.has_blocks, strict=True)]
        ),
        "attention.head_count_kv": _one_or_all(kv_heads),
        "feed_forward_length": _one_or_all([ZERO_FFN if none else n for n, none in zip(ffn, skipped, strict=True)]),
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        f"attention.layer_norm_{'rms_' if model.family.norm == 'rms' else ''}epsilon": norm_epsilon(config),
        **_positions(rope, sizes.head_dim, config),
        **_further(model),
        **model.form.metadata(config, sizes),
    }
    for key, value in values.items():
        _add(writer, key, value)
    if rope.get("rope_type") == "yarn" and not rope.get("truncate", True):
        notes.append(
            "llama.cpp rounds the bounds of the frequencies that YaRN scales, and this model does not (truncate): "
            "log probabilities differ by about 0.01."
        )
    for key, numbers in _by_layer(model).items():
        writer.add_array(key, numbers)
    if any(skipped):
        notes.append(
            f"{sum(skipped)} skipped MLPs are written as FFNs of {ZERO_FFN} zero channels, which llama.cpp needs."
        )
    return notes


def _positions(rope: Mapping[str, Any], head_dim: int, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of rotary positions; {} for a model without."""
    if not rope:
        return {}
    values = {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    scaling: dict[str, Any] = {}
    if rope.get("rope_type") == "linear":
        length = config.max_position_embeddings
        scaling = {"type": "linear", "factor": float(rope["factor"]), "original_context_length": length}
    if rope.get("rope_type") == "yarn":
        scaling = _yarn(rope)
    return values | {f"rope.scaling.{key}": value for key, value in scaling.items()}


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of YaRN; llama.cpp multiplies its factor on scores with one that it computes."""
    computed = 1 + 0.1 * math.log(rope["factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        wanted = [1 + 0.1 * rope[name] * math.log(rope["factor"]) for name in ("mscale", "mscale_all_dim")]
        rope = {"attention_factor": wanted[0] / wanted[1], **rope}
    return {
        "type": "yarn",
        "factor": float(rope["factor"]),
        "original_context_length": int(rope["original_max_position_embeddings"]),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "attn_factor": float(rope.get("attention_factor") or computed) / computed,
    }


def _further(model: Model) -> dict[str, Any]:
    """Return keys that only some models have: factors, windows, and what tells of experts."""
    config, form = model.config, model.form
    values: dict[str, Any] = {}
    for key, names in FACTORS.items():
        if factor := _first(config, names, None):
            values[key] = float(factor)
    if form.windows and has_windows(config):
        rope = config.rope_parameters.get("sliding_attention", rope_parameters(config))
        values["attention.sliding_window"] = config.sliding_window
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        values["attention.sliding_window_pattern"] = window_period(config) or slides
        values["rope.freq_base_swa"] = float(rope["rope_theta"])
    if getattr(config, "clip_qkv", None):
        values["attention.clamp_kqv"] = float(config.clip_qkv)
    mixtures = [i for i, (experts, _) in enumerate(model.sizes.mixtures) if experts]
    if not mixtures:
        return values
    experts, shared = model.sizes.mixtures[mixtures[0]]
    width = model.sizes.layers[mixtures[0]][2]
    values["expert_count"] = experts
    values["expert_used_count"] = _first(config, USED, 1)
    values["expert_feed_forward_length"] = width
    values["expert_shared_feed_forward_length"] = shared
    values["expert_shared_count"] = shared and _first(config, SHARED_COUNTS, 1)
    values["leading_dense_block_count"] = model.sizes.dense_layers
    values["expert_weights_norm"] = bool(_first(config, ("norm_topk_prob",), form.normed_experts is not False))
    values["expert_weights_scale"] = float(_first(config, SCALES, 1.0))
    values["expert_gating_func"] = form.gating
    if (groups := expert_groups(config)) > 1:
        values |= {"expert_group_count": groups, "expert_group_used_count": config.topk_group}
    return values


def _by_layer(model: Model) -> dict[str, list[float]]:
    """Return the numbers of each layer that the file has as a list, in the order of the layers."""
    values: dict[str, list[float]] = {}
    for name, stored in {**model.tensors, **model.buffers}.items():
        if key := model.form.key_of(name):
            values.setdefault(key, []).append(float(stored.read().double()))
    for end, key in model.form.layer_keys.items():
        if len(values.get(key, ())) != len(model.sizes.layers):
            raise CheckpointError(
                f"{model.folder} has no {end} in some layers, which llama.cpp needs. Fetch or write it again."
            )
    return values


def _first(config: PretrainedConfig, names: tuple[str, ...], default: Any) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return a number where all layers agree: most architectures read no list."""
    return values[0] if len(set(values)) == 1 else values


def _add(writer: Any, key: str, value: bool | int | float | str | list[Any]) -> None:
    name = f"{writer.arch}.{key}"
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)


def context_length(config: PretrainedConfig, form: GgufForm) -> tuple[int, list[str]]:
    """Return the tokens for which the file is exact, and notes about it.

    Args:
        config: of the model.
        form: the architecture of llama.cpp that it is written as.
    """
    whole = scaled_positions(config.to_dict()) or UNLIMITED  # llama.cpp's server takes no longer sequences
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    unused = kinds is not None and "sliding_attention" not in kinds
    if form.windows or unused or window is None or window >= whole:
        return whole, []
    note = (
        f"llama.cpp's {form.architecture} has no sliding window, so the context length in the file is the model's "
        f"window, {window} tokens instead of {whole}; up to it both compute the same."
    )
    return int(window), [note]


def rope_factors(model: Model) -> Iterator[tuple[str, Array]]:
    """Yield the divisors of the rotary frequencies that llama.cpp cannot compute from the metadata."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(model.config)
    kind = rope_type(model.config)
    if kind == "proportional":
        pairs = model.form.metadata(model.config, model.sizes)["rope.dimension_count"] // 2
        factors = np.full(pairs, UNROTATED)
        factors[: int(pairs * rope.get("partial_rotary_factor", 1.0))] = rope.get("factor", 1.0)
        yield "rope_freqs.weight", factors.astype(np.float32)
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"))
        steps = torch.arange(0, model.sizes.head_dim, 2, dtype=torch.float64) / model.sizes.head_dim
        plain = float(rope["rope_theta"]) ** -steps
        yield "rope_freqs.weight", (plain / scaled.double()).numpy().astype(np.float32)
