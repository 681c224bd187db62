"""Token streams and the windows drawn from them: inside the text, seeded, disjoint between uses."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.config.data import DataConfig
from pyprune.data import placement
from pyprune.data.overlap import SpanSet
from pyprune.data.sampling import TokenSamples, assert_disjoint, sample_sequences, split_disjoint
from pyprune.data.stream import TokenStream, check_sequence_length, token_stream
from pyprune.errors import CheckpointError, ConfigError, DataError
from tests._support.paths import SHARED_DATA
from tests._support.tokenizer import tiny_tokenizer
from tests.data._fakes import jsonl, prose, text_file

shared = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not here")
TOKENIZER = tiny_tokenizer()


# Tokens


def test_instruction_records_end_with_eos_and_chat_documents_carry_their_marks(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"instruction": "Say hi.", "input": "", "output": "hi"}])
    plain = token_stream(TOKENIZER, DataConfig(source=path))
    assert plain.tokens[-1] == TOKENIZER.eos_token_id
    chat = token_stream(tiny_tokenizer(chat_template=True), DataConfig(source=path, chat_template=True))
    assert TOKENIZER.decode(chat.tokens.tolist()) == "<|user|>Say hi.<|end|><|assistant|>hi<|end|>"


def test_chat_template_without_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        token_stream(TOKENIZER, DataConfig(source=text_file(tmp_path, "a b"), chat_template=True))


def test_samples_are_windows_of_the_text_that_do_not_overlap(tmp_path: Path) -> None:
    text = prose(500)
    config = DataConfig(source=text_file(tmp_path, text), samples=12, sequence_length=50, seed=3)
    samples = sample_sequences(TOKENIZER, config)
    assert samples.ids.shape == (12, 50)
    assert samples.ids.dtype == torch.int64
    ends = sorted(samples.spans.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    for row, (start, end) in zip(samples.ids, samples.spans.spans, strict=True):
        assert TOKENIZER.decode(row) == text[start:end]
    assert len(set(map(tuple, samples.ids.tolist()))) == 12


def test_sampling_is_seeded(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(500))
    first, same, other = (
        sample_sequences(TOKENIZER, DataConfig(source=source, samples=8, sequence_length=32, seed=seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.ids, same.ids)
    assert not torch.equal(first.ids, other.ids)


def test_text_that_is_exactly_large_enough_and_one_token_too_small(tmp_path: Path) -> None:
    text = prose(200)[:398]
    source = text_file(tmp_path, text)  # 398 bytes and the separator are 400 tokens
    samples = sample_sequences(TOKENIZER, DataConfig(source=source, samples=8, sequence_length=50))
    assert sorted(samples.spans.spans) == [(i, i + 50) for i in range(0, 400, 50)]
    with pytest.raises(DataError, match="has 400 tokens; 9 samples of 50 tokens need 450"):
        sample_sequences(TOKENIZER, DataConfig(source=source, samples=9, sequence_length=50))


def test_far_too_many_samples_are_refused_before_anything_is_made_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = text_file(tmp_path, prose(200)[:398])
    config = DataConfig(source=source, samples=10**8, sequence_length=2048)
    monkeypatch.setattr(placement, "place", lambda *arguments: pytest.fail("places were looked for"))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="has 400 tokens; 100000000 samples of 2048 tokens need 204800000000"):
            sample_sequences(TOKENIZER, config)
        with pytest.raises(DataError, match="need 409600000000 tokens in unbroken"):
            split_disjoint(TOKENIZER, {"regularise": config, "recover": config})
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_sets_that_are_too_much_together_have_the_message_of_both(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(200)[:398])
    both = {name: DataConfig(source=source, samples=n, sequence_length=40) for name, n in (("a", 6), ("b", 10**8))}
    with pytest.raises(DataError, match="6 samples of 40 tokens and 100000000 samples of 40 tokens need 4000000240"):
        split_disjoint(TOKENIZER, both)


def test_invalid_options_are_refused_before_reading() -> None:
    with pytest.raises(ConfigError, match="samples is 0"):
        sample_sequences(TOKENIZER, DataConfig(source="none.txt", samples=0))
    wrong = {"regularise": DataConfig(source="none.txt", samples=0), "recover": DataConfig(sequence_length=1)}
    with pytest.raises(ConfigError, match=r"regularise: samples is 0.*\nrecover: sequence_length is 1"):
        split_disjoint(TOKENIZER, wrong)


# Disjointness


def configs(source: str, other: str | None = None, samples: int = 6, length: int = 40) -> dict[str, DataConfig]:
    return {
        "regularise": DataConfig(source=source, samples=samples, sequence_length=length),
        "recover": DataConfig(source=other or source, samples=samples, sequence_length=length),
    }


def test_one_source_is_split_without_overlap_even_when_it_just_fits(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(200)[:478])  # 480 tokens for 2 x 6 x 40
    drawn = split_disjoint(TOKENIZER, configs(source))
    used = sorted(span for samples in drawn.values() for span in samples.spans.spans)
    assert used == [(i, i + 40) for i in range(0, 480, 40)]
    with pytest.raises(DataError, match=r"480 tokens.*need 560"):
        split_disjoint(TOKENIZER, configs(source, samples=7))


def test_a_later_set_does_not_change_an_earlier_one(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(1000))
    both = split_disjoint(TOKENIZER, configs(source))
    alone = sample_sequences(TOKENIZER, configs(source)["regularise"])
    assert torch.equal(both["regularise"].ids, alone.ids)


def test_the_same_file_under_two_names_is_recognised(tmp_path: Path) -> None:
    text = prose(400)
    a, b = text_file(tmp_path, text, "a.txt"), text_file(tmp_path, text, "b.txt")
    drawn = split_disjoint(TOKENIZER, configs(a, b))
    with pytest.raises(DataError, match="share text: 6 of 6 windows of b"):
        assert_disjoint(drawn["regularise"], sample_sequences(TOKENIZER, configs(b)["regularise"]))


def test_the_same_passage_inside_another_file_is_avoided_and_found_to_the_token(tmp_path: Path) -> None:
    shared_text = prose(300)
    a = text_file(tmp_path, shared_text, "a.txt")
    b = jsonl(tmp_path, [{"text": prose(100, seed=5)}, {"text": shared_text}, {"text": prose(80, seed=6)}])
    drawn = split_disjoint(TOKENIZER, configs(a, b, samples=8))
    one = TokenSamples.cut(drawn["regularise"].spans.stream, [(500, 540)])
    other = drawn["recover"].spans.stream
    passage = TOKENIZER.decode(one.ids[0])
    at = TOKENIZER.decode(other.tokens.tolist()).index(passage)
    assert np.flatnonzero(one.spans.copies_in(other)).tolist() == list(range(at, at + 40))
    assert_disjoint(one, TokenSamples.cut(other, [(at - 40, at), (at + 40, at + 80)]))
    with pytest.raises(DataError, match="1 of 1 windows"):
        assert_disjoint(one, TokenSamples.cut(other, [(at + 39, at + 79)]))


def test_windows_of_different_length_that_contain_each_other() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, 300)
    short = TokenSamples.cut(TokenStream.of("a", tokens[100:130]), [(5, 15)])
    long = TokenSamples.cut(TokenStream.of("b", np.concatenate([tokens[:50], tokens[90:150]])), [(40, 80)])
    for a, b in ((short, long), (long, short)):
        with pytest.raises(DataError, match="share text"):
            assert_disjoint(a, b)


def test_test_text_is_kept_out(tmp_path: Path) -> None:
    test_text = prose(100, seed=9)
    source = text_file(tmp_path, prose(60) + "\n\n" + test_text + "\n\n" + prose(60, seed=2))
    stream = TokenStream.of("test", TOKENIZER(test_text)["input_ids"])
    config = DataConfig(source=source, samples=8, sequence_length=64)
    drawn = sample_sequences(TOKENIZER, config, exclude=SpanSet.whole(stream))
    for row in drawn.ids:
        assert TOKENIZER.decode(row) not in test_text
    with pytest.raises(DataError, match="not used by another split"):
        sample_sequences(
            TOKENIZER,
            DataConfig(source=source, samples=18, sequence_length=64),
            exclude=SpanSet.whole(stream),
        )


def test_a_header_repeated_in_every_document_is_no_overlap(tmp_path: Path) -> None:
    records = [{"instruction": prose(10, i), "input": "", "output": prose(10, 100 + i)} for i in range(40)]
    a, b = jsonl(tmp_path, records[:20], "a.jsonl"), jsonl(tmp_path, records[20:], "b.jsonl")
    drawn = split_disjoint(TOKENIZER, configs(a, b, samples=10, length=250))
    assert len(drawn["recover"]) == 10


def test_text_that_only_repeats_itself_cannot_be_split(tmp_path: Path) -> None:
    source = text_file(tmp_path, "ab" * 400)
    with pytest.raises(DataError, match="share text"):
        split_disjoint(TOKENIZER, configs(source))


@given(
    runs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_placement_is_free_and_without_overlap(runs: list[tuple[int, int]], lengths: list[int], seed: int) -> None:
    free = np.concatenate([np.repeat([False, True], run) for run in runs])
    spans = placement.place(free, lengths, np.random.default_rng(seed))
    if spans is None:
        largest = max(lengths)
        assert sum(run[1] // largest for run in runs) < len(lengths)
        return
    used = np.zeros(len(free), dtype=int)
    for (start, end), length in zip(spans, lengths, strict=True):
        assert end - start == length
        used[start:end] += 1
    assert used.max() == 1
    assert free[used == 1].all()


# Limits


def test_sequences_longer_than_the_model_allows() -> None:
    config = SimpleNamespace(max_position_embeddings=128)
    check_sequence_length(config, 128)
    check_sequence_length(SimpleNamespace(), 10**6)
    with pytest.raises(DataError, match="129 tokens, but the model allows at most 128"):
        check_sequence_length(config, 129)


@pytest.mark.parametrize("limit", ["abc", "128", [128], {"a": 1}, True, 1j])
@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_a_limit_that_is_no_number_is_named(name: str, limit: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json gives {name} as .*must be a whole number"):
        check_sequence_length(SimpleNamespace(**{name: limit}), 129)


@pytest.mark.parametrize("limit", [None, 0, -1, 10**30, 129.0, float("nan"), float("inf")])
def test_limits_that_allow_the_length(limit: Any) -> None:
    check_sequence_length(SimpleNamespace(max_position_embeddings=limit), 129)


@pytest.mark.parametrize("limit", [128.0, 0.5])
def test_a_limit_with_a_point_is_a_limit(limit: float) -> None:
    with pytest.raises(DataError, match=f"allows at most {limit}"):
        check_sequence_length(SimpleNamespace(max_position_embeddings=limit), 129)


def test_a_config_without_a_text_part() -> None:
    def several() -> None:
        raise ValueError("Multiple text configs")

    with pytest.raises(CheckpointError, match="no text part: ValueError: Multiple"):
        check_sequence_length(SimpleNamespace(get_text_config=several), 129)


# Real data


@shared
def test_real_train_and_test_text_are_drawn_apart() -> None:
    book = str(SHARED_DATA / "books" / "sherlock_holmes.txt")
    drawn = split_disjoint(TOKENIZER, configs(book, samples=40, length=512))
    other = sample_sequences(
        TOKENIZER,
        DataConfig(source=str(SHARED_DATA / "books" / "huckleberry_finn.txt"), samples=40, sequence_length=512),
    )
    assert_disjoint(drawn["regularise"], other)
