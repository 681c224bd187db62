"""From a ratio to counts: how many layers or hidden channels are removed, rounded to legal sizes, never silently."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Literal

from pyprune.config.run import RatioOf
from pyprune.errors import ConfigError
from pyprune.families import Family, parameters_after
from pyprune.methods.base import PlanRequest
from pyprune.plan import PrunePlan

Shapes = Mapping[str, tuple[int, ...]]
Unit = Literal["layer", "attention", "mlp"]
"""The unit that is removed as a whole: a layer, or one of its two blocks."""
UNIT_NAMES: dict[Unit, str] = {"layer": "layers", "attention": "attention blocks", "mlp": "MLP blocks"}
"""Unit -> its plural."""


@dataclass(frozen=True)
class Decision:
    """How a ratio became a count.

    Attributes:
        count: units (layers or hidden channels) to remove.
        notes: one sentence for each rounding that happened, for the report.
    """

    count: int
    notes: tuple[str, ...] = ()


def share_of_parameters(family: Family, shapes: Shapes, plan: PrunePlan) -> float:
    """Return the share of the dense parameters that the plan removes, in [0, 1]."""
    total = sum(math.prod(shape) for shape in shapes.values())
    return 1 - parameters_after(family, shapes, plan) / total


def sufficient_ratio(share: Fraction | float) -> str:
    """Return a share with four digits, rounded up: a ratio that reaches it."""
    exact = Fraction(share)
    context = Context(prec=4, rounding=ROUND_CEILING)
    return f"{context.divide(Decimal(exact.numerator), Decimal(exact.denominator)).normalize():f}"


def floor_count(ratio: float, total: int, unit: str) -> int:
    """Return floor(ratio * total) without binary surprises (0.29 of 100 is 29).

    Raises:
        ConfigError: the ratio is outside (0, 1), or removes nothing.
    """
    if not 0 < ratio < 1:
        raise ConfigError(f"ratio is {ratio}; it must be strictly between 0 and 1.")
    count = math.floor(Fraction(repr(float(ratio))) * total)
    if count == 0:
        raise ConfigError(
            f"ratio {ratio} of {total} {unit} removes nothing; the smallest ratio that removes one is "
            f"{sufficient_ratio(Fraction(1, total))}."
        )
    return count


def drop_units(plan: PrunePlan, layers: Iterable[int], unit: Unit = "layer") -> PrunePlan:
    """Return the plan without some of its layers, or without the attention or the MLP of these layers.

    Raises:
        PlanError: a layer that the plan does not hold.
    """
    if unit == "layer":
        return plan.drop_layers(layers)
    for index in layers:
        plan = plan.with_layer(index, ffn=()) if unit == "mlp" else plan.with_layer(index, query_heads=(), kv_heads=())
    return plan


def decide_layer_count(request: PlanRequest, unit: Unit = "layer") -> Decision:
    """Return how many layers are removed, or how many attention or MLP blocks.

    Args:
        request: its ``ratio_of`` is layers (floor(ratio * n); also for None) or parameters (the most units whose share
            is within the ratio).
        unit: the unit that is removed; every layer has one of each.

    Raises:
        ConfigError: the ratio removes nothing, leaves nothing, or its unit does not fit this axis.
    """
    total = request.identity.dense.num_layers
    ratio_of = request.ratio_of or "layers"
    if ratio_of == "layers":
        return Decision(floor_count(request.ratio, total, UNIT_NAMES[unit]))
    if ratio_of != "parameters":
        raise ConfigError(f"ratio_of is {ratio_of!r}, but this method removes layers; use layers or parameters.")

    def without(count: int) -> PrunePlan:
        return drop_units(request.identity, range(total - count, total), unit)

    return _largest_within(request, range(1, total), without, UNIT_NAMES[unit])


def decide_hidden_count(request: PlanRequest, usual: RatioOf = "hidden") -> Decision:
    """Return how many hidden channels are removed, so that the kept size is a multiple of ``hidden_multiple``.

    Rounding keeps more rather than fewer channels, and is reported in the notes.

    Args:
        request: its ``ratio_of`` is hidden (floor(ratio * n)) or parameters (the most channels whose share is within
            the ratio).
        usual: the meaning of ``ratio_of`` None.

    Raises:
        ConfigError: the ratio removes nothing once rounded, leaves nothing, or its unit does not fit.
    """
    ratio, multiple, ratio_of = request.ratio, request.hidden_multiple, request.ratio_of or usual
    total = request.identity.dense.hidden_size
    kept_legal = list(range(multiple, total, multiple))
    if not kept_legal:
        raise ConfigError(
            f"hidden_multiple is {multiple}, but the hidden size is only {total}; no smaller size is legal."
        )
    if ratio_of == "parameters":

        def without(count: int) -> PrunePlan:
            return request.identity.keep_hidden(range(total - count))

        counts = [total - kept for kept in reversed(kept_legal)]
        return _largest_within(request, counts, without, "hidden channels")
    if ratio_of != "hidden":
        raise ConfigError(
            f"ratio_of is {ratio_of!r}, but this method removes hidden channels; use hidden or parameters."
        )
    count = floor_count(ratio, total, "hidden channels")
    kept = math.ceil((total - count) / multiple) * multiple
    if kept >= total:
        raise ConfigError(
            f"ratio {ratio} of {total} hidden channels removes {count}, but the kept size must be a multiple "
            f"of {multiple}: nothing would be removed. Use a ratio of at least "
            f"{sufficient_ratio(Fraction(total - kept_legal[-1], total))} or a smaller hidden_multiple."
        )
    if kept == total - count:
        return Decision(count)
    note = (
        f"hidden size rounded from {total - count} up to {kept}, a multiple of {multiple}: "
        f"{total - kept} channels are removed instead of {count}."
    )
    return Decision(total - kept, (note,))


def _largest_within(
    request: PlanRequest, counts: range | list[int], without: Callable[[int], PrunePlan], unit: str
) -> Decision:
    """Return the largest count whose share of parameters does not exceed the ratio (shares grow with the count)."""
    ratio = request.ratio
    if not 0 < ratio < 1:
        raise ConfigError(f"ratio is {ratio}; it must be strictly between 0 and 1.")
    best = 0
    share = 0.0
    for count in counts:
        here = share_of_parameters(request.family, request.shapes, without(count))
        if here > ratio:
            break
        best, share = count, here
    if best == 0:
        first = share_of_parameters(request.family, request.shapes, without(counts[0]))
        raise ConfigError(
            f"ratio {ratio} of the parameters removes no {unit}; the smallest step is {sufficient_ratio(first)}."
        )
    note = f"{best} {unit} are {share:.2%} of the parameters (asked for {ratio:.2%})."
    return Decision(best, (note,))
