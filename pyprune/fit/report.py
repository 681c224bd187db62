"""Make tables and charts of the results for one budget, and for several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pyprune.fit.attempts import Attempt, mean_loss
from pyprune.fit.limits import Limit
from pyprune.fit.quantities import Quantity
from pyprune.fit.search import Fitted
from pyprune.runtime.charts import PointChart, pareto_front
from pyprune.runtime.report import Cell, Report, Table
from pyprune.serving.speed.table import conditions as conditions_of
from pyprune.serving.speed.table import speed_table

UNITS = {"parameters": (1.0, ""), "memory": (1e6, " (MB)"), "prefill": (1e-3, " (ms)"), "generation": (1.0, " (s)")}
"""Kind of a quantity -> size of its unit in tables, and the name of the unit."""


def limits_table(fitted: Fitted) -> Table:
    """Make a row for every limit: the limit, the dense model's amount, the predicted and the measured amount."""
    columns = ("limit", "dense", "predicted", "measured", "predicted / measured - 1")
    return Table("Budget", columns, tuple(_limit_row(fitted, limit) for limit in fitted.budget.limits))


def _limit_row(fitted: Fitted, limit: Limit) -> tuple[Cell, ...]:
    """Make the row of a limit; relative amounts of predictions are relative to the dense model's predicted amount."""
    dense = fitted.dense[limit.quantity]
    whole = fitted.predicted_dense.get(limit.quantity, dense)
    predicted = fitted.winner.solution.predicted[limit.quantity]
    row = (str(limit), limit.write(dense, dense), limit.write(predicted, whole))
    measured = fitted.winner.measured.get(limit.quantity)
    if measured is None:
        return (*row, None if limit.quantity.is_timed else "counted", None)
    error = limit.value(predicted, whole) / limit.value(measured, dense) - 1
    return (*row, limit.write(measured, dense), f"{error:+.1%}")


def attempts_table(fitted: Fitted) -> Table:
    """Make a row for every candidate, the best first: perplexity before training, and its amounts."""
    quantities, kinds = fitted.budget.quantities, fitted.dense_perplexities
    amounts = [convert(quantity, fitted.dense[quantity]) for quantity in quantities]
    rows: list[tuple[Cell, ...]] = [("dense", "", mean_perplexity(kinds), *kinds.values(), *amounts)]
    rows += [_attempt_row(fitted, attempt) for attempt in fitted.attempts]
    return Table(
        "Candidates",
        ("candidate", "search", "mean", *kinds, *map(column_name, quantities)),
        tuple(rows),
        note="Perplexity before training, on windows that nothing was fitted to; mean = geometric mean over the kinds "
        "of text. Times of candidates that were not run are predicted.",
        highlight=1 + fitted.attempts.index(fitted.winner),
    )


def _attempt_row(fitted: Fitted, attempt: Attempt) -> tuple[Cell, ...]:
    amounts = fitted.amounts_of(attempt)
    cells = [convert(quantity, amounts[quantity]) for quantity in fitted.budget.quantities]
    variant = attempt.solution.variant
    return (attempt.plan.summary(), variant, attempt.perplexity, *attempt.perplexities.values(), *cells)


def mean_perplexity(perplexities: Mapping[str, float]) -> float:
    """Geometric mean over the kinds of text."""
    return math.exp(mean_loss(perplexities))


def column_name(quantity: Quantity) -> str:
    """Name the column of a quantity, with its unit."""
    return f"{quantity}{UNITS[quantity.kind][1]}"


def convert(quantity: Quantity, amount: float) -> Cell:
    """Convert an amount to the unit of its column."""
    return int(amount) if quantity.kind == "parameters" else amount / UNITS[quantity.kind][0]


def sweep_table(points: Sequence[Fitted]) -> Table:
    """Make a row for every budget: the winner's perplexity and amounts; mark the points that no other one beats."""
    quantities, front = _quantities(points), pareto(points)
    dense = _dense_of(points)
    mean = mean_perplexity(points[0].dense_perplexities)
    rows: list[tuple[Cell, ...]] = [("dense", "", "", mean, *(convert(q, dense[q]) for q in quantities))]
    for point in points:
        amounts = _amounts(dense, point)
        cells = [convert(quantity, amounts[quantity]) for quantity in quantities]
        best = "yes" if point in front else "no"
        rows.append((str(point.budget), point.winner.plan.summary(), best, point.winner.perplexity, *cells))
    return Table(
        "Quality against cost",
        ("budget", "plan", "on the front", "perplexity", *map(column_name, quantities)),
        tuple(rows),
        note="Perplexity before training, mean over the kinds of text. Times that a budget limits were measured; "
        "the others are predicted.",
    )


