"""Configurations of checkpoints: read, and compared with the weight files before anything is built from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PretrainedConfig
from transformers.utils.hub import cached_file

import pyprune.modeling  # noqa: F401  (registers the pruned architectures with the Auto classes)
from pyprune.checkpoint.damage import actionable, label, read_mapping
from pyprune.checkpoint.gguf import GgufHeader, read_gguf_header, refuse_unused
from pyprune.checkpoint.gguf_config import check_architecture, complete_config
from pyprune.checkpoint.places import Places, find_places, forget_multi_token_
from pyprune.checkpoint.plausible import (
    CONFIG,
    check_config,
    check_parameters,
    check_parts,
    is_exported_quantisation,
    read_config,
    refuse_adapter,
    stored_elements,
)
from pyprune.checkpoint.record import has_record, read_pruning_json
from pyprune.checkpoint.shards import TensorFiles
from pyprune.checkpoint.tower import find_names, has_tower, text_config, text_values
from pyprune.errors import CheckpointError, UnsupportedModelError, did_you_mean, shown
from pyprune.families import (
    Family,
    all_families,
    dense_family,
    family_of_type,
    has_unread_sizes,
    parameter_shapes,
    stored_buffers,
)
from pyprune.families.alone import is_remote, remember_remote

GENERATION = "generation_config.json"
QUANTISED_PER_ELEMENT = 8
"""Weights in a stored element of a quantised checkpoint, at most: eight of 4 bits in a word of 32."""


@dataclass(frozen=True)
class DenseFiles:
    """Holds what the configuration of a local checkpoint and the headers of its files say of its model.

    Attributes:
        config: a head that is stored with other values than the embedding is not tied, whatever config.json says.
        model: on the meta device, tied.
        places: where its tensors are in the files.
    """

    config: PretrainedConfig
    model: Any
    places: Places

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return parameter name -> shape; a tied head has no entry."""
        return parameter_shapes(self.model)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that files hold besides the parameters."""
        return stored_buffers(self.model)


def read_dense_files(folder: str | Path) -> DenseFiles:
    """Read the configuration of a local checkpoint with safetensors, and compare it with the weight files.

    Raises:
        CheckpointError: config.json or the weight files are damaged, or they do not belong together.
        UnsupportedModelError: a model type that pyprune does not know.
    """
    source = str(folder)
    refuse_adapter(Path(folder))
    with actionable(source):
        _refuse_wrapper(read_config(Path(folder)), source)
        config, model = checked_config(source, {"trust_remote_code": False})
        files = TensorFiles(Path(folder))
        places = find_places(files, model)
        tied = getattr(config, "tie_word_embeddings", False)
        if tied and _has_untied_head(files, places, dense_family(config)):
            config.tie_word_embeddings = False
        elif tied:
            model.tie_weights()
        return DenseFiles(config, model, places)


def read_tower_config(folder: str | Path) -> tuple[PretrainedConfig, dict[str, tuple[int, ...]], dict[str, str]] | None:
    """Read the text tower of a local multimodal checkpoint as :func:`read_dense_files` reads other checkpoints.

    Returns:
        (configuration of the causal LM, parameter name -> shape, name of a parameter or stored buffer -> name in the
        files); None for a checkpoint without a tower.

    Raises:
        CheckpointError, UnsupportedModelError: as :func:`read_dense_files`, or the files hold other tensors.
    """
    source = str(folder)
    with actionable(source):
        if not has_tower(read_config(Path(folder))):
            return None
        config, model = checked_config(source, {"trust_remote_code": False})
        if config.tie_word_embeddings:
            model.tie_weights()
    shapes, buffers = parameter_shapes(model), dict(model.named_buffers())
    own = [name for name in model.state_dict() if name in shapes or name in buffers]
    names = find_names(own, model.base_model_prefix, TensorFiles(Path(folder)).names())
    if names is None:
        raise CheckpointError(
            f"The files of {label(source)} do not hold the tensors of a {config.model_type!r} model for its text part. "
            "Load it with pyprune and write it again: pyprune export."
        )
    return config, shapes, {name: names[name] for name in own}


def _has_untied_head(files: TensorFiles, places: Places, family: Family) -> bool:
    """Check whether files hold a head with other values than the embedding."""
    rows = [row for row in family.rows if row.axes == ("vocab", "hidden")]
    found = {row.role: place for name, place in places.tensors.items() for row in rows if row.regex.match(name)}
    if len(found) < 2:
        return False
    head, embedding = (found[role].read(files.read) for role in ("head", "embedding"))
    return not torch.equal(head, embedding.to(head.dtype))


def read_generation_config(folder: str | Path) -> GenerationConfig | None:
    """Read generation_config.json of a local checkpoint; None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not os.path.isfile(os.path.join(folder, GENERATION)):
        return None
    with actionable(str(folder)):
        return GenerationConfig.from_pretrained(folder)


