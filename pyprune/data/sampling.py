"""Text -> samples: seeded, and disjoint between uses.

A source is tokenised into one stream: its documents in order, with the separator of its layout. Samples are windows of
that stream at seeded random places (the papers draw random 2048-token windows). They do not overlap unless the options
allow it. Regularisation, recovery and test text must not share a token: :func:`split_disjoint` draws them apart, and
:func:`assert_disjoint` compares their content. Each text of a mixture gives its share of the samples. Instruction
records may instead be drawn whole, one a row, with the prompt masked (:class:`~pyprune.data.stream.ExampleStream`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pyprune.config.data import DataConfig
from pyprune.data.encoding import Ids, bos_id
from pyprune.data.overlap import SpanSet, shingle_hashes
from pyprune.data.placement import Mask, Span, Windows, divide, place_together
from pyprune.data.samples import TokenSamples as TokenSamples
from pyprune.data.stream import ExampleStream, StreamPart, TokenStream, token_stream, windows_cross
from pyprune.errors import ConfigError, DataError

PADDED_TOKENS = 2**30
"""Records drawn whole take 16 bytes for each of their tokens, padding included."""


def sample_sequences(
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    exclude: SpanSet | Sequence[SpanSet] = (),
    bos: bool = False,
) -> TokenSamples:
    """Draw ``config.samples`` windows of ``config.sequence_length`` tokens, or whole records, seeded.

    Args:
        exclude: text already in use; no drawn token is a copy of it.
        bos: whether the model's family begins its windows with the bos token; it decides if ``config.bos`` is None.

    Raises:
        ConfigError: the options are invalid.
        DataError: the source cannot be read, or is too small (the message has both counts).
    """
    config.validate()
    first = bos_id(tokenizer, config.bos, usual=bos)
    stream = token_stream(tokenizer, config, needed=config.samples * config.sequence_length, bos=first)
    drawn = _draw(stream, config, [exclude] if isinstance(exclude, SpanSet) else list(exclude))
    return drawn if first is None else drawn.beginning_with(first)


def _draw(stream: TokenStream, config: DataConfig, exclude: Sequence[SpanSet]) -> TokenSamples:
    free = _free(stream, exclude)
    if isinstance(stream, ExampleStream):
        return _draw_examples(stream, config, free)
    return _cut(stream, config, _place(stream, free, [config])[0])


def _draw_examples(stream: ExampleStream, config: DataConfig, free: Mask) -> TokenSamples:
    usable = [i for i, (start, _, end) in enumerate(stream.examples) if free[start:end].all()]
    if len(usable) < config.samples:
        total = len(stream.examples)
        if total and not usable:
            raise DataError(_all_used(stream.source))
        taken = "" if len(usable) == total else f", of which {len(usable)} are not used by another split"
        raise DataError(
            f"{stream.source!r} is too small: it has {total} distinct instruction records{taken}; "
            f"{config.samples} are asked for. Lower samples, or give more records."
        )
    if config.samples * config.sequence_length > PADDED_TOKENS:
        raise DataError(
            f"{config.samples} records, padded to sequence_length {config.sequence_length}, are more than "
            f"{PADDED_TOKENS:,} tokens, the most that is held in memory. Lower sequence_length or samples."
        )
    chosen = _rng(config.seed).permutation(usable)[: config.samples]
    return TokenSamples.pad(stream, chosen.tolist(), config.sequence_length, mask_prompt=config.mask_prompt)


def _free(stream: TokenStream, exclude: Sequence[SpanSet]) -> Mask:
    free = np.ones(len(stream.tokens), dtype=np.bool_)
    for spans in exclude:
        free &= ~spans.copies_in(stream)
    return free


def _place(stream: TokenStream, free: Mask, configs: Sequence[DataConfig]) -> list[list[Span]]:
    """Place the windows of several sets in one stream; return those of each set, part after part."""
    rng = _rng(*(config.seed for config in configs))
    spans: list[list[Span]] = [[] for _ in configs]
    for number, part in enumerate(stream.parts):
        inside = _inside(free, part)
        sets = [Windows(c.part_samples[number], c.sequence_length, c.shared_tokens) for c in configs]
        apart = len(configs) > 1 and any(w.shared for w in sets)
        # A billion samples are easily typed: too many are refused before memory is allocated for them.
        fits = sum(w.tokens for w in sets) <= int(inside.sum())
        if not fits or not (_place_apart if apart else _place_together)(stream, inside, sets, rng, spans):
            raise DataError(_too_small(part, inside, sets, within=len(stream.breaks) > 0))
    return spans


def _place_together(
    stream: TokenStream, free: Mask, sets: Sequence[Windows], rng: np.random.Generator, spans: list[list[Span]]
) -> bool:
    """Add the windows of each set to its ``spans``; return whether they fit."""
    placed = place_together(free, sets, rng, stream.breaks)
    for mine, new in zip(spans, placed or [], strict=placed is not None):
        mine += new
    return placed is not None


def _place_apart(
    stream: TokenStream, free: Mask, sets: Sequence[Windows], rng: np.random.Generator, spans: list[list[Span]]
) -> bool:
    """Place the windows of each set in a separate stretch, because overlapping windows would be everywhere.

    Text that repeats itself may be in two stretches, so the text of other sets is left out by its content.
    """
    for number, stretch in enumerate(divide(free, [w.tokens for w in sets], rng)):
        others = tuple(span for i, taken in enumerate(spans) if i != number for span in taken)
        room = stretch & ~SpanSet(stream, others).copies_in(stream)
        if not _place_together(stream, room, [sets[number]], rng, [spans[number]]):
            return False
    return True


def _inside(free: Mask, part: StreamPart) -> Mask:
    inside = np.zeros_like(free)
    inside[part.start : part.end] = free[part.start : part.end]
    return inside


def _cut(stream: TokenStream, config: DataConfig, spans: Sequence[Span]) -> TokenSamples:
    """Cut the windows out, those of a mixture in a seeded order."""
    if len(stream.parts) > 1:
        order = _rng(config.seed, len(stream.parts)).permutation(len(spans))
        spans = [spans[i] for i in order]
    return TokenSamples.cut(stream, spans)


def _all_used(source: str) -> str:
    return f"All of {source!r} is used already: it is a test text, or another use draws all of it. Give another text."


def _too_small(part: StreamPart, free: Mask, sets: Sequence[Windows], *, within: bool) -> str:
    samples = " and ".join(f"{w.count} samples of {w.length} tokens" for w in sets)
    total, left = part.end - part.start, int(free.sum())
    if total and not left:
        return _all_used(part.source)
    taken = "" if left == total else f", of which {left} are not used by another split"
    shared = max(w.shared for w in sets)
    overlap = f"windows that share at most {shared} tokens" if shared else "non-overlapping windows"
    place = ", each inside one document" if within else ""
    advice = "" if shared else ", let the windows overlap (option overlap)"
    return (
        f"{part.source!r} is too small: it has {total} tokens{taken}; {samples} need {sum(w.tokens for w in sets)} "
        f"tokens in unbroken, {overlap}{place}. Lower samples or sequence_length{advice}, or give more text."
    )


def split_disjoint(
    tokenizer: PreTrainedTokenizerBase,
    configs: Mapping[str, DataConfig],
    *,
    bos: bool = False,
) -> dict[str, TokenSamples]:
    """Draw several sample sets that share no text, even when their sources coincide.

    Sets are drawn in the order of ``configs``, each as if alone but around the ones before it, so adding a later set
    changes no earlier one. If that leaves too little unbroken text for a later set, the sets of one stream are placed
    together.

    Args:
        configs: name of the use (for example "regularise", "recover") -> options.
        bos: see :func:`sample_sequences`.

    Raises:
        ConfigError: invalid options, all of them together.
        DataError: a source cannot be read, or is too small for the samples.
    """
    _check(configs)
    first = {name: bos_id(tokenizer, config.bos, usual=bos) for name, config in configs.items()}
    streams = _streams(tokenizer, configs, first)
    try:
        drawn = _draw_in_turn(streams, configs)
    except DataError:
        drawn = _draw_together(streams, configs)
    for a, b in combinations(drawn, 2):
        assert_disjoint(drawn[a], drawn[b], names=(a, b))
    return {name: s if (token := first[name]) is None else s.beginning_with(token) for name, s in drawn.items()}


def _check(configs: Mapping[str, DataConfig]) -> None:
    problems: list[str] = []
    for name, config in configs.items():
        try:
            config.validate()
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)


def _key(config: DataConfig, bos: int | None) -> tuple[Any, ...]:
    """Return the options that decide the stream of a set."""
    inside = not all(windows_cross(config, source) for source in config.sources)
    records = config.layout == "instructions"
    length = config.sequence_length if inside or records else None
    return (config.parts, config.chat_template, config.layout, config.cross_documents, length, bos if records else None)


def _streams(
    tokenizer: PreTrainedTokenizerBase, configs: Mapping[str, DataConfig], bos: Mapping[str, int | None]
) -> dict[str, TokenStream]:
    """Return each set's stream; one source is read once, as far as all its sets need it."""
    keys = {name: _key(config, bos[name]) for name, config in configs.items()}
    needed: dict[tuple[Any, ...], int] = {}
    for name, config in configs.items():
        needed[keys[name]] = needed.get(keys[name], 0) + config.samples * config.sequence_length
    read: dict[tuple[Any, ...], TokenStream] = {}
    for name, config in configs.items():
        key = keys[name]
        if key not in read:
            read[key] = token_stream(tokenizer, config, needed=needed[key], bos=bos[name])
    return {name: read[keys[name]] for name in configs}


