"""Complete the configuration of a GGUF file with the metadata that Transformers ignores, and compare every key.

Transformers takes sizes and norms. Scaled rotary positions, factors on scores and logits, windows and head sizes of
some architectures keep the defaults of their configuration class, whatever the file says. Here they are set, and then
each key that changes a logit is compared with the configuration. A file is read as its keys say, or refused by the
name of a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from pyprune.checkpoint.gguf import GgufHeader
from pyprune.errors import CheckpointError, UnsupportedModelError, shown
from pyprune.families import family_for
from pyprune.families.gguf_forms import FACTORS, norm_epsilon
from pyprune.runtime.progress import warn

SCALING = "rope.scaling."
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_CONTEXTS = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Context lengths before scaling that are tried; all releases of LLaMA 3 have the first."""
GEMMA3_PERIOD, GEMMA3_LAYERS_OF_27B, GEMMA3_THETA = 6, 62, 10000.0
"""Values of llama.cpp where a file of Gemma 3 has no key."""

WITHOUT_EFFECT = {
    "context_length", "vocab_size", "rope.scaling.finetuned", "rope.scaling.type", "rope.scaling.factor",
    "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "attention.sliding_window_pattern",
}  # fmt: skip
"""Keys that change no logit, or that :func:`complete_config` takes over itself."""
OTHER_GROUPS = ("general.", "tokenizer.", "quantize.", "split.", "pyprune.", "imatrix.")