def checked_config(source: str, options: Mapping[str, Any], *, quantised: bool = False) -> tuple[PretrainedConfig, Any]:
    """Read a configuration and compare it with the known families and, of a local folder, with the weight files.

    Returns:
        (configuration, the model on the meta device; None of a hub id, and where the checkpoint brings its own code).
    """
    local = os.path.isdir(source)
    raw = checked_values(source, options, quantised=quantised)
    tensors, elements = stored_elements(Path(source)) if local else (0, 0)
    layers = raw.get("num_hidden_layers")
    if local and type(layers) is int and layers > tensors:
        raise CheckpointError(
            f"{CONFIG} of {source} describes {layers} layers, but its files hold {tensors} tensors. The checkpoint is "
            "incomplete or its config.json was changed."
        )
    if is_exported_quantisation(raw):
        elements *= QUANTISED_PER_ELEMENT
    config = load_config(source, **options)
    check_model_type(config.model_type)
    if not local or options["trust_remote_code"]:
        return config, None
    if has_tower(read_config(Path(source))):
        whole = AutoConfig.from_pretrained(source, **options)
        check_parameters(whole, elements, source, auto=AutoModelForMultimodalLM)
    return config, check_parameters(config, elements, source)


def checked_values(source: str, options: Mapping[str, Any], *, quantised: bool = False) -> Mapping[str, Any]:
    """Read config.json as plain data; refuse unknown model types and sizes that no model has."""
    local = os.path.isdir(source)
    raw: Mapping[str, Any] = (
        read_config(Path(source)) if local else PretrainedConfig.get_config_dict(source, **options)[0]
    )
    if has_tower(raw):
        check_parts(raw, source)
        raw = text_values(raw)
    _refuse_wrapper(raw, source)
    if raw.get("model_type") is not None and not (options.get("trust_remote_code") and raw.get("auto_map")):
        check_model_type(raw["model_type"])
    check_config(raw, source, quantised=quantised)
    return raw


def read_gguf_config(source: str, gguf_file: str, options: Mapping[str, Any]) -> PretrainedConfig:
    """Read the configuration in a GGUF file, after its lengths, counts and tensors were compared with the file."""
    local = os.path.isdir(source)
    path = os.path.join(source, gguf_file) if local else cached_file(source, gguf_file, revision=options["revision"])
    header: GgufHeader = read_gguf_header(Path(str(path)))
    check_architecture(header, all_families())
    config: PretrainedConfig = AutoConfig.from_pretrained(source, **options)
    check_model_type(config.model_type)
    where = os.path.join(source, gguf_file)
    complete_config(config, header)
    check_config(config.to_dict(), where)
    refuse_unused(header, check_parameters(config, header.elements, where))
    return config


def load_config(source: str, **options: Any) -> Any:
    """Load the configuration of a folder or hub id.

    Args:
        source: folder or hub id.
        options: revision and trust_remote_code.

    Raises:
        ValueError: config.json holds a value of the wrong kind.
        CheckpointError: it gives a stock architecture sizes per layer, as pyprune does not.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(source, **options)
        if has_unread_sizes(text_values(values)):
            raise CheckpointError(
                f"{label(source)} has a per_layer_config that no stock architecture reads, and Transformers builds no "
                "model of it. pyprune reads sizes per layer in checkpoints that it wrote itself."
            )
        config = AutoConfig.from_pretrained(source, **options)
        config = text_config(config) if has_tower(values) else config
        forget_multi_token_(config)
    except (AttributeError, TypeError) as error:
        # Only config.json is read here; Transformers raises these for a list where a mapping belongs.
        raise ValueError(f"config.json holds a value of the wrong kind ({error}); correct it.") from error
    if is_remote(config) and config.model_type not in all_families():
        remember_remote(config)
    return config


def is_folder(source: str) -> bool:
    """Check whether a checkpoint is a local folder; refuse a name that can be neither that nor a hub id."""
    if os.path.isdir(source):
        return True
    if os.path.isabs(source) or source.startswith(("./", "../")) or os.path.lexists(source):
        raise CheckpointError(f"{label(source)} is not a folder. Give a checkpoint folder or a hub id.")
    return False


def check_folder(folder: Path, gguf_file: str | None, *, verify: bool) -> None:
    """Refuse a folder that is no checkpoint: without config.json or the GGUF file, with an adapter, or damaged."""
    refuse_adapter(folder)
    if gguf_file is not None and not os.path.isfile(folder / gguf_file):
        raise CheckpointError(f"{folder} has no file {shown(gguf_file)}; name one of its .gguf files.")
    if os.path.isfile(folder / GENERATION):
        read_mapping(folder / GENERATION)  # Transformers ignores a damaged one without a warning
    if has_record(folder):
        read_pruning_json(folder, verify_files=verify)


def _refuse_wrapper(raw: Mapping[str, Any], source: str) -> None:
    """Refuse a model of several parts by saying so; neither its type nor its names are those of its text model."""
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        towers = ", ".join(sorted(name for name in raw if name.endswith("_config") and name != "text_config"))
        raise UnsupportedModelError(
            f"{label(source)} is a model of several parts ({towers or 'text_config'}), and this reads only "
            "text models. Save its language_model and text_config as a checkpoint (with Transformers), and give that."
        )


def check_model_type(name: Any) -> None:
    """Refuse a model type without a table of axes, unless one can be inferred, and name the nearest with a table."""
    if not isinstance(name, str):
        raise UnsupportedModelError(did_you_mean(str(name)[:80], all_families(), "model type"))
    family_of_type(name)
