"""From group scores to a plan: bundles in ascending order, and how many of each layer and axis are removed.

Within one layer and axis the units with the smallest scores are removed first, ties by the smaller index. A plan is
therefore one count for every (layer, axis), and both rankings only choose these counts. Local removes the same count in
every open layer of a kind: the same share of every axis as far as its steps allow, then more steps that fit. Global
merges all orders into one (ties by layer, then heads before ffn) and takes a prefix. Counts are exact: the largest
number whose share of ALL parameters does not exceed the ratio.
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
from pyprune.methods.score._structures import LayerAxis, OpenUnits, StructureScores
from pyprune.plan import LayerPlan, PrunePlan


@dataclass(frozen=True)
class RankedUnits:
    """The units of one layer and axis, in the order of their removal.

    Attributes:
        layer: dense layer index; None for the hidden axis.
        axis: heads, ffn or hidden.
        bundles: dense indices that are removed together (KV heads, query heads, FFN or hidden channels).
        scores: scores of the bundles, ascending; -inf for those that earlier rounds removed.
        removable: how many bundles may be removed.
        removed: how many of them earlier rounds removed; they remain removed.
    """

    layer: int | None
    axis: ScoreAxis
    bundles: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    removable: int
    removed: int

    @property
    def alike(self) -> tuple[ScoreAxis, int]:
        """Return what layers of one kind have in common: the axis, and its number of bundles."""
        return self.axis, len(self.bundles)


KindCounts = dict[tuple[ScoreAxis, int], int]
"""Number of removed bundles, by :attr:`RankedUnits.alike`."""
Counts = dict[LayerAxis, int]
"""Number of removed bundles, by (layer, axis)."""


class Ranking:
    """One model's goal and the plans that reach it.

    Args:
        request: the goal, and the facts of the model.
        scope: the open axes and layers.
        stock_obstacles: plan -> the reasons why no stock architecture can hold it; none if one can.
    """

    def __init__(
        self, request: PlanRequest, scope: OpenUnits, stock_obstacles: Callable[[PrunePlan], Sequence[str]]
    ) -> None:
        self.request = request
        self.scope = scope
        self.stock_obstacles = stock_obstacles
        self.score = request.score
        self.identity = request.identity

    def plan(self, scores: StructureScores, before: PrunePlan, done: Fraction) -> PrunePlan:
        """Return the plan after a round.

        Args:
            scores: scores of every open structure.
            before: the plan of the earlier rounds; its removals are kept.
            done: share of the goal to reach with this round, in (0, 1].

        Raises:
            ConfigError: the goal removes nothing, cannot be reached, or is not legal.
        """
        orders = [self._order(scores, before, *place) for place in self.scope.places]
        counts = self._counts(orders, done)
        if done == 1 and not any(counts.values()):
            self._refuse_nothing(orders)
        return self._remove(orders, counts)

    def check_goal(self) -> None:
        """Refuse, before any scoring, a goal that no scores can reach.

        Raises:
            ConfigError: the goal cannot be reached, or is not legal.
        """
        alike = StructureScores(self.scope, "sum")
        for layer, axis in self.scope.places:
            alike.add_structures(layer, axis, "unit", torch.zeros(self.scope.units(axis, layer)))
        orders = [self._order(alike, self.identity, *place) for place in self.scope.places]
        self._counts(orders, Fraction(1))

    def _counts(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        if self.score.counts:
            return self._goal_by_counts(orders, done)
        if self.scope.axes == ("hidden",):
            return self._goal_of_hidden(orders, done)
        self._check_unit()
        if not self.score.is_local:
            return self._rank_globally(orders, done)
        # The final counts do not depend on scores.
        return {place: math.floor(done * count) for place, count in self._local_goal(orders).items()}

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
        removed = list(self._removed_units(before, layer, axis))
        gone = set(removed)
        values[removed] = -math.inf
        order = removed + [i for i in torch.argsort(values, stable=True).tolist() if i not in gone]
        bundles = self._bundles(order, axis, layer)
        numbers = values.tolist()
        values_of = tuple(scores.bundle_score([numbers[i] for i in bundle]) for bundle in bundles)
        keep = 0 if self.score.allow_empty and axis != "hidden" else 1
        already = bisect_right(list(accumulate(map(len, bundles))), len(removed))
        return RankedUnits(layer, axis, bundles, values_of, max(0, len(bundles) - keep), already)

    def remaining_scores(
        self, scores: StructureScores, before: PrunePlan, layer: int | None, axis: ScoreAxis
    ) -> torch.Tensor:
        """Return the scores of the units of one place that ``before`` has not removed, float64 [units]."""
        values = scores.group_scores(layer, axis)
        alive = torch.ones(len(values), dtype=torch.bool)
        alive[list(self._removed_units(before, layer, axis))] = False
        return values[alive]

    def _removed_units(self, plan: PrunePlan, layer: int | None, axis: ScoreAxis) -> tuple[int, ...]:
        if axis == "hidden":
            return plan.removed_hidden
        whole = next(whole for whole in self.identity.layers if whole.index == layer)
        kept = next((kept for kept in plan.layers if kept.index == layer), None)
        name = "ffn" if axis == "ffn" else "kv_heads" if self.scope.whole_groups else "query_heads"
        return tuple(sorted(set(whole.units(name)) - set(kept.units(name) if kept else ())))

    def _bundles(self, order: Sequence[int], axis: ScoreAxis, layer: int | None) -> tuple[tuple[int, ...], ...]:
        if axis == "heads" and not self.scope.whole_groups:
            return self._query_bundles(order, layer)
        size = {"heads": 1, "ffn": self.score.ffn_multiple, "hidden": self.request.hidden_multiple}[axis]
        # The rest of a dense width that is no multiple is in the first bundle, so that every kept width is legal.
        first = len(order) % size or size
        return (tuple(order[:first]), *(tuple(order[i : i + size]) for i in range(first, len(order), size)))

    def _query_bundles(self, order: Sequence[int], layer: int | None) -> tuple[tuple[int, ...], ...]:
        """Return bundles, the j-th of which holds the j-th weakest query head of every KV group."""
        groups: list[list[int]] = [[] for _ in range(self.scope.units("kv_heads", layer))]
        for head in order:
            groups[head // self.scope.group_size(layer)].append(head)
        return tuple(zip(*groups, strict=True))

    def _goal_by_counts(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        return {(o.layer, o.axis): math.floor(done * (len(o.bundles) - self._kept_bundles(o))) for o in orders}

    def _kept_bundles(self, order: RankedUnits) -> int:
        """Return how many bundles are kept, from the heads or channels that ``counts`` keeps."""
        count = self.score.counts[order.axis]
        heads = self.scope.group_size(order.layer) if order.axis == "heads" and self.scope.whole_groups else 1
        sizes = [len(bundle) * heads for bundle in order.bundles]
        legal = list(accumulate(reversed(sizes)))[::-1]
        if count not in legal:
            shown = ", ".join(map(str, legal[:8])) + (", ..." if len(legal) > 8 else "")
            raise ConfigError(f"score.{order.axis} is {count}; this model allows {shown}.")
        return len(sizes) - legal.index(count)

    def rounding_notes(self) -> tuple[str, ...]:
        """Return the notes on how a share of the hidden size was rounded."""
        if self.score.counts or self.scope.axes != ("hidden",) or self.request.ratio_of != "hidden":
            return ()
        return decide_hidden_count(self.request, usual="parameters").notes

    def _goal_of_hidden(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        (order,) = orders
        decision = decide_hidden_count(self.request, usual="parameters")
        gone = [sum(len(b) for b in order.bundles[:n]) for n in range(len(order.bundles))]
        return {(None, "hidden"): math.floor(done * gone.index(decision.count))}

    def _local_goal(self, orders: Sequence[RankedUnits]) -> Counts:
        """Return floor(p * units) bundles of every layer and axis, for the largest share p within the goal.

        If the next step of one axis is larger than the rest of the goal (a KV head of few), the others continue alone,
        those with the larger steps first.
        """
        first = {o.axis: o for o in orders}
        steps = {axis: self._steps(orders, axis) for axis in first}
        shares = sorted({share for of_axis in steps.values() for share in of_axis})
        starts = {axis: [*of_axis] for axis, of_axis in steps.items()}

        def counts_at(step: int) -> Counts:
            reached = [of[starts[axis][bisect_right(starts[axis], shares[step]) - 1]] for axis, of in steps.items()]
            return _spread(orders, {alike: n for counts in reached for alike, n in counts.items()})

        counts = self._reach_goal(orders, self.request.ratio, len(shares) - 1, counts_at)
        by_step = [[*steps[axis].values()] for axis in sorted(first, key=lambda axis: len(first[axis].bundles))]
        taken = {o.alike: counts[o.layer, o.axis] for o in orders}
        for of_axis in by_step:
            taken = self._fill(orders, taken, of_axis)
        return _spread(orders, self._with_larger_steps(orders, taken, by_step))

    def _steps(self, orders: Sequence[RankedUnits], axis: ScoreAxis) -> dict[Fraction, KindCounts]:
        """Return share -> bundles of one axis that each kind of layers loses, ascending, as far as its steps allow."""
        kinds = {o.alike: o for o in orders if o.axis == axis}
        allowed = {alike: self._allowed_counts(orders, o) for alike, o in kinds.items()}
        steps: dict[Fraction, KindCounts] = {}
        for share in sorted({Fraction(k, units) for _, units in kinds for k in range(units + 1)}):
            exact = {alike: math.floor(share * alike[1]) for alike in kinds}
            steps[share] = {a: allowed[a][bisect_right(allowed[a], n) - 1] for a, n in exact.items()}
        return steps

    def _with_larger_steps(
        self, orders: Sequence[RankedUnits], taken: KindCounts, by_step: Sequence[Sequence[KindCounts]]
    ) -> KindCounts:
        """If the axis with the smallest steps is used up, try one more step of another axis, and less of this one."""
        *larger, finest = by_step
        if not finest[-1].items() <= taken.items():
            return taken
        later = [next((step for step in of_axis if _is_more(step, taken)), None) for of_axis in larger]
        trials = [taken | finest[0] | step for step in later if step]
        filled = [self._fill(orders, t, finest) for t in trials if self._share_of(orders, t) <= self.request.ratio]
        best = max([taken, *filled], key=lambda trial: self._share_of(orders, trial))
        return best if best == taken else self._with_larger_steps(orders, best, by_step)

    def _fill(self, orders: Sequence[RankedUnits], taken: KindCounts, steps: Sequence[KindCounts]) -> KindCounts:
        """Take as many steps of one axis, the same share of every layer, as the goal allows."""
        tried = [taken, *(taken | step for step in steps if _is_more(step, taken))]
        last = self._last_within(orders, self.request.ratio, len(tried) - 1, lambda n: _spread(orders, tried[n]))
        return tried[last]

    def _share_of(self, orders: Sequence[RankedUnits], taken: KindCounts) -> float:
        return self._share(orders, _spread(orders, taken))

    def _allowed_counts(self, orders: Sequence[RankedUnits], order: RankedUnits) -> list[int]:
        """Return the numbers of bundles of ``order``'s axis that every layer may lose, ascending from 0.

        With uniform these are the numbers of heads that a stock architecture takes, if one takes the dense model.
        """
        counts = list(range(order.removable + 1))
        if not self.score.uniform or order.axis != "heads" or self.stock_obstacles(self.identity):
            return counts
        places: list[LayerAxis] = [(o.layer, o.axis) for o in orders if o.alike == order.alike]
        return [k for k in counts if not k or not self.stock_obstacles(self._remove(orders, dict.fromkeys(places, k)))]

    def _rank_globally(self, orders: Sequence[RankedUnits], done: Fraction) -> Counts:
        """Return the longest prefix of the one order over all open layers within the part ``done`` of the goal."""
        compared = self._normalise(orders)
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

        return self._reach_goal(orders, self.request.ratio * float(done), len(places), counts_at)

    def _normalise(self, orders: Sequence[RankedUnits]) -> list[tuple[float, ...]]:
        """Return scores that may be compared across layers and axes; each order remains ascending."""
        how = self.score.normalise
        if how == "none":
            return [order.scores for order in orders]
        units = self._unit_parameters(orders) if how == "size" else _means(orders, of_layers=how == "layer")
        return [
            tuple(score / (unit * len(bundle)) for score, bundle in zip(order.scores, order.bundles, strict=True))
            for order, unit in zip(orders, units, strict=True)
        ]

    def _unit_parameters(self, orders: Sequence[RankedUnits]) -> list[float]:
        """Return the parameters of one unit of each order."""
        first = {o.axis: o for o in reversed(orders)}
        sizes = {axis: self._parameters_of_first(o) / len(o.bundles[0]) for axis, o in first.items()}
        return [sizes[o.axis] for o in orders]

    def _parameters_of_first(self, order: RankedUnits) -> int:
        total = sum(math.prod(shape) for shape in self.request.shapes.values())
        return round(self._share([order], {(order.layer, order.axis): 1}) * total)

    def _reach_goal(
        self, orders: Sequence[RankedUnits], goal: float, steps: int, counts_at: Callable[[int], Counts]
    ) -> Counts:
        """Return the counts of the last step within the goal; refuse a goal that all steps together do not reach."""
        last = self._last_within(orders, goal, steps, counts_at)
        most = self._share(orders, counts_at(last))
        if last == steps and most < goal - 1e-12:
            raise ConfigError(
                f"ratio {self.request.ratio} cannot be reached: the removable part of axes {list(self.scope.axes)} in "
                f"layers {self.scope.layers[0]} to {self.scope.layers[-1]} is {most:.2%} of the parameters. "
                f"Open more layers or axes, or lower the ratio{self._heads_hint(orders)}."
            )
        return counts_at(last)

    def _heads_hint(self, orders: Sequence[RankedUnits]) -> str:
        """Return a further remedy if heads cannot be removed, as the end of a sentence."""
        if self.score.uniform and "heads" in self.scope.axes:
            return "; with score.uniform only the numbers of heads that a stock architecture allows can be removed"
        if self.score.allow_empty or all(o.axis != "heads" or o.removable for o in orders):
            return ""
        if self.scope.whole_groups and self.scope.dense.largest_group > 1:
            return "; each layer has one KV head, which is kept: score.heads_unit=query_head opens its query heads"
        return "; each layer has one head, which is kept unless score.allow_empty is on"

    def _last_within(
        self, orders: Sequence[RankedUnits], goal: float, steps: int, counts_at: Callable[[int], Counts]
    ) -> int:
        """Return the last step, 0 to ``steps``, whose share of parameters is within the goal (shares grow with it)."""
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
            layers=tuple(layer for layer in layers if layer.blocks),
        )

    def _layer(self, layer: LayerPlan, gone: Mapping[LayerAxis, set[int]]) -> LayerPlan:
        heads, ffn = gone.get((layer.index, "heads")), gone.get((layer.index, "ffn"))
        kept: dict[str, list[int]] = {}
        if heads:
            size = self.scope.group_size(layer.index) if self.scope.whole_groups else 1
            kept["query_heads"] = [q for q in layer.query_heads if q // size not in heads]
            if self.scope.whole_groups:
                kept["kv_heads"] = [kv for kv in layer.kv_heads if kv not in heads]
        if ffn:
            kept["ffn"] = [i for i in layer.ffn if i not in ffn]
        return layer.with_units(self.identity.dense, kept)


def _spread(orders: Sequence[RankedUnits], taken: KindCounts) -> Counts:
    """Return the counts of all layers from those of their kinds."""
    return {(o.layer, o.axis): taken[o.alike] for o in orders}


def _is_more(step: KindCounts, taken: KindCounts) -> bool:
    """Return whether a step removes more, and from no kind of layers less."""
    return all(taken[kind] <= n for kind, n in step.items()) and not step.items() <= taken.items()


def _means(orders: Sequence[RankedUnits], *, of_layers: bool) -> list[float]:
    """Return the mean score of a unit of each order's axis, in its layer or in all open ones; 1 if all are zero.

    Units that are removed already do not count.
    """
    groups: dict[object, list[RankedUnits]] = {}
    for order in orders:
        groups.setdefault((order.layer, order.axis) if of_layers else order.axis, []).append(order)
    means = {key: _mean(group) for key, group in groups.items()}
    return [means[(order.layer, order.axis) if of_layers else order.axis] for order in orders]


def _mean(orders: Sequence[RankedUnits]) -> float:
    units = sum(len(bundle) for order in orders for bundle in order.bundles[order.removed :])
    total = math.fsum(score for order in orders for score in order.scores[order.removed :])
    return (total / units if units else 0.0) or 1.0
