"""The widths of all layers at once: a mixed-integer programme, solved with HiGHS (scipy.optimize.milp).

One binary variable x[l, c] for each layer l and choice c, a joint one of attention and MLP:

    minimise  sum loss[l, c] x[l, c]
    so that   sum over c of x[l, c] = 1                                       for every layer
              fixed[q] + sum cost[q, l, c] x[l, c] + pair[q] n <= bound[q]    for every limited quantity

n is the number of distinct pairs of query and KV heads beyond the first. Choices that another choice of the same layer
beats in the loss and every limited quantity are left out. The hidden size is tried in an outer loop. Losses of layers
do not add up exactly, so that the best few solutions are returned that differ in some layers, among them the best of
restricted families (whole layers only, widths only) and those of other objectives (the sum of the losses' roots, which
takes much from few layers, or of their squares, which takes little from many). What is measured afterwards decides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from typing_extensions import override

from pyprune.config.base import Config, option
from pyprune.errors import BudgetError
from pyprune.fit.choices import DROPPED, Choice, Search, UnitScores
from pyprune.fit.limits import Budget, Limit
from pyprune.fit.quantities import CostModel, Quantity, Widths, further_head_pairs
from pyprune.plan import PrunePlan

Variant = Literal["best", "layers", "blocks", "widths", "concentrated", "spread"]
POWERS: dict[str, float] = {"concentrated": 0.5, "spread": 2.0}
"""Variant -> power of the losses that its objective adds up; 1 for the others."""
SHARE_THAT_DIFFERS = 0.1
"""Of the layers, between two solutions, where the options do not say how many."""
_TOLERANCE = 2e-6
"""By how much, relative to the bound, HiGHS may overstep a limit."""

_INFEASIBLE = 2
"""Status of scipy.optimize.milp."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SolveOptions(Config):
    """How the search is solved.

    Attributes:
        solutions: most solutions that are returned.
        different_layers: layers in which two of them differ at least; None = a tenth of all, at least one.
        variants: solved in this order until there are enough, then further ones of "best": best (all choices), layers
            (whole layers or nothing), blocks (attention, MLP or layers or nothing), widths (nothing is skipped),
            concentrated and spread (all choices, other objectives).
        head_pairs: most different pairs of query and KV heads among the layers with attention; None = no limit, in
            ``pyprune fit`` as many as run well (four).
        gap: relative distance from the optimum at which a solution counts as the best.
        nodes: of the search tree, at most; a wall-clock limit would make results depend on the machine.
    """

    solutions: int = option(5, at_least=1, at_most=100)
    different_layers: int | None = option(None, at_least=1, at_most=4096)
    variants: tuple[Variant, ...] = ("best", "layers", "widths", "concentrated")
    head_pairs: int | None = option(None, at_least=1, at_most=4096)
    gap: float = option(1e-4, at_least=0, at_most=0.5)
    nodes: int = option(20_000, at_least=1, at_most=10_000_000)

    @override
    def problems(self) -> Iterator[str]:
        if not self.variants:
            yield f"variants is empty; name one or more of {', '.join(get_args(Variant))}."