def check_architecture(header: GgufHeader, families: Collection[str]) -> None:
    """Refuse a file whose architecture is not read.

    Args:
        header: of the file.
        families: model types that pyprune knows.

    Raises:
        UnsupportedModelError: the message names the architectures that are.
        CheckpointError: sizes differ between its layers.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = [name for name in GGUF_SUPPORTED_ARCHITECTURES if {name, f"{name}_text"} & set(families)]
    architecture = header.facts.get("general.architecture")
    if architecture not in known:
        raise UnsupportedModelError(
            f"{header.path} has the architecture {shown(architecture)}, which is not read from GGUF; "
            f"{', '.join(sorted(known))} are. Use the checkpoint that the file was made from."
        )
    for key in COMPARED:
        value = header.facts.get(f"{architecture}.{key}")
        if isinstance(value, tuple) and len(set(value)) > 1:
            raise _key_error(header, key, list(value[:8]), "sizes per layer are not read from GGUF")


def complete_config(config: PretrainedConfig, header: GgufHeader) -> None:
    """Set the values of a GGUF file's metadata that Transformers ignored, and compare the rest with the configuration.

    Args:
        config: as Transformers reads it from the file; changed in place.
        header: of the file.

    Raises:
        CheckpointError: a key that changes logits has a value that the model cannot have; the message names it.
    """
    architecture = str(header.facts.get("general.architecture"))
    start = f"{architecture}."
    facts = {key.removeprefix(start): value for key, value in header.facts.items() if key.startswith(start)}
    _set_sizes(config, facts)
    _set_windows(config, facts)
    _set_rotary(config, facts, header)
    _compare(config, facts, header, start)


def _set_sizes(config: PretrainedConfig, facts: Mapping[str, Any]) -> None:
    head_dim = facts.get("attention.key_length")
    if head_dim and hasattr(config, "head_dim"):
        config.head_dim = head_dim
    if config.model_type == "gemma3_text":  # as llama.cpp derives it: no key states it
        whole = config.num_hidden_layers == GEMMA3_LAYERS_OF_27B
        width = config.hidden_size / config.num_attention_heads if whole else config.head_dim
        config.query_pre_attn_scalar = int(width) if width == int(width) else width
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and pad >= config.vocab_size:
        config.pad_token_id = None  # the class's default, which a file of another vocabulary does not state
    for key, names in FACTORS.items():
        for name in names:
            if key in facts and hasattr(config, name):
                setattr(config, name, facts[key])


def _set_windows(config: PretrainedConfig, facts: Mapping[str, Any]) -> None:
    window = facts.get("attention.sliding_window")
    if window and hasattr(config, "sliding_window"):
        config.sliding_window = window
    if config.model_type != "gemma3_text":
        return
    layers, pattern = config.num_hidden_layers, facts.get("attention.sliding_window_pattern", GEMMA3_PERIOD)
    slides = pattern if isinstance(pattern, tuple) else [pattern and (i + 1) % pattern for i in range(layers)]
    config.layer_types = ["sliding_attention" if window and slid else "full_attention" for slid in slides]


def _set_rotary(config: PretrainedConfig, facts: Mapping[str, Any], header: GgufHeader) -> None:
    theta = float(facts.get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, **_rope_scaling(facts, header)}
    head_dim = family_for(config).sizes(config).head_dim
    turned = facts.get("rope.dimension_count", head_dim)
    if turned != head_dim and config.model_type in ("phi", "phi3"):
        rope["partial_rotary_factor"] = turned / head_dim
    if "rope.scaling.original_context_length" in facts and rope["rope_type"] == "linear":
        config.max_position_embeddings = facts["rope.scaling.original_context_length"]
    if "rope_freqs.weight" in header.tensors:
        rope |= _llama3(rope, header, head_dim)
    if config.model_type == "gemma3_text":
        base = float(facts.get("rope.freq_base_swa", GEMMA3_THETA))
        config.rope_parameters = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        }
    else:
        config.rope_parameters = rope
        if rope["rope_type"] == "longrope":
            config.original_max_position_embeddings = rope["original_max_position_embeddings"]


def _rope_scaling(facts: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    """Return the scaling of rotary positions; llama.cpp takes a factor without a type as linear."""
    factor = float(facts.get(SCALING + "factor") or facts.get("rope.scale_linear") or 1.0)
    kind, original = facts.get(SCALING + "type", "linear"), facts.get(SCALING + "original_context_length")
    attention_factor = facts.get(SCALING + "attn_factor")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        rope = {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = original or int(facts["context_length"] / factor)
        for name in ("beta_fast", "beta_slow"):
            if f"{SCALING}yarn_{name}" in facts:
                rope[name] = facts[f"{SCALING}yarn_{name}"]
        if attention_factor is not None:
            rope["attention_factor"] = attention_factor * (1 + 0.1 * math.log(factor))
        return rope
    if kind == "longrope":
        long, short = (_tensor(header, f"rope_factors_{name}.weight").tolist() for name in ("long", "short"))
        attention = {} if attention_factor is None else {"attention_factor": attention_factor}
        return {
            "rope_type": "longrope", "long_factor": long, "short_factor": short, **attention,
            "original_max_position_embeddings": original or facts["context_length"],
        }  # fmt: skip
    raise _key_error(header, SCALING + "type", kind, "none, linear, yarn and longrope are read")


def _llama3(rope: Mapping[str, Any], header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Return LLaMA 3's scaling, which a file stores as the divisor of each frequency."""
    stated = _tensor(header, "rope_freqs.weight").astype(np.float64)
    if (stated == 1).all():
        return {}
    for original in LLAMA3_CONTEXTS:
        scaling = {**LLAMA3, "factor": float(stated.max()), "original_max_position_embeddings": original}
        expected = _llama3_factors(scaling, rope["rope_theta"], head_dim)
        if stated.shape == expected.shape and np.allclose(stated, expected, rtol=1e-4):
            return scaling
    raise CheckpointError(
        f"{header.path} divides its rotary frequencies by factors (rope_freqs) that no scaling of LLaMA 3 gives; "
        "Transformers has no other form for them. Use the checkpoint that the file was made from."
    )


