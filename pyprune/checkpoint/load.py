"""Reading models safely.

A checkpoint is an ordinary Hugging Face folder plus ``pruning.json`` (plan, provenance and a SHA-256 of
every other file). Nothing is pickled: weights are safetensors, and a ``.bin`` is only ever read by torch's
weights_only loader.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file, extract_commit_hash

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
from pyprune.checkpoint.gguf import GgufHeader, read_gguf_header, refuse_unused
from pyprune.checkpoint.plausible import (
    CONFIG,
    check_config,
    check_layers,
    check_parameters,
    read_config,
    refuse_adapter,
    stored_elements,
)
from pyprune.checkpoint.record import has_record, read_pruning_json
from pyprune.checkpoint.shards import check_finite, weight_files
from pyprune.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    PypruneError,
    UnsupportedModelError,
    did_you_mean,
    shown,
)
from pyprune.families import all_families, parameter_shapes
from pyprune.plan import MAX_INDEX
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.files import file_digest, read_json
from pyprune.runtime.limits import one_line
from pyprune.runtime.progress import quiet

TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder with one of these files has a tokenizer."""
TOKENIZER_FILES = (
    *TOKENIZER_MARKS, "merges.txt", "vocab.txt", "sentencepiece.bpe.model", "spiece.model",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates",
)  # fmt: skip
"""Everything that Transformers writes or reads for the tokenizers of decoder-only models."""


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
        trust_remote_code: run the repository's own Python code. Off unless it is turned on.
        verify: check the SHA-256 of every file of a pyprune checkpoint first.

    Returns:
        (model in eval mode, tokenizer or None when the folder has none).

    Raises:
        CheckpointError: missing, truncated or tampered files, files that the record does not list, an adapter next
            to the weights, quantised weights, weights that do not fill the model or are not finite.
        UnsupportedModelError: a model type that Transformers or pyprune does not know.
        ConfigError: an unknown dtype, or a device that this machine does not have.
        MissingDependencyError: ``gguf_file`` without the package gguf.
    """
    place = resolve_device(device)
    if dtype not in DTYPES:
        raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
    source = str(path_or_id)
    if _is_folder(source):
        _check_folder(Path(source), gguf_file, verify=verify)
    if gguf_file is not None and find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "gguf", f"Reading {gguf_file}")
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _actionable(source), quiet("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what matters of these is an error below
        if gguf_file is None:
            _checked_config(source, options)
        else:
            options |= {"gguf_file": gguf_file}
        reading = options if gguf_file is None else options | {"config": _gguf_config(source, gguf_file, options)}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], output_loading_info=True, **reading
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        tokenizer = _load_tokenizer(source, options)
    _check_loaded(source, model, info)
    _tell_tying_apart(model)
    if gguf_file is not None:
        _forget_quantisation(model)
        _check_shapes(source, model)
    return _placed(model, place, source), tokenizer


def read_dense_config(folder: str | Path) -> tuple[PretrainedConfig, dict[str, tuple[int, ...]]]:
    """The configuration of a local checkpoint, compared with its weight files, and the shapes it asks for.

    Returns:
        (configuration, parameter name -> shape; tied parameters once).

    Raises:
        CheckpointError: config.json or the weight files are damaged, or they do not belong together.
        UnsupportedModelError: a model type that pyprune does not know.
    """
    source = str(folder)
    refuse_adapter(Path(folder))
    with _actionable(source):
        config, model = _checked_config(source, {"trust_remote_code": False})
        return config, parameter_shapes(model)


def read_generation_config(folder: str | Path) -> GenerationConfig | None:
    """generation_config.json of a local checkpoint, or None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not os.path.isfile(os.path.join(folder, "generation_config.json")):
        return None
    with _actionable(str(folder)):
        return GenerationConfig.from_pretrained(folder)


def _checked_config(source: str, options: Mapping[str, Any]) -> tuple[PretrainedConfig, Any]:
    """The configuration, compared with what pyprune knows and, of a local folder, with what its weight files hold.

    Returns:
        (configuration, the model on the meta device; None of a hub id, and where the checkpoint brings its own code).
    """
    local = os.path.isdir(source)
    raw = _checked_values(source, options)
    tensors, elements = stored_elements(Path(source)) if local else (0, 0)
    if local:
        check_layers(raw.get("num_hidden_layers"), tensors, source)
    config = _config_of(source, **options)
    _check_model_type(config.model_type)
    if not local or options["trust_remote_code"]:
        return config, None
    return config, check_parameters(config, elements, source)


