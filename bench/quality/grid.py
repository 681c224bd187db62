"""Run the cases of a grid that have no record yet, and print recorded rows as tables.

A row is one JSON line: the case, its figures, the setting that its table shares, and the environment it ran in.
"""

from __future__ import annotations

import argparse
import base64
import gc
import itertools
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

from bench._command import read_names, seeds
from bench._machine import machine_label, machine_of
from bench._texts import DATA
from pyprune.errors import ConfigError
from pyprune.plan import PrunePlan
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell, Table, format_cell, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
TEXTS = ("prose", "web", "code", "languages", "wikitext-2", "ptb", "novel")
"""Order of the texts in tables; other texts follow."""


@dataclass(frozen=True)
class Case:
    """One row of a grid.

    Attributes:
        fields: name -> value; they set the case apart in the table.
        identity: further options that its figures depend on; with the fields and the setting they make its key.
        task: what the bench needs to run it.
    """

    fields: Json
    identity: Json = field(default_factory=dict)
    task: Any = None


class Bench(Protocol):
    """A grid whose model and texts are loaded.

    Attributes:
        setting: must be equal for two rows to be comparable: model, dtype, "texts" (name -> :func:`text_identity`).
    """

    setting: Json

    def cases(self) -> Sequence[Case]:
        """Return the cases that were asked for, the controls among them, in the order to run them."""

    def measure(self, case: Case) -> Json:
        """Run a case; return its figures."""

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Free what no later case needs; by default nothing."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: heading.
        value: of a row; None = it has none.
        form: makes one cell of the values of the seeds.
    """

    name: str
    value: Callable[[Json], Any]
    form: Callable[[Sequence[Any]], Cell]


@dataclass(frozen=True)
class Layout:
    """The tables of a grid.

    Attributes:
        lines: fields that name a line.
        columns: are made from the rows of a table.
        order: sorts the rows.
        section: field that has one value in a table; rows where it is empty are part of every table.
        title: of a table, from its last row.
        command: that a row ran; a list below each table has them.
        shares: whether a row without a section is part of the table of another one.
        remarks: sentences below the tables, from all rows.
    """

    lines: tuple[str, ...]
    columns: Callable[[Sequence[Json]], Sequence[Column]]
    order: Callable[[Json], Any] = lambda row: 0
    section: str = ""
    title: Callable[[Json], str] = lambda row: ""
    command: Callable[[Json], str | None] = lambda row: None
    shares: Callable[[Json, Json], bool] = lambda row, other: True
    remarks: Callable[[Sequence[Json]], Iterable[str]] = lambda rows: ()


@dataclass(frozen=True)
class Axis:
    """An option that chooses cases by name.

    Attributes:
        values: allowed names.
        default: names that run where none is chosen; None = all.
        recorded: name -> value of the field of that option in the rows; by default the name.
    """

    values: Sequence[str]
    default: Sequence[str] | None = None
    recorded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """One grid of cases.

    Attributes:
        name: on the command line, of the file of records, and the kind of its rows.
        description: for --help; the first line is its summary.
        open: load what its cases share, from the options, the records and a folder for temporary files.
        layout: of its tables.
        axes: option -> names of cases.
        tokens: of each test text by default; None = all.
        seeds: by default; empty = the grid has no such option.
        dtype: to measure perplexity in by default; empty = the grid has no packaged model.
        options: adds the options that no other grid has.
    """

    name: str
    description: str
    open: Callable[[argparse.Namespace, RecordFile, Path], Bench]
    layout: Layout
    axes: Mapping[str, Axis] = field(default_factory=dict)
    tokens: int | None = None
    seeds: tuple[int, ...] = ()
    dtype: str = ""
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add every option of the grid."""
        for name, axis in self.axes.items():
            usual = "all of " if axis.default is None else f"{', '.join(axis.default)}; of "
            parser.add_argument(
                f"--{name}",
                nargs="+",
                type=partial(read_names, names=list(axis.values), what=name),
                metavar="NAME",
                help=f"default: {usual}{', '.join(axis.values)}".replace("%", "%%"),
            )
        if self.dtype:
            parser.add_argument("--model", metavar="DIR", help="dense checkpoint (default: the packaged SmolLM2-135M)")
            data_option(parser)
            parser.add_argument("--dtype", default=self.dtype, choices=("bfloat16", "float32"), help="to measure in")
        if self.seeds:
            parser.add_argument("--seeds", type=seeds, default=list(self.seeds), metavar="A,B")
        self.options(parser)
        parser.add_argument("--tokens", type=int, default=self.tokens, metavar="N", help="of each test text")
        parser.add_argument(
            "--table", action="store_true", help="print the recorded rows that are chosen and run nothing"
        )
        parser.add_argument("--retry-failed", action="store_true", help="run cases again whose record is a failure")
        parser.add_argument("--jsonl", type=Path, default=RESULTS / f"{self.name}.jsonl", metavar="FILE")

    def run(self, options: argparse.Namespace) -> int:
        """Run the cases without a record and print their rows, or those of the records; 1 if a case failed.

        Raises:
            ConfigError: no row is recorded, or a wrong option.
        """
        chosen = {name: getattr(options, name) for name in self.axes if getattr(options, name) is not None}
        for name, axis in self.axes.items():
            names = itertools.chain(*chosen.get(name, [axis.default or axis.values]))
            setattr(options, name, list(dict.fromkeys(names)))
        records = RecordFile(options.jsonl, retry_failed=options.retry_failed)
        if options.table:
            recorded = {name: [self.axes[name].recorded.get(v, v) for v in getattr(options, name)] for name in chosen}
            rows = [row for row in records.of(self.name).values() if _is_chosen(row, recorded, self.layout.section)]
        else:
            with tempfile.TemporaryDirectory() as work:
                rows = self._measure(self.open(options, records, Path(work)), records)
        if not rows:
            raise ConfigError(f"{options.jsonl} has no row; run the grid without --table first.")
        print(show(rows, self.layout, controls=not (options.table and chosen)))
        return int(any(row["error"] for row in rows))

    def _measure(self, bench: Bench, records: RecordFile) -> list[Json]:
        from pyprune.serving.stats import environment_record

        cases = {digest([bench.setting, case.fields, case.identity])[:16]: case for case in bench.cases()}
        todo = [(key, case) for key, case in cases.items() if key not in records.of(self.name)]
        say(f"{len(cases)} cases, {len(cases) - len(todo)} of them in {records.path} already")
        environment = {name: value for name, value in environment_record().items() if name not in ("cpu", "system")}
        for number, (key, case) in enumerate(todo, start=1):
            say(f"[{number}/{len(todo)}] {label_of(case.fields)}")
            row: Json = {"kind": self.name, "key": key, "case": case.fields, "setting": bench.setting, "error": ""}
            row |= {"figures": {}, "environment": environment}
            try:
                row["figures"] = bench.measure(case)
            except Exception as error:  # one failure (a diverged run, no memory) must not end the grid
                row["error"] = f"{type(error).__name__}: {error}"
            records.add(row)
            say(f"    {row['error'] or row['figures']}")
            bench.finish(case, [later for _, later in todo[number:]])
            gc.collect()
        return [records.of(self.name)[key] for key in cases]


