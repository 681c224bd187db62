"""The losses of each open axis by a plan: units, share of the parameters, and a warning if it loses nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyprune.config.score import ScoreAxis
from pyprune.methods.ratio import share_of_parameters
from pyprune.methods.score._rank import Ranking
from pyprune.methods.score._structures import PLAN_UNITS
from pyprune.plan import LayerPlan, PrunePlan


@dataclass(frozen=True)
class AxisLoss:
    """The loss of one open axis.

    Attributes:
        axis: heads, ffn or hidden.
        removed: query heads, FFN channels of the open layers, or hidden channels that are removed.
        open: how many of them were open.
        share: share of all parameters, in [0, 1], when this axis alone is cut.
        removed_groups: KV heads that are removed; 0 on other axes.
        open_groups: KV heads that were open; 0 on other axes.
    """

    axis: ScoreAxis
    removed: int
    open: int
    share: float
    removed_groups: int = 0
    open_groups: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data for the record."""
        data: dict[str, Any] = {"removed": self.removed, "open": self.open, "share": self.share}
        if self.open_groups:
            data |= {"removed_kv_groups": self.removed_groups, "open_kv_groups": self.open_groups}
        return data

    def __str__(self) -> str:
        name = {"heads": "query heads", "ffn": "FFN channels", "hidden": "hidden channels"}[self.axis]
        groups = f" ({self.removed_groups:,} of {self.open_groups:,} KV groups)" if self.open_groups else ""
        return f"{self.removed:,} of {self.open:,} {name}{groups}, {self.share:.2%} of the parameters"


def losses_by_axis(ranking: Ranking, plan: PrunePlan) -> tuple[AxisLoss, ...]:
    """Return the loss of each open axis by a plan; KV groups are counted if they are removed as a whole."""
    return tuple(_loss(ranking, plan, axis) for axis in ranking.scope.axes)


def _loss(ranking: Ranking, plan: PrunePlan, axis: ScoreAxis) -> AxisLoss:
    scope = ranking.scope
    share = share_of_parameters(
        ranking.request.family, ranking.request.shapes, _axis_plan(ranking.identity, plan, axis)
    )
    if axis == "hidden":
        return AxisLoss(axis, len(plan.removed_hidden), scope.count(axis), share)
    kept = [layer for layer in plan.layers if layer.index in scope.layers]
    total = scope.count(axis)
    if axis == "ffn":
        return AxisLoss(axis, total - sum(len(layer.ffn) for layer in kept), total, share)
    loss = AxisLoss(axis, total - sum(len(layer.query_heads) for layer in kept), total, share)
    if not scope.whole_groups or scope.dense.largest_group == 1:
        return loss
    groups = scope.count("kv_heads")
    return replace(loss, removed_groups=groups - sum(len(layer.kv_heads) for layer in kept), open_groups=groups)


def _axis_plan(identity: PrunePlan, plan: PrunePlan, axis: ScoreAxis) -> PrunePlan:
    """Return the plan with nothing removed on the other axes."""
    if axis == "hidden":
        return replace(identity, hidden=plan.hidden)
    kept = {layer.index: layer for layer in plan.layers}

    def restrict(whole: LayerPlan) -> LayerPlan:
        layer = kept.get(whole.index)
        names = [name for name in PLAN_UNITS[axis] if whole.units(name)]
        return whole.with_units(identity.dense, {name: layer.units(name) if layer else () for name in names})

    return replace(identity, layers=tuple(restrict(layer) for layer in identity.layers))


def losses_note(losses: Collection[AxisLoss]) -> str:
    """Return one sentence for the report."""
    return f"Removed from the open layers: {'; '.join(map(str, losses))}."


def untouched_axes(ranking: Ranking, losses: Collection[AxisLoss], *, standardised: bool) -> list[str]:
    """Return a warning for every open axis that loses nothing; none if counts were given or nothing is removed.

    Args:
        ranking: ranking of the run.
        losses: losses of every open axis.
        standardised: whether the method itself puts its scores on one scale, so that no normalisation applies.
    """
    if ranking.score.counts or not any(loss.removed for loss in losses):
        return []
    warnings = []
    for axis in (loss.axis for loss in losses if not loss.removed):
        others = [loss.axis for loss in losses if loss.axis != axis]
        reason, remedies = _reason(ranking, axis, others, standardised)
        warnings.append(
            f"The axis {axis} is open and loses nothing: {reason}. To remove some of it: {'; '.join(remedies)}. To "
            f"close it: score.axes=[{','.join(others)}]."
        )
    return warnings


def _reason(
    ranking: Ranking, axis: ScoreAxis, others: Sequence[ScoreAxis], standardised: bool
) -> tuple[str, Sequence[str]]:
    """Return why nothing of an axis is removed, and the options that change it."""
    score, scope = ranking.score, ranking.scope
    single = all(scope.units("kv_heads", layer) <= 1 for layer in scope.layers)
    if axis == "heads" and scope.whole_groups and single and not score.allow_empty:
        one_by_one = ["score.heads_unit=query_head"] if scope.dense.largest_group > 1 else []
        return "each layer has one KV head, which is kept", [*one_by_one, "score.allow_empty=true"]
    if score.uniform:
        reason = "every smaller number is beyond the goal or fits no stock architecture"
        return reason, ["a larger ratio", "score.uniform=false"]
    if score.is_local:
        among_all = [] if "hidden" in score.axes else ["score.ranking=global"]
        return "one unit in every open layer is more than the rest of the goal", ["a larger ratio", *among_all]
    reason = f"each of its units scores above all removed {' and '.join(others)}, as score.normalise compares them"
    ways = () if score.aggregation == "prod" else ("layer", "axis")
    named = [f"score.normalise={way}" for way in ways if way != score.normalise and not standardised]
    return reason, [*named, "score.ranking=local"]
