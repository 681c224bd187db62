"""Reports a person can read anywhere: report.md and a self-contained report.html from one description.

A :class:`Report` is data (tables, charts, conditions, notes); :func:`write_report` renders it. The HTML needs
no network and no other file: its charts are inline SVG. Every measured row is shown, the controls too.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyprune.errors import ConfigError
from pyprune.runtime.charts import Chart, StripChart, draw_chart, format_number
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
        OutputError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    markdown_path, html_path = folder / "report.md", folder / "report.html"
    write_text(markdown_path, to_markdown(report))
    write_text(html_path, to_html(report))
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
        return format_number(value)
    return printable(value)


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
figure { margin: 1.5rem 0; padding: .75rem;
  border: 1px solid var(--line); border-radius: 6px; }
.picture { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
.picture figure { margin: 0; } .picture .wide { grid-column: 1 / -1; }
pre { background: var(--mark); padding: .5rem .8rem; border-radius: 6px; overflow-x: auto; margin: .2rem 0 1rem; }
figure svg { width: 100%; height: auto; display: block; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def to_html(report: Report) -> str:
    """Return the report as one self-contained HTML page (inline style, charts as inline SVG, no script)."""
    body = [f"<h1>{html.escape(report.title)}</h1>"]
    if report.picture:
        body.append(f'<div class="picture">{"".join(map(_html_part, report.picture))}</div>')
    body += [f"<p>{html.escape(sentence)}</p>" for sentence in report.summary]
    body += [_html_table(table) for table in report.tables]
    body += [f"<figure>{draw_chart(chart).render()}</figure>" for chart in report.charts]
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
        return f'<figure class="wide">{draw_chart(chart, 900).render()}</figure>'
    return f"<figure>{draw_chart(chart, 440, 290).render()}</figure>"


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
