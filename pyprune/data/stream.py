"""A source as one row of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pyprune.config.data import DataConfig
from pyprune.data.encoding import Ids, check_chat_template, encode, render
from pyprune.data.instructions import Example, encode_examples
from pyprune.data.sources import Corpus, Document, read_corpus
from pyprune.errors import CheckpointError, DataError, shown
from pyprune.runtime.limits import foreign_errors
from pyprune.runtime.progress import track

STREAM_TOKENS = 2**24
"""A stream stops after this many tokens unless more are requested: 8,000 samples of 2,048 fit."""
_PROGRESS_CHARACTERS = 4_000_000


@dataclass(frozen=True, eq=False)
class TokenStream:
    """One source as one row of tokens.

    Attributes:
        source: as the user wrote it.
        tokens: int64 [N].
        identity: SHA-256 of the tokens, so that one text under two names is recognised.
    """

    source: str
    tokens: Ids = field(repr=False)
    identity: str

    @classmethod
    def of(cls, source: str, tokens: Ids | Tensor | Sequence[int]) -> TokenStream:
        """Build a stream from token ids [N]."""
        ids = np.ascontiguousarray(np.asarray(tokens, dtype=np.int64).reshape(-1))
        return cls(source, ids, hashlib.sha256(ids.tobytes()).hexdigest())


@dataclass(frozen=True, eq=False)
class ExampleStream(TokenStream):
    """Instruction records laid end to end, each as it is fed (:mod:`pyprune.data.instructions`), none of them twice.

    Attributes:
        examples: (start, response, end) of each record: its tokens are ``tokens[start:end]``, those to be predicted
            ``tokens[response:end]``.
    """

    examples: tuple[tuple[int, int, int], ...] = field(repr=False, default=())

    @classmethod
    def join(cls, source: str, examples: Iterable[Example]) -> ExampleStream:
        """Lay examples end to end, leaving out those whose tokens came before."""
        distinct = {example.ids.tobytes(): example for example in examples}
        places: list[tuple[int, int, int]] = []
        start = 0
        for example in distinct.values():
            places.append((start, start + example.response, start + len(example.ids)))
            start += len(example.ids)
        nothing = np.zeros(0, dtype=np.int64)
        stream = TokenStream.of(source, np.concatenate([nothing, *(e.ids for e in distinct.values())]))
        return cls(stream.source, stream.tokens, stream.identity, tuple(places))


def token_stream(tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, needed: int | None = None) -> TokenStream:
    """Read and tokenise a source, without special tokens except those of its layout.

    Documents are separated by their layout's joiner; instruction records end with the eos token, and
    chat-templated documents carry their own marks. With layout "stream" instruction records are packed: a window may
    begin inside one, and all of its tokens are predicted. Layout "instructions" gives an :class:`ExampleStream`.

    Args:
        needed: tokens that must be available if the source has them; raises the limit ``STREAM_TOKENS``.

    Raises:
        DataError: see :func:`pyprune.data.sources.read_corpus`; a chat template is to be used and there is none
            that works; or the tokenizer fails.
    """
    corpus = read_corpus(config.source, config.split, config.field)
    if config.chat_template:
        check_chat_template(tokenizer, corpus.name)
    if config.layout == "instructions":
        return _example_stream(tokenizer, corpus, config)
    documents: Iterable[Document] = corpus.documents
    if sum(len(document.text) for document in documents) > _PROGRESS_CHARACTERS:
        documents = track(documents, f"Tokenising {config.source}", total=len(corpus.documents))
    limit = max(STREAM_TOKENS, needed or 0)
    parts = [np.zeros(0, dtype=np.int64)]
    count = 0
    for ids in encode(tokenizer, _layout(tokenizer, corpus, documents, config.chat_template), config.source):
        parts.append(ids)
        count += len(ids)
        if count >= limit:
            break
    return TokenStream.of(config.source, np.concatenate(parts)[:limit])


def _layout(
    tokenizer: PreTrainedTokenizerBase, corpus: Corpus, documents: Iterable[Document], chat_template: bool
) -> Iterator[str]:
    """Yield the text of each document followed by its separator, made only when it is needed."""
    eos = tokenizer.eos_token if corpus.instructions else None
    end = eos if isinstance(eos, str) else corpus.joiner
    for document in documents:
        if not chat_template:
            yield document.text + end
        elif document.text.strip():
            yield render(tokenizer, document.turns, corpus.name)


def _example_stream(tokenizer: PreTrainedTokenizerBase, corpus: Corpus, config: DataConfig) -> ExampleStream:
    examples = encode_examples(tokenizer, corpus, cutoff=config.sequence_length, chat_template=config.chat_template)
    stream = ExampleStream.join(config.source, examples)
    if not stream.examples:
        raise DataError(
            f"No record of {config.source!r} leaves a response to predict in {config.sequence_length} tokens (the "
            "cutoff); raise sequence_length, unless the records have no responses at all."
        )
    return stream


def check_sequence_length(model_config: Any, length: int) -> None:
    """Refuse sequences longer than the model's positions.

    Args:
        model_config: a Transformers config (a text sub-config is looked into).
        length: tokens in a sequence.

    Raises:
        DataError: ``length`` is above the model's limit.
        CheckpointError: the limit is no number, or the config has no text part.
    """
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(_text_config(model_config), name, None)
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise CheckpointError(
                f"The model's config.json gives {name} as {shown(limit)}; it must be a whole number. Correct it."
            )
        if 0 < limit < length:
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
