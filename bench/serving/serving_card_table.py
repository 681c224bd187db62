"""The tables of serving_card.py, made from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench._card_plans import UNEQUAL, UNIFORM, card_plans
from bench._machine import machine_of
from bench.serving.serving_card_ideal import Rates, Workload, ideal, parameters, work
from pyprune.fit.profile import DENSE
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.records import Json, RecordFile
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.load.capacity import Capacity
from pyprune.serving.load.table import TIME_COLUMNS, TIMES, milliseconds
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS
from pyprune.serving.stats import vllm_release
from pyprune.serving.widths import KV_BLOCK_TOKENS, token_bytes_of

KINDS = ("engine", "load", "startup")
CAPACITY_BYTES, CAPACITY_TOKENS = 2**30, (2048, 8192)
SHORT_PROMPT = (1 + SHORT_PROMPT_TOKENS) / 2
"""Mean length of the prompts of a generation turn."""
IDEAL_COLUMNS = ("ideal by FLOPs", "ideal by bytes", "binds", "ideal reached", "left of dense")
HOW_TO_READ = (
    "Ratios are of speed, over the dense model in the same run. In brackets is the 95 % interval of paired turns. "
    "Ideal: the dense model's FLOPs over the smaller one's, and the same for bytes. What takes the dense model longer "
    "binds, and what is reached is compared with it. Left of dense: the share of head, embedding and sampling, which "
    "no cut here makes smaller."
)
STARTED_NAMES = {"stock": "stock", "pruned": "pruned architecture", "uniform": UNIFORM, "unequal": UNEQUAL}
STARTED = (("stock", "pruned"), ("uniform", "unequal"))
"""Pairs of models whose server starts are compared: a stock one, and one as large that the plugin serves."""


def card(records: RecordFile, kinds: Sequence[str] = KINDS) -> str:
    """Return tables of the records as Markdown: machine by machine, release by release of vLLM.

    Args:
        records: of the bench.
        kinds: engine, load and startup, or some of them.
    """
    lines = [HOW_TO_READ]
    for rates in records.of("machine").values():
        machine = machine_of(rates["environment"])
        rows = [row for kind in kinds for row in records.of(kind).values() if machine_of(row["environment"]) == machine]
        for release in dict.fromkeys(vllm_release(row["environment"]) for row in rows):
            lines += _release_tables(
                [row for row in rows if vllm_release(row["environment"]) == release], rates, release
            )
    return "\n\n".join(lines) if lines[1:] else "Nothing is recorded yet; run the bench without --only-table first."


def _release_tables(rows: Sequence[Json], rates: Json, release: str) -> list[str]:
    environment = rates["environment"]
    on = f", on {rates['threads']} of them" if rates["threads"] else ""
    lines = [
        f"{environment['device']} ({environment['cpus']} CPUs), vLLM {release or 'not told'}, bfloat16. At best{on}: "
        f"{rates['flops'] / 1e9:.0f} GFLOP/s, {rates['bytes'] / 1e9:.1f} GB/s."
    ]
    measured = [row for row in rows if row["kind"] != "startup"]
    for model in dict.fromkeys(row["model"] for row in measured):
        lines.append(capacity_table([row for row in measured if row["model"] == model]))
    engines = [row for row in rows if row["kind"] == "engine"]
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in engines):
        alike = [row for row in engines if (row["model"], row["mode"]) == (model, mode)]
        lines += [f"### {model}, engine, {mode}", engine_table(alike, rates), *map(_unequal_over_uniform, alike)]
    for row in rows:
        if row["kind"] == "load":
            title = f"### {row['model']}, servers under load, {row['mode']}"
            lines += [title, load_table(row, rates), times_table(row)]
    starts = [row for row in rows if row["kind"] == "startup"]
    return [line for line in [*lines, *(["### Start until /health", startup_table(starts)] if starts else [])] if line]


def layers_of(row: Json, name: str) -> list[Any]:
    """Return the widths of a model's layers, which follow from the dense sizes."""
    dense = PrunePlan.identity("llama", Sizes.from_dict(row["sizes"]))
    return [layer.widths for layer in {DENSE: dense, **card_plans(dense)}[name].layers]


def capacity_table(records: Sequence[Json]) -> str:
    """Return the parameters and the key-value cache of every model of one dense model's records."""
    sizes = Sizes.from_dict(records[0]["sizes"])
    whole = parameters(sizes, layers_of(records[0], DENSE))
    rows: dict[str, tuple[Cell, ...]] = {}
    for name in dict.fromkeys(name for record in records for name in record["names"]):
        layers = layers_of(records[0], name)
        size, token = parameters(sizes, layers), token_bytes_of(layers, sizes.head_dim, "bfloat16")
        held = (Capacity(token, KV_BLOCK_TOKENS, CAPACITY_BYTES, tokens).sequences for tokens in CAPACITY_TOKENS)
        rows[name] = (name, size, f"{1 - size / whole:.1%}", token, *(f"{number:.2f}" for number in held))
    lengths = (f"sequences of {tokens:,} in 1 GiB" for tokens in CAPACITY_TOKENS)
    columns = ("model", "parameters", "removed", "KV bytes/token", *lengths)
    return markdown_table(Table("", columns, tuple(rows.values())))


