"""Choose the architecture of a cut model: a stock one if one fits, else the pruned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from pyprune.families import Family, StockTarget
from pyprune.families.alone import shorter_config
from pyprune.families.base import Axis, axis_width, kept_indices, kept_lists, layer_overrides, renumbered
from pyprune.plan import LayerPlan, PrunePlan, Sizes


@dataclass(frozen=True)
class Target:
    """The configuration and architecture of a dense model after a plan.

    Attributes:
        config: configuration of the compacted model.
        stock: the stock rule that fits, or None for the pruned architecture.
        reasons: the obstacles of all stock rules; empty if one fits.
        zero_biases: (pattern, axis) of biases that the stock target has and the source lacks.
    """

    config: PretrainedConfig
    stock: StockTarget | None
    reasons: tuple[str, ...]
    zero_biases: tuple[tuple[str, Axis], ...] = ()


def choose_target(
    family: Family,
    config: PretrainedConfig,
    plan: PrunePlan,
    class_obstacle: Callable[[PretrainedConfig], str | None] = lambda config: None,
) -> Target:
    """Pick the first stock architecture that can hold the plan, else the pruned one.

    Args:
        family: of the dense model.
        config: of the dense model.
        plan: the parts to keep.
        class_obstacle: (configuration of a stock architecture) -> reason why the model around it has no place for it.

    Raises:
        PlanError: whole layers are removed that a type without a table cannot lose.
    """
    if family.layers_alone:
        return Target(shorter_config(family.layers_path, config, plan.kept_layers), family.stock_targets[0], ())
    reasons: list[str] = []
    for stock in family.stock_targets:
        reason = stock.obstacle(config, plan)
        if not reason:
            changed = _stock_config(family, config, plan, stock)
            reason = class_obstacle(changed)
        if not reason:
            return Target(changed, stock, (), stock.zero_biases(config))
        reasons.append(f"{stock.model_type}: {reason}")
    return Target(_pruned_config(family, config, plan), None, tuple(reasons))


def class_obstacle(model: PreTrainedModel) -> Callable[[PretrainedConfig], str | None]:
    """Return what tells why the model around a text tower has no place for it; of other models, it tells None."""
    tower = getattr(model, "tower", None)
    return (lambda config: None) if tower is None else tower.class_obstacle


def zero_biases(
    target: Target, plan: PrunePlan, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Biases that the stock target has and the source lacks: (name, zeros)."""
    for i, layer in enumerate(plan.layers):
        for pattern, axis in target.zero_biases:
            kept = kept_indices(axis, layer, plan)
            width = axis_width(axis, plan.dense, layer.index) if kept is None else len(kept)
            yield pattern.replace("{i}", str(i)), torch.zeros(width, dtype=dtype, device=device)


def _common_values(family: Family, config: PretrainedConfig, plan: PrunePlan) -> dict[str, Any]:
    """Dense config values with the layers and the hidden axis already sliced."""
    values = config.to_dict()
    # The class names the model type; the folder and writer of the source do not describe the result.
    for key in (
        "model_type",
        "architectures",
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        "auto_map",
    ):
        values.pop(key, None)
    values |= family.plain_values(config)
    values["num_hidden_layers"] = len(plan.layers)
    values |= dict.fromkeys(family.hidden_fields, len(plan.hidden))
    for key in family.layer_lists:
        if values.get(key) is not None:
            values[key] = [values[key][i] for i in plan.kept_layers]
    if family.layer_fields:
        values["per_layer_config"] = {i: layer_overrides(config, old) for i, old in enumerate(plan.kept_layers)}
    values |= {key: renumbered(values[key] or (), plan.kept_layers) for key in family.index_lists}
    return values | family.kind_values(config, [layer.kind for layer in plan.layers])


