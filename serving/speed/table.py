"""The speed table with the papers' columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pyprune.runtime.report import Cell, Table
from pyprune.serving.comparison import precision_text
from pyprune.serving.speed.results import COLUMNS, MeasuredModel, SpeedReport, Summary, Workload
from pyprune.serving.stats import named_variables, vllm_release

HEADER = ("Model", "PR", "PPL", "Tokens/s", "TI", "Latency (ms)", "Speedup", "Parameters", "Bytes")
EDGE = ("Format", "Load (s)", "Memory (MB)")
RATIOS = {"generation": "TI", "prompt": "Speedup"}
"""Column -> the name of the ratio in it."""
SAID_BELOW = ("precision", "max_repeats")
"""Options that the sentence below the table names."""


def speed_table(
    report: SpeedReport,
    *,
    perplexity: Mapping[str, float] | None = None,
    ratios: Mapping[str, str] | None = None,
) -> Table:
    """Return the table of a report: one row a model, the papers' columns, parameters and bytes.

    Tokens/s and Latency are "median ± median absolute deviation". For llama.cpp the format of the file, the seconds to
    load it and the peak memory of its process in MB follow. Options that differ from the papers' protocol get a column
    of their own, so that a table never hides how it was made.

    Args:
        report: what :func:`pyprune.serving.speed.measure.measure` returned.
        perplexity: model name -> perplexity; models without one show "-".
        ratios: model name -> text for PR, such as "7/30 layers"; default: the share of parameters that was removed.
    """
    extra = _unusual_options(report.workload)
    edge = report.engine == "llamacpp"
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            name,
            (ratios or {}).get(name, f"{report.pruning_ratio(name):.1%}"),
            f"{perplexity[name]:.2f}" if perplexity and name in perplexity else None,
            plus_minus(report.tokens_per_second(name)),
            f"{report.throughput_increase(name):.2f}x",
            plus_minus(report.latency_ms(name)),
            f"{report.speedup(name):.2f}x",
            model.parameters,
            model.bytes,
            *(_edge(model) if edge else ()),
            *extra.values(),
        )
        for name, model in report.models.items()
    )
    return Table("Speed", (*HEADER, *(EDGE if edge else ()), *extra), rows)


def _edge(model: MeasuredModel) -> tuple[Cell, ...]:
    load = None if model.load_seconds is None else f"{model.load_seconds:.2f}"
    return model.format, load, None if model.memory is None else f"{model.memory / 1e6:,.0f}"


def speed_facts(report: SpeedReport, name: str) -> dict[str, Any]:
    """Return the facts of a model's speed for its record.

    Args:
        report: what :func:`pyprune.serving.speed.measure.measure` returned.
        name: of the model in it.
    """
    return {
        "throughput increase (TI)": round(report.throughput_increase(name), 4),
        "prompt speedup": round(report.speedup(name), 4),
        "conditions": conditions(report).replace("\n", " "),
    }


def conditions(report: SpeedReport) -> str:
    """Return a sentence on how the table's figures were taken, and one on how certain their ratios are."""
    w, env = report.workload, report.environment
    taken = [report.tokens_per_second(report.baseline).count, report.latency_ms(report.baseline).count]
    repeats = " and ".join(str(count) for count in dict.fromkeys(taken))
    text = (
        f"{_engine(report)}, {env['device']} ({env['cpus']} CPUs): {w.batch_size} prompts x {w.new_tokens} new "
        f"tokens, one {w.prompt_tokens}-token prompt, median ± MAD of {repeats} interleaved repeats after a warm-up."
    )
    if variables := named_variables(env):
        text += f" Set in the environment: {variables}."
    intervals = {f"{RATIOS[column]} of {name}": i for (name, column), i in report.intervals(COLUMNS).items()}
    return "\n".join(line for line in (text, precision_text(intervals, w), report.note) if line)


def _engine(report: SpeedReport) -> str:
    """Return name, version, the format of the weights, and for vLLM its mode."""
    versions = report.environment["versions"]
    if report.engine == "llamacpp":
        formats = ", ".join(dict.fromkeys(model.format for model in report.models.values()))
        return f"llama.cpp (xllamacpp {versions.get('xllamacpp')}), {formats}"
    name, version = "Transformers", versions.get("transformers")
    if report.engine == "vllm":
        name, version = "vLLM", vllm_release(report.environment)
        on_cpu = report.environment["device"] == report.environment["cpu"]
        return f"{name} {version}, {'eager' if on_cpu else 'compiled'}, {report.workload.dtype}"
    return f"{name} {version}, {report.workload.dtype}"


def _unusual_options(workload: Workload) -> dict[str, str]:
    return {
        f.name: str(getattr(workload, f.name))
        for f in fields(workload)
        if f.name not in SAID_BELOW and getattr(workload, f.name) != f.default
    }


def plus_minus(summary: Summary, digits: int = 1) -> str:
    """Return "median ± median absolute deviation", without decimals from 1000 on."""
    places = digits if summary.median < 1000 else 0
    return f"{summary.median:,.{places}f} ± {summary.mad:,.{places}f}"
