"""Print recorded servers under load: speed, times to the first token and between tokens, and kept service levels.

    python -m bench.serving.load_table

The rows of bench/results/load.jsonl are summaries of `pyprune bench MODEL ... --serving --jsonl FILE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench._machine import machine_label, machine_of
from pyprune.runtime.records import Json
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.load.results import PERCENTILES
from pyprune.serving.load.table import milliseconds

RECORDS = Path(__file__).resolve().parents[1] / "results" / "load.jsonl"


def table(rows: Sequence[Json]) -> str:
    """Return the conditions of the rows and a line for each load and model."""
    first = rows[0]
    o, level = first["options"], first["options"]["slo"]
    head = (
        f"{machine_label(machine_of(first['environment']))}, {first['engine']}, {o['dtype']}: prompts of "
        f"{o['prompt_tokens']} tokens, {o['new_tokens']} new ones; {o['repeats']} turns of {o['requests']} requests. "
        f"Service level: first token within {level['ttft']:g} ms, {level['tpot']:g} ms for each one after it."
    )
    names = ("load", "model", "MB", "end to end (s)", "ratio", *(f"{name} p50/p99 (ms)" for name in ("TTFT", "TPOT")))
    ordered = sorted(rows, key=lambda row: o["loads"].index(row["load"]))
    return f"{head}\n\n{markdown_table(Table('', (*names, 'goodput (requests/s)'), tuple(map(_cells, ordered))))}"


def _cells(row: Json) -> tuple[Cell, ...]:
    ends = (f"p{PERCENTILES[0]}", f"p{PERCENTILES[-1]}")
    times = (milliseconds([row[f"{name}_ms"][end] for end in ends]) for name in ("ttft", "tpot"))
    between = row["interval"] and f" ({row['interval']['low']:.2f} to {row['interval']['high']:.2f})"
    whole = f"{row['end_to_end']['median']:.2f}"
    size = round(row["checkpoint"]["bytes"] / 1e6)
    return (row["load"], row["model"], size, whole, f"{row['ratio']:.2f}x{between or ''}", *times,
            f"{row['goodput']['median']:.2f}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="the records")
    lines = parser.parse_args(arguments).jsonl.read_text(encoding="utf-8").splitlines()
    print(table([json.loads(line) for line in lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
