"""Text -> token windows: seeded sampling and disjoint splits.

A source is tokenised into one stream (documents in order, separated as its layout asks), and samples are
non-overlapping windows of that stream, at seeded random places (the papers draw random 2048-token windows).
Regularisation, recovery and test text must not share a token; :func:`split_disjoint` draws them so, and
:func:`assert_disjoint` checks it by content, whatever the sources are called. Instruction records may instead be
drawn whole, one a row, with the prompt masked (:class:`ExampleStream`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pyprune.config import DataConfig
from pyprune.encoding import Ids, check_chat_template, encode, render
from pyprune.errors import CheckpointError, ConfigError, DataError, shown
from pyprune.instructions import Example, encode_examples
from pyprune.limits import foreign_errors
from pyprune.progress import track
from pyprune.sources import (
    HUB_SOURCES,
    Corpus,
    DemoData,
    Document,
    packaged_text,
    read_corpus,
    read_documents,
    write_demo_data,
)
from pyprune.tokens import IGNORED, Tokens

__all__ = [
    "HUB_SOURCES", "Corpus", "DemoData", "Document", "packaged_text", "read_corpus", "read_documents",
    "write_demo_data",
    "ExampleStream", "SpanSet", "TokenSamples", "TokenStream",
    "assert_disjoint", "check_sequence_length", "check_token_ids", "sample_sequences", "shingle_hashes",
    "split_disjoint", "token_stream",
]  # fmt: skip

Mask = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

STREAM_TOKENS = 2**24
"""A stream stops after this many tokens unless more are asked for: 8,000 samples of 2,048 fit."""

PADDED_TOKENS = 2**30
"""Records drawn whole take 16 bytes for each of their tokens, padding included."""

SHINGLE = 64
"""Tokens in a row that two streams must share before the text counts as the same."""

BOILERPLATE = 4
"""A shingle found more often than this in one stream (a prompt header, a licence) identifies no passage."""

_DISTINCT = SHINGLE // 4
_BASE = 0xD1342543DE82EF95
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
    """Instruction records laid end to end, each as it is fed (:mod:`pyprune.instructions`), none of them twice.

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


