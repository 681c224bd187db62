"""From element scores to structures: which parameters are open, and the running sums of their structures.

A structure is the part of one module that one head, FFN channel or hidden channel owns (its row of q_proj with the
bias, its column of o_proj); a structure sums its elements. Each projection that is fused in a module counts as a
separate module. The coupled structures of one unit form a group, which aggregates them (MoreauPruner, equations 4
and 5). Element scores are reduced as soon as they are added; only one number a structure is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.score import ScoreAxis, ScoreConfig
from pyprune.errors import ConfigError, ScoreError, shown
from pyprune.families import NamedParam, Row, named_axes
from pyprune.families.base import PLAN_AXES, Axis, FusedPart, fused_parts
from pyprune.ops import group_importance
from pyprune.plan import Sizes

LayerAxis = tuple[int | None, str]
"""(layer, axis name) of some structures; the layer is None for the hidden axis, which all layers share."""

PLAN_UNITS: dict[ScoreAxis, tuple[str, ...]] = {"heads": ("query_heads", "kv_heads"), "ffn": ("ffn",)}
"""Axis of a layer -> the axes of plans whose units it removes."""


@dataclass(frozen=True)
class Projection:
    """One of the projections that are fused in a parameter; the whole parameter where nothing is fused.

    Attributes:
        axes: the axis of each of its dimensions.
        label: distinguishes it from the others in the same parameter; empty if there are none.
        dim: the fused dimension; None for a whole parameter.
        part: its place along ``dim``; None for a whole parameter.
    """

    axes: tuple[Axis, ...]
    label: str = ""
    dim: int | None = None
    part: FusedPart | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return its part of a tensor of the parameter's shape."""
        return tensor if self.dim is None or self.part is None else self.part.of(tensor, self.dim)


def projections(row: Row, dense: Sizes, layer: int | None) -> tuple[Projection, ...]:
    """Return the projections that are fused in a parameter, in order; most parameters are one projection."""
    dim = row.fused_dim
    if dim is None or layer is None:
        return (Projection(tuple(axis for (axis,) in row.dimensions)),)
    fused: list[Projection] = []
    for number, part in enumerate(fused_parts(row, dense, layer)):
        axes = tuple(one[number] if d == dim else one[0] for d, one in enumerate(row.dimensions))
        fused.append(Projection(axes, f"[{number}]", dim, part))
    return tuple(fused)


@dataclass(frozen=True)
class OpenUnits:
    """The axes and layers that are open to pruning.

    Attributes:
        dense: the dense sizes.
        axes: the open axes, without those of which the open layers have nothing (heads of Mamba).
        layers: the layers whose heads and FFN are open, ascending. The hidden axis runs through every layer.
        whole_groups: KV heads are removed together with their query heads; otherwise only query heads are removed.
    """

    dense: Sizes
    axes: tuple[ScoreAxis, ...]
    layers: tuple[int, ...]
    whole_groups: bool

    @classmethod
    def of(cls, dense: Sizes, config: ScoreConfig) -> OpenUnits:
        """Read the options.

        Raises:
            ConfigError: open layers that the model does not have, or no open layer.
        """
        total = dense.num_layers
        if config.uniform:
            layers: Sequence[int] = range(total)
        elif config.layers:
            layers = sorted(set(config.layers))
        else:
            last = config.last_layer + total if config.last_layer < 0 else config.last_layer
            if not 0 <= config.first_layer <= last < total:
                raise ConfigError(
                    f"score.first_layer {config.first_layer} to score.last_layer {config.last_layer} is no range of "
                    f"the model's layers 0 to {total - 1}."
                )
            layers = range(config.first_layer, last + 1)
        unknown = [i for i in layers if not 0 <= i < total]
        if unknown:
            raise ConfigError(f"score.layers names {shown(unknown)}; the model has layers 0 to {total - 1}.")
        # Without grouped queries a query head is a whole group.
        whole = config.heads_unit == "kv_group" or dense.largest_group == 1
        scope = cls(dense, config.axes, tuple(layers), whole)
        owned = {axis for _, axis in scope.places}
        return replace(scope, axes=tuple(axis for axis in config.axes if axis in owned))

    @property
    def places(self) -> tuple[tuple[int | None, ScoreAxis], ...]:
        """Return the (layer, axis) of all ranked units, in the order in which ties are broken."""
        inner: list[ScoreAxis] = [axis for axis in ("heads", "ffn") if axis in self.axes]
        places = [(layer, axis) for layer in self.layers for axis in inner if self.units(axis, layer)]
        return (*places, (None, "hidden")) if "hidden" in self.axes else tuple(places)

    def dims(self, row: Row, layer: int | None) -> tuple[tuple[Projection, int, LayerAxis], ...]:
        """Return the open dimensions of a parameter's projections, and the (layer, axis) of their structures."""
        return tuple(
            (projection, dim, place)
            for projection in projections(row, self.dense, layer)
            for dim, axis in enumerate(projection.axes)
            if (place := self._open_place(axis, layer)) is not None
        )

    def _open_place(self, axis: str, layer: int | None) -> LayerAxis | None:
        if axis == "hidden" and "hidden" in self.axes:
            return None, "hidden"
        return (layer, axis) if layer in self.layers and self._is_open(axis) else None

    def _is_open(self, axis: str) -> bool:
        if axis == "kv_heads":
            return "heads" in self.axes and self.whole_groups
        return axis in ("heads", "ffn") and axis in self.axes

    def open_params(self, model: PreTrainedModel) -> tuple[NamedParam, ...]:
        """Return the parameters that own at least one open structure, in the model's order.

        Methods that change weights change such a parameter as a whole, a fused one with its closed projections.
        """
        return tuple(p for p in named_axes(model) if self.dims(p.row, p.layer))

    def units(self, axis: str, layer: int | None) -> int:
        """Return how many structures an axis has in a layer (hidden: in the model); 0 if it is no axis there."""
        return self.dense.hidden_size if layer is None else self.dense.units(PLAN_AXES.get(axis, axis), layer)

    def group_size(self, layer: int | None) -> int:
        """Return how many query heads share one KV head in a layer that has both."""
        return self.units("heads", layer) // self.units("kv_heads", layer)

    def count(self, axis: ScoreAxis | Literal["kv_heads"]) -> int:
        """Return how many units of an axis are open in all open layers (hidden: in the model)."""
        layers: Sequence[int | None] = (None,) if axis == "hidden" else self.layers
        return sum(self.units(axis, layer) for layer in layers)