def _llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> Any:
    """Return the divisors of the rotary frequencies in LLaMA 3's scaling, float64 [head_dim / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _tensor(header: GgufHeader, name: str) -> Any:
    """Read a small tensor of the file, float32 [n]."""
    from gguf import GGUFReader

    if name not in header.tensors:
        raise CheckpointError(f"{header.path} scales its rotary positions by the tensor {name}, which it lacks.")
    return next(np.array(t.data, np.float32) for t in GGUFReader(header.path).tensors if t.name == name)


# --- comparison ----------------------------------------------------------------------------------


def _main_rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return dict(rope.get("full_attention", rope))


def _head_dim(config: Any) -> int:
    return family_for(config).sizes(config).head_dim


def _score_scale(config: Any) -> float:
    if hasattr(config, "attention_multiplier"):
        return float(config.attention_multiplier)
    return float(getattr(config, "query_pre_attn_scalar", _head_dim(config)) ** -0.5)


COMPARED: Mapping[str, Callable[[Any], Any]] = {
    "block_count": lambda c: c.num_hidden_layers,
    "embedding_length": lambda c: c.hidden_size,
    "feed_forward_length": lambda c: c.intermediate_size,
    "attention.head_count": lambda c: c.num_attention_heads,
    "attention.head_count_kv": lambda c: c.num_key_value_heads,
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.layer_norm_rms_epsilon": norm_epsilon,
    "attention.layer_norm_epsilon": norm_epsilon,
    "attention.sliding_window": lambda c: getattr(c, "sliding_window", None) or 0,
    "attention.scale": _score_scale,
    "attention.causal": lambda c: 1,
    "attention.clamp_kqv": lambda c: 0,
    "attention.max_alibi_bias": lambda c: 0,
    "attn_logit_softcapping": lambda c: getattr(c, "attn_logit_softcapping", None) or 0,
    "final_logit_softcapping": lambda c: getattr(c, "final_logit_softcapping", None) or 0,
    "embedding_scale": lambda c: getattr(c, "embedding_multiplier", 1),
    "residual_scale": lambda c: getattr(c, "residual_multiplier", 1),
    "logit_scale": lambda c: getattr(c, "logits_scaling", 1),
    "expert_count": lambda c: 0,
    "expert_used_count": lambda c: 0,
    "rope.dimension_count": lambda c: int(_head_dim(c) * _main_rope(c).get("partial_rotary_factor", 1)),
    "rope.freq_base": lambda c: _main_rope(c)["rope_theta"],
    "rope.freq_base_swa": lambda c: c.rope_parameters.get("sliding_attention", {}).get("rope_theta"),
    "rope.scaling.yarn_ext_factor": lambda c: 1,
    "rope.scaling.yarn_attn_factor": lambda c: 1,
    "rope.scaling.yarn_log_multiplier": lambda c: 0,
}
"""Key that changes logits -> its value in the configuration."""


def _compare(config: PretrainedConfig, facts: Mapping[str, Any], header: GgufHeader, start: str) -> None:
    known = set(llama_cpp_keys())
    unknown = []
    for key, value in facts.items():
        expected = COMPARED[key](config) if key in COMPARED else None
        if key in COMPARED:
            if not _agree(value, expected):
                raise _key_error(header, key, value, f"the model that Transformers makes of it has {expected}")
        elif key in known - WITHOUT_EFFECT:
            raise _key_error(header, key, value, f"it is not read for a {config.model_type} model")
        elif key not in WITHOUT_EFFECT:
            unknown.append(start + key)
    unknown += [key for key in header.facts if not key.startswith((start, *OTHER_GROUPS))]
    if unknown:
        warn(f"Keys of {header.path} that are not known, and not read: {', '.join(map(shown, sorted(unknown)[:8]))}.")


def _agree(value: Any, expected: Any) -> bool:
    """Compare a file's value with that of the configuration; a list holds one for every layer."""
    values = value if isinstance(value, tuple) else (value,)
    numbers = all(isinstance(v, (int, float)) for v in (*values, expected))
    return numbers and all(math.isclose(v, expected, rel_tol=1e-5, abs_tol=1e-12) for v in values)


def _key_error(header: GgufHeader, key: str, value: Any, reason: str) -> CheckpointError:
    name = f"{header.facts.get('general.architecture')}.{key}"
    return CheckpointError(
        f"{header.path} says {name} = {shown(value)}: {reason}. Use the checkpoint that the file was made from."
    )


def llama_cpp_keys() -> Iterator[str]:
    """Yield all keys of architectures that the package gguf knows, without the architecture's name."""
    from gguf import Keys

    for group in vars(Keys).values():
        for value in vars(group).values() if isinstance(group, type) else ():
            if isinstance(value, str) and value.startswith("{arch}."):
                yield value.removeprefix("{arch}.")
