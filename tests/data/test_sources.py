"""Local text that is damaged, closed, too large or no text at all: one line, before the work where that is possible."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench._texts import write_demo_data
from pyprune.data import files, layouts, records
from pyprune.data.sources import check_source, read_corpus
from pyprune.errors import DataError, MissingDependencyError, OutputError
from tests._support.text import read_documents
from tests.data._fakes import fake_datasets, fake_package


def jsonl(folder: Path, *lines: str) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def refused(source: str, words: str) -> None:
    """By the check and by the reading, each in one bounded line."""
    for call in (check_source, read_documents):
        with pytest.raises(DataError, match=words) as caught:
            call(source)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000


# What can be known without reading


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/tmp/" + "a" * 300 + ".txt", "cannot be read: File name too long"),
        ("a" * 300 + ".jsonl.gz", "cannot be read: File name too long"),
        ("/" + "a/" * 4000, "cannot be read: File name too long"),
        ("/tmp/a\0b.txt", "cannot be read: embedded null byte"),
        ("/tmp/\ud800.txt", "cannot be read: .*surrogates not allowed"),
        ("~no-such-account-here/a.txt", "names no home folder"),
        ("/dev/null/a.txt", "cannot be read: Not a directory"),
        ("a" * 300, "Unknown data source"),
        ("a\0b", "Unknown data source"),
        ("org/name\n", "Unknown data source"),
        ("", "Unknown data source"),
        ("/dev/zero", "is a device, pipe or socket"),
        ("/", "is a folder"),
    ],
)
def test_paths_that_are_no_files(source: str, words: str) -> None:
    refused(source, words)


@pytest.mark.parametrize("name", ["alpaca_data.json", "DATA.JSON", "more.json.gz"])
def test_json_as_a_whole_is_no_prose(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('[{"instruction": "Add.", "input": "1 2", "output": "3"}]')
    refused(str(tmp_path / name), "is JSON by its name, which would be read as prose")


def test_lines_of_json_are_known_by_any_spelling_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "DATA.JSONL").write_text('{"text": "words"}\n')
    assert read_documents(str(tmp_path / "DATA.JSONL")) == ["words"]
    (tmp_path / "PACKED.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert read_documents(str(tmp_path / "PACKED.JSONL.GZ")) == ["packed"]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed words"}\n'))
    monkeypatch.setattr("pyprune.data.sources.packaged_file", lambda _: tmp_path / "x.jsonl.gz")
    monkeypatch.setattr("pyprune.data.packages.packaged_file", lambda _: tmp_path / "x.jsonl.gz")
    assert read_documents("package:packed/x.jsonl.gz") == ["packed words"]


def test_pipes_sockets_and_links_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    refused(str(tmp_path / "pipe.txt"), "is a device, pipe or socket")
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        refused("s.txt", "is a device, pipe or socket")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    refused(str(tmp_path / "loop.txt"), "cannot be read: Too many levels of symbolic links")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    refused(str(tmp_path / "gone.txt"), "does not exist")
    gone = tmp_path / "removed"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused("a.txt", r"does not exist. Check the path\.")


def test_files_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "closed.txt"
    path.write_text("text")
    path.chmod(0)
    asked: list[Path] = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(os, "access", access)  # root may read everything
    refused(str(path), "cannot be read: permission denied")
    assert asked == [path, path]
    monkeypatch.undo()

    def closed(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", args[0])

    monkeypatch.setattr("builtins.open", closed)  # what access cannot tell
    with pytest.raises(DataError, match=r"closed.txt' cannot be read: Permission denied\. Give"):
        read_documents(str(path))


def test_large_files_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as stream:
        stream.truncate(files.TEXT_BYTES + 1)  # a hole takes no room
    monkeypatch.setattr("builtins.open", lambda *args, **options: pytest.fail("it was opened"))
    refused(str(path), r"large.txt' has 2,147,483,649 bytes; at most 2,147,483,648 are read")


def test_packaged_text_and_missing_packages_are_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(monkeypatch, tmp_path)
    check_source("package:fakepack/c4.utf8")
    refused("package:fakepack/none.utf8", "holds no file 'none.utf8'")
    refused("package:nopack/c4.utf8", "is not installed")
    refused("package:\0/\0", "is not installed")
    os.mkfifo(tmp_path / "fakepack" / "data" / "pipe.txt")
    monkeypatch.undo()
    fake_datasets(monkeypatch, [])
    check_source("wikitext2")
    check_source("org/name:part")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("wikitext2", "org/name"):
        with pytest.raises(MissingDependencyError, match=r"pyprune\[data\]"):
            check_source(source)


# Compressed files


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-8],
        lambda data: data[:5],
        lambda data: data[:20] + bytes(b ^ 255 for b in data[20:40]) + data[40:],
        lambda data: data[:-8] + b"\1\2\3\4" + data[-4:],
        lambda data: data + b"garbage",
        lambda data: b"no gzip at all",
        lambda data: b"\x1f\x8b\x08\x00" + b"\xff" * 50,
    ],
)
def test_damaged_gzip(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress(os.urandom(200).hex().encode())))
    with pytest.raises(DataError, match=r"a.txt.gz' cannot be read: .*Give a readable, complete file"):
        read_documents(str(path))


def test_several_members_and_an_empty_file_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert read_documents(str(path)) == ["one two"]
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is empty"):
        read_documents(str(path))


def test_a_gzip_bomb_is_read_no_further_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TEXT_BYTES", 100_000)
    monkeypatch.setattr(files, "READ_AT_ONCE", 10_000)
    taken = [0]
    real = gzip.GzipFile.read

    def read(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        data = real(self, size)
        taken[0] += len(data)
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", read)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 50_000_000))
    with pytest.raises(DataError, match=r"bomb.txt.gz' unpacks to too many bytes; at most 100,000 are read"):
        read_documents(str(path))
    assert 100_000 < taken[0] <= 110_000
    path.write_bytes(gzip.compress(b"a" * 100_000))
    assert read_documents(str(path)) == ["a" * 100_000]


def test_zeros_are_binary_at_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_AT_ONCE", 10)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 25 + b"\0" * 50_000_000))
    with pytest.raises(DataError, match="a NUL byte at offset 25"):
        read_documents(str(path))


# Many documents


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blank.txt", "\n" * 300),
        ("paragraphs.txt", "a\n\n" * 150),
        ("wiki.txt", " = A title = \n" * 101),
        ("treebank.txt", " a b \n" * 101),
        ("lines.jsonl", "\n" * 101),
        ("records.jsonl", '{"text": "a"}\n' * 101),
    ],
)
def test_no_more_documents_than_memory_is_spent_on(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text(text)
    if "blank" not in name and "lines" not in name:
        assert len(read_documents(str(path))) > 100
    monkeypatch.setattr(records, "MOST_DOCUMENTS", 100)
    with pytest.raises(DataError, match=rf"{name}' has 1\d\d documents or lines; at most 100 are read"):
        read_documents(str(path))


@given(st.lists(st.sampled_from(["", " ", "  ", "   ", " a ", " a", "a ", " = A = ", " = = ", "\u2028", "\x1c a "])))
def test_layouts_are_told_apart_line_by_line(lines: list[str]) -> None:
    text = "\n".join(lines)
    body = text.removesuffix("\n").split("\n")
    title = next((line for line in body if line.strip()), "")
    if layouts.WIKITEXT_TITLE.match(title):
        expected = [line + "\n" if line.strip() else "" for line in body]
    elif all(len(line) > 2 and line[0] == line[-1] == " " for line in body):
        expected = [line.strip() for line in body]
    else:
        expected = text.split("\n\n")
    assert [document.text for document in layouts.parse_plain("a", text).documents] == expected


# Records


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            r'{"text": "a \ud800 b"}',
            r"line 2: field 'text' holds half of a surrogate pair \('\\ud800' at character 2\)",
        ),
        (r'{"text": "\udc80"}', "line 2: field 'text' holds half of a surrogate pair"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 cannot be read: .*nested too deeply"),
        ('{"text": "a", "n": ' + "1" * 5000 + "}", "line 2 cannot be read: .*4300 digits"),
        ('{"text": ["a"]}', "line 2: field 'text' is list, not text"),
        ("null", "line 2 is a JSON NoneType"),
        ('"' + "a" * 5000 + '"', "line 2 is a JSON str"),
        ("{" + "a" * 5000, "line 2 is not JSON"),
        (json.dumps(dict.fromkeys(f"{i}" * 300 for i in range(3000))), "line 2 has no field 'text'.* and 2,980 more"),
        (r'{"\u001b[2J\u0007": 1}', r"Fields there: \\x1b\[2J\\x07"),
        (r'{"\ud800": 1}', r"Fields there: \\ud800"),
    ],
)
def test_hostile_records_are_named_by_their_line(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_corpus(jsonl(tmp_path, '{"text": "fine"}', line))
    assert len(str(caught.value)) < 4000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (r'{"instruction": "\ud800", "output": "b"}', "line 2: field 'instruction' holds half"),
        (r'{"instruction": "a", "output": "\ud800"}', "line 2: field 'output' holds half"),
        (r'{"instruction": "a", "input": "\ud800", "output": "b"}', "line 2: field 'input' holds half"),
        ('{"instruction": "a", "input": ["x"], "output": "b"}', "line 2: field 'input' is list, not text"),
        ('{"instruction": "a", "input": {"x": 1}, "output": "b"}', "line 2: field 'input' is dict, not text"),
        ('{"instruction": 1, "output": "b"}', "line 2: field 'instruction' is int, not text"),
    ],
)
def test_hostile_instruction_records(record: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_corpus(jsonl(tmp_path, '{"instruction": "a", "output": "b"}', record))


def test_inputs_that_were_taken_before_still_are(tmp_path: Path) -> None:
    values: list[Any] = [None, "", " ", 0, [], {}, False, "x", 3, 2.5, True]
    lines = [json.dumps({"instruction": "a", "input": value, "output": "b"}) for value in values]
    questions = [document.turns[0][1] for document in read_corpus(jsonl(tmp_path, *lines)).documents]
    assert questions == ["a"] * 7 + [f"a\n\n{value}" for value in ("x", "3", "2.5", "True")]


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    assert read_documents(jsonl(tmp_path, r'{"text": "\ud83d\ude00"}')) == ["\U0001f600"]


def test_a_record_of_many_megabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_CHARACTERS", 1000)
    with pytest.raises(DataError, match=r"line 2 has 1,012 characters; a record may have 1,000"):
        read_corpus(jsonl(tmp_path, '{"text": "fine"}', '{"text": "%s"}' % ("a" * 1000)))


# Elsewhere


def test_a_data_set_that_breaks_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield {"text": "a"}
            raise KeyError("a damaged shard")

    fake_datasets(monkeypatch, Rows())
    for source in ("org/name", "wikitext2"):
        with pytest.raises(DataError, match=r"The data set .* cannot be read: KeyError: 'a damaged shard'"):
            read_documents(source)


def test_words_of_a_library_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, ValueError("a\n" * 10**6))
    with pytest.raises(DataError, match="could not be loaded: ValueError: a a") as caught:
        read_documents("wikitext2")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_demo_data_in_a_folder_that_cannot_be(tmp_path: Path) -> None:
    source = jsonl(tmp_path, '{"text": "a"}', '{"text": "b"}')
    for folder in ("/tmp/a\0b", tmp_path / ("a" * 300)):
        with pytest.raises(OutputError, match="Cannot write demo data"):
            write_demo_data(folder, source)
    with pytest.raises(DataError, match="test_share is nan"):
        write_demo_data(tmp_path, source, test_share=float("nan"))
