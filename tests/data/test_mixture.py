"""Mixtures: samples of several texts by share and seed, each labelled, none of them used twice."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench._texts import write_demo_data, write_demo_mixture
from pyprune.config.data import MIXTURES, DataConfig, MixturePart, share_out
from pyprune.data.sampling import assert_disjoint, sample_sequences, split_disjoint
from pyprune.data.stream import token_stream
from pyprune.errors import ConfigError, DataError
from pyprune.quality.perplexity import evaluation_text
from tests._support.text import read_documents
from tests._support.tokenizer import tiny_tokenizer
from tests.data._fakes import fake_datasets, jsonl, prose, text_file

TOKENIZER = tiny_tokenizer()


def parts_in(folder: Path, words: int = 400) -> tuple[MixturePart, ...]:
    """Prose of letters and code of digits, which cannot be taken for each other."""
    code = "".join(chr(ord("0") + ord(c) % 10) if c.isalpha() else c for c in prose(words, seed=1))
    return (
        MixturePart(text_file(folder, prose(words), "a.txt"), "prose", 3),
        MixturePart(jsonl(folder, [{"content": code}], "b.jsonl"), "code", 1, field="content"),
    )


def mixture(folder: Path, samples: int = 8, words: int = 400, **options: Any) -> DataConfig:
    return DataConfig("mixture", samples=samples, mixture=parts_in(folder, words), **{"sequence_length": 50, **options})


def is_code(row: torch.Tensor) -> bool:
    return not any(c.isalpha() for c in TOKENIZER.decode(row))


# Options


@given(st.integers(1, 3000), st.lists(st.floats(0.001, 1000), min_size=1, max_size=9))
def test_shares_add_up_and_leave_nobody_out(count: int, shares: list[float]) -> None:
    count = max(count, len(shares))
    given_out = share_out(count, shares)
    assert sum(given_out) == count
    assert min(given_out) >= 1
    for mine, share in zip(given_out, shares, strict=True):
        assert mine == 1 or mine < count * share / sum(shares) + 1


def test_shares_are_exact_where_they_can_be() -> None:
    assert share_out(144, [3, 3, 2, 1]) == (48, 48, 32, 16)
    assert share_out(128, [part.share for part in MIXTURES["mixture"]]) == (43, 43, 28, 4, 4, 3, 3)
    assert share_out(7, [100, 1, 1]) == (5, 1, 1)


def test_plain_data_is_read_back() -> None:
    data = {"source": "mixture", "mixture": [{"source": "a.txt", "kind": "prose", "share": 2}, {"source": "b.txt"}]}
    config = DataConfig.from_dict(data)
    assert config.sources == ("a.txt", "b.txt")
    assert [part.label for part in config.parts] == ["prose", "b.txt"]
    assert DataConfig.from_dict(config.to_dict()) == config
    assert DataConfig("mixture").parts == MIXTURES["mixture"]
    assert DataConfig("c4", "validation").parts == (MixturePart("c4", split="validation"),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixture": [{"source": "a.txt"}]}, "source is 'wikitext2'; set source to 'mixture'"),
        ({"source": "mixture-offline", "mixture": [{"source": "a.txt"}]}, "set source to 'mixture'"),
        ({"source": "mixture", "mixture": [{"kind": "code"}]}, r"mixture\[0\].source is empty"),
        ({"source": "mixture", "mixture": [{"source": "mixture"}]}, r"mixture\[0\].source is 'mixture', a mixture"),
        ({"source": "mixture", "mixture": [{"source": "a", "share": 0}]}, r"mixture\[0\].share is 0"),
        ({"source": "mixture", "mixture": [{"source": "a", "share": float("nan")}]}, r"mixture\[0\].share is nan"),
        ({"source": "mixture", "mixture": [{"source": "a"}, {"source": "a", "kind": "b"}]}, "lists one text twice"),
        ({"source": "mixture", "mixture": [{"source": "a", "weight": 2}]}, "weight.*Available"),
        ({"source": "mixture", "mixture": {"a": 1}}, "mixture is .*expected a list"),
        ({"source": "mixture", "samples": 6}, "samples is 6, but the mixture has 7 texts"),
        ({"source": "mixture", "layout": "instructions"}, "a mixture is 'stream'"),
        ({"source": "mixture", "split": "validation"}, "split and field are for one source"),
        ({"source": "mixture", "field": "text"}, "split and field are for one source"),
    ],
)
def test_mixtures_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig.from_dict(options)


# Drawing


def test_each_text_gives_its_share_and_each_sample_says_its_kind(tmp_path: Path) -> None:
    samples = sample_sequences(TOKENIZER, mixture(tmp_path))
    assert samples.ids.shape == (8, 50)
    assert Counter(samples.kinds) == {"prose": 6, "code": 2}
    assert [kind == "code" for kind in samples.kinds] == [is_code(row) for row in samples.ids]
    stream = samples.spans.stream
    for row, (start, end) in zip(samples.ids, samples.spans.spans, strict=True):
        assert row.tolist() == stream.tokens[start:end].tolist()
    rows = samples.rows_by_kind()
    assert {kind: len(found) for kind, found in rows.items()} == {"prose": 6, "code": 2}
    assert all(is_code(row) for row in samples[rows["code"]].ids)
    assert samples[rows["code"]].kinds == ("code", "code")


def test_the_kinds_are_mixed_by_seed(tmp_path: Path) -> None:
    first, same, other = (sample_sequences(TOKENIZER, mixture(tmp_path, 16, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first.ids, same.ids)
    assert first.kinds == same.kinds
    assert not torch.equal(first.ids, other.ids)
    assert first.kinds != other.kinds
    assert list(first.kinds) not in (sorted(first.kinds), sorted(first.kinds, reverse=True))


def test_one_text_draws_what_it_draws_alone(tmp_path: Path) -> None:
    part = parts_in(tmp_path)[0]
    alone = sample_sequences(TOKENIZER, DataConfig(part.source, samples=6, sequence_length=50, seed=3))
    mixed = sample_sequences(TOKENIZER, DataConfig("mixture", samples=6, sequence_length=50, seed=3, mixture=(part,)))
    assert torch.equal(alone.ids, mixed.ids)
    assert (alone.kinds, mixed.kinds) == ((part.source,) * 6, ("prose",) * 6)


def test_two_uses_of_one_mixture_share_nothing_even_when_they_just_fit(tmp_path: Path) -> None:
    config = mixture(tmp_path, 40, 200)
    ends = [part.end for part in token_stream(TOKENIZER, config).parts]
    sizes = [ends[0], ends[1] - ends[0]]
    count = 2 * (min(sizes[0] // 3, sizes[1]) // 100) - 1  # code samples in each use; prose gives three times as many
    config = mixture(tmp_path, 2 * count, 200)
    drawn = split_disjoint(TOKENIZER, {"regularise": config, "recover": config})
    assert_disjoint(drawn["regularise"], drawn["recover"])
    used = sorted(span for samples in drawn.values() for span in samples.spans.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(used))
    assert [Counter(samples.kinds) for samples in drawn.values()] == [Counter(drawn["recover"].kinds)] * 2
    for start, end in used:
        assert end <= ends[0] or start >= ends[0], "no window has two kinds"


def test_a_mixture_and_one_of_its_texts_share_nothing(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    book = DataConfig(parts_in(tmp_path)[0].source, samples=20, sequence_length=64)
    drawn = split_disjoint(TOKENIZER, {"regularise": config, "recover": book})
    assert len(drawn["recover"]) == 20
    with pytest.raises(DataError, match="share text"):
        assert_disjoint(drawn["regularise"], sample_sequences(TOKENIZER, DataConfig(**{**vars(book), "samples": 40})))


def test_a_text_that_is_too_small_is_named(tmp_path: Path) -> None:
    prose_part, code = parts_in(tmp_path)
    parts = (prose_part, replace(code, share=9))
    with pytest.raises(DataError, match=r"b\.jsonl' is too small: it has .*; 27 samples of 200 tokens need 5400"):
        sample_sequences(TOKENIZER, DataConfig("mixture", samples=36, sequence_length=200, mixture=parts))


def test_the_mixture_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"text": prose(300, seed=i), "content": prose(300, seed=90 + i)} for i in range(9)])
    samples = sample_sequences(TOKENIZER, DataConfig("mixture", samples=36, sequence_length=64))
    assert Counter(samples.kinds) == {"prose": 12, "web": 12, "code": 8, "languages": 4}


def test_the_mixture_without_a_network() -> None:
    try:
        importlib.metadata.distribution("exllamav3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package exllamav3 is not installed")
    samples = sample_sequences(TOKENIZER, DataConfig("mixture-offline", samples=36, sequence_length=256))
    assert Counter(samples.kinds) == {"prose": 12, "web": 12, "code": 8, "languages": 4}


def test_the_demo_splits_every_text_of_a_mixture(tmp_path: Path) -> None:
    words = {"prose": 40, "code": 700}  # files of code that are passages by themselves
    texts = {kind: [prose(count, seed=i + count) for i in range(40)] for kind, count in words.items()}
    parts = [
        MixturePart(jsonl(tmp_path, [{"text": text} for text in found], f"{kind}.jsonl"), kind, share=2)
        for kind, found in texts.items()
    ]
    demo = write_demo_mixture(tmp_path / "out", parts)
    tests = {kind: evaluation_text(TOKENIZER, str(path)) for kind, path in demo.tests.items()}
    assert list(tests) == ["prose", "code"]
    assert [(part.kind, part.share) for part in demo.parts] == [("prose", 2), ("code", 2)]
    for part in demo.parts:
        kept, held_out = read_documents(part.source), read_documents(str(demo.tests[part.kind]))
        assert (len(kept), len(held_out)) == (30, 10)
        assert sorted(kept + held_out) == sorted(texts[part.kind])
    reserved = [text.spans for text in tests.values()]
    drawn = sample_sequences(TOKENIZER, demo.data(20, 64), exclude=reserved)
    assert Counter(drawn.kinds) == {"prose": 10, "code": 10}
    for text in tests.values():
        assert len(text.token_ids) > 1000
        assert not drawn.spans.copies_in(text.spans.stream).any()


def test_passages_keep_neighbours_together(tmp_path: Path) -> None:
    source = text_file(tmp_path, "\n\n".join(f"line {i}" for i in range(100)))
    demo = write_demo_data(tmp_path / "out", source, passage=50)
    passages = read_documents(str(demo.calibration)) + read_documents(str(demo.test))
    assert sum(len(text) < 50 for text in passages) <= 1, "what is left at the end"
    for text in passages:
        numbers = [int(line.split()[1]) for line in text.split("\n\n")]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
