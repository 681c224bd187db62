"""Families of types without a table: whole layers can be removed, and nothing else.

Nothing is known of such a type but where its layers are. The shorter model is therefore compared with the whole one on
the meta device, plan by plan: outside the layers it has the same tensors, and every kept layer is at its new index what
it was at its old one. ``pyprune/cut/shorter.py`` compares their logits as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from pyprune.errors import PlanError, UnsupportedModelError, shown
from pyprune.families.base import Family, Row, StockClasses, StockTarget, renumbered
from pyprune.families.exceptions import EXCEPTIONS, REFUSED
from pyprune.families.infer import (
    LAYERS,
    build_on_meta,
    causal_types,
    inferred_family,
    plain_attributes,
    plain_values,
    tiny_values,
    undisturbed,
)
from pyprune.plan import DECODER, BlockSizes, PrunePlan, format_ranges

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

LAYER = "layer"
"""The only block of such a layer."""
INDEX = re.compile(r"(layer|block).*(id|idx|index|number)\Z|idx\Z|index\Z")
"""Names of attributes and of lists in a configuration that hold indices of layers."""
COUNT = re.compile(r"layer|first|dense")
"""Names of numbers in a configuration that may count layers from the first or the last."""
_LEFT_OPEN = {
    **{"layer_types": ["full_attention"] * LAYERS, "num_experts": 8, "n_routed_experts": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_topk": 2},
}
"""Fields that some configuration classes leave open."""
Tensors = dict[str, tuple[int, ...]]
"""Name -> shape."""


REMOTE: dict[str, Family] = {}
"""Model type -> family of types whose code a repository brings (:func:`remember_remote`)."""


def is_remote(config: PretrainedConfig) -> bool:
    """Return whether the class of a configuration came with a repository (``trust_remote_code``)."""
    return type(config).__module__.startswith("transformers_modules")


def remember_remote(config: PretrainedConfig) -> None:
    """Make the family of a type whose code came with a repository, so that it is found by its type.

    Raises:
        UnsupportedModelError: its layers cannot be removed; the message names the reason.
    """
    try:
        REMOTE[config.model_type] = family_of_config(config, "its code comes with its repository")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"Whole layers of {config.model_type!r} models, whose code comes with the repository, cannot be removed: "
            f"{error}.\nOther axes need a table (pyprune/families)."
        ) from error


@cache
def family_of_layers(model_type: str) -> Family | str:
    """Return the family of a type of Transformers that can lose whole layers, or the reason why it cannot.

    The reason is "" for a type of which Transformers has no causal LM.
    """
    if model_type not in causal_types() or model_type in REFUSED:
        return REFUSED.get(model_type, "")
    from transformers import AutoConfig

    reason = ""
    for values in ({}, {**_LEFT_OPEN, **tiny_values("any")}):
        try:
            config = AutoConfig.for_model(model_type, **values)
            return family_of_config(config, f"{inferred_family(model_type)}")
        except UnsupportedModelError as error:
            return str(error)
        except Exception as error:  # checks of any configuration class, and constructors of any model class
            reason = reason or f"no model of its default configuration can be built: {shown(error)}"
    return reason


def family_of_config(config: PretrainedConfig, why: str) -> Family:
    """Return the family of a configuration that can lose its last or its second layer.

    Args:
        config: of a dense model, also of a class that its repository brings.
        why: the reason why there is no table.

    Raises:
        UnsupportedModelError: the message is the reason why layers cannot be removed.
    """
    _check_decoder(config)
    with undisturbed():
        model = meta_model(config)
    path = _layers_path(model, config.num_hidden_layers)
    layer = type(model.get_submodule(path)[0])
    classes = (f"{c.__module__}:{c.__qualname__}" for c in (type(config), type(model), layer))
    family = Family(
        model_type=config.model_type,
        classes=StockClasses(*classes),
        rows=(Row(f"{path}.{{i}}.*", (), "inner", LAYER), Row("*", (), "inner")),
        stock_targets=(StockTarget(config.model_type, lambda config, plan: None),),
        layers_path=path,
        kinds={DECODER: {LAYER: ()}},
        block_sizes=lambda family, config, kind: {LAYER: BlockSizes()},
        layers_alone=why,
        closed=dict.fromkeys(("hidden", "heads", "ffn"), "the type has no table of its parameters"),
        plan_obstacle=partial(_plan_obstacle, path),
        gguf="the type has no table of its parameters.",
        **EXCEPTIONS.get(config.model_type, {}) | {"refuse": _variant_obstacle},
    )
    count = config.num_hidden_layers
    for removed in (count - 1, 1):  # a last layer may be of a kind of its own
        found = _find_shorter(path, config, [i for i in range(count) if i != removed])
        if not isinstance(found, str):
            return family
    raise UnsupportedModelError(f"without layer {removed} {found}")


def _check_decoder(config: PretrainedConfig) -> None:
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedModelError("its configuration names no number of layers")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it has an encoder and a decoder")
    if config.model_type != "gpt_neox_japanese" and not config.to_dict().get("is_decoder", True):  # it never reads it
        raise UnsupportedModelError("it is an encoder: each position sees those after it")
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        raise UnsupportedModelError("its layers read the tokens that earlier layers chose (indexer_types)")


def _variant_obstacle(config: PretrainedConfig) -> str | None:
    try:
        _check_decoder(config)
    except UnsupportedModelError as error:
        return f"{error}."
    return None


def meta_model(config: PretrainedConfig) -> Any:
    """Return a causal LM on the meta device, also of a class that its repository brings."""
    return build_on_meta(deepcopy(config), **({"trust_remote_code": True} if is_remote(config) else {}))


def _layers_path(model: nn.Module, count: int) -> str:
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return str(name)
    raise UnsupportedModelError(f"it has no list of {count} layers, the number that its configuration names")


def shorter_config(path: str, config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of the model with these layers alone.

    Args:
        path: dotted path of the layers in the model.
        config: of the dense model.
        kept: indices of the kept layers, ascending.

    Raises:
        PlanError: the kept layers would not be what they were, or something outside of them; the message names it.
    """
    found = _find_shorter(path, config, kept)
    if isinstance(found, str):
        removed = format_ranges([i for i in range(config.num_hidden_layers) if i not in kept])
        raise PlanError(
            f"This {config.model_type!r} model cannot lose the layers {removed}: {found}.\n"
            "Choose others, such as whole periods of its pattern. A table of its parameters (pyprune/families) would "
            "open layers, hidden, heads and ffn."
        )
    return found