def _checked_values(source: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json as plain data, of a known model type and with sizes that a model may have."""
    local = os.path.isdir(source)
    raw = read_config(Path(source)) if local else PretrainedConfig.get_config_dict(source, **options)[0]
    if raw.get("model_type") is not None:
        _check_model_type(raw["model_type"])
    check_config(raw, source)
    return raw


def _gguf_config(source: str, gguf_file: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration in a GGUF file whose lengths, counts and tensors have been compared with the file."""
    local = os.path.isdir(source)
    path = os.path.join(source, gguf_file) if local else cached_file(source, gguf_file, revision=options["revision"])
    header: GgufHeader = read_gguf_header(Path(str(path)))
    config: PretrainedConfig = AutoConfig.from_pretrained(source, **options)
    _check_model_type(config.model_type)
    where = os.path.join(source, gguf_file)
    check_config(config.to_dict(), where)
    refuse_unused(header, check_parameters(config, header.elements, where))
    return config


def _check_loaded(source: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{_named(source)} holds an adapter, which was put on top of its weights. Merge it into its base model "
            "first (peft: merge_and_unload, then save_pretrained)."
        )
    _check_filled(source, info)
    _check_model_type(model.config.model_type)
    for name, parameter in model.named_parameters():
        check_finite(name, parameter, source)


def _check_shapes(source: str, model: PreTrainedModel) -> None:
    """Transformers gives a parameter the shape of its GGUF tensor, whatever the file says of the model's sizes."""
    shapes = parameter_shapes(model)
    asked = parameter_shapes(check_parameters(model.config, sum(map(math.prod, shapes.values())), source))
    wrong = [name for name, shape in shapes.items() if asked.get(name) != shape]
    if wrong:
        raise CheckpointError(
            f"The weights of {_named(source)} do not fit the sizes that its GGUF file names: {wrong[0]} has the shape "
            f"{shapes[wrong[0]]}, expected {asked.get(wrong[0])}. The file is damaged; fetch it again."
        )


def _placed(model: PreTrainedModel, place: torch.device, source: str) -> PreTrainedModel:
    try:
        return cast(PreTrainedModel, cast(Any, model).to(place).eval())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{_named(source)} does not fit into the memory of {place}. Use --device cpu, a smaller dtype, or free it."
        ) from error


