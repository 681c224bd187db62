"""Text -> token windows: seeded sampling and disjoint splits.

A source is tokenised into one stream (documents in order, separated as its layout asks), and samples are
non-overlapping windows of that stream, at seeded random places (the papers draw random 2048-token windows).
Regularisation, recovery and test text must not share a token; :func:`split_disjoint` draws them so, and
:func:`assert_disjoint` checks it by content, whatever the sources are called. Instruction records may instead be
drawn whole, one a row, with the prompt masked (:class:`ExampleStream`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pyprune.config.data import DataConfig
from pyprune.data.encoding import Ids
from pyprune.data.overlap import Mask, SpanSet, shingle_hashes
from pyprune.data.stream import ExampleStream, TokenStream, token_stream
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, DataError

PADDED_TOKENS = 2**30
"""Records drawn whole take 16 bytes for each of their tokens, padding included."""


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
    def tokens(self) -> Batch:
        """What the training loop takes."""
        return Batch(self.input_ids, self.input_ids if self.labels is None else self.labels)

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
    """Refuse what cannot fit before memory is allocated for it: a billion samples are easily typed."""
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
        DataError: a source cannot be read, or is too small for the samples wanted.
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


def _rng(*seeds: int) -> np.random.Generator:
    """Return a generator for any integers (numpy itself refuses negative ones)."""
    return np.random.default_rng([seed % 2**64 for seed in seeds])
