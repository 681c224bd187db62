"""Sources of models, and loading from them. Nothing is unpickled: torch's weights_only loader reads a ``.bin``."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, extract_commit_hash, get_checkpoint_shard_files

from pyprune.checkpoint.configuration import (
    check_folder,
    check_model_type,
    checked_config,
    checked_values,
    is_folder,
    load_config,
    read_dense_files,
    read_gguf_config,
)
from pyprune.checkpoint.damage import actionable, label
from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.manifest import PruningRecord
from pyprune.checkpoint.places import Places, forget_multi_token_, multi_token_names, remember_places
from pyprune.checkpoint.plausible import CONFIG, check_config, check_parameters, read_config
from pyprune.checkpoint.record import has_record, read_pruning_json, read_record
from pyprune.checkpoint.shards import INDEX, SINGLE, TensorFiles, check_finite, has_safetensors, weight_files
from pyprune.checkpoint.stored import StoredModel
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.checkpoint.tower import closed_axes, has_tower, text_model, text_values
from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, did_you_mean
from pyprune.families import find_family, parameter_shapes
from pyprune.modeling.configuration import PrunedConfigMixin
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.files import file_digest
from pyprune.runtime.progress import quiet

OPTIONAL_FILES = ("generation_config.json", "adapter_config.json")
"""Files that some repositories have in addition to config.json and weights; a folder with an adapter is refused."""


class Reading(TypedDict, total=False):
    """Keywords of a :class:`ModelSource`, which functions for users take in addition to a model's name."""

    gguf_file: str | None
    revision: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class ModelSource:
    """The place that a model is read from. Each file is read once, when it is needed, and remembered.

    Attributes:
        name: folder or hub id.
        gguf_file: name of a GGUF file inside it.
        revision: hub revision.
        trust_remote_code: run the repository's own Python code. Off unless it is turned on.
    """

    name: str
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model: str | Path | ModelSource, **reading: Unpack[Reading]) -> Self:
        """Return the source of a model, which may be a source already."""
        if isinstance(model, ModelSource):
            return cast(Self, model)
        return cls(str(model), **reading)

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the hub, by their names in Transformers."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def facts(self) -> dict[str, Any]:
        """Return name, GGUF file and revision as plain data, for a record."""
        return {"model": self.name, "gguf_file": self.gguf_file, "revision": self.revision}

    @cached_property
    def folder(self) -> Path | None:
        """Return the folder of the configuration and the safetensors, fetched from the hub where needed.

        None where the model has no safetensors.

        Raises:
            CheckpointError: the repository cannot be read.
        """
        if os.path.isdir(self.name):
            return Path(self.name) if has_safetensors(Path(self.name)) else None
        maybe = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
        get = partial(cached_file, self.name, revision=self.revision)
        with actionable(self.name), quiet("transformers"):
            config = get(CONFIG)
            for name in OPTIONAL_FILES:
                get(name, **maybe)
            if get(SINGLE, **maybe) is None:
                index = get(INDEX, **maybe)
                if index is None:
                    return None
                get_checkpoint_shard_files(self.name, index, revision=self.revision)
        return Path(str(config)).parent

    @cached_property
    def record(self) -> PruningRecord | None:
        """Return the record of a checkpoint, or None where pyprune did not write it.

        Raises:
            CheckpointError: the record is damaged.
        """
        return read_record(self.name, revision=self.revision)

    @property
    def marks(self) -> str:
        """Return the marks of the text that the model was trained on (:mod:`pyprune.checkpoint.trained_on`)."""
        return str(self.record.provenance.get("training_marks", "")) if self.record is not None else ""

    def inherited_facts(self, *, verify_files: bool = False) -> dict[str, Any]:
        """Return the entries that the record of a checkpoint made from this one takes over from its record.

        Returns:
            "training_marks", because the new weights have seen that text too, and all other entries under "before";
            nothing where pyprune did not write the source.

        Raises:
            CheckpointError: the record is damaged; or with ``verify_files`` one of the files that it lists.
        """
        record = read_record(self.name, revision=self.revision, verify_files=True) if verify_files else self.record
        if record is None:
            return {}
        before = dict(record.provenance)
        marks = before.pop("training_marks", "")
        return {"training_marks": marks, "before": before}

    @cached_property
    def config(self) -> PretrainedConfig:
        """Return the configuration; the weights are not read and may be missing.

        Raises:
            CheckpointError: there is none, or it is damaged.
            UnsupportedModelError: a model type that pyprune does not know.
        """
        with actionable(self.name):
            if self.gguf_file is not None:
                return read_gguf_config(self.name, self.gguf_file, {**self.options, "gguf_file": self.gguf_file})
            if is_folder(self.name):
                read_config(Path(self.name))
            return cast(PretrainedConfig, load_config(self.name, **self.options))

    @property
    def closed_axes(self) -> dict[str, str]:
        """Return the axes of a text tower that the multimodal class closes, with the reason for each; else {}."""
        if self.gguf_file is not None:
            return {}
        with actionable(self.name):
            return closed_axes(PretrainedConfig.get_config_dict(self.name, **self.options)[0])

    @cached_property
    def dtype(self) -> str | None:
        """Return the dtype of most weights of a folder with safetensors, a key of :data:`DTYPES`.

        For other sources, return the one that config.json names, or None. A GGUF file has none: it is dequantised.

        Raises:
            CheckpointError: the configuration or the headers cannot be read.
        """
        if self.gguf_file is not None:
            return None
        local = os.path.isdir(self.name)
        with actionable(self.name):
            if local:
                check_config(text_values(read_config(Path(self.name))), self.name)
            config = self.config
            most = _most_common_dtype(Path(self.name)) if local else None
        name = most or str(getattr(config, "dtype", None)).removeprefix("torch.")
        return name if name in DTYPES else None

    @cached_property
    def version(self) -> str:
        """Return an identifier of these weights, for a run that continues with them later.

        For a folder, a SHA-256 (hex) over name and content of config.json and the weight files that are loaded (of the
        GGUF file alone). The digests of a pyprune record are trusted, because :meth:`load` compares them with the
        files. For a hub id, the commit that the revision stands for, and the GGUF file's name.

        Raises:
            CheckpointError: the folder or the repository cannot be read, or its weights are missing.
            UnsupportedModelError: the folder's config.json names a model type that pyprune does not know.
        """
        folder, local = Path(self.name), is_folder(self.name)
        if local:
            check_folder(folder, self.gguf_file, verify=False)
        with actionable(self.name):
            if not local:
                return self._commit()
            recorded = read_pruning_json(folder).files if has_record(folder) else {}
            if self.gguf_file is None:
                checked_values(self.name, self.options)  # before hours are spent reading weights that nobody can use
                files = [folder / CONFIG, *weight_files(folder, pickled=True)]
            else:
                files = [folder / self.gguf_file]
            digests = {path.name: recorded.get(path.name) or file_digest(path) for path in files}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    def _commit(self) -> str:
        file = cached_file(self.name, self.gguf_file or CONFIG, revision=self.revision)
        commit = extract_commit_hash(file, None)
        if commit is None:
            raise CheckpointError(
                f"{label(self.name)} is no local folder, and the hub names no commit of it. Give a folder."
            )
        return f"{commit}/{self.gguf_file}" if self.gguf_file else commit

    def streaming_obstacle(self) -> str | None:
        """Return why the tensors cannot be read one at a time, as part of a sentence; None where they can.

        Raises:
            CheckpointError: the repository cannot be read.
        """
        if self.gguf_file is not None:
            return "GGUF weights are dequantised when they are loaded"
        if self.trust_remote_code:
            return "the model may run code of its own (--trust-remote-code)"
        if self.folder is None:
            return f"{self.name} has no safetensors"
        values = read_config(self.folder)
        if has_tower(values):
            return "the text tower of a multimodal model is loaded with the others"
        family = find_family(values.get("model_type"))
        if family is None:
            return None
        if family.layers_alone:
            return f"{family.model_type!r} models have no table of their parameters"
        if unknown := self._places.unknown:
            return f"its files hold {unknown[0]}, a name that only Transformers can translate"
        return None

    @cached_property
    def _places(self) -> Places:
        """Return where the tensors of the model are in the safetensors of the folder."""
        return read_dense_files(cast(Path, self.folder)).places

    def layers_obstacle(self) -> str | None:
        """Return why the layers cannot be read one at a time while the model runs; None where they can.

        Raises:
            CheckpointError: the repository cannot be read.
        """
        if has_record(self.name):
            return f"{self.name} has a record, with whose checksums it is compared when it is loaded"
        return self.streaming_obstacle()

    def open_stored(self, *, dtype: str, device: torch.device | str, scratch: Path | None = None) -> StoredModel:
        """Open the model with its weights on disk, to be read one tensor at a time.

        Raises:
            CheckpointError: it has no safetensors, or they are damaged.
        """
        if self.folder is None:
            raise CheckpointError(f"{self.name} has no safetensors to stream weights from; export it first.")
        return StoredModel(self.folder, dtype=DTYPES[dtype], device=device, scratch=scratch)

    def open_layers(self, *, dtype: str, device: str) -> StoredLayers:
        """Open the model to run it with one layer in memory at a time; needs no :meth:`layers_obstacle`."""
        return StoredLayers(self.open_stored(dtype=dtype, device=resolve_device(device)))

    def shapes(self, dtype: str = "float32") -> PreTrainedModel:
        """Build the model on the meta device: modules and shapes. Of its weight files only the headers are read.

        Raises:
            CheckpointError, UnsupportedModelError: as :meth:`load`.
        """
        remote = {"trust_remote_code": self.trust_remote_code}
        with actionable(self.name), quiet("transformers"), torch.device("meta"):
            if self.gguf_file is None:
                config, _ = checked_config(self.name, self.options)
            else:
                config = copy.deepcopy(self.config)
            made = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=DTYPES[dtype], **remote)
        return cast(PreTrainedModel, made)

    def tokenizer(self) -> Any:
        """Load the tokenizer; None where the source has none."""
        options = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        return load_tokenizer(self.name, **options)

    def load(
        self, *, dtype: str = "float32", device: str = "cpu", verify: bool = True, quantised: bool = False
    ) -> tuple[PreTrainedModel, Any]:
        """Load the model and its tokenizer; see :func:`load_model`."""
        place = resolve_device(device)
        if dtype not in DTYPES:
            raise ConfigError(did_you_mean(dtype, DTYPES, "dtype"))
        source, gguf_file, options = self.name, self.gguf_file, self.options
        if is_folder(source):
            check_folder(Path(source), gguf_file, verify=verify)
        if gguf_file is not None and find_spec("gguf") is None:
            raise MissingDependencyError("gguf", "gguf", f"Reading {gguf_file}")
        with actionable(source), quiet("transformers"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the ones that matter are errors below
            if gguf_file is None:
                config, _ = checked_config(source, options, quantised=quantised)
            else:
                options |= {"gguf_file": gguf_file}
                config = read_gguf_config(source, gguf_file, options)
            auto: Any = AutoModelForCausalLM
            if gguf_file is None and has_tower(PretrainedConfig.get_config_dict(source, **options)[0]):
                auto = AutoModelForMultimodalLM
            by_type = auto is AutoModelForCausalLM and isinstance(config, PrunedConfigMixin)
            pass_config = gguf_file is not None or by_type
            loaded: Any = auto.from_pretrained(
                source,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                **options | ({"config": config} if pass_config else {}),
            )
            model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
            tokenizer = load_tokenizer(source, **options)
        if getattr(model, "hf_quantizer", None) is not None and gguf_file is None:
            cast(Any, model).hf_quantizer.compressor.decompress_model(model)
        _check_loaded(source, model, info)
        _correct_tying(model)
        model = text_model(model) if auto is AutoModelForMultimodalLM else model
        forget_multi_token_(model.config)
        if gguf_file is None and not quantised and self.folder is not None:
            remember_places(model, TensorFiles(self.folder))
        check_model_type(model.config.model_type)
        if gguf_file is not None:
            _forget_quantisation(model)
            _check_shapes(source, model)
        return _move_to_device(model, place, source), tokenizer


def load_model(
    path_or_id: str | Path | ModelSource,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    verify: bool = True,
    quantised: bool = False,
    **reading: Unpack[Reading],
) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM and its tokenizer from a local folder or a hub id.

    Args:
        path_or_id: folder or hub id.
        dtype: float32, bfloat16 or float16; the dtype of the weights in memory.
        device: cpu, cuda, cuda:N, or auto (cuda when there is one, else cpu).
        verify: check the SHA-256 of every file of a pyprune checkpoint first.
        quantised: accept checkpoints of ``pyprune export --quantise``, for measuring: weights have the rounded values,
            and inputs of linear layers are rounded at each call where the format asks for it.
        reading: ``gguf_file`` (inside the folder or repository; dequantised to ``dtype``), ``revision`` and
            ``trust_remote_code``, as in :class:`ModelSource`.

    Returns:
        (model in eval mode, tokenizer or None when the folder has none).

    Raises:
        CheckpointError: missing, truncated or tampered files, files that the record does not list, an adapter next
            to the weights, quantised weights, weights that do not fill the model or are not finite.
        UnsupportedModelError: a model type that Transformers or pyprune does not know.
        ConfigError: an unknown dtype, or a device that this machine does not have.
        MissingDependencyError: ``gguf_file`` without the package gguf.
    """
    source = ModelSource.of(path_or_id, **reading)
    return source.load(dtype=dtype, device=device, verify=verify, quantised=quantised)


def _check_loaded(source: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{label(source)} holds an adapter, which was put on top of its weights. Merge it into its base model "
            "first (peft: merge_and_unload, then save_pretrained)."
        )
    check_filled(source, info)
    for name, parameter in model.named_parameters():
        check_finite(name, parameter, source)


def _check_shapes(source: str, model: PreTrainedModel) -> None:
    """Compare shapes with the sizes that a GGUF file names; Transformers takes those of its tensors unchecked."""
    shapes = parameter_shapes(model)
    expected = parameter_shapes(check_parameters(model.config, sum(map(math.prod, shapes.values())), source))
    wrong = [name for name, shape in shapes.items() if expected.get(name) != shape]
    if wrong:
        raise CheckpointError(
            f"The weights of {label(source)} do not fit the sizes that its GGUF file names: {wrong[0]} has the shape "
            f"{shapes[wrong[0]]}, expected {expected.get(wrong[0])}. The file is damaged; fetch it again."
        )


def _move_to_device(model: PreTrainedModel, place: torch.device, source: str) -> PreTrainedModel:
    try:
        return cast(PreTrainedModel, cast(Any, model).to(place).eval())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{label(source)} does not fit into the memory of {place}. Use --device cpu, a smaller dtype, or free it."
        ) from error


def check_filled(source: str, info: Mapping[str, Any]) -> None:
    """Refuse a model with missing weights, which Transformers fills with random numbers and only warns about.

    Args:
        source: folder or hub id, for the message.
        info: returned by ``from_pretrained(..., output_loading_info=True)``.

    Raises:
        CheckpointError: weights are missing, or some have another shape or no place in the model.
    """
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, found))[:3])}"
        for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        if (found := {*(info.get(kind) or ())} - {*multi_token_names(info.get("unexpected_keys") or ())})
    ]
    if problems:
        raise CheckpointError(
            f"The weights of {label(source)} do not fit its config.json ({'; '.join(problems)}). "
            "The checkpoint is incomplete or its config.json was changed."
        )


def _correct_tying(model: PreTrainedModel) -> None:
    """Correct the config where Transformers left a head untied because it is stored with other values."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Remove the marks of quantisation from a dequantised GGUF model, which Transformers would refuse to save."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    for name in ("quantization_method", "is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"):
        model.__dict__.pop(name, None)


def _most_common_dtype(folder: Path) -> str | None:
    """Return the dtype of most numbers in a folder's safetensors, among the keys of :data:`DTYPES`."""
    if not has_safetensors(folder):
        return None
    files, counts = TensorFiles(folder), Counter[str]()
    for name in files.names():
        counts[str(files.dtype(name)).removeprefix("torch.")] += math.prod(files.shape(name))
    return next((name for name, _ in counts.most_common() if name in DTYPES), None)