def _is_chosen(row: Json, values: Mapping[str, Sequence[str]], section: str) -> bool:
    """Check the fields of a row against the chosen values; controls, which have no section, are kept."""
    if section and not row["case"].get(section):
        return True
    return all(row["case"].get(name, "") in ("", *allowed) for name, allowed in values.items())


def keep_plan(records: RecordFile, key: str, plan: PrunePlan) -> PrunePlan:
    """Record a plan, and return it."""
    text = json.dumps(plan.to_dict(), sort_keys=True)
    records.add({"kind": "plan", "key": key, "plan": base64.b85encode(lzma.compress(text.encode())).decode()})
    return plan


def find_plan(records: RecordFile, key: str) -> PrunePlan | None:
    """Return the recorded plan of a key; None where there is none."""
    if key not in records.of("plan"):
        return None
    record = records.of("plan")[key]
    return PrunePlan.from_dict(json.loads(lzma.decompress(base64.b85decode(record["plan"]))))


def text_identity(tokens: int | None, sha256: str) -> list[Any]:
    """Return the tokens that are measured of a test text (None = all), and the beginning of its SHA-256."""
    return [tokens, sha256[:8]]


def count_removed(plan: PrunePlan) -> Json:
    """Count the removed layers, query heads, FFN channels and hidden channels."""
    from pyprune.robustness.compare import removed_units

    return {axis: len(units) for axis, units in removed_units(plan).items()} | {"layers": len(plan.removed_layers)}


def label_of(fields: Mapping[str, Any]) -> str:
    """Return the values of a case's fields in one line."""
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value not in ("", None))


def show(rows: Sequence[Json], layout: Layout, *, controls: bool = False) -> str:
    """Return a Markdown table for each setting and section, with the conditions and the failed cases below.

    Args:
        rows: of one grid.
        layout: of the grid.
        controls: print several rows that have no section in a table of their own, too.
    """
    parts = []
    groups = _group(rows, lambda row: json.dumps(row["setting"], sort_keys=True))
    of_sections = [group for group in groups if any(row["case"].get(layout.section) for row in group)]
    for group in of_sections or groups:  # controls alone say nothing next to other rows
        parts.append(_conditions(group))
        good = sorted((row for row in group if not row["error"]), key=layout.order)
        inside = [row for row in good if row["case"].get(layout.section)]
        shared = [row for row in good if row not in inside]
        sections = _group(inside, lambda row: row["case"][layout.section])
        for section in [*([[]] if not sections or (controls and len(shared) > 1) else []), *sections]:
            belonging = (row for row in shared if not section or layout.shares(row, section[0]))
            parts.append(_table([*belonging, *section], layout))
        remarks = [f"Failed: {label_of(row['case'])}: {row['error']}" for row in group if row["error"]]
        remarks += layout.remarks(good)
        parts.append("\n".join(f"* {remark}" for remark in remarks))
    return "\n\n".join(filter(None, parts))


