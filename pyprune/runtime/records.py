"""Records of runs: JSON lines that are appended and read again, and the differences between runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyprune.errors import CheckpointError, OutputError, shown
from pyprune.runtime.disk import reason
from pyprune.runtime.files import parse_json, read_bounded
from pyprune.runtime.progress import say

Json = dict[str, Any]

_BEGINNING = '{"'
"""Beginning of every written line, also of an incomplete one."""


def append_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object a line and flush it to the disk, so that an interrupted run keeps its results.

    Raises:
        OutputError: the file cannot be written.
    """
    text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(path)
        with path.open("a", encoding="utf-8") as out:
            out.write("\n" * torn + text)
            out.flush()
            if path.is_file():  # a pipe or a terminal has no disk
                os.fsync(out.fileno())
    except OSError as error:
        raise OutputError(f"Cannot append to {path}: {reason(error, path)}. Name a writable file.") from error


def _is_torn(path: Path) -> bool:
    """Check whether a file ends within a line, which a killed process left incomplete."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def digest(data: Any) -> str:
    """Return the SHA-256 of JSON data, hexadecimal; the order of keys makes no difference. Used as a record's key."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


class RecordFile:
    """Results in a JSONL file that is only appended to, so that an interrupted run continues.

    Every record has a "kind" and a "key"; of those that share both, the newest one counts. A line that a killed process
    left incomplete is skipped.

    Args:
        path: the file; made when the first record comes. None = records are kept in memory alone.
        program: that writes such files, for messages.
        option: the command-line option that names the file, for messages.
        retry_failed: leave out records with an "error", so that their cases run again.

    Raises:
        CheckpointError: the file cannot be read, or holds other data; it is not changed.
    """

    def __init__(
        self, path: Path | None, *, program: str = "this bench", option: str = "--jsonl", retry_failed: bool = False
    ) -> None:
        self.path = path
        self._program = program
        self._option = option
        self._kinds: dict[str, dict[str, Json]] = {}
        text = self._text()
        for number, line in enumerate(text.splitlines(), start=1):
            record = self._parse(line, number)
            if record is not None and not (retry_failed and record.get("error")):
                self._remember(record)

    def _text(self) -> str:
        if self.path is None or not (self.path.is_file() or self.path.is_dir()):  # a pipe would keep it waiting
            return ""
        try:
            return read_bounded(self.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}. Name another {self._option}.") from error

    def _parse(self, line: str, number: int) -> Json | None:
        try:
            record = parse_json(line)
        except ValueError as error:
            if not (line and _BEGINNING.startswith(line[: len(_BEGINNING)])):
                raise self._foreign(number, shown(error)) from error
            say(f"{self.path}, line {number} is not complete; it is left alone, and its case runs again.")
            return None
        if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in ("kind", "key")):
            raise self._foreign(number, "no kind and key")
        return record

    def _foreign(self, number: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}, line {number} was not written by {self._program} ({why}); name another {self._option}."
        )

    def _remember(self, record: Json) -> None:
        self.of(record["kind"])[record["key"]] = record

    def of(self, kind: str) -> dict[str, Json]:
        """Return key -> newest record of a kind, in the order in which the keys first came."""
        return self._kinds.setdefault(kind, {})

    def add(self, record: Json) -> Json:
        """Keep a record, on the disk at once, and return it.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is not None:
            append_jsonl(self.path, [record])
        self._remember(record)
        return record


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the differences between two sets of options or facts, one line each: "train.steps was 4, now 5".

    Args:
        before: of the run that was interrupted; may be nested.
        now: of the run that would continue it.
        path: dotted name of both, with a dot at its end.
    """
    lines: list[str] = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{path}{key}.")
        elif a != b:
            lines.append(f"{path}{key} was {shown(a)}, now {shown(b)}")
    return lines