@dataclass(frozen=True)
class Solution:
    """Widths of all layers that keep a budget.

    Attributes:
        hidden_size: of the model.
        widths: of every dense layer, :data:`pyprune.fit.choices.DROPPED` where it goes.
        loss: the sum of the losses, that of the hidden size included.
        predicted: what the model takes of every limited quantity, in the quantity's unit.
        variant: which search found it.
    """

    hidden_size: int
    widths: tuple[Widths, ...]
    loss: float
    predicted: Mapping[Quantity, float]
    variant: str

    def differs(self, other: Solution) -> int:
        """In how many layers two solutions differ."""
        return sum(mine != theirs for mine, theirs in zip(self.widths, other.widths, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "variant": self.variant,
            "loss": self.loss,
            "hidden_size": self.hidden_size,
            "widths": [[w.query_heads, w.kv_heads, w.ffn] for w in self.widths],
            "predicted": {str(quantity): amount for quantity, amount in self.predicted.items()},
        }


def plan_of(solution: Solution, search: Search, scores: UnitScores) -> PrunePlan:
    """The plan of a solution: at every width the units with the best scores stay.

    Raises:
        BudgetError: a smaller hidden size, and scores that know nothing of hidden channels.
        PlanError: the widths are not those of a valid plan.
    """
    plan = scores.plan(search.identity, dict(enumerate(solution.widths)), solution.hidden_size)
    plan.validate()
    return plan


def solve(
    search: Search,
    budget: Budget,
    costs: CostModel,
    options: SolveOptions = SolveOptions(),
) -> tuple[Solution, ...]:
    """The best solutions that keep a budget, the smallest loss first. The same input gives the same solutions.

    Args:
        search: the choices of every layer and their losses.
        budget: what is limited.
        costs: predicts what is limited.
        options: see :class:`SolveOptions`.

    Raises:
        BudgetError: no plan keeps the budget (the message says which limit cannot be kept and what can be reached), or
            the cost model does not know a quantity.
    """
    options.validate()
    dense = budget.dense(costs, search.identity)
    bounds = budget.bounds(dense)
    programmes = [_Programme(search, hidden, bounds, costs, options) for hidden in search.hidden]
    apart = options.different_layers or max(1, round(SHARE_THAT_DIFFERS * len(search.layers)))
    found: list[Solution] = []
    for variant in _turns(options):
        if len(found) == options.solutions:
            break
        best = _best([p.solve(variant, found, apart) for p in programmes])
        if best is not None:
            found.append(best)
        elif variant == "best":
            break  # what is left differs too little
    if not found:
        raise BudgetError(_why_infeasible(search, budget, costs, dense, options))
    return tuple(sorted(found, key=lambda solution: solution.loss))


def check_feasible(search: Search, budget: Budget, costs: CostModel, options: SolveOptions = SolveOptions()) -> None:
    """Refuse a budget that no plan keeps; which plan would lose least is not asked, so that losses may be missing.

    Args:
        search: the choices of every layer.
        budget: what is limited.
        costs: predicts what is limited.
        options: see :class:`SolveOptions`.

    Raises:
        BudgetError: see :func:`solve`.
    """
    dense = budget.dense(costs, search.identity)
    bounds = budget.bounds(dense)
    programmes = [_Programme(search, hidden, bounds, costs, options) for hidden in search.hidden]
    first = budget.limits[0]
    others = {quantity: bound for quantity, bound in bounds.items() if quantity != first.quantity}
    if _least(programmes, first, others) > bounds[first.quantity]:
        raise BudgetError(_why_infeasible(search, budget, costs, dense, options))


def _turns(options: SolveOptions) -> Iterator[Variant]:
    yield from options.variants
    while True:
        yield "best"


def _best(solutions: Sequence[Solution | None]) -> Solution | None:
    there = [solution for solution in solutions if solution is not None]
    return min(there, key=lambda solution: solution.loss, default=None)


class _Programme:
    """The programme of one hidden size.

    Args:
        search: the choices.
        hidden: hidden size.
        bounds: upper bound of every limited quantity.
        costs: predicts them.
        options: see :class:`SolveOptions`.
    """

    def __init__(
        self,
        search: Search,
        hidden: int,
        bounds: Mapping[Quantity, float],
        costs: CostModel,
        options: SolveOptions,
    ) -> None:
        self.search = search
        self.hidden = hidden
        self.options = options
        self.bounds = dict(bounds)
        self.fixed = {quantity: costs.fixed(quantity, hidden) for quantity in bounds}
        known = {choice.widths for layer in search.layers for choice in layer} - {DROPPED}
        self.cost = {
            (quantity, widths): costs.layer(quantity, hidden, widths) for quantity in bounds for widths in known
        } | {(quantity, DROPPED): 0.0 for quantity in bounds}
        self.head_pair = {quantity: costs.head_pair(quantity) for quantity in bounds}

    def solve(self, variant: Variant, before: Sequence[Solution], apart: int) -> Solution | None:
        """The best solution of a variant that differs from those before in some layers; None where there is none."""
        columns = self._columns(variant)
        losses = np.array([choice.loss for _, choice in columns])
        power = POWERS.get(variant, 1.0)
        objective = losses if power == 1 else np.maximum(losses, 0) ** power
        cuts = self._no_goods(columns, before, apart)
        chosen = self._chosen(columns, objective, cuts, self.bounds)
        return None if chosen is None else self._solution(variant, chosen)

    def least(self, quantity: Quantity, others: Mapping[Quantity, float]) -> float | None:
        """The smallest amount of a quantity within the bounds of others; None where these alone cannot be kept."""
        columns = self._columns("best", dominated=False)
        objective = np.array([self.cost[quantity, choice.widths] for _, choice in columns])
        scale = float(objective.max()) or 1.0
        chosen = self._chosen(columns, objective / scale, [], others, self.head_pair[quantity] / scale)
        return None if chosen is None else self._amounts(chosen)[quantity]

    def _columns(self, variant: Variant, *, dominated: bool = True) -> list[tuple[int, Choice]]:
        """(layer, choice) of every variable."""
        found: list[tuple[int, Choice]] = []
        for index, layer in enumerate(self.search.layers):
            dense = layer[0].widths
            own = [choice for choice in layer if _belongs(choice.widths, dense, variant)]
            found += [(index, choice) for choice in (self._undominated(own) if dominated else own)]
        return found

    def _undominated(self, choices: Sequence[Choice]) -> list[Choice]:
        """Without those that another one of the same layer beats in the loss and in every limited quantity."""
        if self._pairs_matter:
            pairs: dict[tuple[int, int], list[Choice]] = {}
            for choice in choices:  # where pairs are few or cost something, a choice may be needed for its pair
                pairs.setdefault((choice.widths.query_heads, choice.widths.kv_heads), []).append(choice)
            return [choice for some in pairs.values() for choice in self._frontier(some)]
        return self._frontier(choices)

    @property
    def _pairs_matter(self) -> bool:
        """Whether it is limited how many pairs of heads there are, or any limit depends on it."""
        return self.options.head_pairs is not None or any(self.head_pair.values())

    def _frontier(self, choices: Sequence[Choice]) -> list[Choice]:
        table = np.array([[c.loss, *(self.cost[q, c.widths] for q in self.bounds)] for c in choices])
        no_worse = (table[:, None, :] <= table[None, :, :]).all(-1)  # [i, j]: i is nowhere worse than j
        first = np.arange(len(choices))
        beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
        return [choice for choice, by in zip(choices, beats.T, strict=True) if not by.any()]

    def _no_goods(
        self, columns: Sequence[tuple[int, Choice]], before: Sequence[Solution], apart: int
    ) -> list[tuple[Floats, float]]:
        """Rows (coefficients, upper bound) that keep a solution away from those found before."""
        same = [solution for solution in before if solution.hidden_size == self.hidden]
        return [
            (
                np.array([float(choice.widths == solution.widths[layer]) for layer, choice in columns]),
                float(len(self.search.layers) - apart),
            )
            for solution in same
        ]

    def _chosen(
        self,
        columns: Sequence[tuple[int, Choice]],
        objective: Floats,
        cuts: Sequence[tuple[Floats, float]],
        bounds: Mapping[Quantity, float],
        per_pair: float = 0.0,
    ) -> tuple[Choice, ...] | None:
        """The choice of every layer; bounds are tightened by the solver's tolerance where it used that.

        Args:
            columns: (layer, choice) of every variable.
            objective: coefficient of each column.
            cuts: further rows (coefficients, upper bound).
            bounds: of the quantities to limit.
            per_pair: coefficient of the number of head pairs beyond the first in the objective.
        """
        for tightened in (0.0, _TOLERANCE, 2 * _TOLERANCE):
            chosen = self._solved(columns, objective, cuts, bounds, per_pair, 1 - tightened)
            if chosen is None:
                return None
            amounts = self._amounts(chosen)
            if all(amounts[quantity] <= bound for quantity, bound in bounds.items()):
                return chosen
        return None

    def _solved(
        self,
        columns: Sequence[tuple[int, Choice]],
        objective: Floats,
        cuts: Sequence[tuple[Floats, float]],
        bounds: Mapping[Quantity, float],
        per_pair: float,
        share: float,
    ) -> tuple[Choice, ...] | None:
        layers = len(self.search.layers)
        place = np.array([layer for layer, _ in columns])
        dropped = np.array([float(choice.widths == DROPPED) for _, choice in columns])
        # Each limit is divided by its bound, so that one tolerance means the same for bytes and seconds.
        rows = [np.array([self.cost[q, c.widths] / bound for _, c in columns]) for q, bound in bounds.items()]
        most = [share - self.fixed[q] / bound for q, bound in bounds.items()]
        rows += [dropped, *(row for row, _ in cuts)]
        most += [layers - 1.0, *(bound for _, bound in cuts)]
        pair_variables, pair_rows = self._pair_rows(columns)
        width = len(columns) + pair_variables
        one_each = csr_array((np.ones(len(columns)), (place, np.arange(len(columns)))), shape=(layers, width))
        limits = np.zeros((len(rows), width))
        limits[:, : len(columns)] = rows
        weights, largest = np.concatenate([objective, np.zeros(pair_variables)]), np.ones(width)
        if pair_variables:  # the last one is the number of pairs beyond the first
            limits[: len(bounds), -1] = [self.head_pair[q] / bound for q, bound in bounds.items()]
            weights[-1], largest[-1] = per_pair, pair_variables
        constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(csr_array(limits), -np.inf, np.array(most))]
        with _silent_stdout():
            result = milp(
                weights,
                integrality=np.ones(width),
                bounds=Bounds(0, largest),
                constraints=[*constraints, *pair_rows],
                options={"mip_rel_gap": self.options.gap, "node_limit": self.options.nodes},
            )
        if result.x is None and result.status != _INFEASIBLE:
            raise BudgetError(
                f"The solver stopped without a solution ({result.message}). Raise nodes (now {self.options.nodes:,}), "
                "or open fewer choices."
            )
        if result.x is None:
            return None
        picked = result.x[: len(columns)]
        return tuple(max(zip(picked[place == i], _of(columns, i), strict=True), key=_value)[1] for i in range(layers))

    def _pair_rows(self, columns: Sequence[tuple[int, Choice]]) -> tuple[int, list[LinearConstraint]]:
        """How many variables count head pairs, and the rows that tie them to the columns.

        There is one for each pair, 1 where a layer has it, and behind them the number of pairs beyond the first.
        """
        own = [(c.widths.query_heads, c.widths.kv_heads) for _, c in columns]
        pairs = sorted(set(own) - {(0, 0)})
        if not (pairs and self._pairs_matter):
            return 0, []
        used = sorted({(layer, pair) for (layer, _), pair in zip(columns, own, strict=True) if pair != (0, 0)})
        row_of = {key: i for i, key in enumerate(used)}
        width = len(columns) + len(pairs) + 1
        entries = [
            (row_of[layer, pair], i, 1.0)
            for i, ((layer, _), pair) in enumerate(zip(columns, own, strict=True))
            if pair != (0, 0)
        ] + [(row, len(columns) + pairs.index(pair), -1.0) for (_, pair), row in row_of.items()]
        at, column, value = zip(*entries, strict=True)
        open_pairs = csr_array((np.array(value), (np.array(at), np.array(column))), shape=(len(used), width))
        counts = np.zeros((2, width))
        counts[:, len(columns) : -1] = 1
        counts[1, -1] = -1
        most = np.array([self.options.head_pairs or np.inf, 1.0])
        return len(pairs) + 1, [LinearConstraint(open_pairs, -np.inf, 0), LinearConstraint(counts, -np.inf, most)]

    def _amounts(self, chosen: Sequence[Choice]) -> dict[Quantity, float]:
        further = further_head_pairs(choice.widths for choice in chosen)
        return {
            q: self.fixed[q] + sum(self.cost[q, choice.widths] for choice in chosen) + self.head_pair[q] * further
            for q in self.bounds
        }

    def _solution(self, variant: Variant, chosen: Sequence[Choice]) -> Solution:
        loss = float(sum(choice.loss for choice in chosen)) + self.search.hidden[self.hidden]
        widths = tuple(choice.widths for choice in chosen)
        return Solution(self.hidden, widths, loss, self._amounts(chosen), variant)


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discard what is written to the descriptor of stdout, where HiGHS leaves lines of its own even when told not to.

    Where a command prints JSON, they would be part of it.
    """
    try:
        own = os.dup(1)
    except OSError:  # a process without stdout
        yield
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nowhere)


def _of(columns: Sequence[tuple[int, Choice]], index: int) -> list[Choice]:
    return [choice for layer, choice in columns if layer == index]


def _value(entry: tuple[float, Choice]) -> float:
    return entry[0]


def _belongs(widths: Widths, dense: Widths, variant: Variant) -> bool:
    """Whether a variant takes a choice."""
    attention = (widths.query_heads, widths.kv_heads) == (dense.query_heads, dense.kv_heads)
    match variant:
        case "layers":
            return widths in (dense, DROPPED)
        case "blocks":
            return (attention or not widths.kv_heads) and widths.ffn in (0, dense.ffn)
        case "widths":
            return bool(widths.kv_heads and widths.ffn)
        case _:
            return True


def _why_infeasible(
    search: Search, budget: Budget, costs: CostModel, dense: Mapping[Quantity, float], options: SolveOptions
) -> str:
    """Which limits cannot be kept, and the nearest values that can."""
    bounds = budget.bounds(dense)
    programmes = [_Programme(search, hidden, bounds, costs, options) for hidden in search.hidden]
    alone = {limit: _least(programmes, limit, {}) for limit in budget.limits}
    beyond = [(limit, amount) for limit, amount in alone.items() if amount > limit.bound(dense[limit.quantity])]
    if beyond:
        return "\n".join(_unreachable(limit, amount, dense) for limit, amount in beyond)
    lines = ["No plan keeps all limits of the budget together, though each can be kept alone. Nearest that can be:"]
    for limit in budget.limits:
        rest = Budget(tuple(other for other in budget.limits if other != limit))
        others = rest.bounds(dense)
        # Another limit of the same quantity stays, and decides where it is the tighter one.
        amount = _least(programmes, limit, {q: bound for q, bound in others.items() if q != limit.quantity})
        if amount <= others.get(limit.quantity, float("inf")) and amount < float("inf"):
            lines.append(f"- {limit.reachable(amount, dense[limit.quantity])} with {rest}")
    if len(lines) == 1:
        return (
            f"No plan keeps all of {budget}, and leaving out any one of these limits does not help: loosen several, or "
            "open more choices (what may be skipped, smaller FFN shares, other hidden sizes)."
        )
    return "\n".join([*lines, "Loosen one of them, or open more choices."])


def _least(programmes: Sequence[_Programme], limit: Limit, others: Mapping[Quantity, float]) -> float:
    """The smallest amount of what a limit bounds within the bounds of others; infinite where those cannot be kept."""
    found = [programme.least(limit.quantity, others) for programme in programmes]
    return min((amount for amount in found if amount is not None), default=float("inf"))


def _unreachable(limit: Limit, amount: float, dense: Mapping[Quantity, float]) -> str:
    whole = dense[limit.quantity]
    return (
        f"{limit} cannot be kept: the most that the choices can do is {limit.reachable(amount, whole)} (the dense "
        f"model has {limit.written(whole, whole)}). Loosen it, or open more choices: what may be skipped, smaller FFN "
        "shares, other hidden sizes."
    )
