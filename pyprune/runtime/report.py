"""Reports a person can read anywhere: report.md and a self-contained report.html from one description.

A :class:`Report` is data (tables, charts, conditions, notes); :func:`write_report` renders it. The HTML needs
no network and no other file: its charts are inline SVG. Every measured row is shown, the controls too.
"""

from __future__ import annotations

import hashlib
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyprune.errors import ConfigError, MissingDependencyError
from pyprune.runtime.files import write_text
from pyprune.runtime.progress import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Cell = str | int | float | None
"""A value of a table: text, a count (thousands separators), a measured number (four digits), None (a dash)."""


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: of the rows.
        columns: headings, each with its unit.
        rows: one sequence of cells a row, as many as there are columns.
        note: a sentence below the table (how to read it); empty = none.
        highlight: index of the row to set in bold (the recommended one); None = none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    highlight: int | None = None

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ConfigError(
                    f"Row {number} of the table {self.title!r} has {len(row)} cells; it needs {len(self.columns)}."
                )


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars with their values next to them.

    Attributes:
        title: of the comparison.
        unit: label of the value axis, with the unit and which direction is better.
        bars: label -> value, top to bottom.
        reference: a value to draw as a dashed line (the dense model's); None = none.
        reference_label: name of the dashed line.
        highlight: label of the bar in the accent colour.
        logarithmic: a logarithmic value axis, for values that span decades.
    """

    title: str
    unit: str
    bars: Mapping[str, float]
    reference: float | None = None
    reference_label: str = "dense"
    highlight: str | None = None
    logarithmic: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis.

    Attributes:
        title: of the chart.
        x_label: label of the horizontal axis, with the unit.
        y_label: label of the vertical axis, with the unit.
        lines: label -> y values; the x values are 1, 2, ....
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class PointChart:
    """Points in a plane with their names; those of a front are joined.

    Attributes:
        title: of the chart.
        x_label: label of the horizontal axis, with the unit and which direction is better.
        y_label: label of the vertical axis, with the unit and which direction is better.
        points: label -> (x, y).
        front: labels of the points that no other beats in both, joined by a line.
        reference: label of the point in another colour (the dense model); None = none.
    """

    title: str
    x_label: str
    y_label: str
    points: Mapping[str, tuple[float, float]]
    front: Sequence[str] = ()
    reference: str | None = None


@dataclass(frozen=True)
class StripChart:
    """A row of numbered squares, some of which are missing: the layers of a model.

    Attributes:
        title: of the chart.
        count: number of squares, from 0.
        missing: numbers of those that are drawn as gaps.
    """

    title: str
    count: int
    missing: Sequence[int]


Chart = BarChart | LineChart | PointChart | StripChart
Label = TypeVar("Label")


def pareto_front(points: Mapping[Label, Sequence[float]]) -> list[Label]:
    """Return the labels of the points that no other beats: at most as much of everything, and less of something.

    Args:
        points: label -> its figures, of which less is better (negate one of which more is better).
    """

    def beats(a: Sequence[float], b: Sequence[float]) -> bool:
        return tuple(a) != tuple(b) and all(x <= y for x, y in zip(a, b, strict=True))

    return [label for label, point in points.items() if not any(beats(other, point) for other in points.values())]


@dataclass(frozen=True)
class Report:
    """The contents of a report.

    Attributes:
        title: one line.
        summary: the sentences that matter most, one a paragraph.
        tables: in reading order.
        charts: in reading order (HTML only; every number in them is in a table as well).
        conditions: of the measurements: name -> value.
        notes: caveats, one a bullet.
        picture: charts above everything else, two next to each other (HTML only, as ``charts``); a strip is as wide as
            the page.
        commands: purpose -> shell command, for the next steps.
    """

    title: str
    summary: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    picture: tuple[Chart, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)


def write_report(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` into ``folder`` (made if missing); each file appears whole.

    Returns:
        The paths of the Markdown and of the HTML file.

    Raises:
        MissingDependencyError: the report has charts and matplotlib is not installed.
        OutputError: a file cannot be written.
    """
    page = to_html(report)  # before anything is written: matplotlib may be missing
    folder.mkdir(parents=True, exist_ok=True)
    markdown_path, html_path = folder / "report.md", folder / "report.html"
    write_text(markdown_path, to_markdown(report))
    write_text(html_path, page)
    return markdown_path, html_path


def format_cell(value: Cell) -> str:
    """Return a cell as text: 1234567 -> "1,234,567"; 33.9071 -> "33.91"; 1.7e7 -> "1.7e+07"; None -> "-"."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _format_float(value)
    return printable(value)


def _format_float(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def to_markdown(report: Report) -> str:
    """Return the report as GitHub-flavoured Markdown (without the charts)."""
    parts = [f"# {report.title}", *report.summary]
    for table in report.tables:
        parts += [f"## {table.title}", noted_table(table)]
    if report.commands:
        shown = "\n".join(f"{command}    # {purpose}" for purpose, command in report.commands.items())
        parts += ["## What to type next", f"```sh\n{shown}\n```"]
    if report.conditions:
        parts += ["## Conditions", "\n".join(f"- {k}: {v}" for k, v in report.conditions.items())]
    if report.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in report.notes)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Return one table in Markdown; columns of numbers are aligned to the right."""
    numeric = _numeric_columns(table)
    lines = [
        "| " + " | ".join(_escape_markdown(c) for c in table.columns) + " |",
        "|" + "|".join("---:" if right else "---" for right in numeric) + "|",
    ]
    for number, row in enumerate(table.rows):
        cells = [_escape_markdown(format_cell(cell)) for cell in row]
        if number == table.highlight:
            cells = [f"**{cell}**" if cell else cell for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def noted_table(table: Table) -> str:
    """Return one table in Markdown with its note below."""
    return "\n\n".join(filter(None, (markdown_table(table), table.note)))


def _escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _numeric_columns(table: Table) -> list[bool]:
    """Return which columns are numeric: no cell is free text (a dash and text like "1.2x" count as numbers)."""

    def number_like(cell: Cell) -> bool:
        return not isinstance(cell, str) or cell == "" or cell[0].isdigit() or cell[0] in "-+"

    return [all(number_like(row[i]) for row in table.rows) for i in range(len(table.columns))]


def rich_table(table: Table) -> RichTable:
    """Return the table for a terminal."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    result = RichTable(title=escape(table.title), caption=escape(table.note) or None, title_justify="left")
    for heading, right in zip(table.columns, _numeric_columns(table), strict=True):
        result.add_column(escape(heading), justify="right" if right else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        style = "bold" if number == table.highlight else None
        result.add_row(*(escape(format_cell(cell)) for cell in row), style=style)
    return result


def print_table(table: Table) -> None:
    """Print the table to stdout: drawn on a terminal, as Markdown into a file or a pipe."""
    from rich.console import Console

    out = Console()
    if out.is_terminal:
        out.print(rich_table(table))
        return
    print(f"{table.title}\n\n{noted_table(table)}\n")


STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2430; --soft: #5d6778; --line: #d9dee7; --paper: #ffffff; --mark: #eaf2fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #a0a9b8; --line: #3a4250; --paper: #171b22; --mark: #213349; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom-width: 2px; } .n { text-align: right; white-space: nowrap; }
tr.best { background: var(--mark); font-weight: 600; } .note { color: var(--soft); font-size: .92rem; }
figure { margin: 1.5rem 0; padding: .75rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px; }
.picture { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
.picture figure { margin: 0; } .picture .wide { grid-column: 1 / -1; }
pre { background: var(--mark); padding: .5rem .8rem; border-radius: 6px; overflow-x: auto; margin: .2rem 0 1rem; }
figure svg { width: 100%; height: auto; display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def to_html(report: Report) -> str:
    """Return the report as one self-contained HTML page (inline style, charts as inline SVG, no script).

    Raises:
        MissingDependencyError: the report has charts and matplotlib is not installed.
    """
    body = [f"<h1>{html.escape(report.title)}</h1>"]
    if report.picture:
        body.append(f'<div class="picture">{"".join(map(_html_part, report.picture))}</div>')
    body += [f"<p>{html.escape(sentence)}</p>" for sentence in report.summary]
    body += [_html_table(table) for table in report.tables]
    body += [f"<figure>{chart_svg(chart)}</figure>" for chart in report.charts]
    if report.commands:
        typed = (f"{html.escape(k)}<pre>{html.escape(v)}</pre>" for k, v in report.commands.items())
        body.append(f"<h2>What to type next</h2>{''.join(typed)}")
    if report.conditions:
        pairs = (f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in report.conditions.items())
        body.append(f"<h2>Conditions</h2><dl>{''.join(pairs)}</dl>")
    if report.notes:
        items = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
        body.append(f"<h2>Notes</h2><ul>{items}</ul>")
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(report.title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _html_part(chart: Chart) -> str:
    """Render a chart of the picture: half the page wide, with letters of the usual size."""
    if isinstance(chart, StripChart):
        return f'<figure class="wide">{chart_svg(chart, 9.4)}</figure>'
    return f"<figure>{chart_svg(chart, 4.6, 3.0)}</figure>"


def _html_table(table: Table) -> str:
    numeric = [' class="n"' if right else "" for right in _numeric_columns(table)]
    head = "".join(f"<th{c}>{html.escape(t)}</th>" for c, t in zip(numeric, table.columns, strict=True))
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td{c}>{html.escape(format_cell(cell))}</td>" for c, cell in zip(numeric, row, strict=True))
        rows.append(f'<tr class="best">{cells}</tr>' if number == table.highlight else f"<tr>{cells}</tr>")
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{html.escape(table.title)}</h2><div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def check_charts() -> None:
    """Raise :class:`MissingDependencyError` before any work if a report with charts could not be drawn."""
    _figure(1, 1)


INK, SOFT, ACCENT, PLAIN = "#1d2430", "#5d6778", "#1f6fb2", "#b6c1cf"
LINE_COLOURS = ("#1f6fb2", "#d1701f", "#3a8f4d", "#8a5ab5", "#5d6778", "#b23a48")


def chart_svg(chart: Chart, width: float = 7.6, height: float | None = None) -> str:
    """Return a chart as one ``<svg>`` element whose text is drawn as paths (it needs no font).

    Args:
        chart: to draw.
        width: in inches; text has the same size in points at any width.
        height: in inches; None = by its contents. A strip has a fixed one.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    usual = 1.3 + 0.42 * len(chart.bars) if isinstance(chart, BarChart) else 3.4
    figure = _figure(width, 1.15 if isinstance(chart, StripChart) else height or usual)
    axes = figure.add_subplot()
    if isinstance(chart, BarChart):
        _draw_bars(axes, chart)
    elif isinstance(chart, StripChart):
        _draw_strip(axes, chart)
    elif isinstance(chart, PointChart):
        _draw_points(axes, chart)
    else:
        _draw_lines(axes, chart)
    axes.set_title(_plain(chart.title), loc="left", fontsize=11, color=INK, pad=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PLAIN)
    axes.tick_params(which="both", colors=INK, labelsize=9)
    if isinstance(chart, StripChart):
        axes.set_axis_off()
    figure.tight_layout()
    text = _svg_text(figure, chart.title)
    text = text[text.index("<svg") :].strip()
    return _named_points(text, chart) if isinstance(chart, PointChart) else text


def _point_id(chart: PointChart, label: str) -> str:
    """Return the id of a point's element: valid for any text, and unique in a page of several charts."""
    return "point-" + hashlib.sha256(f"{chart.title}\n{label}".encode()).hexdigest()[:12]


def _named_points(svg: str, chart: PointChart) -> str:
    """Give every point its label and values as text, which a browser shows under the pointer."""
    for label, (x, y) in chart.points.items():
        name = html.escape(f"{label}: {_format_float(x)}, {_format_float(y)}")
        group = f'<g id="{_point_id(chart, label)}">'
        svg = svg.replace(group, f"{group}\n<title>{name}</title>")
    return svg


def _figure(width: float, height: float) -> Any:
    """Return a figure without a GUI backend (width and height in inches)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "report", "A report with charts") from error
    return Figure(figsize=(width, height))


def _svg_text(figure: Any, title: str) -> str:
    """Render to SVG, the same text for the same figure (matplotlib's element ids are random without a salt)."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Title": title})
    return out.getvalue()


def _plain(text: str) -> str:
    """Escape $, which begins a formula: names of folders may hold one."""
    return text.replace("$", r"\$")


def _draw_bars(axes: Any, chart: BarChart) -> None:
    labels, values = list(chart.bars), list(chart.bars.values())
    colours = [ACCENT if label == chart.highlight else PLAIN for label in labels]
    bars = axes.barh(list(map(_plain, labels)), values, color=colours, height=0.62)
    if chart.logarithmic:
        axes.set_xscale("log")
    axes.bar_label(bars, labels=[_format_float(v) for v in values], padding=4, fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=SOFT, linestyle="--", linewidth=1)
        text = f"{chart.reference_label} {_format_float(chart.reference)}"
        axes.annotate(
            _plain(text),
            (chart.reference, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
            color=SOFT,
        )
    axes.set_xlabel(_plain(chart.unit), fontsize=9, color=SOFT)
    axes.tick_params(axis="y", length=0)


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for number, (label, values) in enumerate(chart.lines.items()):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        axes.plot(range(1, len(values) + 1), values, label=_plain(label), color=colour, linewidth=1.6)
    axes.set_xlabel(_plain(chart.x_label), fontsize=9, color=SOFT)
    axes.set_ylabel(_plain(chart.y_label), fontsize=9, color=SOFT)
    axes.grid(axis="y", color="#e8ecf2", linewidth=0.8)
    if chart.lines:
        axes.legend(frameon=False, fontsize=9)


def _draw_strip(axes: Any, chart: StripChart) -> None:
    for number in range(chart.count):
        missing = number in chart.missing
        look = {"facecolor": "none", "linestyle": "--"} if missing else {"facecolor": ACCENT}
        axes.bar(number, 1, 0.84, edgecolor=PLAIN if missing else ACCENT, **look)
        axes.text(number, 0.5, str(number), ha="center", va="center", fontsize=8, color=SOFT if missing else "white")
    axes.set_xlim(-0.6, chart.count - 0.4)


def _draw_points(axes: Any, chart: PointChart) -> None:
    places = [x for x, _ in chart.points.values()] or [0.0]
    middle = (min(places) + max(places)) / 2
    for label, (x, y) in chart.points.items():
        colour = SOFT if label == chart.reference else ACCENT if label in chart.front else PLAIN
        axes.plot([x], [y], marker="o", linestyle="", color=colour, markersize=6, gid=_point_id(chart, label))
        left = x <= middle  # the other labels grow towards the middle too, so that none is cut off
        axes.annotate(
            _plain(label),
            (x, y),
            xytext=(5 if left else -5, 4),
            textcoords="offset points",
            ha="left" if left else "right",
            fontsize=8,
            color=INK,
        )
    joined = sorted(chart.points[label] for label in chart.front)
    axes.plot([x for x, _ in joined], [y for _, y in joined], color=ACCENT, linewidth=1, zorder=0)
    axes.set_xlabel(_plain(chart.x_label), fontsize=9, color=SOFT)
    axes.set_ylabel(_plain(chart.y_label), fontsize=9, color=SOFT)
    axes.grid(color="#e8ecf2", linewidth=0.8)
    axes.margins(x=0.12, y=0.12)