def engine_table(records: Sequence[Json], rates: Mapping[str, Any]) -> str:
    """Return a row for each workload and model.

    Args:
        records: of one dense model and mode.
        rates: of the machine.
    """
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        prefill = record["kind_of_work"] == "prefill"
        load = Workload(record["tokens"]) if prefill else Workload(SHORT_PROMPT, record["tokens"], record["batch"])
        for name in record["names"]:
            figures = record["figures"][name]
            row = (record["quantity"], name, f"{figures['seconds']:.3f}")
            rows.append((*row, *_comparison(record, name, figures, load, rates)))
    return markdown_table(Table("", ("workload", "model", "s", "ratio", *IDEAL_COLUMNS), tuple(rows)))


def _comparison(
    record: Json, name: str, figures: Json, load: Workload, rates: Mapping[str, Any]
) -> tuple[Cell, ...]:  # fmt: skip
    """Return the cells that compare a model with the dense one; empty ones for the dense model itself."""
    if name == DENSE:
        return (None,) * (1 + len(IDEAL_COLUMNS))
    sizes = Sizes.from_dict(record["sizes"])
    dense, smaller = (work(sizes, layers_of(record, which), load) for which in (DENSE, name))
    best = ideal(dense, smaller, Rates(rates["flops"], rates["bytes"]))
    reached = f"{figures['ratio'] / best.ratio:.1%}"
    return _ratio(figures), f"{best.flops:.3f}x", f"{best.bytes:.3f}x", best.binds, reached, f"{best.left:.1%}"


def _ratio(figures: Json, unit: str = "x") -> str:
    interval = figures["interval"]
    return f"{figures['ratio']:.3f}{unit}" + (f" ({interval['low']:.3f} to {interval['high']:.3f})" if interval else "")


def _unequal_over_uniform(record: Json) -> str:
    """Say how much longer the unequal widths take than the uniform ones in the same turns; "" without both."""
    if not record["unequal"]:
        return ""
    ratio = _ratio(record["unequal"], " times")
    return f"{record['quantity']}, {UNEQUAL}: {ratio} the seconds of {UNIFORM} of as many parameters."


def load_table(record: Json, rates: Mapping[str, Any]) -> str:
    """Return a row for each concurrency and model of one run of servers.

    Args:
        record: with the summaries of :class:`pyprune.serving.load.results.LoadReport`.
        rates: of the machine.
    """
    o = record["options"]
    rows: list[tuple[Cell, ...]] = []
    for concurrency in record["concurrency"]:
        load = Workload(o["prompt_tokens"], o["new_tokens"], concurrency)
        for name in record["names"]:
            figures = record["summary"][name][f"{concurrency} at once"]
            row = (f"{concurrency} at once", name, f"{figures['tokens_per_second']['median']:.1f}")
            rows.append((*row, *_comparison(record, name, figures, load, rates)))
    turns = " to ".join(map(str, dict.fromkeys(record["turns"])))
    head = f"Prompts of {o['prompt_tokens']} tokens, {o['new_tokens']} new ones; turns of each model and load: {turns}."
    columns = ("load", "model", "output tokens/s", "ratio", *IDEAL_COLUMNS)
    return f"{' '.join([head, *record['notes']])}\n\n{markdown_table(Table('', columns, tuple(rows)))}"


def times_table(record: Json) -> str:
    """Return a row for each concurrency and model: every time that its requests took."""
    rows = []
    for load in (f"{concurrency} at once" for concurrency in record["concurrency"]):
        for name in record["names"]:
            times = (record["summary"][name][load][f"{metric}_ms"] for metric in TIMES)
            rows.append((load, name, *(milliseconds(list(each.values())) if each else None for each in times)))
    return markdown_table(Table("", ("load", "model", *TIME_COLUMNS), tuple(rows)))


def startup_table(records: Iterable[Json]) -> str:
    """Return the seconds of starts in turn, a row for each pair of models of :data:`STARTED`, and the plugin's own."""
    rows: list[tuple[Cell, ...]] = []
    plugin = []
    for record in records:
        seconds = record["seconds"]
        for base, other in (pair for pair in STARTED if set(pair) <= set(seconds)):
            more = record["more"][other]
            started = (f"{STARTED_NAMES[name]}: {_spread(seconds[name])}" for name in (other, base))
            rows.append((record["model"], record["mode"], *started, _spread(more, "+")))
        if "plugin" in record:
            spread = _spread(record["plugin"])
            plugin.append(f"The plugin in a process that has vLLM and Transformers, {record['model']}: {spread} s.")
    columns = ("model", "mode", "started (s)", "instead of (s)", "more (s)")
    note = "Median (fastest to slowest) of starts in turn, after one of each that fills the caches and is not counted."
    return "\n\n".join([markdown_table(Table("", columns, tuple(rows))), note, *plugin])


def _spread(values: Sequence[float], sign: str = "") -> str:
    """Show (median, least, most)."""
    middle, least, most = (f"{value:{sign}.2f}" for value in values)
    return f"{middle} ({least} to {most})"
