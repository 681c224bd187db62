"""Perplexity by the two published protocols.

Both protocols cut one token stream into windows, drop the tail, and take exp of a mean negative log-likelihood. They
differ in the window (2048 or 128 tokens), and so in the context of a prediction, and in the average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from pyprune.data.encoding import bos_id, encode_first
from pyprune.data.overlap import SpanSet
from pyprune.data.sources import evaluation_split, read_corpus, text_sha256
from pyprune.data.stream import TokenStream, check_token_ids, corpus_stream, position_limit
from pyprune.errors import ConfigError, DataError, PypruneError, did_you_mean, shown
from pyprune.families import begins_with_bos
from pyprune.runtime.intervals import half_width
from pyprune.runtime.modes import evaluation_mode
from pyprune.runtime.progress import track
from pyprune.train.loss import token_losses

WINDOWS: dict[str, int] = {"ppl-2048": 2048, "ppl-128": 128}
"""Tokens in a window of each protocol (docs/reference/evaluation.md)."""
_FORWARD_TOKENS = 2048
PIECE = 128
"""Predictions whose mean loss counts as one observation of an interval: losses of neighbouring tokens correlate."""


class EvaluationError(PypruneError):
    """An evaluation that gave no usable number (for example a loss that is not finite)."""


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """A test text, joined and tokenised once.

    Attributes:
        source: source, as the user wrote it.
        token_ids: int64 [N], with the tokenizer's own special tokens (a LLaMA tokenizer puts one bos in front).
        text_sha256: SHA-256 of the joined text.
        max_windows: most windows the protocol uses (C4: 256); None = all.
        read: returns the text as calibration would read it; None = ``token_ids``.
    """

    source: str
    token_ids: Tensor = field(repr=False)
    text_sha256: str
    max_windows: int | None = None
    read: Callable[[], TokenStream] | None = field(default=None, repr=False)

    @cached_property
    def passages(self) -> TokenStream:
        """Return the text as calibration reads it, each document tokenised alone, to find it in other streams.

        At a document's ends these tokens differ from ``token_ids`` if a tokenizer joins neighbouring documents.
        """
        return TokenStream.of(self.source, self.token_ids) if self.read is None else self.read()

    def passage_ids(self) -> Tensor:
        """Return the token ids of :attr:`passages`, int64 [N]."""
        return torch.from_numpy(self.passages.tokens)

    @property
    def spans(self) -> SpanSet:
        """Return the whole text, to keep it out of calibration with ``sample_sequences(..., exclude=text.spans)``."""
        return SpanSet.whole(self.passages)


@dataclass(frozen=True)
class PerplexityResult:
    """One perplexity and the text of its measurement.

    Attributes:
        perplexity: exp of the mean negative log-likelihood, nats.
        windows: windows evaluated.
        tokens: tokens in them; each window predicts all of its tokens but the first.
        protocol: ppl-2048 or ppl-128.
        window: tokens in a window (the protocol's, unless it was overridden).
        source: source of the text.
        text_sha256: SHA-256 of the joined text.
        interval: 95 % t interval of the perplexity, from the mean losses of pieces of :data:`PIECE` predictions. It
            covers other text of the kind; two models on one text differ by less. None for fewer than two pieces.
    """

    perplexity: float
    windows: int
    tokens: int
    protocol: str
    window: int
    source: str = ""
    text_sha256: str = ""
    interval: tuple[float, float] | None = None


def evaluation_text(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    split: str | None = None,
    field: str | None = None,
    max_tokens: int | None = None,
) -> EvaluationText:
    r"""Read a source, join it as its layout asks (blank line; one space for C4) and tokenise it once.

    Args:
        source: see :func:`pyprune.data.sources.read_corpus`.
        split: split of a hub data set; None = the one of published results (PTB and C4: validation, else test).
        max_tokens: tokenise only this many tokens; None = all.
        field: the field or column with the text.

    Raises:
        DataError: the source cannot be read, or the tokenizer fails.
    """
    chosen = split or evaluation_split(source)
    corpus = read_corpus(source, chosen, field)
    text = corpus.text()
    ids = torch.from_numpy(encode_first(tokenizer, text, source, max_tokens, special=True))
    read = partial(corpus_stream, tokenizer, corpus)
    return EvaluationText(source, ids, text_sha256(text), corpus.max_windows, read)


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
    bos: bool | None = None,
) -> PerplexityResult:
    """Measure the perplexity of ``model`` on a source.

    Args:
        source: a source, or a text from :func:`evaluation_text` (to tokenise once for several models).
        protocol: "ppl-2048" or "ppl-128".
        split: split of a hub data set; None = test or validation.
        field: column or .jsonl field with the text; None = "text".
        window: tokens in a window; None = the protocol's.
        max_tokens: use only this many tokens of the text; None = all.
        batch_size: windows in one forward pass; None = about 2,048 tokens.
        bos: whether every window begins with the tokenizer's bos token; None = as the model's family expects it
            (Gemma: yes). The published protocols, which are LLaMA's, have it in the first window alone.

    Raises:
        ConfigError, DataError, EvaluationError: see :func:`perplexity` and :func:`evaluation_text`.
    """
    window_size(protocol, window)
    text = source
    if not isinstance(text, EvaluationText):
        text = evaluation_text(tokenizer, text, split=split, field=field, max_tokens=max_tokens)
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
        bos=bos_id(tokenizer, bos, usual=begins_with_bos(getattr(model, "config", None))),
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
    bos: int | None = None,
) -> PerplexityResult:
    """Measure perplexity over non-overlapping windows of one token stream; the tail is dropped.

    ppl-2048: exp of the mean of the windows' mean losses over their 2047 predictions (the loss that a Hugging Face
    model returns). ppl-128: exp of the mean over all predicted tokens, 127 a window. The model runs in its own dtype,
    the loss in float32. Training mode is restored afterwards.

    Args:
        model: a causal language model: model(input_ids=[B, T], use_cache=False).logits is [B, T, vocab].
        token_ids: int64 [N].
        window: tokens in a window; None = the protocol's.
        max_tokens: use only this many tokens from the beginning; None = all.
        max_windows: use at most this many windows; None = all.
        batch_size: windows in a forward pass; None = about 2048 tokens.
        bos: token id that replaces the first one of every window, which is never predicted; None = none.

    Raises:
        ConfigError: an unknown protocol or an option out of range.
        DataError: less text than one window, or a window longer than the model allows, or ids outside its
            vocabulary.
        EvaluationError: a loss that is not finite (the message names the window).
    """
    size = window_size(protocol, window)
    step = batch_size if batch_size is not None else max(1, _FORWARD_TOKENS // size)
    if step < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be at least 1.")
    windows = cut_windows(token_ids, size, max_tokens, max_windows, source, bos)
    _check_model(model, windows, size)
    losses: list[Tensor] = []
    with evaluation_mode(model), torch.no_grad():
        for batch in track(
            windows.split(min(step, len(windows))), f"Perplexity ({protocol})", total=-(-len(windows) // step)
        ):
            losses.append(_window_losses(model, batch))
            _check_finite(losses[-1], sum(map(len, losses)) - len(batch), size, source)
    return build_result(torch.cat(losses), windows, protocol, source, sha256)


def build_result(losses: Tensor, windows: Tensor, protocol: str, source: str, text_sha256: str) -> PerplexityResult:
    """Return the result for the losses of all predictions, float64 [windows, T - 1], in windows, [windows, T]."""
    return PerplexityResult(
        average_perplexity(losses, protocol),
        len(windows),
        windows.numel(),
        protocol,
        windows.shape[1],
        source,
        text_sha256,
        interval(losses),
    )


def average_perplexity(losses: Tensor, protocol: str) -> float:
    """Return the perplexity of losses, float64 [windows, T - 1], as a protocol averages them."""
    mean = losses.mean(dim=1).mean() if protocol == "ppl-2048" else losses.sum() / losses.numel()
    return float(mean.exp())


def interval(losses: Tensor) -> tuple[float, float] | None:
    """Return the 95 % interval of the perplexity of losses, float64 [windows, T - 1]; None for less than two pieces."""
    pieces = losses.flatten().unfold(0, PIECE, PIECE).mean(1) if losses.numel() >= PIECE else losses.new_empty(0)
    if len(pieces) < 2:
        return None
    middle, half = float(losses.mean()), half_width(pieces.tolist())
    return math.exp(middle - half), math.exp(middle + half)


def window_size(protocol: str, window: int | None = None) -> int:
    """Return the tokens of a protocol's window, unless another number is given.

    Raises:
        ConfigError: an unknown protocol, or a window of fewer than 2 tokens.
    """
    if protocol not in WINDOWS:
        raise ConfigError(did_you_mean(protocol, WINDOWS, "perplexity protocol"))
    if window is not None and window < 2:
        raise ConfigError(f"window is {window}; it must be at least 2 tokens.")
    return window or WINDOWS[protocol]


def cut_windows(
    token_ids: Tensor | Sequence[int],
    size: int,
    max_tokens: int | None,
    max_windows: int | None,
    source: str,
    bos: int | None = None,
) -> Tensor:
    """Cut a token stream into windows, int64 [windows, size], and drop the tail; the options of :func:`perplexity`.

    Raises:
        ConfigError: ``max_tokens`` is below 1.
        DataError: less text than one window.
    """
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
    windows = used[: count * size].reshape(count, size)
    if bos is not None:
        windows = windows.clone()
        windows[:, 0] = bos
    return windows


def _check_model(model: nn.Module, windows: Tensor, size: int) -> None:
    config = getattr(model, "config", None)
    if config is None:
        return
    limit = position_limit(config) or size
    if limit < size:
        shorter = [name for name, tokens in WINDOWS.items() if tokens <= limit]
        advice = f"Use the protocol {' or '.join(shorter)}." if shorter else "No protocol has windows that short."
        raise DataError(f"A window has {size} tokens, but the model allows at most {shown(limit)}. {advice}")
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