def _find_shorter(path: str, config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig | str:
    """Return the configuration of the shorter model, or the first difference to the dense one."""
    reason = ""
    with undisturbed():
        dense = meta_model(config)
        for values in _candidates(config, kept):
            try:
                shorter = type(config)(**values)
                difference = _difference(dense, meta_model(shorter), path, kept)
            except Exception as error:  # the code of any configuration and model class
                difference = f"its classes refuse it: {shown(error)}"
            if difference is None:
                return shorter
            reason = reason or difference
    return reason


def _plan_obstacle(path: str, config: PretrainedConfig, plan: PrunePlan) -> str | None:
    if not plan.removed_layers:
        return None
    return _cached_obstacle(path, _Same(config), plan.kept_layers)


class _Same:
    """A configuration that can be looked up: two of them are equal if their values are."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.text = config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.text == other.text


@cache
def _cached_obstacle(path: str, same: _Same, kept: tuple[int, ...]) -> str | None:
    try:
        shorter_config(path, same.config, kept)
    except PlanError as error:
        return str(error)
    return None


def _candidates(config: PretrainedConfig, kept: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield values of configurations that may describe the shorter model, the likeliest first.

    Lists by layer are sliced, indices of layers renumbered (from 0, then from 1), patterns written out, and numbers
    that count layers from either end reduced, one at a time. Which of them is right, the models tell.
    """
    whole = plain_values(config)
    layers = config.num_hidden_layers
    count = {config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): len(kept)}
    count |= {name: len(kept) for name in ("num_blocks", "num_layers") if whole.get(name) == layers}

    def shorten(values: Mapping[str, Any], **how: Any) -> dict[str, Any]:
        return {name: _shorter_value(name, value, layers, kept, **how) for name, value in values.items()}

    first = shorten(whole) | count
    yield first
    yield shorten(whole, first=1) | count
    yield shorten(whole, tile=True) | count
    if step := whole.get("decoder_sparse_step"):
        dense = [i for i in range(layers) if i in (whole.get("mlp_only_layers") or ()) or (i + 1) % step]
        yield first | {"mlp_only_layers": renumbered(dense, kept), "decoder_sparse_step": 1}
    for name, value in whole.items():
        if type(value) is int and 0 < value < layers and COUNT.search(name):
            yield first | {name: sum(i < value for i in kept)}
            yield first | {name: sum(i >= layers - value for i in kept)}


