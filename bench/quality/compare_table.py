"""The table of compare.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from bench._machine import Machine, machine_of, named
from bench.quality.compare_cases import CASES, DENSE
from pyprune.errors import ConfigError
from pyprune.runtime.records import Json
from pyprune.runtime.report import Table, markdown_table

TEXTS = ("prose", "web", "code", "languages", "wikitext-2", "ptb", "novel")
USUAL_TOKENS = 18 * 8 * 256
"""Trained on where a row does not say how many."""
NAMES = {"layers": "layers", "heads": "query heads", "ffn": "FFN channels", "hidden": "hidden channels"}


def table(rows: Sequence[Json]) -> str:
    """One table for each setting and case as Markdown: means over the seeds, and the smallest and largest value.

    Raises:
        ConfigError: there is no row.
    """
    if not rows:
        raise ConfigError("No row is recorded; run the bench without --only-table first.")
    settings: dict[str, list[Json]] = {}
    for row in rows:
        settings.setdefault(_setting(row), []).append(row)
    parts = [(f"{name}\n\n" if len(settings) > 1 else "") + _tables(own) for name, own in settings.items()]
    return "\n\n".join(parts)


def _setting(row: Json) -> str:
    """What rows of one table share: what was measured on, in which dtype, after how much training."""
    texts = ", ".join(f"{text} ({row['limits'][text]:,})" for text in TEXTS if text in row["limits"])
    trained = row.get("train_tokens", USUAL_TOKENS)
    return f"Test tokens of {texts}; {row['dtype']}; {trained:,} tokens in a training."


def _tables(rows: Sequence[Json]) -> str:
    """Rows of one setting."""
    dense = [row for row in rows if not row["case"]]
    tables = []
    for name, case in CASES.items():
        own = [row for row in rows if row["case"] == name]
        if own:
            labels = [*DENSE, *case.arms]
            tables.append(f"{case.label}: {_went(own[0])}\n\n{_table([*dense, *own], labels)}")
    return "\n\n".join(tables or [_table(dense, list(DENSE))])


def _went(row: Json) -> str:
    """What the records say that went."""
    gone = row["removed"]
    axes = ["layers"] if gone["layers"] else ["heads", "ffn", "hidden"]
    parts = [f"{gone[axis]:,} {NAMES[axis]}" for axis in axes if gone[axis]]
    return f"{', '.join(parts)} went; {row['parameters']:,} parameters stay"


def _table(rows: Sequence[Json], labels: Sequence[str]) -> str:
    texts = [text for text in TEXTS if text in rows[0]["perplexity"]]
    machines = Counter(machine_of(row["environment"]) for row in rows)
    machine = machines.most_common(1)[0][0]
    cells = []
    for label in labels:
        some = sorted((row for row in rows if row["arm"] == label), key=lambda row: row["seed"])
        if some:
            cells.append(_cells(label, some, texts, machine))
    columns = ("arm", "seeds", *texts, "tokens trained", "tokens calibrated", "seconds", "CPU seconds", "peak MB")
    note = f"\n\nSeconds are those of {named(machine)}." if len(machines) > 1 else ""
    return markdown_table(Table("", columns, tuple(cells))) + note


def _cells(label: str, some: Sequence[Json], texts: Sequence[str], machine: Machine) -> tuple[object, ...]:
    peaks = [step["peak_bytes"] for row in some for step in row["steps"] if "peak_bytes" in step]
    timed = [row["steps"] for row in some if machine_of(row["environment"]) == machine]
    spent = (mean(sum(step[name] for step in row) for row in timed) for name in ("seconds", "cpu_seconds"))
    return (
        label,
        len(some),
        *(_spread([row["perplexity"][text] for row in some]) for text in texts),
        f"{some[0]['tokens_trained']:,}",
        f"{some[0]['tokens_calibrated']:,}",
        *(map(round, spent) if timed else (None, None)),
        round(max(peaks) / 1e6) if peaks else None,
    )


def _spread(values: Sequence[float]) -> str:
    ends = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{mean(values):.1f}{ends}"
