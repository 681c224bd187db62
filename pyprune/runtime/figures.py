"""Checks of files of figures that a user names (``--json``, ``--jsonl``): may an existing file change?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyprune.errors import OutputError
from pyprune.runtime.disk import is_written_in_place
from pyprune.runtime.files import JSON_BYTES, check_file, parse_json, read_json

WRITTEN_BY = "pyprune"
"""Key of the version in every JSON file of figures: only a file with it is replaced."""


def check_figures(
    path: Path, *others: str | Path | None, option: str = "--json", ours: Callable[[dict[str, Any]], bool] | None = None
) -> None:
    """Raise :class:`OutputError` before any work for a file of figures that may not be written there.

    An existing file is replaced only if it is empty, or pyprune wrote it (it holds the key :data:`WRITTEN_BY`) and
    ``ours`` accepts it.

    Args:
        path: the file.
        others: other paths that the command reads or writes.
        option: that names the file.
        ours: (data of a JSON file of pyprune's) -> whether it may be replaced; None = it holds figures.
    """
    check_file(path)
    _refuse_used(option, path, others)
    if (
        path.is_file()
        and not is_written_in_place(path)
        and path.stat().st_size
        and not _is_of(path, ours or _are_figures)
    ):
        obstacle = "was not written by pyprune" if ours is None else "is nothing that this command wrote"
        raise OutputError(f"{path} exists and {obstacle}, so it is not replaced. Name another file, or remove it.")


def check_lines(path: Path, *others: str | Path | None) -> None:
    """Raise :class:`OutputError` before any work for a file of JSON lines (``--jsonl``) that may not be appended to.

    An existing file must begin with a JSON object.

    Args:
        path: the file.
        others: other paths that the command reads or writes.
    """
    check_file(path)
    _refuse_used("--jsonl", path, others)
    if is_written_in_place(path) or not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as stream:
        line = stream.readline(JSON_BYTES)
    try:
        record = parse_json(line.decode("utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise OutputError(f"{path} exists and does not hold JSON lines, so nothing is appended to it. Name another.")


def _refuse_used(option: str, path: Path, others: Iterable[str | Path | None]) -> None:
    for other in others:
        if other is not None and (_same(path, other) or _inside(path, Path(other))):
            raise OutputError(
                f"{option} is {path}, but the command uses {other} for something else; name another file."
            )


def _is_of(path: Path, ours: Callable[[dict[str, Any]], bool]) -> bool:
    """Check whether a file is JSON that pyprune wrote, and of this kind."""
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and WRITTEN_BY in data and ours(data)


def _are_figures(data: dict[str, Any]) -> bool:
    """Check that a file holds figures: profiles and records of checkpoints name the version too, but are sealed."""
    return "sha256" not in data


def _same(path: Path, other: str | Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
