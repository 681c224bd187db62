"""Reading models safely.

A checkpoint is an ordinary Hugging Face folder plus ``pruning.json`` (plan, provenance and a SHA-256 of
every other file). Nothing is pickled: weights are safetensors, and a ``.bin`` is only ever read by torch's
weights_only loader.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file, extract_commit_hash

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
from pyprune.checkpoint.damage import actionable, named, read_mapping
from pyprune.checkpoint.gguf import GgufHeader, read_gguf_header, refuse_unused
from pyprune.checkpoint.gguf_config import check_architecture, complete_config
from pyprune.checkpoint.plausible import (
    CONFIG,
    check_config,
    check_layers,
    check_parameters,
    is_exported_quantisation,
    read_config,
    refuse_adapter,
    stored_elements,
)
from pyprune.checkpoint.record import has_record, read_pruning_json
from pyprune.checkpoint.shards import TensorFiles, check_finite, has_safetensors, weight_files
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.errors import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    UnsupportedModelError,
    did_you_mean,
    shown,
)
from pyprune.families import all_families, parameter_shapes
from pyprune.modeling.configuration import PrunedConfigMixin, config_with_sizes_per_layer, has_sizes_per_layer
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.files import file_digest
from pyprune.runtime.progress import quiet

GENERATION = "generation_config.json"
QUANTISED_PER_ELEMENT = 8
"""Weights in a stored element of a quantised checkpoint, at most: eight of 4 bits in a word of 32."""


def load_model(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
    quantised: bool = False,
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
        quantised: also take what ``pyprune export --quantise`` writes, for measuring: weights have the rounded values,
            and inputs of linear layers are rounded as they come where the format asks for it.

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
    with actionable(source), quiet("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what matters of these is an error below
        if gguf_file is None:
            config, _ = _checked_config(source, options, quantised=quantised)
        else:
            options |= {"gguf_file": gguf_file}
            config = _gguf_config(source, gguf_file, options)
        given = gguf_file is not None or isinstance(config, PrunedConfigMixin)
        reading = options | {"config": config} if given else options
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], output_loading_info=True, **reading
        )
        model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        tokenizer = load_tokenizer(source, **options)
    if getattr(model, "hf_quantizer", None) is not None and gguf_file is None:
        cast(Any, model).hf_quantizer.compressor.decompress_model(model)
    _check_loaded(source, model, info)
    _tell_tying_apart(model)
    if gguf_file is not None:
        _forget_quantisation(model)
        _check_shapes(source, model)
    return _placed(model, place, source), tokenizer


def read_dense_config(folder: str | Path) -> tuple[PretrainedConfig, dict[str, tuple[int, ...]]]:
    """The configuration of a local checkpoint, compared with its weight files, and the shapes it asks for.

    Returns:
        (configuration, parameter name -> shape). A tied head has no entry; one that is stored with other values than
        the embedding is not tied, whatever config.json says.

    Raises:
        CheckpointError: config.json or the weight files are damaged, or they do not belong together.
        UnsupportedModelError: a model type that pyprune does not know.
    """
    source = str(folder)
    refuse_adapter(Path(folder))
    with actionable(source):
        config, model = _checked_config(source, {"trust_remote_code": False})
        if config.tie_word_embeddings and _has_own_head(Path(folder), config):
            config.tie_word_embeddings = False
        elif config.tie_word_embeddings:
            model.tie_weights()
        return config, parameter_shapes(model)


def _has_own_head(folder: Path, config: PretrainedConfig) -> bool:
    """Whether a folder's safetensors hold a head with other values than the embedding."""
    if not has_safetensors(folder):
        return False
    rows = all_families()[str(config.model_type).removeprefix("pruned_")].rows
    vocabulary = [row for row in rows if row.axes == ("vocab", "hidden")]
    files, found = TensorFiles(folder), {}
    for name in files.names():
        for row in vocabulary:
            if row.regex.match(name) or row.regex.match(f"model.{name}"):  # the decoder alone may be stored
                found[row.role] = name
    if len(found) < 2:
        return False
    head = files.read(found["head"])
    return not torch.equal(head, files.read(found["embedding"]).to(head.dtype))


