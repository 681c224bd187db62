"""Measure perplexity and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pyprune.cli.base import (
    add_to_record,
    comma_separated,
    guard,
    output,
    refuse_split,
    refuse_unread,
    say_what_is_loaded,
)

if TYPE_CHECKING:
    from pyprune.quality.measure import Evaluation

PROTOCOL, BATCH_SIZE = "ppl-2048", 8


@guard
def evaluate(
    model: str,
    *,
    ppl: list[str] | None = None,
    protocol: str = PROTOCOL,
    max_tokens: int | None = None,
    split: str | None = None,
    field: str | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a task in one forward pass.")] = BATCH_SIZE,
    bos: bool | None = None,
    dtype: str = "float32",
    device: str = "auto",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    annotate: bool = False,
    json_file: str | None = None,
    debug: bool = False,
) -> None:
    """Measure a model's quality: perplexity by the papers' protocols, and zero-shot tasks through lm-eval.

    Example: pyprune eval pruned/ --ppl wikitext2 --tasks piqa,arc_easy

    Args:
        model (MODEL): Checkpoint folder (pruned or not) or hub id.
        ppl (SOURCE): Text to measure perplexity on: wikitext2, ptb, c4, a datasets id, or a .txt/.jsonl(.gz) file.
            Repeatable.
        protocol: ppl-2048 (windows of 2048 tokens, mean of window losses) or ppl-128 (windows of 128 tokens, mean over
            tokens).
        max_tokens: Use only this many tokens of each text, for a quick look. Default: all.
        tasks (A,B): lm-eval tasks, comma-separated, e.g. piqa,arc_easy.
        limit: Examples of each task, for a quick look. Default: all.
        bos: Begin every window and prompt with the bos token, or none. Default: as the model's family expects (Gemma:
            yes).
        dtype: float32, bfloat16 or float16: dtype to compute in.
    """
    names = comma_separated(tasks or "")
    if tasks is not None and not names:
        raise typer.BadParameter("names no task; for example piqa,arc_easy", param_hint="--tasks")
    if not ppl and not names:
        raise typer.BadParameter("give --ppl SOURCE, --tasks A,B, or both", param_hint="--ppl / --tasks")
    if not names:
        refuse_unread("--tasks", {"--limit": limit is not None, "--batch-size": batch_size != BATCH_SIZE})
    if not ppl:
        of_text = {"--max-tokens": max_tokens, "--split": split, "--field": field}
        given = {name: value is not None for name, value in of_text.items()}
        refuse_unread("--ppl", {"--protocol": protocol != PROTOCOL, **given})
    refuse_split(split, ppl or ())
    say_what_is_loaded(model)
    from pyprune.checkpoint.load import ModelSource
    from pyprune.checkpoint.record import check_annotatable
    from pyprune.quality.measure import evaluate as measure
    from pyprune.runtime.report import Table

    if annotate:
        check_annotatable(model)
    evaluation = measure(
        ModelSource(model, gguf_file, revision, trust_remote_code),
        ppl=ppl or (),
        protocol=protocol,
        max_tokens=max_tokens,
        split=split,
        field=field,
        tasks=names,
        limit=limit,
        batch_size=batch_size,
        bos=bos,
        dtype=dtype,
        device=device,
    )
    measured, scores = evaluation.perplexity, evaluation.tasks
    of_all: dict[str, str | int | None] = {"dtype": dtype, "gguf_file": gguf_file, "revision": revision, "bos": bos}
    of_texts = {**of_all, "split": split, "field": field, "max_tokens": max_tokens}
    of_tasks = {**of_all, "limit": limit}
    tables = []
    if measured:
        rows = tuple((r.source, r.protocol, r.perplexity, r.windows, r.tokens) for r in measured)
        tables.append(Table("Perplexity", ("text", "protocol", "PPL", "windows", "tokens"), rows, _note(of_texts)))
    if scores:
        flat = [(task, metric, v) for task, values in scores.items() for metric, v in values.items()]
        if evaluation.mean_accuracy is not None:
            left_out = evaluation.without_accuracy
            of = f"the tasks with acc (without: {', '.join(left_out)})" if left_out else "all tasks"
            flat.append((f"mean of {of}", "acc", evaluation.mean_accuracy))
        tables.append(Table("Tasks", ("task", "metric", "value"), tuple(flat), _note(of_tasks)))
    # Print before annotating: a full disk must not lose the figures.
    output({"model": model, "conditions": of_texts | of_tasks, **evaluation.to_dict()}, json_file, *tables)
    if annotate:
        parts = {r.source: text_conditions(r.source, split, field, max_tokens) for r in measured}
        add_to_record(model, quality=_facts(evaluation, parts, limit, dtype, bos))


def _note(conditions: Mapping[str, str | int | None]) -> str:
    """List the conditions that are not the default, for the line below a table."""
    unusual = [f"{name} {value}" for name, value in conditions.items() if value not in (None, "float32")]
    return f"Measured with: {', '.join(unusual)}." if unusual else ""


def _facts(
    evaluation: Evaluation, parts: Mapping[str, list[str]], limit: int | None, dtype: str, bos: bool | None
) -> dict[str, float]:
    """Name the figures for the record, with the part of the text (``parts``) or task that was measured."""
    computed = [dtype] if dtype != "float32" else []
    computed += [] if bos is None else ["with bos" if bos else "without bos"]
    of_task = [f"{limit} examples"] if limit is not None else []
    measured = evaluation.perplexity
    texts = {named_figure(f"{r.protocol} {r.source}", parts[r.source] + computed): r.perplexity for r in measured}
    return {name: round(value, 4) for name, value in texts.items()} | {
        named_figure(f"{task} {metric}", of_task + computed): value
        for task, values in evaluation.tasks.items()
        for metric, value in values.items()
    }


def text_conditions(source: str, split: str | None, field: str | None, max_tokens: int | None = None) -> list[str]:
    """Describe the part of a text that was read, if it was not all of the default part."""
    from pyprune.data.sources import has_splits

    first = None if max_tokens is None else f"{max_tokens:,} tokens"
    parts = {"split": split if has_splits(source) else None, "field": field, "first": first}
    return [f"{name} {value}" for name, value in parts.items() if value is not None]


def named_figure(name: str, conditions: Sequence[str]) -> str:
    """Name a figure in a record, with its conditions."""
    return f"{name} ({', '.join(conditions)})" if conditions else name


def loaded_perplexity(
    path: str, source: str, protocol: str, *, split: str | None = None, field: str | None = None
) -> float:
    """Load a checkpoint, measure one text with it, and release its memory."""
    import gc

    from pyprune.quality.measure import evaluate as measure
    from pyprune.runtime.device import empty_cache

    perplexity = measure(path, ppl=source, protocol=protocol, split=split, field=field).perplexity[0].perplexity
    gc.collect()
    empty_cache()  # the engine that is started next needs nearly all of it
    return perplexity