def _shorter_value(
    name: str, value: Any, layers: int, kept: Sequence[int], *, first: int = 0, tile: bool = False
) -> Any:
    """Return a value of the shorter configuration.

    Args:
        name: of the field.
        value: of the dense configuration.
        layers: number of layers of the dense model.
        kept: indices of the kept layers.
        first: number of the first layer, where a list holds numbers of layers.
        tile: write out a list of words that is repeated along the layers.
    """
    if isinstance(value, Mapping) and "layer" in name and all(str(key).isdecimal() for key in value):
        return {new: value[key] for new, i in enumerate(kept) for key in (i, str(i)) if key in value}
    if isinstance(value, Mapping):
        return {key: _shorter_value(str(key), v, layers, kept, first=first, tile=tile) for key, v in value.items()}
    if not isinstance(value, list | tuple) or not value or name.endswith("_token_id"):
        return value
    if len(value) == layers:
        return [value[i] for i in kept]
    if tile and all(isinstance(word, str) for word in value) and len(value) < layers:
        return [value[i % len(value)] for i in kept]
    indices = all(type(i) is int and 0 <= i - first < layers for i in value) and list(value) == sorted(set(value))
    if not (indices and re.search(r"layer|idx|indices|_ids", name)):
        return value
    return [first + new for new in renumbered([i - first for i in value], kept)]


def _difference(dense: nn.Module, shorter: nn.Module, path: str, kept: Sequence[int]) -> str | None:
    """Return the first thing by which the shorter model is not the dense one without some layers, or None."""
    before, after = dense.get_submodule(path), shorter.get_submodule(path)
    if len(cast(Any, after)) != len(kept):
        return f"{len(cast(Any, after))} layers are built where {len(kept)} are kept"
    outside = lambda name: not name.startswith(f"{path}.")  # noqa: E731
    if found := _other(_shapes(dense, outside), _shapes(shorter, outside)):
        name, old, new = found
        return f"{name} outside the layers has the shape {old}, and {new} in the shorter model"
    facts = [_facts(layer) for layer in before.children()]
    values: dict[str, set[tuple[int, Any]]] = {}
    for index, each in enumerate(facts):
        for name, value in each.items():
            values.setdefault(name, set()).add((index, value))
    counters = {name for name, pairs in values.items() if len(pairs) > 1 and all(i == value for i, value in pairs)}
    for new_index, index in enumerate(kept):
        one, other = before.get_submodule(str(index)), after.get_submodule(str(new_index))
        if found := _other(_shapes(one), _shapes(other)):
            return f"{found[0]} of layer {index} has the shape {found[1]}, and {found[2]} as layer {new_index}"
        if found := _other(_renumbered(facts[index], kept, counters), _facts(other)):
            return f"{found[0]} of layer {index} is {found[1]}, and {found[2]} as layer {new_index}"
    owners: dict[int, str] = {}
    for name, tensor in before.named_parameters(remove_duplicate=False):
        layer = owners.setdefault(id(tensor), name.partition(".")[0])
        if layer != name.partition(".")[0]:
            return f"{name.partition('.')[2]} belongs to layers {layer} and {name.partition('.')[0]}"
    return None


def _other(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first name with another value, and both values; None if there is none."""
    for name in (*old, *new):
        if name not in old or name not in new or old[name] != new[name]:
            before, after = (shown(values[name]) if name in values else "missing" for values in (old, new))
            return name, before, after
    return None


def _shapes(module: nn.Module, among: Callable[[str], bool] = lambda name: True) -> Tensors:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: tuple(tensor.shape) for name, tensor in named if among(name)}


def _facts(layer: nn.Module) -> dict[str, Any]:
    """Return the class and the plain attributes of each module of a layer, by dotted name."""
    classes = {f"{name} ".lstrip(): type(module).__name__ for name, module in layer.named_modules()}
    return classes | plain_attributes(layer)


def _renumbered(facts: Mapping[str, Any], kept: Sequence[int], counters: Collection[str]) -> dict[str, Any]:
    """Return the facts of a layer with new indices of layers.

    Args:
        facts: of a dense layer.
        kept: indices of the kept layers.
        counters: facts that are the layer's own index in every layer; other indices are known by their names.
    """
    new = {index: position for position, index in enumerate(kept)}
    return {
        name: new.get(value, value)
        if type(value) is int and (name in counters or INDEX.search(name.rpartition(".")[2]))
        else value
        for name, value in facts.items()
    }
