"""From group scores to a plan: bundles in ascending order, and how many of each layer and axis go.

Within one layer and axis the units with the smallest scores go first, ties by the smaller index. So a plan is one count
for every (layer, axis), and both rankings only choose these counts: local removes the same count in every open layer,
the same share of every axis as far as its steps allow and then what still fits, global merges all orders into one (ties
by layer, then heads before ffn) and takes a prefix. Counts are exact: the largest number whose share of ALL parameters
does not exceed the ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import torch

from pyprune.config.score import ScoreAxis
from pyprune.errors import ConfigError
from pyprune.methods.base import PlanRequest
from pyprune.methods.ratio import decide_hidden_count, share_of_parameters, sufficient_ratio
from pyprune.methods.score._structures import LayerAxis, OpenUnits, StructureScores, opened_places
from pyprune.plan import LayerPlan, PrunePlan, kv_head_of


@dataclass(frozen=True)
class RankedUnits:
    """The units of one layer and axis, the first to go first.

    Attributes:
        layer: dense layer index; None for the hidden axis.
        axis: heads, ffn or hidden.
        bundles: dense indices that go together (KV heads, query heads, FFN or hidden channels).
        scores: of the bundles, ascending; -inf for those that earlier rounds removed.
        removable: how many bundles may go.
        removed: how many of them earlier rounds removed, which stay away.
    """

    layer: int | None
    axis: ScoreAxis
    bundles: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    removable: int
    removed: int


Counts = dict[LayerAxis, int]
"""Bundles that go, by (layer, axis)."""


class Ranking:
    """One model's goal and the plans that reach it.

    Args:
        request: the goal, and the facts of the model.
        scope: what is open.
        why_not_stock: why no stock architecture can hold a plan; nothing when one can.
    """

    def __init__(
        self, request: PlanRequest, scope: OpenUnits, why_not_stock: Callable[[PrunePlan], Sequence[str]]
    ) -> None:
        self.request = request
        self.scope = scope
        self.why_not_stock = why_not_stock
        self.score = request.score
        self.identity = request.identity

    def plan(self, scores: StructureScores, before: PrunePlan, done: Fraction) -> PrunePlan:
        """The plan after a round.

        Args:
            scores: of every open structure.
            before: the plan of the earlier rounds; what it removed stays removed.
            done: share of the goal to reach with this round, in (0, 1].

        Raises:
            ConfigError: the goal removes nothing, cannot be reached, or is not legal.
        """
        orders = [self._order(scores, before, layer, axis) for layer, axis in opened_places(self.scope)]
        counts = self._counts(orders, done)
        if done == 1 and not any(counts.values()):
            self._refuse_nothing(orders)
        return self._remove(orders, counts)

    def check_goal(self) -> None:
        """Find out before any scoring what no scores could mend.

        Raises:
            ConfigError: the goal cannot be reached, or is not legal.
        """
        alike = StructureScores(self.scope, "sum")
        for layer, axis in opened_places(self.scope):
            alike.add_structures(layer, axis, "unit", torch.zeros(self.scope.units(axis)))
        orders = [self._order(alike, self.identity, layer, axis) for layer, axis in opened_places(self.scope)]
        self._counts(orders, Fraction(1))

    def _counts(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        if self.score.counts:
            return self._by_counts(orders, done)
        if self.scope.axes == ("hidden",):
            return self._hidden_by_ratio(orders, done)
        self._check_unit()
        return self._local(orders, done) if self.score.is_local else self._global(orders, done)

    def _refuse_nothing(self, orders: Sequence[RankedUnits]) -> None:
        if self.score.counts:
            raise ConfigError(
                "The counts of score.heads, score.ffn and score.hidden keep everything; lower one of them."
            )
        places = orders if self.score.is_local else [min(orders, key=self._parameters_of_first)]
        smallest = self._share(orders, {(o.layer, o.axis): 1 for o in places if o.axis == places[-1].axis})
        raise ConfigError(
            f"ratio {self.request.ratio} of the parameters removes nothing; the smallest step is "
            f"{sufficient_ratio(smallest)}."
        )

    def _check_unit(self) -> None:
        if self.request.ratio_of not in (None, "parameters"):
            raise ConfigError(
                f"ratio_of is {self.request.ratio_of!r}, but {self.request.method} removes {list(self.scope.axes)}; "
                "use parameters, or give counts (score.heads, score.ffn)."
            )

    def _order(self, scores: StructureScores, before: PrunePlan, layer: int | None, axis: ScoreAxis) -> RankedUnits:
        values = scores.group_scores(layer, axis).clone()
        removed = list(self._removed(before, layer, axis))
        gone = set(removed)
        values[removed] = -math.inf
        order = removed + [i for i in torch.argsort(values, stable=True).tolist() if i not in gone]
        bundles = self._bundles(order, axis)
        numbers = values.tolist()
        values_of = tuple(scores.of_bundle([numbers[i] for i in bundle]) for bundle in bundles)
        keep = 0 if self.score.allow_empty and axis != "hidden" else 1
        already = bisect_right(list(accumulate(map(len, bundles))), len(removed))
        return RankedUnits(layer, axis, bundles, values_of, max(0, len(bundles) - keep), already)

    def remaining(self, scores: StructureScores, before: PrunePlan, layer: int | None, axis: ScoreAxis) -> torch.Tensor:
        """Scores of the units of one place that ``before`` has not removed, float64 [units]."""
        values = scores.group_scores(layer, axis)
        alive = torch.ones(len(values), dtype=torch.bool)
        alive[list(self._removed(before, layer, axis))] = False
        return values[alive]

    def _removed(self, plan: PrunePlan, layer: int | None, axis: ScoreAxis) -> tuple[int, ...]:
        if axis == "hidden":
            return plan.removed_hidden
        found = [x for x in plan.layers if x.index == layer]
        kept = LayerPlan(-1, (), (), ()) if not found else found[0]
        units = {"heads": kept.kv_heads if self.scope.whole_groups else kept.query_heads, "ffn": kept.ffn}[axis]
        return tuple(sorted(set(range(self._unit_count(axis))) - set(units)))

    def _unit_count(self, axis: ScoreAxis) -> int:
        return self.scope.units("kv_heads" if axis == "heads" and self.scope.whole_groups else axis)

    def _bundles(self, order: Sequence[int], axis: ScoreAxis) -> tuple[tuple[int, ...], ...]:
        if axis == "heads" and not self.scope.whole_groups:
            return self._query_bundles(order)
        size = {"heads": 1, "ffn": self.score.ffn_multiple, "hidden": self.request.hidden_multiple}[axis]
        # What is left of a dense width that is no multiple goes with the first bundle, so that every rest is legal.
        first = len(order) % size or size
        return (tuple(order[:first]), *(tuple(order[i : i + size]) for i in range(first, len(order), size)))

    def _query_bundles(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Bundle j holds the j-th weakest query head of every KV group."""
        dense = self.scope.dense
        groups: list[list[int]] = [[] for _ in range(dense.num_key_value_heads)]
        for head in order:
            groups[kv_head_of(head, dense)].append(head)
        return tuple(zip(*groups, strict=True))

    def _by_counts(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        counts: Counts = {}
        for order in orders:
            kept = self._kept_bundles(order)
            counts[order.layer, order.axis] = math.floor(done * (len(order.bundles) - kept))
        return counts

    def _kept_bundles(self, order: RankedUnits) -> int:
        """How many bundles stay when ``counts`` says how many heads or channels do."""
        wanted = self.score.counts[order.axis]
        sizes = [len(bundle) * self._heads_in(order.axis) for bundle in order.bundles]
        legal = list(accumulate(reversed(sizes)))[::-1]
        if wanted not in legal:
            shown = ", ".join(map(str, legal[:8])) + (", ..." if len(legal) > 8 else "")
            raise ConfigError(f"score.{order.axis} is {wanted}; this model allows {shown}.")
        return len(sizes) - legal.index(wanted)

    def _heads_in(self, axis: ScoreAxis) -> int:
        return self.scope.dense.group_size if axis == "heads" and self.scope.whole_groups else 1

    def rounding_notes(self) -> tuple[str, ...]:
        """What is to be said of the hidden size that a share of it comes to."""
        if self.score.counts or self.scope.axes != ("hidden",) or self.request.ratio_of != "hidden":
            return ()
        return decide_hidden_count(self.request, usual="parameters").notes

    def _hidden_by_ratio(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        (order,) = orders
        decision = decide_hidden_count(self.request, usual="parameters")
        gone = [sum(len(b) for b in order.bundles[:n]) for n in range(len(order.bundles))]
        return {(None, "hidden"): math.floor(done * gone.index(decision.count))}

    def _local(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        """The part of the final counts that is due; they do not depend on scores."""
        counts = self._local_goal(orders, self.request.ratio)
        return {place: math.floor(done * count) for place, count in counts.items()}

    def _local_goal(self, orders: Sequence[RankedUnits], goal: float) -> Counts:
        """The largest share p, with floor(p * units) bundles of every layer and axis, that stays within the goal.

        Where the next step of one axis is too large for what is left (a KV head of few), the others go on alone, those
        with the larger steps first.
        """
        first = {o.axis: o for o in orders}
        allowed = {axis: self._allowed(orders, order) for axis, order in first.items()}
        shares = sorted({Fraction(k, len(o.bundles)) for o in first.values() for k in range(len(o.bundles) + 1)})

        def counts_at(step: int) -> Counts:
            wanted = {axis: math.floor(shares[step] * len(o.bundles)) for axis, o in first.items()}
            counts = {axis: allowed[axis][bisect_right(allowed[axis], wanted[axis]) - 1] for axis in first}
            return {(o.layer, o.axis): counts[o.axis] for o in orders}

        counts = self._largest(orders, goal, len(shares) - 1, counts_at)
        by_step = sorted(first, key=lambda axis: len(first[axis].bundles))
        for axis in by_step:
            counts = self._filled(orders, goal, counts, axis, allowed[axis])
        return self._with_larger_steps(orders, goal, counts, by_step, allowed)

    def _with_larger_steps(
        self,
        orders: Sequence[RankedUnits],
        goal: float,
        counts: Counts,
        by_step: Sequence[ScoreAxis],
        allowed: Mapping[ScoreAxis, Sequence[int]],
    ) -> Counts:
        """Where nothing more of the axis with the smallest steps may go, less of it and one more step of another."""
        *larger, finest = by_step
        places = {axis: [(o.layer, o.axis) for o in orders if o.axis == axis] for axis in by_step}
        now = {axis: counts[places[axis][0]] for axis in by_step}
        if now[finest] < allowed[finest][-1]:
            return counts
        start = counts | dict.fromkeys(places[finest], allowed[finest][0])
        trials = [
            start | dict.fromkeys(places[axis], next(k for k in allowed[axis] if k > now[axis]))
            for axis in larger
            if now[axis] < allowed[axis][-1]
        ]
        filled = [
            self._filled(orders, goal, trial, finest, allowed[finest])
            for trial in trials
            if self._share(orders, trial) <= goal
        ]
        best = max([counts, *filled], key=lambda found: self._share(orders, found))
        return best if best == counts else self._with_larger_steps(orders, goal, best, by_step, allowed)

    def _filled(
        self, orders: Sequence[RankedUnits], goal: float, counts: Counts, axis: ScoreAxis, allowed: Sequence[int]
    ) -> Counts:
        """The same with as many bundles of one axis, the same in every layer, as the goal allows."""
        places: list[LayerAxis] = [(o.layer, o.axis) for o in orders if o.axis == axis]
        larger = [count for count in allowed if count >= counts[places[0]]]

        def counts_at(step: int) -> Counts:
            return counts | dict.fromkeys(places, larger[step])

        return counts_at(self._last_within(orders, goal, len(larger) - 1, counts_at))

    def _allowed(self, orders: Sequence[RankedUnits], order: RankedUnits) -> list[int]:
        """How many bundles of ``order``'s axis may go in every layer, ascending from 0.

        For uniform only the numbers of heads that a stock architecture takes, if one takes the dense model.
        """
        counts = list(range(order.removable + 1))
        if not self.score.uniform or order.axis != "heads" or self.why_not_stock(self.identity):
            return counts
        places: list[LayerAxis] = [(o.layer, o.axis) for o in orders if o.axis == order.axis]
        return [k for k in counts if not k or not self.why_not_stock(self._remove(orders, dict.fromkeys(places, k)))]

    def _global(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        """The longest prefix of the one order over all open layers that stays within the part of the goal."""
        compared = self._normalised(orders)
        merged = sorted(
            (value, place, position)
            for place, (order, values) in enumerate(zip(orders, compared, strict=True))
            for position, value in enumerate(values[: order.removable])
            if position >= order.removed
        )
        places = [place for _, place, _ in merged]

        def counts_at(step: int) -> Counts:
            counts: Counts = {(o.layer, o.axis): o.removed for o in orders}
            for place in places[:step]:
                counts[orders[place].layer, orders[place].axis] += 1
            return counts

        return self._largest(orders, self.request.ratio * float(done), len(places), counts_at)

    def _normalised(self, orders: Sequence[RankedUnits]) -> list[tuple[float, ...]]:
        """Scores that may be compared across layers and axes; each order stays ascending."""
        how = self.score.normalise
        if how == "none":
            return [order.scores for order in orders]
        units = self._sizes(orders) if how == "size" else _means(orders, of_layers=how == "layer")
        return [
            tuple(score / (unit * len(bundle)) for score, bundle in zip(order.scores, order.bundles, strict=True))
            for order, unit in zip(orders, units, strict=True)
        ]

    def _sizes(self, orders: Sequence[RankedUnits]) -> list[float]:
        """Parameters of one unit of each order."""
        first = {o.axis: o for o in reversed(orders)}
        sizes = {axis: self._parameters_of_first(o) / len(o.bundles[0]) for axis, o in first.items()}
        return [sizes[o.axis] for o in orders]

    def _parameters_of_first(self, order: RankedUnits) -> int:
        total = sum(math.prod(shape) for shape in self.request.shapes.values())
        return round(self._share([order], {(order.layer, order.axis): 1}) * total)

    def _largest(
        self, orders: Sequence[RankedUnits], goal: float, steps: int, counts_at: Callable[[int], Counts]
    ) -> Counts:
        """The counts of the last step within the goal, which not all steps may fall short of."""
        last = self._last_within(orders, goal, steps, counts_at)
        most = self._share(orders, counts_at(last))
        if last == steps and most < goal - 1e-12:
            raise ConfigError(
                f"ratio {self.request.ratio} cannot be reached: all that may go of axes {list(self.scope.axes)} in "
                f"layers {self.scope.layers[0]} to {self.scope.layers[-1]} is {most:.2%} of the parameters. "
                f"Open more layers or axes, or lower the ratio{self._heads_hint(orders)}."
            )
        return counts_at(last)

    def _heads_hint(self, orders: Sequence[RankedUnits]) -> str:
        """What else helps where heads have to stay."""
        if self.score.uniform and "heads" in self.scope.axes:
            return "; with score.uniform only as many heads go as a stock architecture allows"
        if self.score.allow_empty or all(o.axis != "heads" or o.removable for o in orders):
            return ""
        if self.scope.whole_groups and self.scope.dense.group_size > 1:
            return "; each layer has one KV head, which stays: score.heads_unit=query_head opens its query heads"
        return "; each layer has one head, which stays unless score.allow_empty is on"

    def _last_within(
        self, orders: Sequence[RankedUnits], goal: float, steps: int, counts_at: Callable[[int], Counts]
    ) -> int:
        """The last step, 0 to ``steps``, whose share of parameters is within the goal (shares grow with the steps)."""
        # bisect_right finds the first step beyond the goal; rounding of the share itself must not decide.
        beyond = bisect_right(range(steps + 1), goal + 1e-12, key=lambda step: self._share(orders, counts_at(step)))
        return beyond - 1

    def _share(self, orders: Sequence[RankedUnits], counts: Counts) -> float:
        return share_of_parameters(self.request.family, self.request.shapes, self._remove(orders, counts))

    def _remove(self, orders: Sequence[RankedUnits], counts: Mapping[LayerAxis, int]) -> PrunePlan:
        gone: dict[LayerAxis, set[int]] = {}
        for order in orders:
            count = counts.get((order.layer, order.axis), 0)
            gone[order.layer, order.axis] = {i for bundle in order.bundles[:count] for i in bundle}
        layers = (self._layer(layer, gone) for layer in self.identity.layers)
        hidden = gone.get((None, "hidden"), set())
        return replace(
            self.identity,
            hidden=tuple(i for i in self.identity.hidden if i not in hidden),
            layers=tuple(layer for layer in layers if layer.query_heads or layer.ffn),
        )

    def _layer(self, layer: LayerPlan, gone: Mapping[LayerAxis, set[int]]) -> LayerPlan:
        heads, ffn = gone.get((layer.index, "heads"), set()), gone.get((layer.index, "ffn"), set())
        if self.scope.whole_groups:
            kv_heads = tuple(kv for kv in layer.kv_heads if kv not in heads)
            queries = tuple(q for q in layer.query_heads if kv_head_of(q, self.scope.dense) not in heads)
        else:
            queries = tuple(q for q in layer.query_heads if q not in heads)
            kv_heads = layer.kv_heads if queries else ()
        return LayerPlan(layer.index, queries, kv_heads, tuple(i for i in layer.ffn if i not in ffn))


def _means(orders: Sequence[RankedUnits], *, of_layers: bool) -> list[float]:
    """Mean score of one unit of each order's axis, in its layer or in all open ones, without the units that are gone.

    1 where all scores are zero.
    """
    alike: dict[object, list[RankedUnits]] = {}
    for order in orders:
        alike.setdefault((order.layer, order.axis) if of_layers else order.axis, []).append(order)
    means = {key: _mean(some) for key, some in alike.items()}
    return [means[(order.layer, order.axis) if of_layers else order.axis] for order in orders]


def _mean(orders: Sequence[RankedUnits]) -> float:
    units = sum(len(bundle) for order in orders for bundle in order.bundles[order.removed :])
    total = math.fsum(score for order in orders for score in order.scores[order.removed :])
    return (total / units if units else 0.0) or 1.0
