"""Results in JSON lines are appended, found again and never mixed with somebody else's; runs are compared in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyprune.errors import CheckpointError, OutputError
from pyprune.runtime.records import RecordFile, append_jsonl, differences, digest


def record(key: str, value: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "cell", "key": key, "value": value, **more}


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    append_jsonl(path, [{"a": 1}])
    append_jsonl(path, [{"a": 2}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="writable"):
        append_jsonl(tmp_path, [{}])


def test_what_has_no_disk_is_written_to_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    append_jsonl(Path("/dev/stdout"), [{"a": 1}])
    append_jsonl(Path("/dev/null"), [{"a": 2}])
    assert capfd.readouterr().out == '{"a": 1}\n'


def test_the_newest_record_of_a_key_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    records = RecordFile(path)
    assert records.add(record("a")) == record("a")
    records.add(record("b", 1))
    records.add(record("a", 2))
    records.add({"kind": "dense", "key": "a"})
    again = RecordFile(path)
    for found in (records, again):
        assert found.of("cell") == {"a": record("a", 2), "b": record("b", 1)}
        assert list(found.of("dense")) == ["a"]
        assert found.of("other") == {}
    assert len(path.read_text().splitlines()) == 4, "nothing is replaced"


def test_failed_records_may_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    records = RecordFile(path)
    records.add(record("a", error="no memory"))
    records.add(record("b", error=""))
    assert list(RecordFile(path).of("cell")) == ["a", "b"]
    assert list(RecordFile(path, retry_failed=True).of("cell")) == ["b"]


def test_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = RecordFile(None)
    records.add(record("a"))
    assert records.of("cell") == {"a": record("a")}
    assert not list(tmp_path.iterdir())


def test_a_row_does_not_continue_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    append_jsonl(path, [{"a": 3}])
    assert path.read_text() == '{"a": 1}\n{"a": 2\n{"a": 3}\n'
    append_jsonl(path, [{"a": 4}])
    assert path.read_text().endswith('{"a": 3}\n{"a": 4}\n')


@pytest.mark.parametrize("length", [1, 2, 10, -1])
def test_a_torn_line_loses_its_record_only(length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    whole, line = (json.dumps(record(key), sort_keys=True) for key in "ab")
    path.write_text(f"{whole}\n{line[:length]}")
    records = RecordFile(path)
    assert list(records.of("cell")) == ["a"]
    assert "line 2 is not complete" in " ".join(capsys.readouterr().err.split())
    records.add(record("c"))
    assert path.read_text().startswith(f"{whole}\n{line[:length]}\n")
    assert list(RecordFile(path).of("cell")) == ["a", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "my notes\n",
        '{\n  "kind": 1\n}\n',
        '{"a": 1}\n',
        "[]\n",
        "3\n",
        '"kind key"\n',
        "\n",
        '{"kind": [], "key": {}}',
        r"{\rtf1 text}",
        "{{",
    ],
)
def test_the_file_of_somebody_else_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"was not written by a program .*; name another --out"):
        RecordFile(path, program="a program", option="--out")
    assert path.read_text() == text


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        RecordFile(path)


def test_a_digest_depends_on_what_is_said_and_not_on_its_order() -> None:
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert len({digest(data) for data in ({"a": 1}, {"a": 2}, {"b": 1}, [1], [[1]], "a", None)}) == 7
    assert digest([]) == "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945", "kept records name theirs"


def test_differences_are_named_by_their_path() -> None:
    before = {"same": 1, "train": {"steps": 4, "lr": 1e-4}, "gone": "x", "kind": {"a": 1}}
    now = {"same": 1, "train": {"steps": 5, "lr": 1e-4}, "new": True, "kind": "text"}
    assert differences(before, now) == [
        "gone was 'x', now None",
        "kind was {'a': 1}, now 'text'",
        "new was None, now True",
        "train.steps was 4, now 5",
    ]
    assert not differences(before, before)
