"""Choose the widths of all layers at once by a mixed-integer programme, solved with HiGHS (scipy.optimize.milp).

One binary variable x[l, c] for each layer l and choice c, a joint one of attention and MLP:

    minimise  sum loss[l, c] x[l, c]
    so that   sum over c of x[l, c] = 1                                      for every layer
              base[q] + sum cost[q, l, c] x[l, c] + pair[q] n <= bound[q]    for every limited quantity

n is the number of distinct pairs of query and KV heads beyond the first. Choices that another choice of the same layer
beats in the loss and every limited quantity are left out. The hidden size is tried in an outer loop.

Losses of layers do not add up exactly. Several good solutions are therefore returned, which differ in some layers and
are compared by measurements. Among them are the best of restricted families (whole layers only, widths only) and those
of other objectives: the sum of the losses' roots takes much from few layers, that of their squares little from many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
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
from pyprune.runtime.descriptors import redirect

Variant = Literal["best", "layers", "blocks", "widths", "concentrated", "spread"]
POWERS: dict[str, float] = {"concentrated": 0.5, "spread": 2.0}
"""Variant -> power of the losses that its objective adds up; 1 for the others."""
SHARE_THAT_DIFFERS = 0.1
"""Default share of the layers in which two solutions differ."""
_TOLERANCE = 2e-6
"""Share of the bound by which HiGHS may exceed a limit."""
_INFEASIBLE = 2
"""Status of scipy.optimize.milp."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SolveOptions(Config):
    """How the search is solved.

    Attributes:
        solutions: most solutions that are returned.
        different_layers: layers in which two of them differ at least; None = a tenth of all, at least one.
        variants: solved in this order, then "best" again until there are enough solutions: best (all choices), layers
            (whole layers or nothing), blocks (attention, MLP or layers or nothing), widths (nothing is skipped),
            concentrated and spread (all choices, other objectives).
        head_pairs: most different pairs of query and KV heads among the layers with attention; None = no limit; in
            ``pyprune fit``, the number that runs well (four).
        gap: relative distance from the optimum at which a solution counts as the best.
        nodes: most nodes of the search tree; a wall-clock limit would make results depend on the machine.
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
        widths: of every dense layer, :data:`pyprune.fit.choices.DROPPED` if it is removed.
        loss: the sum of the losses, that of the hidden size included.
        predicted: the model's amount of every limited quantity, in the quantity's unit.
        variant: of the search that found it.
    """

    hidden_size: int
    widths: tuple[Widths, ...]
    loss: float
    predicted: Mapping[Quantity, float]
    variant: str

    def differs(self, other: Solution) -> int:
        """Count the layers in which two solutions differ."""
        return sum(mine != theirs for mine, theirs in zip(self.widths, other.widths, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "variant": self.variant,
            "loss": self.loss,
            "hidden_size": self.hidden_size,
            "widths": [list(widths.sizes) for widths in self.widths],
            "predicted": {str(quantity): amount for quantity, amount in self.predicted.items()},
        }


def plan_of(solution: Solution, search: Search, scores: UnitScores) -> PrunePlan:
    """Make the plan of a solution, which keeps the units with the best scores at every width.

    Raises:
        BudgetError: a smaller hidden size, without scores of hidden channels.
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
    """Find the best solutions that keep a budget, the smallest loss first. The same input gives the same solutions.

    Args:
        search: the choices of every layer and their losses.
        budget: limits.
        costs: predicts the limited quantities.
        options: see :class:`SolveOptions`.

    Raises:
        BudgetError: no plan keeps the budget (the message names the limit and the nearest one that can be kept), or the
            cost model does not know a quantity.
    """
    options.validate()
    dense = budget.dense(costs, search.identity)
    bounds = budget.bounds(dense)
    programmes = [_Programme(search, hidden, bounds, costs, options) for hidden in search.hidden]
    apart = options.different_layers or max(1, round(SHARE_THAT_DIFFERS * len(search.layers)))
    solutions: list[Solution] = []
    further: Variant = "best"
    for variant in chain(options.variants, repeat(further)):
        if len(solutions) == options.solutions:
            break
        each = [solution for p in programmes if (solution := p.solve(variant, solutions, apart)) is not None]
        if each:
            solutions.append(min(each, key=lambda solution: solution.loss))
        elif variant == "best":
            break  # the remaining solutions differ too little
    if not solutions:
        raise BudgetError(_explain_infeasible(search, budget, costs, dense, options))
    return tuple(sorted(solutions, key=lambda solution: solution.loss))


def check_feasible(search: Search, budget: Budget, costs: CostModel, options: SolveOptions = SolveOptions()) -> None:
    """Refuse a budget that no plan keeps. Losses are not read, so that they may be missing.

    Args:
        search: the choices of every layer.
        budget: limits.
        costs: predicts the limited quantities.
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
        raise BudgetError(_explain_infeasible(search, budget, costs, dense, options))


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
        self.base = {quantity: costs.base(quantity, hidden) for quantity in bounds}
        every = {choice.widths for layer in search.layers for choice in layer} - {DROPPED}
        self.cost = {
            (quantity, widths): costs.layer(quantity, hidden, widths) for quantity in bounds for widths in every
        }
        self.cost |= {(quantity, DROPPED): 0.0 for quantity in bounds}
        self.head_pair = {quantity: costs.head_pair(quantity) for quantity in bounds}

    def solve(self, variant: Variant, before: Sequence[Solution], apart: int) -> Solution | None:
        """Find the best solution of a variant that differs from those before in some layers; None if none does."""
        columns = self._columns(variant)
        losses = np.array([choice.loss for _, choice in columns])
        power = POWERS.get(variant, 1.0)
        objective = losses if power == 1 else np.maximum(losses, 0) ** power
        cuts = self._no_goods(columns, before, apart)
        chosen = self._choose(columns, objective, cuts, self.bounds)
        return None if chosen is None else self._solution(variant, chosen)

    def least(self, quantity: Quantity, others: Mapping[Quantity, float]) -> float | None:
        """Find the smallest amount of a quantity within the bounds of others; None if these cannot be kept."""
        columns = self._columns("best", dominated=False)
        objective = np.array([self.cost[quantity, choice.widths] for _, choice in columns])
        scale = float(objective.max()) or 1.0
        chosen = self._choose(columns, objective / scale, [], others, self.head_pair[quantity] / scale)
        return None if chosen is None else self._amounts(chosen)[quantity]

    def _columns(self, variant: Variant, *, dominated: bool = True) -> list[tuple[int, Choice]]:
        """Return (layer, choice) of every variable."""
        columns: list[tuple[int, Choice]] = []
        for index, layer in enumerate(self.search.layers):
            choices = [choice for choice in layer if _belongs(choice.widths, layer[0].widths, variant)]
            columns += [(index, choice) for choice in (self._drop_dominated(choices) if dominated else choices)]
        return columns

    def _drop_dominated(self, choices: Sequence[Choice]) -> list[Choice]:
        """Drop choices that another one of the same layer beats in the loss and in every limited quantity."""
        if self._pairs_matter:
            pairs: dict[tuple[int, int], list[Choice]] = {}
            for choice in choices:  # if pairs are limited or cost something, a choice may be needed for its pair
                pairs.setdefault(choice.widths[:2], []).append(choice)
            return [choice for alike in pairs.values() for choice in self._frontier(alike)]
        return self._frontier(choices)

    @property
    def _pairs_matter(self) -> bool:
        """Check whether the number of pairs of heads is limited, or any limit depends on it."""
        return self.options.head_pairs is not None or any(self.head_pair.values())

    def _frontier(self, choices: Sequence[Choice]) -> list[Choice]:
        table = np.array([[c.loss, *(self.cost[q, c.widths] for q in self.bounds)] for c in choices])
        no_worse = (table[:, None, :] <= table[None, :, :]).all(-1)  # [i, j]: i is in nothing worse than j
        first = np.arange(len(choices))
        beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
        return [choice for choice, by in zip(choices, beats.T, strict=True) if not by.any()]

    def _no_goods(
        self, columns: Sequence[tuple[int, Choice]], before: Sequence[Solution], apart: int
    ) -> list[tuple[Floats, float]]:
        """Return rows (coefficients, upper bound) that exclude solutions similar to those before."""
        most = float(len(self.search.layers) - apart)
        same = [solution.widths for solution in before if solution.hidden_size == self.hidden]
        return [(np.array([float(choice.widths == widths[at]) for at, choice in columns]), most) for widths in same]

    def _choose(
        self,
        columns: Sequence[tuple[int, Choice]],
        objective: Floats,
        cuts: Sequence[tuple[Floats, float]],
        bounds: Mapping[Quantity, float],
        per_pair: float = 0.0,
    ) -> tuple[Choice, ...] | None:
        """Return the choice of every layer; tighten the bounds if the solver exceeds them within its tolerance.

        Args:
            columns: (layer, choice) of every variable.
            objective: coefficient of each column.
            cuts: further rows (coefficients, upper bound).
            bounds: of the quantities to limit.
            per_pair: coefficient of the number of head pairs beyond the first in the objective.
        """
        layers = len(self.search.layers)
        place = np.array([layer for layer, _ in columns])
        dropped = np.array([float(choice.widths == DROPPED) for _, choice in columns])
        # Divide each limit by its bound, so that one tolerance applies to bytes and seconds alike.
        rows = [np.array([self.cost[q, c.widths] / bound for _, c in columns]) for q, bound in bounds.items()]
        most = [1 - self.base[q] / bound for q, bound in bounds.items()]
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
        options = {"mip_rel_gap": self.options.gap, "node_limit": self.options.nodes}
        limited = np.arange(len(rows)) < len(bounds)
        for tightened in (0.0, _TOLERANCE, 2 * _TOLERANCE):
            within = LinearConstraint(csr_array(limits), -np.inf, np.array(most) - tightened * limited)
            constraints = [LinearConstraint(one_each, 1, 1), within, *pair_rows]
            # HiGHS prints to the descriptor of stdout whatever its options say, into the JSON that a command prints.
            with open(os.devnull, "wb") as nowhere, redirect(1, nowhere):
                result = milp(
                    weights,
                    integrality=np.ones(width),
                    bounds=Bounds(0, largest),
                    constraints=constraints,
                    options=options,
                )
            if result.x is None and result.status != _INFEASIBLE:
                raise BudgetError(
                    f"The solver stopped without a solution ({result.message}). Raise nodes (now "
                    f"{self.options.nodes:,}), or open fewer choices."
                )
            if result.x is None:
                return None
            picked = result.x[: len(columns)]
            chosen = tuple(columns[int(np.where(place == i, picked, -1.0).argmax())][1] for i in range(layers))
            amounts = self._amounts(chosen)
            if all(amounts[quantity] <= bound for quantity, bound in bounds.items()):
                return chosen
        return None

    def _pair_rows(self, columns: Sequence[tuple[int, Choice]]) -> tuple[int, list[LinearConstraint]]:
        """Return the number of variables that count head pairs, and the rows that tie them to the columns.

        A variable for each pair is 1 if a layer has it; a last one is the number of pairs beyond the first.
        """
        pair_of = [c.widths[:2] for _, c in columns]
        pairs = sorted(set(pair_of) - {(0, 0)})
        if not (pairs and self._pairs_matter):
            return 0, []
        used = sorted({(layer, pair) for (layer, _), pair in zip(columns, pair_of, strict=True) if pair != (0, 0)})
        row_of = {key: i for i, key in enumerate(used)}
        width = len(columns) + len(pairs) + 1
        entries = [
            (row_of[layer, pair], i, 1.0)
            for i, ((layer, _), pair) in enumerate(zip(columns, pair_of, strict=True))
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
            q: self.base[q] + sum(self.cost[q, choice.widths] for choice in chosen) + self.head_pair[q] * further
            for q in self.bounds
        }

    def _solution(self, variant: Variant, chosen: Sequence[Choice]) -> Solution:
        loss = float(sum(choice.loss for choice in chosen)) + self.search.hidden[self.hidden]
        widths = tuple(choice.widths for choice in chosen)
        return Solution(self.hidden, widths, loss, self._amounts(chosen), variant)


def _belongs(widths: Widths, dense: Widths, variant: Variant) -> bool:
    """Check whether a variant allows a choice."""
    attention = (widths.query_heads, widths.kv_heads) == (dense.query_heads, dense.kv_heads)
    match variant:
        case "layers":
            return widths in (dense, DROPPED)
        case "blocks":
            return (attention or not widths.kv_heads) and widths.ffn in (0, dense.ffn)
        case "widths":
            return all(kept or not whole for kept, whole in zip(widths, dense, strict=True))
        case _:
            return True


def _explain_infeasible(
    search: Search, budget: Budget, costs: CostModel, dense: Mapping[Quantity, float], options: SolveOptions
) -> str:
    """Name the limits that cannot be kept, and the nearest values that can."""
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
        # Another limit of the same quantity may be the tighter one.
        amount = _least(programmes, limit, {q: bound for q, bound in others.items() if q != limit.quantity})
        if amount <= others.get(limit.quantity, float("inf")) and amount < float("inf"):
            lines.append(f"- {limit.nearest(amount, dense[limit.quantity])} with {rest}")
    if len(lines) == 1:
        return (
            f"No plan keeps all of {budget}, and leaving out any one of these limits does not help: loosen several, or "
            "open more choices (what may be skipped, smaller FFN shares, other hidden sizes)."
        )
    return "\n".join([*lines, "Loosen one of them, or open more choices."])


def _least(programmes: Sequence[_Programme], limit: Limit, others: Mapping[Quantity, float]) -> float:
    """Find the smallest amount of a limited quantity within the bounds of others; infinite if those cannot be kept."""
    amounts = [programme.least(limit.quantity, others) for programme in programmes]
    return min((amount for amount in amounts if amount is not None), default=float("inf"))


def _unreachable(limit: Limit, amount: float, dense: Mapping[Quantity, float]) -> str:
    whole = dense[limit.quantity]
    return (
        f"{limit} cannot be kept: the nearest that the choices can reach is {limit.nearest(amount, whole)} (the dense "
        f"model has {limit.write(whole, whole)}). Loosen it, or open more choices: what may be skipped, smaller FFN "
        "shares, other hidden sizes."
    )