def weights_version(
    path_or_id: str | Path,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """What tells one set of weights from another, for a run that continues with them later.

    Args:
        path_or_id: folder or hub id.
        gguf_file: name of a GGUF file inside it.
        revision: hub revision.
        trust_remote_code: as in :func:`load_model`; nothing is run here.

    Returns:
        Of a folder, a SHA-256 (hex) over name and content of config.json and the weight files that are loaded (of the
        GGUF file alone); the digests of a pyprune record are believed, because :func:`load_model` compares them with
        the files. Of a hub id, the commit that the revision stands for.

    Raises:
        CheckpointError: the folder or the repository cannot be read, or its weights are missing.
        UnsupportedModelError: the folder's config.json names a model type that pyprune does not know.
    """
    source = str(path_or_id)
    folder = Path(source)
    local = _is_folder(source)
    if local:
        _check_folder(folder, gguf_file, verify=False)
    with _actionable(source):
        if not local:
            file = cached_file(source, gguf_file or CONFIG, revision=revision)
            commit = extract_commit_hash(file, None)
            if commit is None:
                raise CheckpointError(f"{_named(source)} is not a local folder, and the hub names no commit of it.")
            return commit
        known = read_pruning_json(folder).files if has_record(folder) else {}
        if gguf_file is None:
            _checked_values(source, {})  # before hours are spent reading weights that nobody can use
        files = [folder / gguf_file] if gguf_file else [folder / CONFIG, *weight_files(folder, pickled=True)]
        digests = {path.name: known.get(path.name) or file_digest(path) for path in files}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def stored_dtype(path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """The dtype that a checkpoint's config.json names, a key of :data:`DTYPES`, or None where it names none.

    Raises:
        CheckpointError: the configuration cannot be read.
    """
    source = str(path_or_id)
    with _actionable(source):
        if os.path.isdir(source):
            check_config(read_config(Path(source)), source)
        config = _config_of(source, revision=revision, trust_remote_code=trust_remote_code)
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else None


def load_tokenizer(path_or_id: str | Path, **options: Any) -> Any:
    """The tokenizer of a folder or hub id, or None when a folder has none.

    Raises:
        CheckpointError: its files are damaged, or need code that is not run.
    """
    source = str(path_or_id)
    with _actionable(source):
        return _load_tokenizer(source, {"trust_remote_code": False, **options})


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
    if local:
        _check_token_ids(folder / "tokenizer.json")
    with _without_panic_reports():
        return AutoTokenizer.from_pretrained(source, **options)


def _check_token_ids(path: Path) -> None:
    """The tokenizers library makes a table as long as the largest id, and ends the process where that does not fit."""
    if not path.is_file():
        return
    data = read_json(path)
    model = data.get("model") if isinstance(data, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = data.get("added_tokens") if isinstance(data, dict) else None
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i <= MAX_INDEX), None)
    if wrong is not None:
        raise CheckpointError(
            f"{path} names the token id {shown(wrong)}; allowed are 0 to {MAX_INDEX}. The file is damaged; fetch it "
            "again."
        )


@contextmanager
def _without_panic_reports() -> Iterator[None]:
    """Keep what the block writes to stderr, and let it through unless Rust panics.

    The tokenizers library reports a panic there by itself, a page with RUST_BACKTRACE, before the exception arrives.
    """
    try:
        sys.stderr.flush()
        real = os.dup(2)
    except (OSError, AttributeError):  # there is no stderr
        yield
        return
    panicked = False
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = _is_panic(error)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            kept.seek(0)
            if not panicked:
                sys.stderr.write(kept.read().decode(errors="replace"))


def _is_panic(error: BaseException) -> bool:
    """Whether it is a panic of Rust code, which pyo3 raises as an exception that is no Exception."""
    return type(error).__name__ == "PanicException"


def _is_folder(source: str) -> bool:
    """Whether a checkpoint is a local folder; what is neither that nor may be a hub id is refused."""
    if os.path.isdir(source):
        return True
    if os.path.isabs(source) or source.startswith(("./", "../")) or os.path.lexists(source):
        raise CheckpointError(f"{_named(source)} is not a folder. Give a checkpoint folder or a hub id.")
    return False


def _check_folder(folder: Path, gguf_file: str | None, *, verify: bool) -> None:
    refuse_adapter(folder)
    if gguf_file is not None and not os.path.isfile(folder / gguf_file):
        raise CheckpointError(f"{folder} has no file {shown(gguf_file)}.")
    if gguf_file is None and not os.path.isfile(folder / CONFIG):
        raise CheckpointError(f"{folder} has no {CONFIG}; it is not a checkpoint folder.")
    if has_record(folder):
        read_pruning_json(folder, verify_files=verify)


def _config_of(source: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(source, **options)
    except (AttributeError, TypeError) as error:
        # Only config.json is read here: this is what Transformers makes of a list where a mapping belongs.
        raise ValueError(f"config.json holds a value of the wrong kind ({error}).") from error


def _check_model_type(name: Any) -> None:
    known = set(all_families()) | {f"pruned_{family}" for family in all_families()}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(did_you_mean(str(name)[:80], all_families(), "model type"))


def _named(source: str) -> str:
    """A path or hub id for a message: as it is, unless it is very long or would not stay on one line."""
    return source if source.isprintable() and len(source) <= 300 else shown(source)


@contextmanager
def _actionable(source: str) -> Iterator[None]:
    """Turn whatever Transformers and what it calls raise on a bad checkpoint into one CheckpointError.

    A damaged file can make those libraries raise anything: Rust code even panics, which is no Exception. What pyprune
    raises itself passes, and so do Ctrl-C and the end of the process.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    named = _named(source)
    try:
        yield
    except PypruneError:
        raise
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{named} is not a local folder and could not be fetched from the hub: {_reason(error)}. "
            "Check the id and the network, or give a local folder."
        ) from error
    except UnpicklingError as error:
        raise CheckpointError(
            f"{named} holds a .bin file with more than plain tensors in it; it was not read, because "
            "reading it would run its code. Get the weights as safetensors."
        ) from error
    except ImportError as error:
        raise CheckpointError(
            f"{named} needs a package that is not installed: {_reason(error)}. Quantised checkpoints are not read "
            "(give the original weights); other attention than the usual one is chosen by an entry in config.json, "
            "which can be removed."
        ) from error
    except MemoryError as error:
        raise CheckpointError(f"{named} needs more memory than there is, or its sizes are damaged.") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        _refuse(source, error)


def _refuse(source: str, error: BaseException) -> None:
    text, named = _reason(error), _named(source)
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        raise UnsupportedModelError(f"{named}: {text}") from error
    if not os.path.isdir(source):
        raise CheckpointError(
            f"{named} is not a local folder, and reading it from the hub failed: {text} "
            "Check the spelling and the network, or give a local folder."
        ) from error
    raise CheckpointError(
        f"{named} could not be read: {text} The files may be truncated or damaged; fetch or write the checkpoint again."
    ) from error


def _reason(error: BaseException) -> str:
    """A library's error in one line of bounded length, with its type where the text alone says too little."""
    text = one_line(str(error))
    speaks = isinstance(error, (OSError, ValueError, RuntimeError)) and text
    return text if speaks else f"{type(error).__name__} ({text})."


def _check_filled(source: str, info: Mapping[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns; here that is an error."""
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:3])}"
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {_named(source)} do not fit its config.json ({'; '.join(problems)}). "
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