@dataclass(frozen=True, eq=False)
class SpanSet:
    """Parts of a stream that are in use.

    Attributes:
        stream: the stream.
        spans: half-open (start, end) token positions.
    """

    stream: TokenStream
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, stream: TokenStream) -> SpanSet:
        """Return all of ``stream`` (test text is evaluated from beginning to end)."""
        return cls(stream, ((0, len(stream.tokens)),))

    def covered(self) -> Mask:
        """Return which tokens of the stream are in use, bool [N]."""
        mask = np.zeros(len(self.stream.tokens), dtype=np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def found_in(self, other: TokenStream) -> Mask:
        """Return which tokens of ``other`` are copies of tokens in use here, bool [len(other.tokens)].

        A token is a copy when both streams agree on at least ``SHINGLE`` tokens in a row around it, so a
        window of any length is found again exactly, in any file. Passages repeated all over a stream are
        left out.
        """
        covered = self.covered()
        if not covered.any():
            return np.zeros(len(other.tokens), dtype=np.bool_)
        same = self.stream.identity == other.identity
        mask = _copies(self.stream.tokens, covered, other.tokens, same)
        return mask | covered if same else mask


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Windows of equal length, or whole instruction records padded to it, drawn from one stream.

    Attributes:
        input_ids: int64 [samples, sequence_length]; ``IGNORED`` marks right padding.
        spans: where each window lies in its stream, in the order of the rows.
        fingerprints: SHA-256 of each window, without padding.
        labels: int64 [samples, sequence_length], ``IGNORED`` where nothing is to be predicted; None = every token
            counts.
    """

    input_ids: Tensor = field(repr=False)
    spans: SpanSet
    fingerprints: tuple[str, ...] = field(repr=False)
    labels: Tensor | None = field(repr=False, default=None)

    def __len__(self) -> int:
        return len(self.spans.spans)

    @property
    def tokens(self) -> Tokens:
        """What the training loop takes."""
        return Tokens(self.input_ids, self.input_ids if self.labels is None else self.labels)

    @classmethod
    def cut(cls, stream: TokenStream, spans: Sequence[tuple[int, int]]) -> TokenSamples:
        """Cut windows of equal length out of a stream."""
        rows = np.stack([stream.tokens[start:end] for start, end in spans])
        return cls(torch.from_numpy(rows), SpanSet(stream, tuple(spans)), _fingerprints(rows))

    @classmethod
    def pad(
        cls, stream: ExampleStream, chosen: Sequence[int], sequence_length: int, *, mask_prompt: bool
    ) -> TokenSamples:
        """Take whole examples, one a row, padded on the right."""
        ids = np.full((len(chosen), sequence_length), IGNORED, dtype=np.int64)
        labels = ids.copy()
        places = [stream.examples[i] for i in chosen]
        for row, (start, response, end) in enumerate(places):
            ids[row, : end - start] = stream.tokens[start:end]
            predicted = response if mask_prompt else start
            labels[row, predicted - start : end - start] = stream.tokens[predicted:end]
        spans = SpanSet(stream, tuple((start, end) for start, _, end in places))
        prints = _fingerprints(stream.tokens[start:end] for start, _, end in places)
        return cls(torch.from_numpy(ids), spans, prints, torch.from_numpy(labels))


def _fingerprints(rows: Iterable[Ids]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(row.tobytes()).hexdigest() for row in rows)


def token_stream(tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, needed: int | None = None) -> TokenStream:
    """Read and tokenise a source, without special tokens except those of its layout.

    Documents are separated by their layout's joiner; instruction records end with the eos token, and
    chat-templated documents carry their own marks. With layout "stream" instruction records are packed: a window may
    begin inside one, and all of its tokens are predicted. Layout "instructions" gives an :class:`ExampleStream`.

    Args:
        needed: tokens that must be available if the source has them; raises the limit ``STREAM_TOKENS``.

    Raises:
        DataError: see :func:`pyprune.sources.read_corpus`; a chat template is asked for and there is none that works;
            or the tokenizer fails.
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


def sample_sequences(
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    exclude: SpanSet | Sequence[SpanSet] = (),
) -> TokenSamples:
    """Draw ``config.samples`` non-overlapping windows of ``config.sequence_length`` tokens, or whole records, seeded.

    Args:
        exclude: text already in use; no drawn token is a copy of it.

    Raises:
        ConfigError: the options are invalid.
        DataError: the source cannot be read, or is too small (the message has both counts).
    """
    config.validate()
    stream = token_stream(tokenizer, config, needed=config.samples * config.sequence_length)
    return _draw(stream, config, [exclude] if isinstance(exclude, SpanSet) else list(exclude))


def _draw(stream: TokenStream, config: DataConfig, exclude: Sequence[SpanSet]) -> TokenSamples:
    free = _free(stream, exclude)
    if isinstance(stream, ExampleStream):
        return _draw_examples(stream, config, free)
    _check_room(stream, free, [config])
    lengths = [config.sequence_length] * config.samples
    placed = _place(free, lengths, _rng(config.seed))
    if placed is None:
        raise DataError(_too_small(stream, free, [config]))
    return TokenSamples.cut(stream, placed)


def _draw_examples(stream: ExampleStream, config: DataConfig, free: Mask) -> TokenSamples:
    usable = [i for i, (start, _, end) in enumerate(stream.examples) if free[start:end].all()]
    if len(usable) < config.samples:
        total = len(stream.examples)
        taken = "" if len(usable) == total else f", of which {len(usable)} are not used by another split"
        raise DataError(
            f"{stream.source!r} is too small: it has {total} distinct instruction records{taken}; "
            f"{config.samples} are asked for. Lower samples, or give more records."
        )
    if config.samples * config.sequence_length > PADDED_TOKENS:
        raise DataError(
            f"{config.samples} records, padded to sequence_length {config.sequence_length}, are more than "
            f"{PADDED_TOKENS:,} tokens, which is all that is held in memory. Lower sequence_length or samples."
        )
    chosen = _rng(config.seed).permutation(usable)[: config.samples]
    return TokenSamples.pad(stream, chosen.tolist(), config.sequence_length, mask_prompt=config.mask_prompt)


def _free(stream: TokenStream, exclude: Sequence[SpanSet]) -> Mask:
    free = np.ones(len(stream.tokens), dtype=np.bool_)
    for spans in exclude:
        free &= ~spans.found_in(stream)
    return free


def _check_room(stream: TokenStream, free: Mask, configs: Sequence[DataConfig]) -> None:
    """Refuse what cannot fit before anything is made for it: a billion samples are easily asked for."""
    if sum(c.samples * c.sequence_length for c in configs) > int(free.sum()):
        raise DataError(_too_small(stream, free, configs))


def _too_small(stream: TokenStream, free: Mask, configs: Sequence[DataConfig]) -> str:
    wanted = " and ".join(f"{c.samples} samples of {c.sequence_length} tokens" for c in configs)
    needed = sum(c.samples * c.sequence_length for c in configs)
    total, left = len(stream.tokens), int(free.sum())
    taken = "" if left == total else f", of which {left} are not used by another split"
    return (
        f"{stream.source!r} is too small: it has {total} tokens{taken}; {wanted} need {needed} tokens "
        "in unbroken, non-overlapping windows. Lower samples or sequence_length, or give more text."
    )


def _place(free: Mask, lengths: Sequence[int], rng: np.random.Generator) -> list[tuple[int, int]] | None:
    """Place windows without overlap at random places of the free runs; None if they do not fit.

    Windows are dealt to runs, longest first, with a chance proportional to how many still fit there; inside
    a run every arrangement has the same chance.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    starts, room = edges[::2], edges[1::2] - edges[::2]
    members: list[list[int]] = [[] for _ in starts]
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        weights = room // lengths[item]
        total = weights.sum()
        if total == 0:
            return None
        run = int(np.searchsorted(np.cumsum(weights), rng.integers(total), side="right"))
        members[run].append(item)
        room[run] -= lengths[item]
    spans: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for start, slack, items in zip(starts, room, members, strict=True):
        _spread(int(start), int(slack), items, lengths, rng, spans)
    return spans


def _spread(
    start: int,
    slack: int,
    items: list[int],
    lengths: Sequence[int],
    rng: np.random.Generator,
    spans: list[tuple[int, int]],
) -> None:
    """Fill in the spans of one run: its windows in random order, ``slack`` tokens spread between them."""
    order = rng.permutation(items) if items else ()
    gaps = np.sort(rng.integers(0, slack + 1, size=len(items)))
    used = start
    for item, gap in zip(order, gaps, strict=True):
        at = used + int(gap)
        spans[int(item)] = (at, at + lengths[int(item)])
        used += lengths[int(item)]


def split_disjoint(
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, DataConfig],
    *,
    reserved: Sequence[SpanSet] = (),
) -> dict[str, TokenSamples]:
    """Draw several sample sets that share no text, even when their sources coincide.

    Sets are drawn in the order of ``configs``, each as it would be drawn alone but around the ones before it,
    so adding a later set changes no earlier one. Only where that leaves too little unbroken text for a later
    set are the sets of one stream placed together.

    Args:
        configs: name of the use (for example "regularise", "recover") -> options.
        reserved: text that no set may touch (the test text: ``EvaluationText.spans``).

    Raises:
        ConfigError: invalid options, all of them together.
        DataError: a source cannot be read, or is too small for what is asked of it.
    """
    problems = [f"{name}: {p}" for name, config in configs.items() for p in config.problems()]
    if problems:
        raise ConfigError(problems)
    streams = _streams(tokenizer, configs)
    try:
        drawn = _draw_in_turn(streams, configs, reserved)
    except DataError:
        drawn = _draw_together(streams, configs, reserved)
    for a, b in combinations(drawn, 2):
        assert_disjoint(drawn[a], drawn[b], names=(a, b))
    return drawn


def _key(config: DataConfig) -> tuple[Any, ...]:
    cutoff = config.sequence_length if config.layout == "instructions" else None
    return (config.source, config.split, config.field, config.chat_template, config.layout, cutoff)


def _streams(tokenizer: PreTrainedTokenizerBase, configs: Mapping[str, DataConfig]) -> dict[str, TokenStream]:
    """Return each set's stream; one source is read once, as far as all its sets need it."""
    needed: dict[tuple[Any, ...], int] = {}
    for config in configs.values():
        needed[_key(config)] = needed.get(_key(config), 0) + config.samples * config.sequence_length
    read: dict[tuple[Any, ...], TokenStream] = {}
    for config in configs.values():
        key = _key(config)
        if key not in read:
            read[key] = token_stream(tokenizer, config, needed=needed[key])
    return {name: read[_key(config)] for name, config in configs.items()}


def _draw_in_turn(
    streams: Mapping[str, TokenStream], configs: Mapping[str, DataConfig], reserved: Sequence[SpanSet]
) -> dict[str, TokenSamples]:
    taken = list(reserved)
    drawn: dict[str, TokenSamples] = {}
    for name, config in configs.items():
        drawn[name] = _draw(streams[name], config, taken)
        taken.append(drawn[name].spans)
    return drawn


def _draw_together(
    streams: Mapping[str, TokenStream], configs: Mapping[str, DataConfig], reserved: Sequence[SpanSet]
) -> dict[str, TokenSamples]:
    groups: dict[str, list[str]] = {}
    for name, stream in streams.items():
        groups.setdefault(stream.identity, []).append(name)
    taken = list(reserved)
    drawn: dict[str, TokenSamples] = {}
    for names in groups.values():
        stream, members = streams[names[0]], [configs[name] for name in names]
        if isinstance(stream, ExampleStream):  # whole records waste nothing, so drawing in turn is the best there is
            for name in names:
                drawn[name] = _draw(stream, configs[name], taken)
                taken.append(drawn[name].spans)
            continue
        free = _free(stream, taken)
        _check_room(stream, free, members)
        lengths = [c.sequence_length for c in members for _ in range(c.samples)]
        placed = _place(free, lengths, _rng(*(c.seed for c in members)))
        if placed is None:
            raise DataError(_too_small(stream, free, members))
        for name, config in zip(names, members, strict=True):
            drawn[name] = TokenSamples.cut(streams[name], placed[: config.samples])
            placed = placed[config.samples :]
            taken.append(drawn[name].spans)
    return {name: drawn[name] for name in configs}


def assert_disjoint(a: TokenSamples, b: TokenSamples, *, names: tuple[str, str] = ("a", "b")) -> None:
    """Check by content that two sample sets share no text.

    Finds windows of the same text that overlap by as little as one token, also under different file names,
    and equal windows of any origin. Both sets must come from one tokenizer.

    Raises:
        DataError: how many windows of ``b`` are in ``a``, and where the first one lies.
    """
    copied = a.spans.found_in(b.spans.stream)
    shared = [i for i, (start, end) in enumerate(b.spans.spans) if copied[start:end].any()]
    if not shared:
        shared = _contained(a.input_ids.numpy(), b.input_ids.numpy())
    if shared:
        start, end = b.spans.spans[shared[0]]
        raise DataError(
            f"{names[0]} and {names[1]} are not disjoint: {len(shared)} of {len(b)} windows of {names[1]} "
            f"({b.spans.stream.source!r}, the first at tokens {start} to {end}) hold text of {names[0]} "
            f"({a.spans.stream.source!r}). Use other text for one of them, or draw both with split_disjoint."
        )


def _contained(a: Ids, b: Ids) -> list[int]:
    """Return the rows of ``b`` that contain, or are contained in, a row of ``a``."""
    size = min(a.shape[1], b.shape[1])
    in_a, in_b = (shingle_hashes(rows, size) for rows in (a, b))
    hit = np.isin(in_b, in_a)
    return [int(i) for i in np.flatnonzero(hit.any(axis=1))]


def shingle_hashes(tokens: Ids, size: int) -> Hashes:
    """Return a 64-bit polynomial hash of every ``size`` tokens in a row, along the last axis.

    Args:
        tokens: int64 [..., N] with N >= size.
        size: tokens in a shingle.

    Returns:
        uint64 [..., N - size + 1]; the same on every machine, so that hashes can be stored.
    """
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return _combine(mixed ^ (mixed >> np.uint64(29)), size)


def _combine(mixed: Hashes, size: int) -> Hashes:
    """Hash by doubling: the hash of 2m tokens is made of two hashes of m tokens."""
    if size == 1:
        return mixed
    half = size // 2
    parts = _combine(mixed, half)
    count = mixed.shape[-1] - size + 1
    first, second = parts[..., :count], parts[..., half : half + count]
    result = first * np.uint64(pow(_BASE, half, 2**64)) + second
    return result * np.uint64(_BASE) + mixed[..., size - 1 :] if size % 2 else result


def _among(hashes: Hashes, wanted: Hashes) -> Ids:
    """Return the positions of ``hashes`` whose value occurs in ``wanted``.

    A hashed bit table drops nearly all others before the exact comparison, which has to sort.
    """
    bits = min(max(int(8 * len(wanted)).bit_length(), 10), 27)
    shift = np.uint64(64 - bits)
    table = np.zeros(2**bits, dtype=np.bool_)
    table[(wanted * np.uint64(_BASE)) >> shift] = True
    likely = np.flatnonzero(table[(hashes * np.uint64(_BASE)) >> shift])
    return likely[np.isin(hashes[likely], wanted)]


def _copies(tokens: Ids, covered: Mask, other: Ids, same: bool) -> Mask:
    """Return which tokens of ``other`` align with a covered token inside a shared run of shingle length.

    Args:
        same: ``other`` is the same stream, so that a passage is not compared with itself.
    """
    mask = np.zeros(len(other), dtype=np.bool_)
    size = min(SHINGLE, len(tokens), len(other))
    if size == 0:
        return mask
    here, there = shingle_hashes(tokens, size), shingle_hashes(other, size)
    sums = np.concatenate(([0], np.cumsum(covered)))
    touched = sums[size:] > sums[:-size]
    at = _among(there, here[touched])
    where = _among(here, there[at])
    order = where[np.argsort(here[where], kind="stable")]
    first = np.searchsorted(here[order], there[at], side="left")
    count = np.searchsorted(here[order], there[at], side="right") - first
    count[_common(at, count, size, len(other))] = 0
    if same:
        count[touched[at]] = 0
    for nth in range(int(count.max(initial=0))):
        chosen = np.flatnonzero(count > nth)
        match, position = order[first[chosen] + nth], at[chosen]
        for offset in range(size):
            mask[position[covered[match + offset]] + offset] = True
    return mask


def _common(at: Ids, count: Ids, size: int, length: int) -> Mask:
    """Return which of the shared shingles identify no passage: those made mostly of frequent shingles.

    The end of a prompt header with the first tokens of what follows is rare as a shingle, and says no more than
    the header does; so a shingle needs some tokens that no frequent shingle covers.
    """
    frequent = at[count > BOILERPLATE]
    steps = np.bincount(frequent, minlength=length + 1) - np.bincount(frequent + size, minlength=length + 1)
    own = np.concatenate(([0], np.cumsum(np.cumsum(steps[:length]) == 0)))
    few: Mask = own[at + size] - own[at] < min(_DISTINCT, size)
    return few | (count > BOILERPLATE)


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


def _rng(*seeds: int) -> np.random.Generator:
    """Return a generator for any integers (numpy itself refuses negative ones)."""
    return np.random.default_rng([seed % 2**64 for seed in seeds])
