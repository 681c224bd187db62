"""Compare quality and speed of any number of checkpoints: find those that no other one beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyprune.runtime.charts import PointChart, pareto_front
from pyprune.runtime.report import Cell, Report, Table
from pyprune.serving.load.options import Load
from pyprune.serving.load.results import LoadReport
from pyprune.serving.load.table import load_conditions, load_notes, load_table, server_table
from pyprune.serving.speed.results import SpeedReport
from pyprune.serving.speed.table import conditions, speed_table


@dataclass(frozen=True)
class Axis:
    """A measure of speed.

    Attributes:
        name: what was measured, with the unit.
        values: model -> value.
        more_is_better: True for a rate, False for a time.
    """

    name: str
    values: Mapping[str, float]
    more_is_better: bool

    def front(self, perplexity: Mapping[str, float]) -> list[str]:
        """Return the models that no other one beats in perplexity and in this speed."""
        sign = -1 if self.more_is_better else 1
        return pareto_front({name: (sign * value, perplexity[name]) for name, value in self.values.items()})

    def chart(self, perplexity: Mapping[str, float], baseline: str) -> PointChart:
        """Return a chart of perplexity against this speed, the front joined by a line."""
        better = "more" if self.more_is_better else "less"
        return PointChart(
            f"Perplexity against {self.name}",
            f"{self.name}, {better} is better",
            "perplexity, lower is better",
            {name: (value, perplexity[name]) for name, value in self.values.items()},
            front=self.front(perplexity),
            reference=baseline,
        )


def speed_tradeoff(report: SpeedReport, perplexity: Mapping[str, float], text: str) -> Report:
    """Return the report of the papers' two columns.

    Args:
        report: what :func:`pyprune.serving.speed.measure.measure` returned.
        perplexity: of every model of it.
        text: the text of the perplexity, and how it was measured.
    """
    axes = (
        Axis("tokens/s", {name: report.tokens_per_second(name).median for name in report.models}, True),
        Axis("prompt latency (ms)", {name: report.latency_ms(name).median for name in report.models}, False),
    )
    taken, *notes = conditions(report).splitlines()
    return _report(
        axes, perplexity, report.baseline, [speed_table(report, perplexity=perplexity)], {"speed": taken}, notes, text
    )


def load_tradeoff(report: LoadReport, perplexity: Mapping[str, float], text: str) -> Report:
    """Return the report of servers under load; the arguments are those of :func:`speed_tradeoff`."""
    axes = [_axis(report, load) for load in report.options.loads]
    tables = [load_table(report), server_table(report, perplexity=perplexity)]
    return _report(axes, perplexity, report.baseline, tables, load_conditions(report), load_notes(report), text)


def _axis(report: LoadReport, load: Load) -> Axis:
    """Return the axis of output tokens/s; under a rate, which decides those, of the mean end-to-end time."""
    if load.rate is None:
        speeds = {name: report.tokens_per_second(name, load).median for name in report.models}
        return Axis(f"output tokens/s, {load}", speeds, True)
    times = {name: 1000 * report.end_to_end(name, load).median for name in report.models}
    return Axis(f"mean end-to-end time (ms), {load}", times, False)


def _report(
    axes: Sequence[Axis],
    perplexity: Mapping[str, float],
    baseline: str,
    tables: Sequence[Table],
    conditions: Mapping[str, str],
    notes: Sequence[str],
    text: str,
) -> Report:
    return Report(
        "Quality against speed",
        tables=(_table(axes, perplexity), *tables),
        charts=tuple(axis.chart(perplexity, baseline) for axis in axes),
        conditions={"perplexity": text, **conditions},
        notes=tuple(notes),
    )


def _table(axes: Sequence[Axis], perplexity: Mapping[str, float]) -> Table:
    fronts = [axis.front(perplexity) for axis in axes]
    rows: list[tuple[Cell, ...]] = []
    for name, value in perplexity.items():
        speeds = [
            (axis.values[name], "yes" if name in front else "no") for axis, front in zip(axes, fronts, strict=True)
        ]
        rows.append((name, value, *(cell for pair in speeds for cell in pair)))
    columns = ("model", "perplexity", *(heading for axis in axes for heading in (axis.name, "unbeaten")))
    note = (
        "Unbeaten: no other model has a perplexity at most as high, is at least as fast, and is better in one of them."
    )
    return Table("Quality against speed", columns, tuple(rows), note=note)