def _table(rows: Sequence[Json], layout: Layout) -> str:
    names, columns = layout.lines, layout.columns(rows)
    lines = []
    for line in _group(rows, lambda row: [row["case"].get(name) for name in names]):
        values = ([value for row in line if (value := column.value(row)) is not None] for column in columns)
        cells = (column.form(some) if some else None for column, some in zip(columns, values, strict=True))
        lines.append((*_heads(line[0], names), *cells))
    table = markdown_table(Table("", (*names, *(column.name for column in columns)), tuple(lines)))
    commands: dict[tuple[str, ...], str] = {}
    for row in rows:
        if command := layout.command(row):  # of several seeds, the shortest command names none
            heads = _heads(row, names)
            commands[heads] = min(commands.get(heads, command), command, key=len)
    listed = "\n".join(f"* {', '.join(heads)}: `{command}`" for heads, command in commands.items())
    return "\n\n".join(filter(None, (layout.title(rows[-1]), table, listed)))


def _heads(row: Json, names: Sequence[str]) -> tuple[str, ...]:
    """Return the first cells of a row's line."""
    values = (row["case"].get(name) for name in names)
    return tuple("-" if value is None else str(value) for value in values)


def _group(rows: Iterable[Json], key: Callable[[Json], Any]) -> list[list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(str(key(row)), []).append(row)
    return list(groups.values())


def _conditions(rows: Sequence[Json]) -> str:
    setting = dict(rows[0]["setting"])
    texts = setting.pop("texts", {})
    read = [f"{name} ({format_cell(texts[name][0] or 'all')} tokens)" for name in _order_texts(texts)]
    shared = ", ".join(f"{name} {setting[name]}" for name in sorted(setting))
    if read:
        shared += f"; perplexity on {', '.join(read)}"
    machines = sorted({machine_label(machine_of(row["environment"])) for row in rows})
    return " ".join(f"{part}." for part in (shared, "; ".join(machines)) if part)


def _order_texts(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (TEXTS.index(name) if name in TEXTS else len(TEXTS), name))


def figure(*path: str, usual: Any = None) -> Callable[[Json], Any]:
    """Return a function that looks a figure up in a row; it returns the usual value where the row lacks it."""

    def value(row: Json) -> Any:
        found: Any = row["figures"]
        for name in path:
            found = found.get(name, usual) if isinstance(found, Mapping) else usual
        return found

    return value


def perplexity_columns(rows: Sequence[Json], form: Callable[[Sequence[Any]], Cell]) -> list[Column]:
    """Return a column for each text and protocol that the rows have."""
    pairs = dict.fromkeys(
        (text, protocol)
        for row in rows
        for protocol, values in row["figures"].get("perplexity", {}).items()
        for text in values
    )
    names = _order_texts(text for text, _ in pairs)
    ordered = sorted(pairs, key=lambda pair: names.index(pair[0]))
    several = len({protocol for _, protocol in pairs}) > 1
    return [
        Column(f"{text} {protocol.upper()}" if several else text, figure("perplexity", protocol, text), form)
        for text, protocol in ordered
    ]


def spent_columns() -> list[Column]:
    """Return columns of what :func:`bench._command.run_command` measured."""
    return [
        Column("CPU seconds", figure("cpu_seconds"), lambda v: round(mean(v))),
        Column("peak GB", figure("peak_bytes"), lambda v: f"{max(v) / 1e9:.1f}"),
    ]


def gemma_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the file of Gemma 3 270M and the folder of the data sets."""
    parser.add_argument("--gemma", type=Path, metavar="FILE", help="GGUF file of Gemma 3 270M, in a folder of its own")
    data_option(parser)


def data_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the folder of the data sets."""
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of the data sets")


def first(values: Sequence[Any]) -> Cell:
    """Return the first value."""
    return values[0]


def each(values: Sequence[Any]) -> Cell:
    """Return the different values, in the order of the seeds."""
    return " / ".join(dict.fromkeys(map(format_cell, values)))


def most_megabytes(values: Sequence[int]) -> Cell:
    """Return the largest number of bytes in MB."""
    return round(max(values) / 1e6)


def mean_and_range(values: Sequence[float], digits: int = 1) -> Cell:
    """Return the mean, with the smallest and the largest of values that differ."""
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{mean(values):.{digits}f}{f' ({least} to {most})' if least != most else ''}"


def median_and_each(values: Sequence[float]) -> Cell:
    """Return the median, with every value where there are several."""
    several = f" ({' / '.join(map(format_cell, values))})" if len(values) > 1 else ""
    return f"{format_cell(median(values))}{several}"