def _stock_config(family: Family, config: PretrainedConfig, plan: PrunePlan, stock: StockTarget) -> PretrainedConfig:
    # Layers of another kind may have no attention.
    heads, kv_heads = (max(layer.widths[axis] for layer in plan.layers) for axis in range(2))
    values = _common_values(family, config, plan)
    values |= {"num_attention_heads": heads} if heads else {}
    for layer in reversed(plan.layers):  # the last ones may be wider by a rule (Gemma 4)
        widths = {name: len(layer.units(axis)) for axis, name in family.width_fields(layer.kind).items()}
        values |= {name: width for name, width in widths.items() if width and hasattr(config, name)}
    if family.layer_fields:
        _count_kv_heads(values, plan)
    elif family.has_head_dim_field and heads:
        values |= {"num_key_value_heads": kv_heads, **family.head_dim_values(plan.dense)}
    values |= stock.config_changes(config)
    # A stock architecture with biases on its output projections has another switch for them.
    values.pop("output_bias", None)
    return AutoConfig.for_model(stock.model_type, **values)


def _count_kv_heads(values: dict[str, Any], plan: PrunePlan) -> None:
    """State the KV heads of every layer; those that most layers have are the global ones."""
    usual = values["num_key_value_heads"]
    layers = values["per_layer_config"].values()
    pairs = zip(plan.layers, layers, strict=True)
    counts = [len(layer.kv_heads) or own.get("num_key_value_heads", usual) for layer, own in pairs]
    values["num_key_value_heads"] = max(counts, key=counts.count)
    for own, count in zip(layers, counts, strict=True):
        own["num_key_value_heads"] = count


def _pruned_config(family: Family, config: PretrainedConfig, plan: PrunePlan) -> PretrainedConfig:
    from pyprune.modeling import pruned_config_class

    values = _common_values(family, config, plan)
    if not family.layer_fields and plan.dense.head_dim:
        values |= {"num_key_value_heads": plan.dense.num_key_value_heads, **family.head_dim_values(plan.dense)}
    if plan.removed_layers:
        values |= kept_lists(config, family.computed_lists, plan.kept_layers)
    if family.inner_from_hidden and plan.removed_hidden:
        values["source_hidden_size"] = plan.dense.hidden_size
    if family.needs_virtual_norm(config, plan):
        values["norm_size"] = plan.dense.hidden_size
    for axis, name in family.mixture_fields.items():
        values.setdefault(name, max(plan.dense.units(axis, layer.index) for layer in plan.layers))
    # vLLM divides the largest number of heads of all layers among its ranks, those without attention among them.
    most = tuple(max(layer.widths[axis] for layer in plan.layers) for axis in (0, 1))
    stock = values.get("per_layer_config") or {}
    values["per_layer_config"] = {
        i: {**stock.get(i, {}), **_layer_overrides(family, layer, plan.dense, most, {**values, **stock.get(i, {})})}
        for i, layer in enumerate(plan.layers)
    }
    return cast(PretrainedConfig, pruned_config_class(family.model_type)(**values))


def _layer_overrides(
    family: Family, layer: LayerPlan, dense: Sizes, most: tuple[int, ...], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the widths of a layer that its configuration does not have, in Transformers' per_layer_config notation.

    Args:
        family: of the model.
        layer: its kept parts.
        dense: the dense widths.
        most: query and KV heads that a layer without attention is given.
        values: the configuration of the layer, as the dense model has it.
    """
    heads, kv_heads, _ = layer.widths
    skip = [block for block in dense.blocks(layer.index) if not layer.keeps(block)]
    usual = {
        "num_attention_heads": (heads or most[0], dense.units("query_heads", layer.index)),
        "num_key_value_heads": (kv_heads or most[1], dense.units("kv_heads", layer.index)),
        **{
            name: (len(layer.units(axis)), dense.units(axis, layer.index))
            for axis, name in family.width_fields(layer.kind).items()
        },
    }
    changed = {
        name: width
        for name, (width, whole) in usual.items()
        if width and whole and width != (values.get(name) or whole)
    }
    return {"skip": skip, **changed} if skip else changed
