"""The tables of serving_card.py, made from its records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from bench._card_plans import UNEQUAL, UNIFORM
from bench._machine import machine_of
from bench.serving.serving_card_ideal import Ideal, Rates, Workload, ideal, parameters, work
from pyprune.fit.profile import DENSE
from pyprune.plan import Sizes
from pyprune.runtime.records import Json, RecordFile
from pyprune.runtime.report import Cell, Table, markdown_table, noted_table
from pyprune.serving.load.capacity import Capacity
from pyprune.serving.load.table import GPU_MEMORY, TIME_COLUMNS, TIMES, milliseconds, start_seconds
from pyprune.serving.speed.precision import Interval, ratio_interval
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS
from pyprune.serving.stats import vllm_release
from pyprune.serving.widths import KV_BLOCK_TOKENS, token_bytes_of

ASKED_PREFILL, ASKED_GENERATION, ASKED_UNEQUAL = 0.95, 0.88, 0.03
KINDS = ("engine", "load", "startup")
CAPACITY_BYTES, CAPACITY_TOKENS = 2**30, (2048, 8192)
SHORT_PROMPT = (1 + SHORT_PROMPT_TOKENS) / 2
"""Mean length of the prompts of a generation turn."""
IDEAL_COLUMNS = ("ideal by FLOPs", "ideal by bytes", "binds", "ideal reached", "left of dense")
HOW_TO_READ = (
    "Ratios are of speed, over the dense model in the same run; in brackets the 95 % interval from paired turns. "
    "Ideal: the dense model's FLOPs over the smaller one's, and the same of bytes. What binds is what takes the "
    "dense model longer at the machine's rates, and what is reached is compared with it. Left of dense: the head's, "
    "the embedding's and the sampling's share of it, which no cut here makes smaller."
)

STARTED_NAMES = {"stock": "stock", "pruned": "pruned architecture", "uniform": UNIFORM, "unequal": UNEQUAL}
STARTED = (("stock", "pruned"), ("uniform", "unequal"))
"""Pairs of models whose server starts are compared: a stock one, and one as large that the plugin serves."""
ONE_AT_A_TIME = (
    "The engines were up one after another, so that turns are no pairs: each is compared with the other model's "
    "median, and there are no intervals."
)


def card(records: RecordFile) -> str:
    """All tables of what is recorded, as Markdown."""
    machines = list(records.of("machine").values())
    if not machines:
        return "Nothing is recorded yet; run the bench without --only-table first."
    return "\n\n".join([HOW_TO_READ, *(line for rates in machines for line in _of_machine(records, rates))])


def _of_machine(records: RecordFile, rates: Json) -> list[str]:
    """What was measured on the machine that has these rates, release by release of vLLM."""
    machine = machine_of(rates["environment"])
    everything = {
        kind: [record for record in records.of(kind).values() if machine_of(record["environment"]) == machine]
        for kind in KINDS
    }
    releases = dict.fromkeys(vllm_release(record["environment"]) for found in everything.values() for record in found)
    return [line for release in releases or [""] for line in _of_release(everything, rates, release)]


def _of_release(everything: Mapping[str, Sequence[Json]], rates: Json, release: str) -> list[str]:
    """What was measured with one release of vLLM."""
    engines, loads, starts = (
        [record for record in everything[kind] if vllm_release(record["environment"]) == release] for kind in KINDS
    )
    found = [_machine(rates, release)]
    for one in _firsts([*engines, *loads], "model"):
        found.append(capacity_table([r for r in (*engines, *loads) if r["model"] == one["model"]]))
    for one in _firsts(engines, "model", "mode"):
        same = [r for r in engines if (r["model"], r["mode"]) == (one["model"], one["mode"])]
        found += [f"### {one['model']}, engine, {one['mode']}", engine_table(same, rates), *verdicts(same, rates)]
    for record in loads:
        title = f"### {record['model']}, servers under load, {record['mode']}"
        found += [title, load_table(record, rates), times_table(record), servers_table(record)]
    if starts:
        found += ["### Start until /health", startup_table(starts)]
    return found


def _firsts(records: Sequence[Json], *names: str) -> list[Json]:
    """The first record of every combination of values."""
    found: dict[tuple[Any, ...], Json] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in names), record)
    return list(found.values())


def _machine(rates: Mapping[str, Any], release: str) -> str:
    environment = rates["environment"]
    on = f", on {rates['threads']} of them" if rates["threads"] else ""
    return (
        f"{environment['device']} ({environment['cpus']} CPUs), vLLM {release or 'not told'}, bfloat16. At best{on}: "
        f"{rates['flops'] / 1e9:.0f} GFLOP/s, {rates['bytes'] / 1e9:.1f} GB/s."
    )


def capacity_table(records: Sequence[Json]) -> str:
    """Parameters and key-value cache of every model, counted.

    Args:
        records: of one dense model; each with "sizes", "names" of its models, and for each "layers" (their widths).
    """
    sizes = Sizes(**records[0]["sizes"])
    whole = parameters(sizes, records[0]["layers"][DENSE])
    rows: dict[str, tuple[Cell, ...]] = {}
    for record, name in ((r, name) for r in records for name in r["names"]):
        own = parameters(sizes, record["layers"][name])
        token = token_bytes_of(record["layers"][name], sizes.head_dim, "bfloat16")
        held = (Capacity(token, KV_BLOCK_TOKENS, CAPACITY_BYTES, tokens).sequences for tokens in CAPACITY_TOKENS)
        rows[name] = (name, own, f"{1 - own / whole:.1%}", token, *(f"{number:.2f}" for number in held))
    lengths = (f"sequences of {tokens:,} in 1 GiB" for tokens in CAPACITY_TOKENS)
    columns = ("model", "parameters", "removed", "KV bytes/token", *lengths)
    return markdown_table(Table("", columns, tuple(rows.values())))


def engine_table(records: Sequence[Json], rates: Mapping[str, Any]) -> str:
    """A row for each workload and model.

    Args:
        records: of one dense model and mode.
        rates: of the machine.
    """
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        for name in record["names"]:
            row = (record["quantity"], name, f"{median(record['seconds'][name]):.3f}")
            if name == DENSE:
                rows.append((*row, *[None] * (1 + len(IDEAL_COLUMNS))))
                continue
            rows.append((*row, _shown_ratio(record, speed_ratios(record, name)), *_ideal_cells(record, name, rates)))
    note = "" if all(map(_in_turns, records)) else ONE_AT_A_TIME
    return noted_table(Table("", ("workload", "model", "s", "ratio", *IDEAL_COLUMNS), tuple(rows), note))


def speed_ratios(record: Json, name: str) -> list[float]:
    """A model's speed over the dense one's, turn by turn: against the dense turns before and after it.

    Where the engines were up one after another, against the dense model's median.
    """
    dense, own = record["seconds"][DENSE], record["seconds"][name]
    if not _in_turns(record):
        return [median(dense) / seconds for seconds in own]
    around = zip(pairwise(dense), own, strict=True)
    return [math.sqrt(before * after) / seconds for (before, after), seconds in around]


def _in_turns(record: Json) -> bool:
    """Whether the engines were up together; older records do not say it, and all were."""
    return bool(record.get("resident", True))


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))


def _shown_ratio(record: Json, ratios: Sequence[float]) -> str:
    """Their geometric mean, with its interval where turns were paired."""
    return f"{_mean(ratios):.3f}x{_interval_of(record, ratios)}"


def _interval_of(record: Json, ratios: Sequence[float]) -> str:
    return _brackets(ratio_interval(ratios)) if _in_turns(record) else ""


def _brackets(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval.low:.3f} to {interval.high:.3f})"


def ideal_of(record: Json, name: str, load: Workload, rates: Mapping[str, Any]) -> Ideal:
    """How much faster than the dense model one of a record could be.

    Args:
        record: with "sizes" and "layers".
        name: of the model.
        load: what it does.
        rates: of the machine.
    """
    sizes = Sizes(**record["sizes"])
    dense, own = (work(sizes, record["layers"][which], load) for which in (DENSE, name))
    return ideal(dense, own, Rates(rates["flops"], rates["bytes"]))


def _workload(record: Json) -> Workload:
    if record["kind_of_work"] == "prefill":
        return Workload(record["tokens"])
    return Workload(SHORT_PROMPT, record["tokens"], record["batch"])


def _ideal_cells(record: Json, name: str, rates: Mapping[str, Any]) -> tuple[Cell, ...]:
    best = ideal_of(record, name, _workload(record), rates)
    return _cells(best, _mean(speed_ratios(record, name)))


def _cells(best: Ideal, reached: float) -> tuple[Cell, ...]:
    share = f"{reached / best.ratio:.1%}"
    return (f"{best.flops:.3f}x", f"{best.bytes:.3f}x", best.binds, share, f"{best.left:.1%}")


def verdicts(records: Sequence[Json], rates: Mapping[str, Any]) -> list[str]:
    """One line for each workload and what was asked of it.

    Args:
        records: of one dense model and mode.
        rates: of the machine.
    """
    found: list[str] = []
    for record in records:
        found += _layers_verdict(record, rates)
    found += [line for record in records for line in _unequal_verdict(record)]
    apart = [{name for name in (UNIFORM, UNEQUAL) if name in record["seconds"]} for record in records]
    if set().union(*apart) == {UNIFORM, UNEQUAL} and {UNIFORM, UNEQUAL} not in apart:
        found.append(f"{UNEQUAL} and {UNIFORM} did not take turns, so that they are not compared; raise --resident.")
    return found


def _layers_verdict(record: Json, rates: Mapping[str, Any]) -> list[str]:
    """What share of the ideal the models with fewer layers reached."""
    asked = ASKED_PREFILL if record["kind_of_work"] == "prefill" else ASKED_GENERATION
    found = []
    for name in record["names"]:
        if name.endswith(" layers"):
            best = ideal_of(record, name, _workload(record), rates)
            share = _mean(speed_ratios(record, name)) / best.ratio
            found.append(
                f"{record['quantity']}, {name}: {share:.1%} of the ideal ({best.binds}) was reached, {asked:.0%} was "
                f"asked: {_verdict(share >= asked)}."
            )
    return found


def _unequal_verdict(record: Json) -> list[str]:
    """How much longer the unequal widths take than the uniform ones in the same turns."""
    if not {UNIFORM, UNEQUAL} <= set(record["seconds"]):
        return []
    unequal, uniform = record["seconds"][UNEQUAL], record["seconds"][UNIFORM]
    beside = uniform if _in_turns(record) else [median(uniform)] * len(unequal)
    ratios = [seconds / other for seconds, other in zip(unequal, beside, strict=True)]
    mean, most = _mean(ratios), 1 + ASKED_UNEQUAL
    return [
        f"{record['quantity']}, {UNEQUAL}: {mean:.3f} times{_interval_of(record, ratios)} the seconds of "
        f"{UNIFORM} of as many parameters, at most {most:.2f} was asked: {_verdict(mean <= most)}."
    ]


def _verdict(kept: bool) -> str:
    return "kept" if kept else "missed"


def load_table(record: Json, rates: Mapping[str, Any]) -> str:
    """A row for each concurrency and model of one run of servers.

    Args:
        record: with the summaries of :class:`pyprune.serving.load.results.LoadReport`.
        rates: of the machine.
    """
    o = record["options"]
    rows: list[tuple[Cell, ...]] = []
    for concurrency in record["concurrency"]:
        load = Workload(o["prompt_tokens"], o["new_tokens"], concurrency)
        for name in record["names"]:
            own = record["summary"][name][f"{concurrency} at once"]
            row = (f"{concurrency} at once", name, f"{own['tokens_per_second']['median']:.1f}")
            if name == DENSE:
                rows.append((*row, *[None] * (1 + len(IDEAL_COLUMNS))))
                continue
            interval = Interval(**own["interval"]) if own["interval"] else None
            cells = _cells(ideal_of(record, name, load, rates), own["ratio"])
            rows.append((*row, f"{own['ratio']:.3f}x{_brackets(interval)}", *cells))
    turns = Counter((turn["model"], turn["load"]) for turn in record["turns"])
    notes = record["notes"] if "notes" in record else [record["note"]]
    how = " ".join([
        f"Prompts of {o['prompt_tokens']} tokens, {o['new_tokens']} new ones; turns of each model and load: "
        f"{_range(list(turns.values()))}.",
        *(note for note in notes if note),
    ])  # fmt: skip
    columns = ("load", "model", "output tokens/s", "ratio", *IDEAL_COLUMNS)
    return f"{how}\n\n{markdown_table(Table('', columns, tuple(rows)))}"


def times_table(record: Json) -> str:
    """A row for each concurrency and model of one run of servers: every time that its requests took.

    Args:
        record: see :func:`load_table`.
    """
    rows = []
    for load in (f"{concurrency} at once" for concurrency in record["concurrency"]):
        for name in record["names"]:
            found = (record["summary"][name][load][f"{metric}_ms"] for metric in TIMES)
            rows.append((load, name, *(milliseconds(list(each.values())) if each else None for each in found)))
    return markdown_table(Table("", ("load", "model", *TIME_COLUMNS), tuple(rows)))


def servers_table(record: Json) -> str:
    """A row for each model of one run of servers: what its server takes.

    Args:
        record: with the models of :class:`pyprune.serving.load.results.LoadReport`.
    """
    memories = {"memory": "peak host memory (MB)"}
    if any(record["models"][name].get("gpu_memory") for name in record["names"]):
        memories["gpu_memory"] = GPU_MEMORY
    rows: list[tuple[Cell, ...]] = []
    for name in record["names"]:
        own = record["models"][name]
        held = own["capacity"] and f"{own['capacity']['sequences']:.2f} of {own['capacity']['context']:,}"
        taken = (own[memory] and f"{own[memory] / 1e6:,.0f}" for memory in memories)
        rows.append((name, start_seconds(own["load_seconds"]), *taken, held))
    gib = f"{record['options']['kv_gib']:g} GiB"
    columns = ("model", "until healthy (s)", *memories.values(), f"sequences in {gib}")
    return markdown_table(Table("", columns, tuple(rows)))


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers, default=0), max(numbers, default=0)
    return str(least) if least == most else f"{least} to {most}"


def startup_table(records: Iterable[Json]) -> str:
    """Seconds of starts in turn, a row for each pair of models of :data:`STARTED`, and what the plugin itself takes."""
    rows = [_start_row(r, *pair) for r in records for pair in STARTED if set(pair) <= set(r["seconds"])]
    columns = ("model", "mode", "started (s)", "instead of (s)", "more (s)", "asked")
    note = "Median (fastest to slowest) of starts in turn, after one of each that fills the caches and is not counted."
    found = [markdown_table(Table("", columns, tuple(rows))), note]
    found += [
        f"The plugin in a process that has vLLM and Transformers, {r['model']}: {_spread(r['plugin'])} s."
        for r in records
        if "plugin" in r
    ]
    return "\n\n".join(found)


def _start_row(record: Json, base: str, other: str) -> tuple[Cell, ...]:
    of_base, of_other, asked = record["seconds"][base], record["seconds"][other], record["asked"]
    more = [b - a for a, b in zip(of_base, of_other, strict=True)]
    return (
        record["model"],
        record["mode"],
        f"{STARTED_NAMES[other]}: {_spread(of_other)}",
        f"{STARTED_NAMES[base]}: {_spread(of_base)}",
        f"{median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})",
        f"under {asked:g} s: {_verdict(median(more) < asked)}",
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