def pareto(points: Sequence[Fitted]) -> list[Fitted]:
    """Return the points that no other one beats: at most their loss and amounts, and less of one."""
    quantities, dense = _quantities(points), _dense_of(points)
    amounts = [_amounts(dense, point) for point in points]
    figures = {n: (points[n].winner.loss, *(each[q] for q in quantities)) for n, each in enumerate(amounts)}
    return [points[number] for number in pareto_front(figures)]


def _dense_of(points: Sequence[Fitted]) -> dict[Quantity, float]:
    """Return the dense model's amounts: measured for one of the points, else predicted."""
    amounts: dict[Quantity, float] = {}
    for point in points:
        amounts |= {q: amount for q, amount in point.dense.items() if q not in amounts or q in point.winner.dense}
    return amounts


def _amounts(dense: Mapping[Quantity, float], point: Fitted) -> dict[Quantity, float]:
    """Return the amounts of a point's winner; times keep their ratio to the dense model's, which are ``dense`` here."""
    amounts = point.amounts_of(point.winner)
    return {q: amount * dense[q] / point.dense[q] if q.is_timed else amount for q, amount in amounts.items()}


def fit_report(fitted: Fitted, model: str, conditions: Mapping[str, str]) -> Report:
    """Report the limits with predicted and measured amounts, every candidate, and the speed of the written model.

    Args:
        fitted: the result for a budget, with the written model.
        model: name of the dense one.
        conditions: of the search.
    """
    tables, notes = [limits_table(fitted), attempts_table(fitted)], []
    if fitted.speed is not None:
        tables.append(speed_table(fitted.speed))
        conditions = {**conditions, "speed": conditions_of(fitted.speed)}
    elif fitted.not_run:
        notes.append(f"The written model was not timed. {fitted.not_run}")
    return Report(
        f"{model} within {fitted.budget}",
        summary=(f"Kept: {fitted.winner.plan.summary()}.",),
        tables=tuple(tables),
        charts=tuple(_candidates_chart(fitted, quantity) for quantity in fitted.budget.quantities),
        conditions=conditions,
        notes=tuple(notes),
    )


def _candidates_chart(fitted: Fitted, quantity: Quantity) -> PointChart:
    """Chart the candidates, the winner among them, and the dense model."""
    winner = fitted.attempts.index(fitted.winner)
    names = ["winner" if n == winner else f"candidate {n + 1}" for n in range(len(fitted.attempts))]
    pairs = zip(names, fitted.attempts, strict=True)
    places = {name: (fitted.amounts_of(attempt)[quantity], attempt.perplexity) for name, attempt in pairs}
    return _chart(quantity, fitted, fitted.dense, places)


def sweep_report(points: Sequence[Fitted], model: str, conditions: Mapping[str, Any]) -> Report:
    """Report a sweep: a table and, for each limited quantity, a chart of perplexity against amounts."""
    return Report(
        f"{model}: what budgets allow",
        tables=(sweep_table(points),),
        charts=tuple(_sweep_chart(points, quantity) for quantity in _quantities(points)),
        conditions={name: str(value) for name, value in conditions.items()},
    )


def _sweep_chart(points: Sequence[Fitted], quantity: Quantity) -> PointChart:
    dense = _dense_of(points)
    places = {str(p.budget): (_amounts(dense, p)[quantity], p.winner.perplexity) for p in points}
    return _chart(quantity, points[0], dense, places)


def _chart(
    quantity: Quantity, fitted: Fitted, dense: Mapping[Quantity, float], places: Mapping[str, tuple[float, float]]
) -> PointChart:
    """Chart name -> (amount of the quantity, perplexity), and the dense model with its amounts ``dense``."""
    scale = UNITS[quantity.kind][0]
    every = {"dense": (dense[quantity], mean_perplexity(fitted.dense_perplexities)), **places}
    return PointChart(
        f"Perplexity against {quantity}",
        f"{column_name(quantity)}, less is better",
        "perplexity before training, lower is better",
        {name: (amount / scale, perplexity) for name, (amount, perplexity) in every.items()},
        front=pareto_front(places),
        reference="dense",
    )


def _quantities(points: Sequence[Fitted]) -> tuple[Quantity, ...]:
    """Return the quantities of every point: all that any of the budgets limits."""
    return tuple(dict.fromkeys(quantity for point in points for quantity in point.dense))
