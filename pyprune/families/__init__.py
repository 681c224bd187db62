"""Families: one file a group of model types, each exporting ``FAMILIES``; found by looking in this folder."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from pyprune.errors import UnsupportedModelError, did_you_mean
from pyprune.families.base import (
    Family,
    NamedParam,
    Row,
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
    "StockTarget",
    "all_families",
    "check_plan",
    "count_parameters",
    "decoder_layers",
    "family_for",
    "named_axes",
    "parameter_shapes",
    "parameters_after",
    "shapes_after",
]


@cache
def all_families() -> dict[str, Family]:
    """Model type -> family, for every file in this folder.

    Raises:
        UnsupportedModelError: two files describe the same model type.
    """
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "base":
            continue
        for family in import_module(f"{__name__}.{module.name}").FAMILIES:
            if family.model_type in found:
                raise UnsupportedModelError(f"Two families describe {family.model_type!r}.")
            found[family.model_type] = family
    return found


def family_for(model: PreTrainedModel | PretrainedConfig) -> Family:
    """The family of a model or configuration.

    A model that pyprune has cut to unequal sizes is not a dense model any more and has no family.

    Raises:
        UnsupportedModelError: an unknown model type, or a variant that the family refuses.
    """
    config = cast("PretrainedConfig", getattr(model, "config", model))
    model_type = str(config.model_type)
    family = all_families().get(model_type)
    if family is None:
        if model_type.removeprefix("pruned_") in all_families():
            raise UnsupportedModelError(
                f"The model is of type {model_type!r}: it was cut to unequal sizes already. "
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
    model_type = str(model.config.model_type).removeprefix("pruned_")
    if model_type not in all_families():
        raise UnsupportedModelError(did_you_mean(model_type, all_families(), "model type"))
    return all_families()[model_type].layers(model)


def named_axes(model: PreTrainedModel) -> list[NamedParam]:
    """Every parameter of the model with its axis names; tied parameters appear once.

    Raises:
        UnsupportedModelError: a parameter that no row describes.
    """
    family = family_for(model)
    result = []
    for name, parameter in model.named_parameters():
        row, layer = family.match(name)
        result.append(NamedParam(name, parameter, row, layer))
    return result
