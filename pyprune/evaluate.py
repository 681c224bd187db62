"""Quality of a model: perplexity by the two published protocols, and zero-shot tasks through lm-eval.

Both protocols cut one token stream into windows, drop the tail, and take exp of a mean negative log-likelihood;
they differ in the window (2048 or 128 tokens), so in the context a prediction sees, and in what is averaged.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from pyprune.calibrate import SpanSet, TokenStream, check_sequence_length, check_token_ids
from pyprune.encoding import check_chat_template, encode, render
from pyprune.errors import ConfigError, DataError, MissingDependencyError, PypruneError, did_you_mean, shown
from pyprune.limits import foreign_errors
from pyprune.loss import token_losses
from pyprune.progress import quiet, track
from pyprune.sources import evaluation_split, read_corpus, text_sha256

Protocol = Literal["ppl-2048", "ppl-128"]
WINDOWS: dict[str, int] = {"ppl-2048": 2048, "ppl-128": 128}
"""Tokens in a window of each protocol (METHODS.md, "Evaluation protocols")."""

_FORWARD_TOKENS = 2048
_UNKNOWN_SHOWN = 5


class EvaluationError(PypruneError):
    """An evaluation that gave no usable number (for example a loss that is not finite)."""


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """A test text, joined and tokenised once.

    Attributes:
        source: as the user wrote it, with the split of a hub data set.
        token_ids: int64 [N], with the tokenizer's own special tokens (a LLaMA tokenizer puts one bos in front).
        text_sha256: of the joined text.
        max_windows: most windows the protocol uses (C4: 256); None = all.
    """

    source: str
    token_ids: Tensor = field(repr=False)
    text_sha256: str
    max_windows: int | None = None

    @property
    def spans(self) -> SpanSet:
        """The whole text, to be kept out of calibration with ``split_disjoint(..., reserved=[text.spans])``."""
        return SpanSet.whole(TokenStream.of(self.source, self.token_ids))


@dataclass(frozen=True)
class PerplexityResult:
    """One perplexity and what it was measured on.

    Attributes:
        perplexity: exp of the mean negative log-likelihood, nats.
        windows: windows evaluated.
        tokens: tokens in them; each window predicts all of its tokens but the first.
        protocol: ppl-2048 or ppl-128.
        window: tokens in a window (the protocol's, unless it was overridden).
        source: where the text came from.
        text_sha256: of the joined text.
    """

    perplexity: float
    windows: int
    tokens: int
    protocol: str
    window: int
    source: str = ""
    text_sha256: str = ""


def evaluation_text(
    tokenizer: PreTrainedTokenizerBase, source: str, *, split: str | None = None, field: str | None = None
) -> EvaluationText:
    r"""Read a source, join it as its layout asks (blank line; one space for C4) and tokenise it once.

    Args:
        source: see :func:`pyprune.sources.read_corpus`.
        split: of a hub data set; None = the one results are published on (PTB and C4: validation, else test).
        field: the field or column with the text.

    Raises:
        DataError: the source cannot be read, or the tokenizer fails.
    """
    chosen = split or evaluation_split(source)
    corpus = read_corpus(source, chosen, field)
    text = corpus.text()
    ids = np.concatenate(list(encode(tokenizer, [text], source, special=True)))
    return EvaluationText(source, torch.from_numpy(ids), text_sha256(text), corpus.max_windows)


def evaluate_perplexity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source: str | EvaluationText,
    protocol: str = "ppl-2048",
    *,
    split: str | None = None,
    field: str | None = None,
    window: int | None = None,
    max_tokens: int | None = None,
    batch_size: int | None = None,
) -> PerplexityResult:
    """Measure the perplexity of ``model`` on a source.

    Args:
        source: a source, or a text from :func:`evaluation_text` (to tokenise once for several models).
        protocol: "ppl-2048" or "ppl-128".
        split, field: see :func:`evaluation_text`.
        window, max_tokens, batch_size: see :func:`perplexity`.

    Raises:
        ConfigError, DataError, EvaluationError: see :func:`perplexity` and :func:`evaluation_text`.
    """
    _window(protocol, window)
    text = (
        source if isinstance(source, EvaluationText) else evaluation_text(tokenizer, source, split=split, field=field)
    )
    return perplexity(
        model,
        text.token_ids,
        protocol=protocol,
        window=window,
        max_tokens=max_tokens,
        max_windows=text.max_windows,
        batch_size=batch_size,
        source=text.source,
        sha256=text.text_sha256,
    )


def perplexity(
    model: nn.Module,
    token_ids: Tensor | Sequence[int],
    *,
    protocol: str = "ppl-2048",
    window: int | None = None,
    max_tokens: int | None = None,
    max_windows: int | None = None,
    batch_size: int | None = None,
    source: str = "the text",
    sha256: str = "",
) -> PerplexityResult:
    """Measure perplexity over non-overlapping windows of one token stream; the tail is dropped.

    ppl-2048: exp of the mean of the windows' mean losses over their 2047 predictions (what a Hugging Face model
    returns as its loss). ppl-128: exp of the mean over all predicted tokens, 127 a window. The model runs in its
    own dtype, the loss in float32. Training mode is put back afterwards.

    Args:
        model: a causal language model: model(input_ids=[B, T], use_cache=False).logits is [B, T, vocab].
        token_ids: int64 [N].
        window: tokens in a window; None = the protocol's.
        max_tokens: use only this many tokens from the beginning; None = all.
        max_windows: use at most this many windows; None = all.
        batch_size: windows in a forward pass; None = about 2048 tokens.

    Raises:
        ConfigError: an unknown protocol or an option out of range.
        DataError: less text than one window, or a window longer than the model allows, or ids outside its
            vocabulary.
        EvaluationError: a loss that is not finite (the message names the window).
    """
    size = _window(protocol, window)
    step = batch_size if batch_size is not None else max(1, _FORWARD_TOKENS // size)
    if step < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
    windows = _cut(token_ids, size, max_tokens, max_windows, source)
    _check_model(model, windows, size)
    losses: list[Tensor] = []
    with _evaluating(model), torch.no_grad():
        for batch in track(
            windows.split(min(step, len(windows))), f"Perplexity ({protocol})", total=-(-len(windows) // step)
        ):
            losses.append(_window_losses(model, batch))
            _check_finite(losses[-1], sum(map(len, losses)) - len(batch), size, source)
    per_token = torch.cat(losses)
    mean = per_token.mean(dim=1).mean() if protocol == "ppl-2048" else per_token.sum() / per_token.numel()
    return PerplexityResult(float(mean.exp()), len(windows), windows.numel(), protocol, size, source, sha256)


def _window(protocol: str, window: int | None) -> int:
    if protocol not in WINDOWS:
        raise ConfigError(did_you_mean(protocol, WINDOWS, "perplexity protocol"))
    if window is not None and window < 2:
        raise ConfigError(f"window is {window}; it must be at least 2 tokens.")
    return window or WINDOWS[protocol]


def _cut(
    token_ids: Tensor | Sequence[int], size: int, max_tokens: int | None, max_windows: int | None, source: str
) -> Tensor:
    """Return the windows, int64 [windows, size]."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64).reshape(-1)
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}; it must be at least 1.")
    used = ids if max_tokens is None else ids[:max_tokens]
    count = len(used) // size
    if count == 0:
        limit = "" if max_tokens is None else f" ({len(used)} after max_tokens={max_tokens})"
        raise DataError(
            f"{source!r} has {len(ids)} tokens{limit}, less than one window of {size}. "
            "Give more text, or use a protocol with a shorter window."
        )
    count = count if max_windows is None else min(count, max_windows)
    return used[: count * size].reshape(count, size)