class StructureScores:
    """Sums of element scores, one number a structure.

    Args:
        scope: the open axes and layers.
        aggregation: sum, mean, max or prod over the structures of a group; prod is kept as the sum of logarithms,
            which gives the same order and cannot underflow.

    Attributes:
        standardised: set by a scorer whose scores are positions on a scale, negative ones among them.
    """

    def __init__(self, scope: OpenUnits, aggregation: str) -> None:
        self.scope = scope
        self.aggregation = aggregation
        self.standardised = False
        self.sums: dict[LayerAxis, dict[str, Tensor]] = {}

    def add_elements(
        self, param: NamedParam, factor: Tensor, weight: Tensor | None = None, *, signed: bool = False
    ) -> None:
        """Reduce the element scores ``factor * weight`` of one parameter into its structures.

        Args:
            param: a parameter with open structures.
            factor: of the parameter's shape.
            weight: of the parameter's shape; None is 1.
            signed: each channel counts |sum of its elements| instead of the sum of their absolute values.
        """
        module = param.name.rpartition(".")[0]
        for projection, dim, (layer, axis) in self.scope.dims(param.row, param.layer):
            name = PLAN_AXES.get(axis, axis)
            size = 1 if layer is None else self.scope.dense.channels(name, layer, param.row.head_dim)
            part = projection.of(factor)
            other = torch.ones_like(part) if weight is None else projection.of(weight)
            values = group_importance(part, other, dim, size, signed=signed)  # float64 products and sums
            self.add_structures(layer, axis, module + projection.label, values)

    def add_structures(self, layer: int | None, axis: str, module: str, values: Tensor) -> None:
        """Add to the structures of one module.

        Args:
            layer: dense layer index; None for the hidden axis.
            axis: heads, kv_heads, ffn or hidden.
            module: name of the module that owns the structures (its weight and bias count together).
            values: [heads, KV heads, FFN or hidden channels], finite; at least 0 where the aggregation is prod.

        Raises:
            ScoreError: the size does not fit, or a score is not a number.
        """
        expected = self.scope.units(axis, layer)
        values = values.detach().double().cpu()
        if values.shape != (expected,):
            raise ScoreError(
                f"Scores of {module} have shape {tuple(values.shape)}; {axis} has {expected} in layer {layer}."
            )
        if not torch.isfinite(values).all():
            raise ScoreError(
                f"Scores of {module} ({axis}) hold {int((~torch.isfinite(values)).sum())} values that are not finite: "
                "weights are damaged (pyprune eval reports them), or gradients overflowed (use dtype float32, or a "
                "smaller gamma or sigma)."
            )
        held = self.sums.setdefault((layer, axis), {})
        held[module] = held[module] + values if module in held else values

    def bundle_score(self, scores: Sequence[float]) -> float:
        """Return the score of units that are removed together: the sum, or the mean if scores can be negative.

        Standardised scores and logarithms can be negative; their sum would be smaller for more units.
        """
        total = math.fsum(scores)
        return total / len(scores) if self.standardised or self.aggregation == "prod" else total

    def group_scores(self, layer: int | None, axis: str) -> Tensor:
        """Return the scores of the groups of one axis, float64 [units]: KV groups or query heads, FFN or hidden.

        Raises:
            ScoreError: nothing was added for them.
        """
        structures = self._structures(layer, axis)
        if axis != "heads" or not self.scope.whole_groups:
            return _aggregate(structures, self.aggregation)
        kv_heads = self.scope.units("kv_heads", layer)
        # Query head q reads KV head q // group_size, so the heads of a group are neighbours.
        queries = structures.view(len(structures), kv_heads, -1).transpose(1, 2).reshape(-1, kv_heads)
        coupled = [queries]
        if (layer, "kv_heads") in self.sums:
            coupled.append(self._structures(layer, "kv_heads"))
        return _aggregate(torch.cat(coupled), self.aggregation)

    def _structures(self, layer: int | None, axis: str) -> Tensor:
        held = self.sums.get((layer, axis))
        if not held:
            raise ScoreError(f"The method gave no score for {axis} in layer {layer}.")
        return torch.stack(list(held.values()))


def _aggregate(structures: Tensor, how: str) -> Tensor:
    """Aggregate scores [structures, units] to [units]."""
    if how == "max":
        return structures.amax(0)
    values = structures.log() if how == "prod" else structures
    return values.mean(0) if how == "mean" else values.sum(0)
