"""Families: one file for each group of model types, exporting ``FAMILIES``.

Found by looking in this folder and in the entry points ``pyprune.families`` of installed packages.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from pyprune.errors import UnsupportedModelError, did_you_mean, shown
from pyprune.families.base import (
    Family,
    NamedParam,
    Row,
    StockClasses,
    StockTarget,
    check_plan,
    count_parameters,
    parameter_shapes,
    parameters_after,
    shapes_after,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "Family",
    "NamedParam",
    "Row",
    "StockClasses",
    "StockTarget",
    "all_families",
    "begins_with_bos",
    "check_plan",
    "count_parameters",
    "decoder_layers",
    "family_for",
    "named_axes",
    "parameter_shapes",
    "parameters_after",
    "resolve",
    "shapes_after",
    "why_unserved",
]

GROUP = "pyprune.families"
"""Entry point group of packages that bring families: each entry point is a module with ``FAMILIES``."""


@cache
def all_families() -> dict[str, Family]:
    """Model type -> family: every file in this folder, then what installed packages bring by the entry point.

    Raises:
        UnsupportedModelError: an entry point cannot be loaded or holds no families, or two families describe the same
            model type or would share the name of a pruned class.
    """
    found: dict[str, Family] = {}
    where: dict[str, str] = {}
    for source, families in (*_own_families(), *_installed_families()):
        for family in families:
            for name in (family.model_type, family.pruned_config, family.pruned_model):
                if name in where:
                    raise UnsupportedModelError(
                        f"Two families bring {name!r}: {where[name]} and {source}. Rename or uninstall one of them."
                    )
                where[name] = source
            found[family.model_type] = family
    return found


def why_unserved(config: Mapping[str, Any]) -> str:
    """Why vLLM's own class of a stock architecture refuses a config.json (plain data); empty where it does not."""
    family = all_families().get(str(config.get("model_type")))
    return "" if family is None else family.unserved(config)


def _own_families() -> Iterator[tuple[str, Sequence[Family]]]:
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("base", "common", "gguf_forms", "scale"):
            name = f"{__name__}.{module.name}"
            yield name, import_module(name).FAMILIES


def _installed_families() -> Iterator[tuple[str, Sequence[Family]]]:
    """What the entry points of :data:`GROUP` name: modules with ``FAMILIES``."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        source = f"the entry point {entry.name!r} ({entry.value}) of {GROUP}"
        try:
            families = entry.load().FAMILIES
        except Exception as error:  # another package's code: it can raise anything
            raise UnsupportedModelError(
                f"{_capital(source)} cannot be loaded: {shown(error)}. Repair or uninstall the package that brings it."
            ) from error
        if not isinstance(families, tuple | list) or not all(isinstance(family, Family) for family in families):
            raise UnsupportedModelError(
                f"{_capital(source)} has FAMILIES = {shown(families)}; it must be a tuple of pyprune.families.Family."
            )
        yield source, families


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def resolve(path: str) -> Any:
    """What an import path "module:name" of a family names.

    Raises:
        UnsupportedModelError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"A family names {path!r}, which cannot be imported ({shown(error)}). "
            "It must be 'module:name'; check it and the version of the package it is in."
        ) from error


def begins_with_bos(config: Any) -> bool:
    """Whether models of this configuration expect a bos token before every text; False for a type that is not known.

    Args:
        config: of a model, pruned or not, or anything else.
    """
    family = all_families().get(str(getattr(config, "model_type", "")).removeprefix("pruned_"))
    return family is not None and family.begins_with_bos


def family_for(model: PreTrainedModel | PretrainedConfig) -> Family:
    """The family of a model or configuration.

    A model in pyprune's own architecture is not a dense model any more and has no family.

    Raises:
        UnsupportedModelError: an unknown model type, or a variant that the family refuses.
    """
    config = cast("PretrainedConfig", getattr(model, "config", model))
    model_type = str(config.model_type)
    family = all_families().get(model_type)
    if family is None:
        if model_type.removeprefix("pruned_") in all_families():
            raise UnsupportedModelError(
                f"The model is of type {model_type!r}, pyprune's own architecture: it was cut already. "
                "Start from the dense model and a new plan."
            )
        raise UnsupportedModelError(did_you_mean(model_type, all_families(), "model type"))
    reason = family.refuse(config)
    if reason:
        raise UnsupportedModelError(f"This {model_type!r} variant is not supported: {reason}")
    return family


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, dense or cut; each maps hidden states [B, T, H] to hidden states [B, T, H].

    Raises:
        UnsupportedModelError: an unknown model type.
    """
    return _family_of_any(model).layers(model)


def _family_of_any(model: PreTrainedModel) -> Family:
    """The family of a model, or the one that it had before it was cut."""
    model_type = str(model.config.model_type).removeprefix("pruned_")
    if model_type not in all_families():
        raise UnsupportedModelError(did_you_mean(model_type, all_families(), "model type"))
    return all_families()[model_type]


def named_axes(model: PreTrainedModel) -> list[NamedParam]:
    """Every parameter of the model, dense or cut, with its axis names; tied parameters appear once.

    Raises:
        UnsupportedModelError: an unknown model type, or a parameter that no row describes.
    """
    family = _family_of_any(model)
    result = []
    for name, parameter in model.named_parameters():
        row, layer = family.match(name)
        result.append(NamedParam(name, parameter, row, layer))
    return result
