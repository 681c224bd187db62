"""Quality of a checkpoint on disk: loaded once, measured on texts and tasks, never on its training text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

from pyprune.checkpoint.load import ModelSource, Reading
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.trained_on import refuse_training_text
from pyprune.data.sources import evaluation_split, look_up
from pyprune.errors import ConfigError
from pyprune.quality.perplexity import (
    EvaluationText,
    PerplexityResult,
    evaluate_perplexity,
    evaluation_text,
    window_size,
)
from pyprune.quality.tasks import accuracies, check_tasks, evaluate_tasks, mean_accuracy, reporting_tasks
from pyprune.runtime.device import warn_of_slow_dtype
from pyprune.runtime.products import products_in
from pyprune.runtime.progress import say


@dataclass(frozen=True)
class Evaluation:
    """The measured quality. JSON-able through :meth:`to_dict`.

    Attributes:
        perplexity: one result for each text, in the order of the sources.
        tasks: task -> metric -> value.
        mean_accuracy: mean over the tasks that report an accuracy ("acc"), in [0, 1]; None if none does.
        without_accuracy: requested tasks that report no accuracy: the mean leaves them out.
    """

    perplexity: tuple[PerplexityResult, ...] = ()
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    mean_accuracy: float | None = None
    without_accuracy: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


def evaluate(
    model: str | Path | ModelSource,
    *,
    ppl: str | Sequence[str] = (),
    protocol: str = "ppl-2048",
    max_tokens: int | None = None,
    split: str | None = None,
    field: str | None = None,
    tasks: str | Sequence[str] = (),
    limit: int | None = None,
    batch_size: int = 8,
    bos: bool | None = None,
    dtype: str = "float32",
    device: str = "auto",
    **reading: Unpack[Reading],
) -> Evaluation:
    """Measure the quality of a checkpoint, pruned or not, as ``pyprune eval`` does. Nothing is written.

    Args:
        model: folder or hub id.
        ppl: texts to measure perplexity on: wikitext2, ptb, c4, a data set of the hub, or a .txt or .jsonl file.
        protocol: ppl-2048 or ppl-128; see :func:`pyprune.quality.perplexity.perplexity`.
        max_tokens: use only this many tokens of each text; None = all.
        split: split of hub data sets; None = the one of published results (PTB and C4: validation, else test).
        field: the column or .jsonl field with the text; None = "text", or the fields of an instruction layout.
        tasks: lm-eval tasks, for example piqa.
        limit: examples of each task; None = all.
        batch_size: requests of a task in one forward pass.
        bos: whether every window of a text and every prompt of a task begins with the bos token; None = as the model's
            family expects it (Gemma: yes).
        dtype: compute dtype: float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        ConfigError: neither a text nor a task, an unknown task or protocol, or an option out of range.
        MissingDependencyError: tasks without lm-eval.
        CheckpointError: the model cannot be read, or has no tokenizer.
        DataError: a text cannot be read, is too short, or was training text of this checkpoint.
        EvaluationError: a loss that is not finite.
    """
    sources = [ppl] if isinstance(ppl, str) else list(ppl)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not sources and not names:
        raise ConfigError("There is nothing to measure; give ppl (for example 'wikitext2'), tasks, or both.")
    look_up((source, split or evaluation_split(source)) for source in sources)
    window_size(protocol)
    manager = check_tasks(names, limit=limit, batch_size=batch_size) if names else None
    source = ModelSource.of(model, **reading)
    loaded, tokenizer = source.load(dtype=dtype, device=device, quantised=True)
    if tokenizer is None:
        raise no_tokenizer(source.name)
    warn_of_slow_dtype(dtype, loaded.device)
    measured = []
    with products_in(dtype):
        for test in sources:
            text = evaluation_text(tokenizer, test, split=split, field=field, max_tokens=max_tokens)
            _refuse_training_text(source, text, test)
            measured.append(evaluate_perplexity(loaded, tokenizer, text, protocol, max_tokens=max_tokens, bos=bos))
            if len(sources) > 1 or names:  # report it now: the next text or the tasks may fail
                say(f"{test}: {protocol} perplexity {measured[-1].perplexity:.4g}.", "dim")
        if not names:
            return Evaluation(tuple(measured))
        scores = evaluate_tasks(loaded, tokenizer, names, limit=limit, batch_size=batch_size, bos=bos, manager=manager)
    each = reporting_tasks(names, manager)
    without = tuple(task for task in each if task not in accuracies(scores, each))
    return Evaluation(tuple(measured), scores, mean_accuracy(scores, each), without)


def check_test_text(model_id: str | Path, source: str, *, split: str | None = None, field: str | None = None) -> None:
    """Refuse a text that a checkpoint was trained on, for a caller that measures without loading it here.

    Args:
        model_id: folder or hub id.
        source, split, field: see :func:`evaluate`.

    Raises:
        CheckpointError, DataError: as :func:`evaluate`.
    """
    model = ModelSource.of(model_id)
    tokenizer = model.tokenizer() if model.marks else None
    if tokenizer is not None:
        _refuse_training_text(model, evaluation_text(tokenizer, source, split=split, field=field), source)


def _refuse_training_text(model: ModelSource, text: EvaluationText, source: str) -> None:
    if model.marks:
        refuse_training_text(model.marks, text.passage_ids(), source, model.name)