def _check_model(model: nn.Module, windows: Tensor, size: int) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    check_sequence_length(config, size)
    check_token_ids(config, windows)


def _window_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the negative log-likelihoods, float64 [B, T - 1], of a batch of windows [B, T]."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = windows.to(device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    # Summing thousands of float32 losses would cost digits that the protocols' mean keeps.
    return token_losses(logits, ids).double().cpu()


def _check_finite(losses: Tensor, first: int, size: int, source: str) -> None:
    bad = (~losses.isfinite()).any(dim=1).nonzero()
    if len(bad):
        index = first + int(bad[0, 0])
        raise EvaluationError(
            f"The loss is not finite in window {index} of {source!r} (tokens {index * size} to "
            f"{(index + 1) * size}). The model's weights or its dtype are broken: "
            "check them for NaN or inf, or evaluate in float32."
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def evaluate_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    limit: int | float | None = None,
    batch_size: int = 8,
    *,
    num_fewshot: int | None = None,
    include_path: Path | str | None = None,
    apply_chat_template: bool = False,
) -> dict[str, dict[str, float]]:
    """Run lm-eval tasks on a model in memory (stock or pruned architecture alike).

    Args:
        tasks: lm-eval task or group names, for example piqa, arc_easy.
        limit: examples a task (a share below 1); None = all. Limited figures are for trying out only.
        batch_size: requests in a forward pass.
        num_fewshot: examples in the prompt; None = the task's own number.
        include_path: folder of further task files (YAML), for example over local jsonl files.
        apply_chat_template: wrap the prompts in the tokenizer's chat template.

    Returns:
        task -> metric -> value, for example {"piqa": {"acc": 0.68, "acc_stderr": 0.01}}. A metric under a filter
        other than lm-eval's "none" is called "metric,filter".

    Raises:
        MissingDependencyError: lm-eval is not installed.
        ConfigError: no task, an unknown one, or an option out of range.
        DataError: a task cannot be loaded or run: its file, its data, or the chat template it is asked with.
    """
    _check_task_options(tasks, limit, batch_size, num_fewshot)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise MissingDependencyError("lm-eval", "eval", "Evaluating tasks") from error
    if apply_chat_template:
        check_chat_template(tokenizer, ", ".join(tasks))
        render(tokenizer, [("user", "Hello")], ", ".join(tasks), add_generation_prompt=True)
    manager = _task_manager(tasks, include_path)
    with _evaluating(model), quiet("lm_eval"), _task_errors(model, tasks):
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        # The global seeds stay as they are: an evaluation must not change the training around it.
        output = simple_evaluate(
            wrapped,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            task_manager=manager,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    results: dict[str, dict[str, Any]] = output["results"] if output else {}
    return {task: _metrics(values) for task, values in results.items()}


def _check_task_options(tasks: Sequence[str], limit: float | None, batch_size: int, num_fewshot: int | None) -> None:
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
    if num_fewshot is not None and num_fewshot < 0:
        raise ConfigError(f"num_fewshot is {num_fewshot}; it must be at least 0.")


@contextmanager
def _task_errors(model: nn.Module, tasks: Sequence[str]) -> Iterator[None]:
    """One error for whatever lm-eval makes of a task's file and data; what the model raises stays as it is."""
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
        known = list(manager.all_tasks)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ConfigError([_unknown_task(task, known) for task in unknown[:_UNKNOWN_SHOWN]])
    return manager


def _unknown_task(task: str, known: Sequence[str]) -> str:
    close = get_close_matches(task, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown task {shown(task)}.{hint} `lm-eval ls tasks` lists all {len(known)} of them."


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    return {key.removesuffix(",none"): float(value) for key, value in numbers.items() if "," in key}
