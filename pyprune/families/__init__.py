"""Families: one file for each group of model types, exporting ``FAMILIES``.

They are discovered in this folder and in the entry points ``pyprune.families`` of installed packages. The family of a
type without a file is inferred from Transformers' classes (``infer.py``), on its first use.
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
from pyprune.families.engines import mixture_obstacle, stock_obstacle
from pyprune.families.prefix import dense_type, is_pruned_type

if TYPE_CHECKING:
    from torch import Tensor, nn
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
    "check_table",
    "count_parameters",
    "decoder_layers",
    "dense_family",
    "family_for",
    "family_or_reason",
    "family_of_type",
    "find_family",
    "has_unread_sizes",
    "named_axes",
    "parameter_shapes",
    "parameters_after",
    "resolve",
    "serving_obstacle",
    "shapes_after",
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
    by_type: dict[str, Family] = {}
    sources: dict[str, str] = {}
    for source, families in (*_shipped_families(), *_installed_families()):
        for family in families:
            for name in (family.model_type, family.pruned_config, family.pruned_model):
                if name in sources:
                    raise UnsupportedModelError(
                        f"Two families bring {name!r}: {sources[name]} and {source}. Rename or uninstall one of them."
                    )
                sources[name] = source
            by_type[family.model_type] = family
    return by_type


def serving_obstacle(config: Mapping[str, Any]) -> str | None:
    """Why vLLM's own class refuses a config.json (plain data) or answers otherwise; None where it does not.

    Its classes of mixtures serve pruned architectures too.
    """
    family = all_families().get(str(config.get("model_type")))
    return family.unserved(config) if family else stock_obstacle(config) or mixture_obstacle(config)


def _shipped_families() -> Iterator[tuple[str, Sequence[Family]]]:
    for module in pkgutil.iter_modules(__path__):
        if module.name not in (
            "alone",
            "base",
            "common",
            "engines",
            "exceptions",
            "gemma4",
            "gguf_forms",
            "gguf_mixers",
            "gguf_types",
            "infer",
            "latent",
            "mixtures",
            "prefix",
            "scale",
            "table",
        ):
            name = f"{__name__}.{module.name}"
            yield name, import_module(name).FAMILIES


def _installed_families() -> Iterator[tuple[str, Sequence[Family]]]:
    """Load the modules with ``FAMILIES`` that the entry points of :data:`GROUP` name."""
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
    """Import the object of an import path "module:name" of a family.

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
    """Check whether models of this configuration expect a bos token before every text; False for an unknown type.

    Args:
        config: of a model, pruned or not, or anything else.
    """
    family = find_family(getattr(config, "model_type", ""))
    return family is not None and family.begins_with_bos


def has_unread_sizes(config: Mapping[str, Any]) -> bool:
    """Check whether a config.json (plain data) gives a stock architecture sizes by layer that it does not read."""
    layers, model_type = config.get("per_layer_config"), str(config.get("model_type"))
    if not layers or is_pruned_type(model_type):
        return False
    family = find_family(model_type)
    if not isinstance(layers, Mapping) or not all(isinstance(own, Mapping) for own in layers.values()):
        return True
    return not {name for own in layers.values() for name in own} <= set(family.layer_fields if family else ())


def find_family(model_type: object) -> Family | None:
    """Return the family of a model type, dense or pruned; None if it has no table and none can be inferred."""
    family = family_or_reason(dense_type(model_type))
    return family if isinstance(family, Family) else None


def family_of_type(model_type: object) -> Family:
    """Return the family of a model type, dense or pruned.

    Raises:
        UnsupportedModelError: it has no table, and none can be inferred; the message names the reason.
    """
    name = dense_type(model_type)
    family = family_or_reason(name)
    if isinstance(family, Family):
        return family
    text = did_you_mean(name[:80], all_families(), "model type")
    raise UnsupportedModelError(f"{text} No table could be inferred for it: {family}." if family else text)


def family_or_reason(model_type: str) -> Family | str:
    """Return a family, of whole layers alone where no table can be inferred, or the reason why there is none.

    The reason is "" for a type that Transformers does not know.
    """
    family = all_families().get(model_type)
    if family is not None:
        return family
    from pyprune.families.alone import REMOTE, family_of_layers
    from pyprune.families.infer import inferred_family

    if model_type in REMOTE:
        return REMOTE[model_type]
    inferred = inferred_family(model_type)
    if isinstance(inferred, Family):
        return inferred
    alone = family_of_layers(model_type)
    return alone if isinstance(alone, Family) else f"{inferred}; nor whole layers removed: {alone}" if inferred else ""


def family_for(model: PreTrainedModel | PretrainedConfig) -> Family:
    """Return the family of a dense model or configuration.

    A model in pyprune's own architecture is refused, as it was cut already.

    Raises:
        UnsupportedModelError: an unknown model type, or a variant that the family refuses.
    """
    config = cast("PretrainedConfig", getattr(model, "config", model))
    model_type = str(config.model_type)
    if is_pruned_type(model_type) and find_family(model_type):
        raise UnsupportedModelError(
            f"The model is of type {model_type!r}, pyprune's own architecture: it was cut already. "
            "Start from the dense model and a new plan."
        )
    family = family_of_type(model_type)
    reason = family.variant_obstacle(config)
    if family.refuse(config) and model_type not in all_families():
        from pyprune.families.alone import family_of_layers

        alone = family_of_layers(model_type)
        # Whole layers can be removed of variants without rows.
        if isinstance(alone, Family) and not alone.variant_obstacle(config):
            return alone
    if reason:
        raise UnsupportedModelError(f"This {model_type!r} variant is not supported: {reason}")
    return family


def check_table(family: Family, work: str) -> None:
    """Refuse work that reads a table, for a type that has none.

    Args:
        family: of the model.
        work: what would be done, the beginning of a sentence.

    Raises:
        UnsupportedModelError: the message names a method that needs no table.
    """
    if family.layers_alone:
        raise UnsupportedModelError(
            f"{work} needs a table of the parameters of {family.model_type!r} models, and there is none.\n"
            "Whole layers can be removed without one: --method shortgpt-plain."
        )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a model, dense or cut; each maps hidden states [B, T, H] to hidden states [B, T, H].

    Raises:
        UnsupportedModelError: an unknown model type.
    """
    return dense_family(model).layers(model)


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model, by name, that its checkpoints hold besides the parameters."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def removable_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers of a dense model that can be removed whatever else is kept, ascending.

    The first layers of a text tower may have to be kept, because features of images are added after them.
    """
    family, tower = family_for(model), getattr(model, "tower", None)
    first = 0 if tower is None else tower.first_layers
    return tuple(index for index in family.removable_layers(family.layer_kinds(model.config)) if index >= first)


def dense_family(model: PreTrainedModel | PretrainedConfig) -> Family:
    """Return the family of a model or configuration, or the one that it had before it was cut.

    Raises:
        UnsupportedModelError: an unknown model type.
    """
    return family_of_type(getattr(model, "config", model).model_type)


def named_axes(model: PreTrainedModel) -> list[NamedParam]:
    """Return every parameter of the model, dense or cut, with its axis names; tied parameters appear once.

    Raises:
        UnsupportedModelError: an unknown model type, or a parameter that no row describes.
    """
    family = dense_family(model)
    kinds = family.layer_kinds(model.config)
    pairs = ((name, parameter, *family.match(name, kinds)) for name, parameter in model.named_parameters())
    return [NamedParam(*pair) for pair in pairs]