def _draw_in_turn(streams: Mapping[str, TokenStream], configs: Mapping[str, DataConfig]) -> dict[str, TokenSamples]:
    taken: list[SpanSet] = []
    drawn: dict[str, TokenSamples] = {}
    for name, config in configs.items():
        drawn[name] = _draw(streams[name], config, taken)
        taken.append(drawn[name].spans)
    return drawn


def _draw_together(streams: Mapping[str, TokenStream], configs: Mapping[str, DataConfig]) -> dict[str, TokenSamples]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, stream in streams.items():
        groups.setdefault((stream.sha256, *(part.end for part in stream.parts)), []).append(name)
    taken: list[SpanSet] = []
    drawn: dict[str, TokenSamples] = {}
    for names in groups.values():
        stream = streams[names[0]]
        if isinstance(stream, ExampleStream):  # whole records waste nothing: drawing in turn is best
            for name in names:
                drawn[name] = _draw(stream, configs[name], taken)
                taken.append(drawn[name].spans)
            continue
        placed = _place(stream, _free(stream, taken), [configs[name] for name in names])
        for name, spans in zip(names, placed, strict=True):
            drawn[name] = _cut(streams[name], configs[name], spans)
            taken.append(drawn[name].spans)
    return {name: drawn[name] for name in configs}


