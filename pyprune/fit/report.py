"""Tables and charts of what was found for one budget, and for several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyprune.fit.attempts import Attempt, mean_loss
from pyprune.fit.limits import Limit
from pyprune.fit.quantities import Quantity
from pyprune.fit.search import Fitted
from pyprune.runtime.report import Cell, PointChart, Report, Table, pareto_front
from pyprune.serving.speed.table import conditions as conditions_of
from pyprune.serving.speed.table import speed_table

UNITS = {"parameters": (1.0, ""), "memory": (1e6, " (MB)"), "prefill": (1e-3, " (ms)"), "generation": (1.0, " (s)")}
"""Kind of a quantity -> how much one of its unit in tables is, and how the unit is written."""


def limits_table(found: Fitted) -> Table:
    """Every limit: what was asked, what was predicted and what was measured, the dense model beside it."""
    columns = ("limit", "dense", "predicted", "measured", "predicted / measured - 1")
    return Table("Budget", columns, tuple(_limit_row(found, limit) for limit in found.budget.limits))


def _limit_row(found: Fitted, limit: Limit) -> tuple[Cell, ...]:
    """What is relative to the dense model is told as the budget has it: predictions beside its predicted amount."""
    dense = found.dense[limit.quantity]
    whole = found.predicted_dense.get(limit.quantity, dense)
    predicted = found.winner.solution.predicted[limit.quantity]
    row = (str(limit), limit.written(dense, dense), limit.written(predicted, whole))
    measured = found.winner.measured.get(limit.quantity)
    if measured is None:
        return (*row, None if limit.quantity.is_timed else "counted", None)
    error = limit.value(predicted, whole) / limit.value(measured, dense) - 1
    return (*row, limit.written(measured, dense), f"{error:+.1%}")


def attempts_table(found: Fitted) -> Table:
    """Every candidate that was tried, the best first: perplexity before training, and what it takes."""
    quantities, kinds = found.budget.quantities, found.dense_perplexities
    amounts = [in_unit(quantity, found.dense[quantity]) for quantity in quantities]
    rows: list[tuple[Cell, ...]] = [("dense", "", mean_perplexity(kinds), *kinds.values(), *amounts)]
    rows += [_attempt_row(found, attempt) for attempt in found.attempts]
    return Table(
        "Candidates",
        ("candidate", "search", "mean", *kinds, *map(heading, quantities)),
        tuple(rows),
        note="Perplexity of the candidates, reconstructed as the conditions say and not trained, on windows that "
        "nothing was fitted to; mean = geometric mean over the kinds of text. Times of candidates that were not run "
        "are predicted, beside what the dense model took here.",
        highlight=1 + found.attempts.index(found.winner),
    )


def _attempt_row(found: Fitted, attempt: Attempt) -> tuple[Cell, ...]:
    own = found.amounts_of(attempt)
    amounts = [in_unit(quantity, own[quantity]) for quantity in found.budget.quantities]
    variant = attempt.solution.variant
    return (attempt.plan.summary(), variant, attempt.perplexity, *attempt.perplexities.values(), *amounts)


def mean_perplexity(perplexities: Mapping[str, float]) -> float:
    """Geometric mean over the kinds of text."""
    return math.exp(mean_loss(perplexities))


def heading(quantity: Quantity) -> str:
    """A quantity as the heading of a column, with its unit."""
    return f"{quantity}{UNITS[quantity.kind][1]}"


def in_unit(quantity: Quantity, amount: float) -> Cell:
    """An amount in the unit of its column."""
    return int(amount) if quantity.kind == "parameters" else amount / UNITS[quantity.kind][0]


def sweep_table(points: Sequence[Fitted]) -> Table:
    """One row a budget: the winner's perplexity and what it takes; what no other point beats is marked."""
    quantities, front = _quantities(points), pareto(points)
    dense = _dense_of(points)
    mean = mean_perplexity(points[0].dense_perplexities)
    rows: list[tuple[Cell, ...]] = [("dense", "", "", mean, *(in_unit(q, dense[q]) for q in quantities))]
    for point in points:
        own = _beside(dense, point)
        amounts = [in_unit(quantity, own[quantity]) for quantity in quantities]
        best = "yes" if point in front else "no"
        rows.append((str(point.budget), point.winner.plan.summary(), best, point.winner.perplexity, *amounts))
    return Table(
        "Quality against cost",
        ("budget", "plan", "on the front", "perplexity", *map(heading, quantities)),
        tuple(rows),
        note="Perplexity after a reconstruction as the conditions say and before any training, mean over the kinds of "
        "text. Times that a budget limits were measured; the others are predicted, beside what the dense model took.",
    )


