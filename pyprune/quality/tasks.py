"""Zero-shot tasks through lm-eval."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from pyprune.errors import ConfigError, DataError, MissingDependencyError, shown
from pyprune.families import begins_with_bos
from pyprune.runtime.limits import foreign_errors
from pyprune.runtime.modes import evaluation_mode
from pyprune.runtime.progress import quiet

_UNKNOWN_SHOWN = 5


def evaluate_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    limit: int | float | None = None,
    batch_size: int = 8,
    *,
    include_path: Path | str | None = None,
    bos: bool | None = None,
    manager: Any = None,
) -> dict[str, dict[str, float]]:
    """Run lm-eval tasks on a model in memory (stock or pruned architecture alike).

    Args:
        tasks: lm-eval task or group names, for example piqa, arc_easy.
        limit: examples a task (a share below 1); None = all. Limited figures are for trying out only.
        batch_size: requests in a forward pass.
        include_path: folder of further task files (YAML), for example over local jsonl files.
        bos: whether prompts begin with the bos token; None = as the model's family expects it, else as lm-eval does.
        manager: the result of :func:`check_tasks` for these tasks; None = they are looked up here.

    Returns:
        task -> metric -> value, for example {"piqa": {"acc": 0.68, "acc_stderr": 0.01}}. A metric under a filter
        other than lm-eval's "none" is called "metric,filter".

    Raises:
        MissingDependencyError: lm-eval is not installed.
        ConfigError: no task, an unknown one, or an option out of range.
        DataError: a task cannot be loaded or run: its file, its data, or the chat template of its prompts.
    """
    manager = manager or check_tasks(tasks, limit=limit, batch_size=batch_size, include_path=include_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with evaluation_mode(model), quiet("lm_eval"), _task_errors(model, tasks):
        first = True if bos is None and begins_with_bos(getattr(model, "config", None)) else bos
        wrapped = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, add_bos_token=first
        )
        # The global seeds are not set: an evaluation must not change the training around it.
        output = simple_evaluate(
            wrapped,
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    results: dict[str, dict[str, Any]] = output["results"] if output else {}
    return {task: _metrics(values) for task, values in results.items()}


def check_tasks(
    tasks: Sequence[str],
    *,
    limit: int | float | None = None,
    batch_size: int = 8,
    include_path: Path | str | None = None,
) -> Any:
    """Look tasks up without running them, before a long run reaches them; arguments and errors as above.

    Returns:
        lm-eval's manager of these tasks.
    """
    _check_task_options(tasks, limit, batch_size)
    try:
        import lm_eval.models.huggingface  # noqa: F401 - also imports its dependencies
    except ImportError as error:
        raise MissingDependencyError(_missing_package(error), "eval", "Evaluating tasks") from error
    return _task_manager(tasks, include_path)


def _missing_package(error: ImportError) -> str:
    """Return the name of the package that lm-eval lacks, or "lm-eval" itself."""
    return "lm-eval" if error.name is None or error.name.startswith("lm_eval") else error.name


def reporting_tasks(tasks: Sequence[str], manager: Any) -> list[str]:
    """Return the names of the tasks that report results: a tag is replaced by the tasks that carry it.

    Args:
        tasks: names that :func:`check_tasks` accepts.
        manager: its result.
    """
    tags = set(manager.all_tags)
    named = [sorted(manager.task_index[task].tags) if task in tags else [task] for task in tasks]
    return list(dict.fromkeys(name for names in named for name in names))


def accuracies(results: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> dict[str, float]:
    """Return task -> accuracy in [0, 1], its "acc", for those of ``tasks`` that report one.

    Args:
        results: result of :func:`evaluate_tasks`.
        tasks: result of :func:`reporting_tasks`: the results of a group hold its members too, which must not count
            again.
    """
    return {task: results[task]["acc"] for task in tasks if "acc" in results.get(task, {})}


def mean_accuracy(results: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> float | None:
    """Return the mean of :func:`accuracies`, each task counting alike; None if no task reports one."""
    values = accuracies(results, tasks).values()
    return sum(values) / len(values) if values else None


def _check_task_options(tasks: Sequence[str], limit: float | None, batch_size: int) -> None:
    if not tasks:
        raise ConfigError("tasks is empty; name at least one lm-eval task, for example piqa.")
    if not all(isinstance(task, str) and task.strip() for task in tasks):
        raise ConfigError(
            f"tasks is {shown(list(tasks))}, where a name is blank; name lm-eval tasks, for example piqa."
        )
    if limit is not None and not limit > 0:
        raise ConfigError(f"limit is {limit}; it must be above 0, or left out for all examples.")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")


@contextmanager
def _task_errors(model: nn.Module, tasks: Sequence[str]) -> Iterator[None]:
    """Raise one error for all errors of lm-eval with a task's file and data; errors of the model pass unchanged."""
    try:
        with foreign_errors(
            DataError,
            f"The tasks {shown(list(tasks))} cannot be loaded and run",
            "Check their files and data and the network, or give include_path with tasks over local files.",
        ):
            yield
    except DataError as error:
        cause = error.__cause__
        if cause is not None and _raised_in(model, cause):
            raise cause from None
        raise


def _raised_in(model: nn.Module, error: BaseException) -> bool:
    return any(frame.f_locals.get("self") is model for frame, _ in traceback.walk_tb(error.__traceback__))


def _task_manager(tasks: Sequence[str], include_path: Path | str | None) -> Any:
    """Return an lm-eval task manager that knows all of ``tasks``."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"include_path is {folder!r}, which is not a folder; give a folder of task YAML files.")
    with foreign_errors(ConfigError, f"The tasks in {folder!r} cannot be listed", "Correct its YAML files."):
        manager = None
        if folder is not None:
            # Indexing the thousands of built-in tasks takes seconds and is needed only for built-in names.
            manager = TaskManager(include_path=folder, include_defaults=False)
        if manager is None or not set(tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder)
        names = list(manager.all_tasks)
    unknown = [task for task in tasks if task not in names]
    if unknown:
        raise ConfigError([_unknown_task(task, names) for task in unknown[:_UNKNOWN_SHOWN]])
    return manager


def _unknown_task(task: str, names: Sequence[str]) -> str:
    close = get_close_matches(task, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown task {shown(task)}.{hint} `lm-eval ls tasks` lists all {len(names)} of them."


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    return {key.removesuffix(",none"): float(value) for key, value in numbers.items() if "," in key}