def assert_disjoint(a: TokenSamples, b: TokenSamples, *, names: tuple[str, str] = ("a", "b")) -> None:
    """Check by content that two sample sets share no text.

    Finds windows of the same text that overlap by as little as one token, also under different file names,
    and equal windows of any origin. Both sets must come from one tokenizer.

    Raises:
        DataError: with the number of windows of ``b`` in ``a``, and the position of the first one.
    """
    copied = a.spans.copies_in(b.spans.stream)
    shared = [i for i, (start, end) in enumerate(b.spans.spans) if copied[start:end].any()]
    if not shared:
        shared = _shared_rows(a.as_read, b.as_read)
    if shared:
        start, end = b.spans.spans[shared[0]]
        raise DataError(
            f"{names[0]} and {names[1]} share text: {len(shared)} of {len(b)} windows of {names[1]} "
            f"({b.spans.stream.source!r}, the first at tokens {start} to {end}) are in {names[0]} "
            f"({a.spans.stream.source!r}). Use other text for one, or draw both with split_disjoint."
        )


def _shared_rows(a: Ids, b: Ids) -> list[int]:
    """Return the rows of ``b`` that contain, or are contained in, a row of ``a``."""
    size = min(a.shape[1], b.shape[1])
    in_a, in_b = (shingle_hashes(rows, size) for rows in (a, b))
    hit = np.isin(in_b, in_a)
    return [int(i) for i in np.flatnonzero(hit.any(axis=1))]


def _rng(*seeds: int) -> np.random.Generator:
    """Return a generator for any integers (numpy itself refuses negative ones)."""
    return np.random.default_rng([seed % 2**64 for seed in seeds])
