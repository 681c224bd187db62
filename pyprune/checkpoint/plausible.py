"""Compare the claims of a checkpoint with the sizes of its files, before memory is allocated.

Transformers builds any sizes in config.json: a billion layers, labels or channels fill the memory of the machine
long before a missing weight is noticed. It also obeys other entries of a folder: another file with the weights, an
adapter on top of them, a kernel of the hub to run.
"""

from __future__ import annotations

import copy
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from pyprune.checkpoint.damage import read_mapping
from pyprune.errors import CheckpointError, shown
from pyprune.families import find_family
from pyprune.plan import MAX_INDEX, MAX_LAYERS

CONFIG = "config.json"
CONFIG_BYTES = 16 << 20
QUANTISED_BY = "compressed-tensors"
ADAPTERS = ("adapter_config.json", "adapter_model.*")
COUNTS = {
    "num_hidden_layers": MAX_LAYERS,
    "num_labels": 100_000,
    "max_position_embeddings": 1 << 31,
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim", "num_attention_heads",
         "num_key_value_heads", "head_dim", "norm_size"),
        MAX_INDEX,
    ),
}  # fmt: skip
"""Sizes in config.json, and the largest that any model has."""
CONFIG_SLACK, SMALL_MODEL = 4, 1 << 26
"""A model may have this many times the parameters of its files (missing ones are named later), or this many at all."""


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with a PEFT adapter, which Transformers would put on top of the weights silently.

    Raises:
        CheckpointError: the message names the file.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} could not be read: {error.strerror}. Check its permissions.") from error
    for name in names:
        if any(fnmatchcase(name.lower(), pattern) for pattern in ADAPTERS):
            raise CheckpointError(
                f"{folder} holds the adapter {shown(name)}, which would change the weights as they are read. Merge it "
                "into its base model first (peft: merge_and_unload, then save_pretrained), or move it away."
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder as plain data.

    Raises:
        CheckpointError: it is missing, too long, not JSON, or names another file than the usual ones for the weights.
    """
    path = folder / CONFIG
    if not os.path.isfile(path):
        raise CheckpointError(f"{folder} has no {CONFIG}; give a checkpoint folder.")
    config = read_mapping(path, CONFIG_BYTES)
    if config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{path} names the file of its weights ({shown(config['transformers_weights'])}), which only some readers "
            "follow. Rename that file to model.safetensors and remove the entry transformers_weights."
        )
    return config


def check_config(config: Mapping[str, Any], source: str, *, quantised: bool = False) -> None:
    """Refuse values of config.json that no model has, and those that would run or need foreign code.

    Args:
        config: config.json as plain data, of a model type that pyprune knows.
        source: folder or hub id, for the message.
        quantised: accept weights that :mod:`pyprune.serving.quantise` wrote.

    Raises:
        CheckpointError: a size that is no whole number, zero, negative or enormous; a token id outside the vocabulary,
            a list of another length than the layers, an activation, a dtype or a rope type that Transformers does not
            know; quantised weights; attention of a repository on the hub.
    """
    for name, most in COUNTS.items():
        value = config.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise _not_allowed(source, name, value, f"whole numbers from 1 to {most:,}")
    _check_numbers(config, source)
    _check_named_values(config, source)
    for name in ("quantization_config", "compression_config"):
        if config.get(name) and not (quantised and is_exported_quantisation(config)):
            where = " here (eval, bench, serve and inspect take this one)" if is_exported_quantisation(config) else ""
            raise CheckpointError(
                f"{source} is quantised ({CONFIG} has {name}), and quantised checkpoints are not read{where}. Give the "
                "original weights, or a GGUF file with --gguf-file."
            )
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):
            raise CheckpointError(
                f"{CONFIG} of {source} asks for attention from the hub ({name}: {shown(config[name])}), which would "
                "run code that comes from there. Remove that entry."
            )


def _not_allowed(source: str, name: str, value: Any, allowed: str) -> CheckpointError:
    """Return the error of a value in config.json that no model has: its field, its value, the allowed ones.

    Args:
        source: folder or hub id.
        name: of the field.
        value: of the field.
        allowed: in words.
    """
    return CheckpointError(
        f"{CONFIG} of {source} says {name} = {shown(value)}; allowed are {allowed}. Correct it, or take the file that "
        "the model's authors published."
    )


def _check_named_values(config: Mapping[str, Any], source: str) -> None:
    """Refuse values on which Transformers fails with a message that names neither the field nor allowed values."""
    import torch
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rows, pad = config.get("vocab_size"), config.get("pad_token_id")
    if isinstance(rows, int) and isinstance(pad, int) and pad >= rows:
        raise _not_allowed(source, "pad_token_id", pad, f"0 to {rows - 1} (vocab_size is {rows}) and null")
    layers, family = config.get("num_hidden_layers"), find_family(config.get("model_type"))
    for name in family.layer_lists if family is not None else ():
        values = config.get(name)
        if isinstance(values, list) and isinstance(layers, int) and len(values) != layers:
            raise _not_allowed(source, name, values, f"lists of {layers} entries, one for each layer")
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if isinstance(config.get(name), str) and config[name] not in ACT2FN:
            raise _not_allowed(source, name, config[name], "the activations of Transformers, such as silu and gelu")
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if isinstance(value, str) and not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
            raise _not_allowed(source, name, value, "the dtypes of torch, such as float32 and bfloat16")
    known = {*ROPE_INIT_FUNCTIONS, "default", "mrope", "su"}  # the early name of longrope
    for field in ("rope_parameters", "rope_scaling"):
        for rope in _ropes(config.get(field)):
            kind = rope.get("rope_type", rope.get("type"))
            if isinstance(kind, str) and kind not in known:
                raise _not_allowed(source, f"{field}.rope_type", kind, ", ".join(sorted(known)))


def _check_numbers(config: Mapping[str, Any], source: str) -> None:
    for name, value in _numbers(config):
        last = name.rpartition(".")[2]
        if not math.isfinite(value):  # JSON has neither, Python's reader takes both
            raise _not_allowed(source, name, value, "finite numbers")
        if (last == "rope_theta" and value <= 0) or (last.endswith(("_eps", "_epsilon")) and value < 0):
            raise _not_allowed(source, name, value, "numbers above 0")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every float, with its dotted name."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)


def _ropes(value: Any) -> list[Mapping[str, Any]]:
    """Return the rotary scaling of a model, or of each kind of its layers."""
    if not isinstance(value, Mapping):
        return []
    return [value, *(inner for inner in value.values() if isinstance(inner, Mapping))]


def is_exported_quantisation(config: Mapping[str, Any]) -> bool:
    """Check whether config.json describes quantised weights that ``pyprune export --quantise`` wrote."""
    facts = config.get("quantization_config")
    if not isinstance(facts, dict) or facts.get("quant_method") != QUANTISED_BY or config.get("compression_config"):
        return False
    groups = facts.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        return False
    # A target or an exception that begins with "re:" would be run as a regular expression.
    names = [*(group.get("targets") for group in groups.values()), facts.get("ignore")]
    return all(isinstance(listed, list) and all(map(_is_plain_name, listed)) for listed in names)


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and not name.startswith("re:")


def stored_elements(folder: Path) -> tuple[int, int]:
    """Return how many tensors and how many elements the weight files of a folder can hold at most.

    Exact for safetensors, by their headers; otherwise the number of bytes.

    Raises:
        CheckpointError: there are no weight files, or they are damaged.
    """
    from pyprune.checkpoint.shards import TensorFiles, weight_files

    files = weight_files(folder, pickled=True)
    if files[0].suffix == ".bin":
        for file in files:
            _check_pickled(file)
        size = sum(file.stat().st_size for file in files)
        return size, size
    tensors = TensorFiles(folder)
    names = tensors.names()
    return len(names), sum(prod(tensors.shape(name)) for name in names)


def _check_pickled(path: Path) -> None:
    """Refuse an empty file, and one that unpacks to a larger one: torch.save does not compress."""
    size = path.stat().st_size
    if not size:
        raise CheckpointError(f"{path} is empty: it was not written to its end. Fetch or write the checkpoint again.")
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > size:
        raise CheckpointError(f"{path} unpacks to {unpacked:,} bytes; it was not written by torch and was not read.")


def check_parts(config: Mapping[str, Any], source: str) -> None:
    """Refuse sizes of the parts of a multimodal model, such as its vision tower, that no model has.

    Args:
        config: config.json as plain data.
        source: folder or hub id, for the message.

    Raises:
        CheckpointError: a size that is enormous.
    """
    for part, values in config.items():
        for name, most in COUNTS.items() if part.endswith("_config") and isinstance(values, Mapping) else ():
            if type(values.get(name)) is int and not 1 <= values[name] <= most:
                raise _not_allowed(source, f"{part}.{name}", values[name], f"whole numbers from 1 to {most:,}")


def check_parameters(config: Any, elements: int, source: str, *, auto: Any = None) -> Any:
    """Refuse a configuration of far more parameters than the files hold, before one of them is allocated.

    Args:
        config: a Transformers configuration of a known architecture.
        elements: of all tensors in the files.
        source: folder or hub id, for the message.
        auto: the Auto class that has the model; None = that of causal LMs.

    Returns:
        The model on the meta device: names and shapes without memory.

    Raises:
        CheckpointError: the message has both numbers.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device("meta"):
        model = (auto or AutoModelForCausalLM).from_config(copy.deepcopy(config))
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > max(CONFIG_SLACK * elements, SMALL_MODEL):
        raise CheckpointError(
            f"The configuration of {source} describes a model of {parameters:,} parameters, but its files hold "
            f"{elements:,}. The checkpoint is incomplete or its configuration was changed."
        )
    return model