def pareto(points: Sequence[Fitted]) -> list[Fitted]:
    """The points that no other one beats: at most as much loss, at most as much of everything, and less of one."""
    quantities, dense = _quantities(points), _dense_of(points)
    found = {number: _beside(dense, point) for number, point in enumerate(points)}
    figures = {n: (points[n].winner.loss, *(own[quantity] for quantity in quantities)) for n, own in found.items()}
    return [points[number] for number in pareto_front(figures)]


def _dense_of(points: Sequence[Fitted]) -> dict[Quantity, float]:
    """What the dense model takes: as one of the points measured it, else as predicted."""
    found: dict[Quantity, float] = {}
    for point in points:
        found |= {q: amount for q, amount in point.dense.items() if q not in found or q in point.winner.dense}
    return found


def _beside(dense: Mapping[Quantity, float], point: Fitted) -> dict[Quantity, float]:
    """What the winner of a point takes where the dense model takes so much: times keep their ratio to its own."""
    own = point.amounts_of(point.winner)
    return {q: amount * dense[q] / point.dense[q] if q.is_timed else amount for q, amount in own.items()}


def fit_report(found: Fitted, model: str, conditions: Mapping[str, str]) -> Report:
    """What was asked, predicted and measured, every candidate, and the speed of what was written.

    Args:
        found: with what was written.
        model: name of the dense one.
        conditions: of the search.
    """
    tables, notes = [limits_table(found), attempts_table(found)], []
    if found.speed is not None:
        tables.append(speed_table(found.speed))
        conditions = {**conditions, "speed": conditions_of(found.speed)}
    elif found.not_run:
        notes.append(f"What was written was not timed. {found.not_run}")
    return Report(
        f"{model} within {found.budget}",
        summary=(f"Kept: {found.winner.plan.summary()}.",),
        tables=tuple(tables),
        charts=tuple(_candidates_chart(found, quantity) for quantity in found.budget.quantities),
        conditions=conditions,
        notes=tuple(notes),
    )


def _candidates_chart(found: Fitted, quantity: Quantity) -> PointChart:
    """The candidates, the winner among them, beside the dense model."""
    winner = found.attempts.index(found.winner)
    names = ["winner" if n == winner else f"candidate {n + 1}" for n in range(len(found.attempts))]
    pairs = zip(names, found.attempts, strict=True)
    places = {name: (found.amounts_of(attempt)[quantity], attempt.perplexity) for name, attempt in pairs}
    return _chart(quantity, found, found.dense, places)


def sweep_report(points: Sequence[Fitted], model: str, conditions: Mapping[str, Any]) -> Report:
    """The table of a sweep and, for each limited quantity, a chart of perplexity against what the models take."""
    return Report(
        f"{model}: what budgets allow",
        tables=(sweep_table(points),),
        charts=tuple(_sweep_chart(points, quantity) for quantity in _quantities(points)),
        conditions={name: str(value) for name, value in conditions.items()},
    )


def _sweep_chart(points: Sequence[Fitted], quantity: Quantity) -> PointChart:
    dense = _dense_of(points)
    places = {str(p.budget): (_beside(dense, p)[quantity], p.winner.perplexity) for p in points}
    return _chart(quantity, points[0], dense, places)


def _chart(
    quantity: Quantity, found: Fitted, dense: Mapping[Quantity, float], places: Mapping[str, tuple[float, float]]
) -> PointChart:
    """Name -> (amount of the quantity, perplexity), beside the dense model of a search, which takes ``dense``."""
    scale = UNITS[quantity.kind][0]
    every = {"dense": (dense[quantity], mean_perplexity(found.dense_perplexities)), **places}
    return PointChart(
        f"Perplexity against {quantity}",
        f"{heading(quantity)}, less is better",
        "perplexity before training, lower is better",
        {name: (amount / scale, perplexity) for name, (amount, perplexity) in every.items()},
        front=pareto_front(places),
        reference="dense",
    )


def _quantities(points: Sequence[Fitted]) -> tuple[Quantity, ...]:
    """What is known of every point: all that any of the budgets limits."""
    return tuple(dict.fromkeys(quantity for point in points for quantity in point.dense))
