"""Windows that overlap inside one set, and windows that stay inside documents."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyprune.config.data import DataConfig
from pyprune.data import stream as streams
from pyprune.data.placement import Windows, divide, place_together
from pyprune.data.sampling import assert_disjoint, sample_sequences, split_disjoint
from pyprune.data.stream import token_stream
from pyprune.errors import ConfigError, DataError
from tests._support.tokenizer import tiny_tokenizer
from tests.data._fakes import fake_datasets, jsonl, prose, text_file

TOKENIZER = tiny_tokenizer()


# Overlap


def starts(samples: Any) -> list[int]:
    return sorted(start for start, _ in samples.spans.spans)


def test_more_windows_than_the_text_has_room_for(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(200)[:998])  # 1,000 tokens
    options: dict[str, Any] = {"source": source, "samples": 18, "sequence_length": 100}
    with pytest.raises(DataError, match=r"18 samples of 100 tokens need 1800.*windows overlap \(option overlap\)"):
        sample_sequences(TOKENIZER, DataConfig(**options))
    samples = sample_sequences(TOKENIZER, DataConfig(**options, overlap=0.5))
    assert samples.ids.shape == (18, 100)
    apart = [b - a for a, b in pairwise(starts(samples))]
    assert min(apart) >= 50
    assert min(apart) < 100, "some windows overlap"
    with pytest.raises(DataError, match=r"20 samples of 100 tokens need 1050 tokens.*share at most 50 tokens"):
        sample_sequences(TOKENIZER, DataConfig(**{**options, "samples": 20}, overlap=0.5))


@pytest.mark.parametrize("overlaps", [(0.5, 0.5), (0.5, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("words", [400, 4000])
def test_different_uses_never_share_a_token(overlaps: tuple[float, float], words: int, tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(words))
    total = len(token_stream(TOKENIZER, DataConfig(source)).tokens)
    counts = [int(0.45 * total) // (50 if overlap else 100) - 1 for overlap in overlaps]
    wanted = {
        name: DataConfig(source, samples=count, sequence_length=100, overlap=overlap, seed=i)
        for i, (name, count, overlap) in enumerate(zip(("regularise", "recover"), counts, overlaps, strict=True))
    }
    drawn = split_disjoint(TOKENIZER, wanted)
    assert [len(samples) for samples in drawn.values()] == counts
    a, b = (samples.spans.mask() for samples in drawn.values())
    assert not (a & b).any()
    assert_disjoint(drawn["regularise"], drawn["recover"])
    for samples, overlap in zip(drawn.values(), overlaps, strict=True):
        assert min(y - x for x, y in pairwise(starts(samples))) >= (50 if overlap else 100)


def test_text_that_repeats_itself_is_in_one_use_only(tmp_path: Path) -> None:
    passages = [prose(30, seed=i) for i in range(40)]
    source = text_file(tmp_path, "\n\n".join(passages + passages[20:25]))
    wanted = {
        name: DataConfig(source, samples=70, sequence_length=100, overlap=0.5, seed=seed)
        for seed, name in enumerate(("regularise", "recover"))
    }
    drawn = split_disjoint(TOKENIZER, wanted)
    texts = ["".join(TOKENIZER.decode(row) for row in samples.ids) for samples in drawn.values()]
    assert any(passage[50:90] in text for passage in passages[20:25] for text in texts), "what is there twice is used"
    assert_disjoint(drawn["regularise"], drawn["recover"])


@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=5),
    count=st.integers(1, 9),
    length=st.integers(2, 9),
    shared=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 200), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_placed_windows_keep_every_promise(
    runs: list[tuple[int, int]], count: int, length: int, shared: int, cuts: list[int], seed: int
) -> None:
    free = np.concatenate([np.repeat([False, True], run) for run in runs])
    breaks = np.array(sorted({cut % len(free) for cut in cuts}), dtype=np.int64)
    windows = Windows(count, length, min(shared, length - 1))
    placed = place_together(free, [windows], np.random.default_rng(seed), breaks)
    if placed is None:
        return
    spans = sorted(placed[0])
    assert len(spans) == count
    for start, end in spans:
        assert end - start == length
        assert free[start:end].all()
        assert not ((breaks > start) & (breaks < end)).any()
    assert all(b[0] - a[0] >= windows.pitch for a, b in pairwise(spans))


@given(
    free=st.lists(st.booleans(), min_size=1, max_size=300),
    needs=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_stretches_divide_the_free_tokens(free: list[bool], needs: list[int], seed: int) -> None:
    mask = np.array(free)
    stretches = divide(mask, needs, np.random.default_rng(seed))
    assert np.array_equal(np.sum(stretches, axis=0, dtype=int), mask.astype(int))
    for stretch, need in zip(stretches, needs, strict=True):
        assert abs(stretch.sum() - mask.sum() * need / sum(needs)) <= 1
        assert stretch.sum() >= need or mask.sum() < sum(needs)


def test_one_set_that_fits_is_placed() -> None:
    free = np.ones(1000, dtype=bool)
    for count in range(1, 10):
        for shared in (0, 10, 90):
            windows = Windows(count, 100, shared)
            assert place_together(free[: windows.tokens], [windows], np.random.default_rng(0)) is not None
            assert place_together(free[: windows.tokens - 1], [windows], np.random.default_rng(0)) is None


def test_overlap_is_for_windows() -> None:
    with pytest.raises(ConfigError, match=r"overlap is 0\.5, but layout 'instructions' takes whole records"):
        DataConfig(overlap=0.5, layout="instructions").validate()
    with pytest.raises(ConfigError, match=r"overlap is 1\.0; it must be below 1"):
        DataConfig(overlap=1.0).validate()
    with pytest.raises(ConfigError, match="cross_documents is set, but layout 'instructions'"):
        DataConfig(cross_documents=True, layout="instructions").validate()


# Documents


def records(folder: Path) -> tuple[str, list[str]]:
    texts = [prose(40, seed=i)[: 60 + 20 * (i % 8)] for i in range(40)]
    return jsonl(folder, [{"text": text} for text in texts]), texts


def test_windows_inside_documents(tmp_path: Path) -> None:
    source, texts = records(tmp_path)
    room = sum(len(text) // 100 for text in texts)
    config = DataConfig(source, samples=room, sequence_length=100, cross_documents=False)
    samples = sample_sequences(TOKENIZER, config)
    decoded = [TOKENIZER.decode(row) for row in samples.ids]
    assert all(any(window in text for text in texts) for window in decoded)
    assert len(set(decoded)) == room
    crossing = sample_sequences(TOKENIZER, DataConfig(source, samples=room, sequence_length=100))
    assert not all(any(TOKENIZER.decode(row) in text for text in texts) for row in crossing.ids)
    with pytest.raises(DataError, match=rf"{room + 1} samples of 100 tokens .*windows, each inside one document"):
        sample_sequences(TOKENIZER, replace(config, samples=room + 1))


def test_documents_that_hold_no_window_are_left_out(tmp_path: Path) -> None:
    source, texts = records(tmp_path)
    found = token_stream(TOKENIZER, DataConfig(source, sequence_length=100, cross_documents=False))
    long = [text for text in texts if len(text) >= 100]
    assert TOKENIZER.decode(found.tokens.tolist()) == "".join(long)
    assert found.breaks.tolist() == [sum(map(len, long[:i])) for i in range(len(long))]


def test_reading_stops_when_there_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STREAM_TOKENS", 300)
    source, texts = records(tmp_path)
    config = DataConfig(source, sequence_length=100, cross_documents=False)
    for needed, lengths in ((0, [100, 120]), (900, [100, 120, 140, 160, 180, 200, 100, 120])):
        found = token_stream(TOKENIZER, config, needed=needed)
        assert [len(text) for text in texts if text in TOKENIZER.decode(found.tokens.tolist())] == lengths


def test_bookcorpus_samples_are_parts_of_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": prose(40, seed=i)} for i in range(30)]
    fake_datasets(monkeypatch, rows)
    config = DataConfig("bookcorpus", samples=10, sequence_length=128)
    for row in sample_sequences(TOKENIZER, config).ids:
        assert any(TOKENIZER.decode(row) in record["text"] for record in rows)
    crossing = DataConfig("bookcorpus", samples=30, sequence_length=128, cross_documents=True)
    windows = [TOKENIZER.decode(row) for row in sample_sequences(TOKENIZER, crossing).ids]
    assert not all(any(window in record["text"] for record in rows) for window in windows)


def test_uses_of_one_source_with_other_lengths_stay_apart(tmp_path: Path) -> None:
    source, _ = records(tmp_path)
    wanted = {
        name: DataConfig(source, samples=count, sequence_length=length, cross_documents=False)
        for name, count, length in (("regularise", 2, 120), ("recover", 48, 70))
    }
    drawn = split_disjoint(TOKENIZER, wanted)  # 48 windows of 70 need documents that are too short for 120
    assert_disjoint(drawn["regularise"], drawn["recover"])
