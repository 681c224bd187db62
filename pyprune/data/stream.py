"""A source, or a mixture of several, as one row of tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pyprune.config.data import DataConfig, MixturePart
from pyprune.data.documents import Corpus, Document
from pyprune.data.encoding import Ids, check_chat_template, encode, encode_each, join_ids, render
from pyprune.data.instructions import Example, encode_examples
from pyprune.data.placement import NO_BREAKS
from pyprune.data.sources import crosses_documents, read_corpus
from pyprune.errors import CheckpointError, DataError, shown
from pyprune.runtime.limits import foreign_errors
from pyprune.runtime.progress import track

STREAM_TOKENS = 2**24
"""A stream stops after this many tokens unless more are requested: 8,000 samples of 2,048 fit."""
_PROGRESS_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class StreamPart:
    """One text in a stream: its tokens are ``tokens[start:end]``.

    Attributes:
        source: as the user wrote it.
        kind: label of its samples.
        start, end: half-open token positions.
    """

    source: str
    kind: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class TokenStream:
    """One source, or the texts of a mixture one after the other, as one row of tokens.

    Attributes:
        source: as the user wrote it.
        tokens: int64 [N].
        sha256: of the tokens, hexadecimal, so that one text under two names is recognised.
        parts: the texts, in order; no window reaches from one into the next.
        breaks: positions that no window may cross, int64, ascending (where one document ends and the next begins, if
            windows do not cross documents).
    """

    source: str
    tokens: Ids = field(repr=False)
    sha256: str
    parts: tuple[StreamPart, ...] = field(repr=False, kw_only=True)
    breaks: Ids = field(repr=False, default_factory=lambda: NO_BREAKS, kw_only=True)

    @classmethod
    def of(
        cls, source: str, tokens: Ids | Tensor | Sequence[int], *, kind: str | None = None, breaks: Ids = NO_BREAKS
    ) -> TokenStream:
        """Build a stream of one text from its token ids [N]; its kind is the source unless one is given."""
        ids = np.ascontiguousarray(np.asarray(tokens, dtype=np.int64).reshape(-1))
        part = StreamPart(source, kind or source, 0, len(ids))
        return TokenStream(source, ids, _digest(ids), parts=(part,), breaks=breaks)

    def kind_at(self, position: int) -> str:
        """Return the kind of text at a token position."""
        return next(part.kind for part in self.parts if position < part.end)


def _digest(ids: Ids) -> str:
    return hashlib.sha256(ids.data).hexdigest()


@dataclass(frozen=True, eq=False)
class ExampleStream(TokenStream):
    """Instruction records laid end to end, each in its fed form (:mod:`pyprune.data.instructions`), none of them twice.

    Attributes:
        examples: (start, response, end) of each record: its tokens are ``tokens[start:end]``, the predicted ones
            ``tokens[response:end]``.
    """

    examples: tuple[tuple[int, int, int], ...] = field(repr=False, default=(), kw_only=True)

    @classmethod
    def join(cls, source: str, examples: Iterable[Example]) -> ExampleStream:
        """Lay examples end to end, leaving out those whose tokens came before."""
        distinct = {example.ids.tobytes(): example for example in examples}
        places: list[tuple[int, int, int]] = []
        start = 0
        for example in distinct.values():
            places.append((start, start + example.response, start + len(example.ids)))
            start += len(example.ids)
        stream = TokenStream.of(source, join_ids(e.ids for e in distinct.values()))
        return cls(source, stream.tokens, stream.sha256, parts=stream.parts, examples=tuple(places))


def token_stream(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, needed: int | None = None, bos: int | None = None
) -> TokenStream:
    """Read and tokenise a source, or every text of a mixture, without special tokens except those of its layout.

    Documents are separated by their layout's joiner; instruction records end with the eos token, and
    chat-templated documents carry their own marks. With layout "stream" instruction records are packed: a window may
    begin inside one, and all of its tokens are predicted. Layout "instructions" gives an :class:`ExampleStream`.
    If windows do not cross documents, those that are too short for one are left out, and a break alone separates the
    others.

    Args:
        needed: tokens that must be available if the source has them; raises the limit ``STREAM_TOKENS``.
        bos: id of a token that every instruction record begins with; None = the habit of the tokenizer.

    Raises:
        DataError: see :func:`pyprune.data.sources.read_corpus`; no working chat template for
            ``chat_template``; or the tokenizer fails.
    """
    if config.layout == "instructions":
        return _example_stream(tokenizer, config, bos)
    total = sum(part.share for part in config.parts)
    streams: list[TokenStream] = []
    for part in config.parts:
        share = part.share / total
        required = round((needed or 0) * share) + (config.sequence_length if len(config.parts) > 1 else 0)
        limit = max(round(STREAM_TOKENS * share), required)
        streams.append(_text_stream(tokenizer, config, part, limit, required))
    return streams[0] if len(streams) == 1 else _end_to_end(config.source, streams)


def _end_to_end(source: str, streams: Sequence[TokenStream]) -> TokenStream:
    starts = [0, *np.cumsum([len(stream.tokens) for stream in streams])]
    parts = tuple(
        replace(part, start=int(start) + part.start, end=int(start) + part.end)
        for start, stream in zip(starts, streams, strict=False)
        for part in stream.parts
    )
    breaks = np.concatenate([stream.breaks + start for start, stream in zip(starts, streams, strict=False)])
    tokens = np.concatenate([stream.tokens for stream in streams])
    return TokenStream(source, tokens, _digest(tokens), parts=parts, breaks=breaks)


def _text_stream(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, part: MixturePart, limit: int, needed: int
) -> TokenStream:
    """Tokenise one text for windows: at most ``limit`` tokens, with windows of ``needed`` if it has them."""
    corpus = read_corpus(part.source, part.split, part.field)
    if config.chat_template:
        check_chat_template(tokenizer, corpus.name)
    documents: Iterable[Document] = corpus.documents
    if sum(len(document.text) for document in documents) > _PROGRESS_CHARACTERS:
        documents = track(documents, f"Tokenising {part.source}", total=len(corpus.documents))
    crosses = windows_cross(config, part.source)
    texts = _layout(tokenizer, corpus, documents, config.chat_template, corpus.joiner if crosses else "")
    if crosses:
        return TokenStream.of(part.source, join_ids(encode(tokenizer, texts, part.source), limit), kind=part.label)
    breaks: list[int] = []
    each = encode_each(tokenizer, texts, part.source)
    ids = join_ids(_long_enough(each, config.sequence_length, limit, needed, breaks))
    return TokenStream.of(part.source, ids, kind=part.label, breaks=np.array(breaks, dtype=np.int64))


def corpus_stream(tokenizer: PreTrainedTokenizerBase, corpus: Corpus) -> TokenStream:
    """Tokenise a whole text in one row, as for calibration with windows that cross documents."""
    texts = _layout(tokenizer, corpus, corpus.documents, False, corpus.joiner)
    return TokenStream.of(corpus.name, join_ids(encode(tokenizer, texts, corpus.name)))


def windows_cross(config: DataConfig, source: str) -> bool:
    """Return whether the windows of one source run on from one document into the next."""
    return crosses_documents(source) if config.cross_documents is None else config.cross_documents


def _long_enough(documents: Iterable[Ids], length: int, limit: int, needed: int, breaks: list[int]) -> Iterator[Ids]:
    """Yield documents that hold a whole window, until ``limit`` tokens are read and windows of ``needed`` are there.

    The start of each is added to ``breaks``.
    """
    read = kept = room = 0
    for ids in documents:
        read += len(ids)
        if len(ids) >= length:
            breaks.append(kept)
            kept += len(ids)
            room += len(ids) - len(ids) % length
            yield ids
        if read >= limit and room >= needed:
            return


def _layout(
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    documents: Iterable[Document],
    chat_template: bool,
    separator: str,
) -> Iterator[str]:
    """Yield the text of each document followed by its separator, made only when it is needed."""
    eos = tokenizer.eos_token if corpus.instructions else None
    end = eos if isinstance(eos, str) else separator
    for document in documents:
        if not chat_template:
            yield document.text + end
        elif document.text.strip():
            yield render(tokenizer, document.turns, corpus.name)


def _example_stream(tokenizer: PreTrainedTokenizerBase, config: DataConfig, bos: int | None) -> ExampleStream:
    corpus = read_corpus(config.source, config.split, config.field)
    if config.chat_template:
        check_chat_template(tokenizer, corpus.name)
    examples = encode_examples(
        tokenizer, corpus, cutoff=config.sequence_length, chat_template=config.chat_template, bos=bos
    )
    stream = ExampleStream.join(config.source, examples)
    if not stream.examples:
        raise DataError(
            f"No record of {config.source!r} leaves a response to predict in {config.sequence_length} tokens (the "
            "cutoff); raise sequence_length, unless the records have no responses at all."
        )
    return stream


def position_limit(model_config: Any) -> float | None:
    """Return the most positions that a model has; None if its configuration names no limit.

    Args:
        model_config: a Transformers config (a text sub-config is looked into).

    Raises:
        CheckpointError: the limit is no number, or the config has no text part.
    """
    return min(_position_limits(model_config).values(), default=None)


def _position_limits(model_config: Any) -> dict[str, float]:
    """Name in the configuration -> positions."""
    limits: dict[str, float] = {}
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(_text_config(model_config), name, None)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise CheckpointError(
                f"The model's config.json gives {name} as {shown(limit)}; it must be a whole number. Correct it."
            )
        if 0 < limit < math.inf:
            limits[name] = limit
    return limits


def check_sequence_length(model_config: Any, length: int) -> None:
    """Refuse sequences longer than the model's positions.

    Args:
        model_config: see :func:`position_limit`.
        length: tokens in a sequence.

    Raises:
        DataError: ``length`` is above the model's limit.
        CheckpointError: see :func:`position_limit`.
    """
    for name, limit in _position_limits(model_config).items():
        if limit < length:
            raise DataError(
                f"The sequence length is {length} tokens, but the model allows at most {shown(limit)} ({name}). "
                f"Choose {shown(limit)} or less."
            )


def check_token_ids(model_config: Any, ids: Tensor) -> None:
    """Refuse token ids that the model has no embedding for.

    Args:
        model_config: a Transformers config.
        ids: int64, any shape, without padding.

    Raises:
        DataError: the message names the id.
    """
    vocabulary = getattr(_text_config(model_config), "vocab_size", None)
    smallest, largest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if smallest < 0:
        raise DataError(
            f"The text has token id {smallest}; ids start at 0. Use the tokenizer that belongs to the model."
        )
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise DataError(
            f"The text has token id {largest}, but the model's vocabulary has {vocabulary} entries. "
            "Use the tokenizer that belongs to the model."
        )


def _text_config(model_config: Any) -> Any:
    if not hasattr(model_config, "get_text_config"):
        return model_config
    with foreign_errors(CheckpointError, "The model's config.json has no text part", "Use a causal language model."):
        return model_config.get_text_config()
