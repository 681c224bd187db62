"""Write the facts of a model in addition to its tensors into a GGUF file: sizes, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from pyprune.families.gguf_forms import GgufForm
from pyprune.serving.checkpoints import scaled_positions
from pyprune.serving.gguf.blocks import Array
from pyprune.serving.gguf.layout import COMPUTED_ROPE, ZERO_FFN, Model, rope_parameters, rope_type


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
    writer.add_context_length(length)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(len(sizes.layers))
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(_one_or_all(heads))
    writer.add_head_count_kv(_one_or_all(kv_heads))
    writer.add_feed_forward_length(_one_or_all([n or ZERO_FFN for n in ffn]))
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    if model.family.norm == "rms":
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    rope = rope_parameters(config)
    writer.add_rope_dimension_count(int(sizes.head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        _add(writer, "rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
    for key, value in model.form.metadata(config).items():
        _add(writer, key, value)
    if not all(ffn):
        notes.append(
            f"{ffn.count(0)} skipped MLPs are written as FFNs of {ZERO_FFN} zero channels, which llama.cpp needs."
        )
    return notes


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return a number where all layers agree: most architectures read no list."""
    return values[0] if len(set(values)) == 1 else values


def _add(writer: Any, key: str, value: int | float | str) -> None:
    name = f"{writer.arch}.{key}"
    if isinstance(value, str):
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
    whole = scaled_positions(config.to_dict())  # llama.cpp's server takes no longer sequences
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
    """Yield the divisors of the rotary frequencies that llama.cpp cannot compute from the metadata (LLaMA 3)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(model.config)
    kind = rope_type(model.config)
    if kind in COMPUTED_ROPE:
        return
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"))
    steps = torch.arange(0, model.sizes.head_dim, 2, dtype=torch.float64) / model.sizes.head_dim
    plain = float(rope["rope_theta"]) ** -steps
    yield "rope_freqs.weight", (plain / scaled.double()).numpy().astype(np.float32)