def model_without_weights(
    path_or_id: str | Path,
    *,
    dtype: str = "float32",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a checkpoint on the meta device: its modules and shapes; of its files only the sizes are looked at.

    Args:
        path_or_id: folder or hub id.
        dtype: of the weights, as :func:`load_model` would make them.
        gguf_file, revision, trust_remote_code: as there.

    Raises:
        CheckpointError, UnsupportedModelError: as :func:`load_model`.
    """
    source, remote = str(path_or_id), {"trust_remote_code": trust_remote_code}
    options: dict[str, Any] = {"revision": revision, **remote}
    with actionable(source), quiet("transformers"), torch.device("meta"):
        if gguf_file is None:
            config, _ = _checked_config(source, options)
        else:
            config = _gguf_config(source, gguf_file, {**options, "gguf_file": gguf_file})
        made = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=DTYPES[dtype], **remote)
    return cast(PreTrainedModel, made)


def read_generation_config(folder: str | Path) -> GenerationConfig | None:
    """generation_config.json of a local checkpoint, or None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not os.path.isfile(os.path.join(folder, GENERATION)):
        return None
    with actionable(str(folder)):
        return GenerationConfig.from_pretrained(folder)


def _checked_config(
    source: str, options: Mapping[str, Any], *, quantised: bool = False
) -> tuple[PretrainedConfig, Any]:
    """The configuration, compared with what pyprune knows and, of a local folder, with what its weight files hold.

    Returns:
        (configuration, the model on the meta device; None of a hub id, and where the checkpoint brings its own code).
    """
    local = os.path.isdir(source)
    raw = _checked_values(source, options, quantised=quantised)
    tensors, elements = stored_elements(Path(source)) if local else (0, 0)
    if local:
        check_layers(raw.get("num_hidden_layers"), tensors, source)
    if is_exported_quantisation(raw):
        elements *= QUANTISED_PER_ELEMENT
    config = config_of(source, **options)
    _check_model_type(config.model_type)
    if not local or options["trust_remote_code"]:
        return config, None
    return config, check_parameters(config, elements, source)


def _checked_values(source: str, options: Mapping[str, Any], *, quantised: bool = False) -> Mapping[str, Any]:
    """config.json as plain data, of a known model type and with sizes that a model may have."""
    local = os.path.isdir(source)
    raw = read_config(Path(source)) if local else PretrainedConfig.get_config_dict(source, **options)[0]
    _refuse_wrapper(raw, source)
    if raw.get("model_type") is not None:
        _check_model_type(raw["model_type"])
    check_config(raw, source, quantised=quantised)
    return raw


def _gguf_config(source: str, gguf_file: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration in a GGUF file whose lengths, counts and tensors have been compared with the file."""
    local = os.path.isdir(source)
    path = os.path.join(source, gguf_file) if local else cached_file(source, gguf_file, revision=options["revision"])
    header: GgufHeader = read_gguf_header(Path(str(path)))
    check_architecture(header, all_families())
    config: PretrainedConfig = AutoConfig.from_pretrained(source, **options)
    _check_model_type(config.model_type)
    where = os.path.join(source, gguf_file)
    complete_config(config, header)
    check_config(config.to_dict(), where)
    refuse_unused(header, check_parameters(config, header.elements, where))
    return config


def _check_loaded(source: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{named(source)} holds an adapter, which was put on top of its weights. Merge it into its base model "
            "first (peft: merge_and_unload, then save_pretrained)."
        )
    check_filled(source, info)
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
            f"The weights of {named(source)} do not fit the sizes that its GGUF file names: {wrong[0]} has the shape "
            f"{shapes[wrong[0]]}, expected {asked.get(wrong[0])}. The file is damaged; fetch it again."
        )


def _placed(model: PreTrainedModel, place: torch.device, source: str) -> PreTrainedModel:
    try:
        return cast(PreTrainedModel, cast(Any, model).to(place).eval())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{named(source)} does not fit into the memory of {place}. Use --device cpu, a smaller dtype, or free it."
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
        the files. Of a hub id, the commit that the revision stands for, and the GGUF file's name.

    Raises:
        CheckpointError: the folder or the repository cannot be read, or its weights are missing.
        UnsupportedModelError: the folder's config.json names a model type that pyprune does not know.
    """
    source = str(path_or_id)
    folder = Path(source)
    local = _is_folder(source)
    if local:
        _check_folder(folder, gguf_file, verify=False)
    with actionable(source):
        if not local:
            file = cached_file(source, gguf_file or CONFIG, revision=revision)
            commit = extract_commit_hash(file, None)
            if commit is None:
                raise CheckpointError(f"{named(source)} is not a local folder, and the hub names no commit of it.")
            return f"{commit}/{gguf_file}" if gguf_file else commit
        known = read_pruning_json(folder).files if has_record(folder) else {}
        if gguf_file is None:
            _checked_values(source, {})  # before hours are spent reading weights that nobody can use
        files = [folder / gguf_file] if gguf_file else [folder / CONFIG, *weight_files(folder, pickled=True)]
        digests = {path.name: known.get(path.name) or file_digest(path) for path in files}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def stored_dtype(path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str | None:
    """The dtype of most weights of a folder with safetensors, a key of :data:`DTYPES`.

    Of what is not here, or not in that format, it is the one that config.json names, or None where it names none.

    Raises:
        CheckpointError: the configuration or the headers cannot be read.
    """
    source = str(path_or_id)
    with actionable(source):
        if os.path.isdir(source):
            check_config(read_config(Path(source)), source)
        config = config_of(source, revision=revision, trust_remote_code=trust_remote_code)
        found = _dtype_of_most(Path(source)) if os.path.isdir(source) else None
    name = found or str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else None


def _dtype_of_most(folder: Path) -> str | None:
    """The dtype of most numbers in a folder's safetensors; those of no key of :data:`DTYPES` do not count."""
    if not has_safetensors(folder):
        return None
    files, counts = TensorFiles(folder), Counter[str]()
    for name in files.names():
        counts[str(files.dtype(name)).removeprefix("torch.")] += math.prod(files.shape(name))
    return next((name for name, _ in counts.most_common() if name in DTYPES), None)


def _is_folder(source: str) -> bool:
    """Whether a checkpoint is a local folder; what is neither that nor may be a hub id is refused."""
    if os.path.isdir(source):
        return True
    if os.path.isabs(source) or source.startswith(("./", "../")) or os.path.lexists(source):
        raise CheckpointError(f"{named(source)} is not a folder. Give a checkpoint folder or a hub id.")
    return False


def _check_folder(folder: Path, gguf_file: str | None, *, verify: bool) -> None:
    refuse_adapter(folder)
    if gguf_file is not None and not os.path.isfile(folder / gguf_file):
        raise CheckpointError(f"{folder} has no file {shown(gguf_file)}.")
    if gguf_file is None and not os.path.isfile(folder / CONFIG):
        raise CheckpointError(f"{folder} has no {CONFIG}; it is not a checkpoint folder.")
    if os.path.isfile(folder / GENERATION):
        read_mapping(folder / GENERATION)  # Transformers leaves a damaged one out in silence
    if has_record(folder):
        read_pruning_json(folder, verify_files=verify)


def config_of(source: str, **options: Any) -> Any:
    """The configuration of a folder or hub id; with ``per_layer_config``, that of the pruned architecture.

    Args:
        source: folder or hub id.
        options: revision and trust_remote_code.

    Raises:
        ValueError: config.json holds a value of the wrong kind, or sizes per layer that the architecture has not.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(source, **options)
        if has_sizes_per_layer(values):
            return config_with_sizes_per_layer(values)
        return AutoConfig.from_pretrained(source, **options)
    except (AttributeError, TypeError) as error:
        # Only config.json is read here: this is what Transformers makes of a list where a mapping belongs.
        raise ValueError(f"config.json holds a value of the wrong kind ({error}).") from error


def _refuse_wrapper(raw: Mapping[str, Any], source: str) -> None:
    """Say of a text model with a tower beside it what it is; neither its type nor its names are those of its text."""
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        towers = ", ".join(sorted(name for name in raw if name.endswith("_config") and name != "text_config"))
        raise UnsupportedModelError(
            f"{named(source)} is a model of several parts ({towers or 'text_config'}), and text models alone are "
            "pruned. Load it with Transformers, save its language_model and text_config as a checkpoint, and give that."
        )


def _check_model_type(name: Any) -> None:
    known = set(all_families()) | {f"pruned_{family}" for family in all_families()}
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(did_you_mean(str(name)[:80], all_families(), "model type"))


def check_filled(source: str, info: Mapping[str, Any]) -> None:
    """Transformers fills missing weights with random numbers and only warns; here that is an error.

    Args:
        source: folder or hub id, for the message.
        info: what ``from_pretrained(..., output_loading_info=True)`` told.

    Raises:
        CheckpointError: weights are missing, or some have another shape or no place in the model.
    """
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind]))[:3])}"
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        if info.get(kind)
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {named(source)} do not fit its config.json ({'; '.join(problems)}). "
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
