"""Files of figures that a user names (``--json``, ``--jsonl``): what stands there already, and may it change."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pyprune.errors import OutputError
from pyprune.runtime.disk import in_place
from pyprune.runtime.files import JSON_BYTES, check_file, parse_json, read_json

WRITTEN_BY = "pyprune"
"""Key of the version in every JSON file of figures: only a file with it is replaced."""


def check_figures(path: Path, *others: str | Path | None) -> None:
    """Raise :class:`OutputError` before any work for a file of figures (``--json``) that may not be written there.

    An existing file is replaced only if pyprune wrote it (it holds the key :data:`WRITTEN_BY`) or it is empty.

    Args:
        path: the file.
        others: what else the command reads or writes.
    """
    check_file(path)
    for other in others:
        if other is not None and (_same(path, other) or _inside(path, Path(other))):
            raise OutputError(f"--json is {path}, but the command uses {other} for something else; name another file.")
    if path.is_file() and not in_place(path) and path.stat().st_size and not _holds_figures(path):
        raise OutputError(
            f"{path} exists and was not written by pyprune, so it is not replaced. Name another file, or remove it."
        )


def check_lines(path: Path) -> None:
    """Raise :class:`OutputError` before any work for a file of JSON lines that may not be appended to.

    An existing file must begin with a JSON object; a text of somebody's is not.
    """
    check_file(path)
    if in_place(path) or not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as stream:
        line = stream.readline(JSON_BYTES)
    try:
        found = parse_json(line.decode("utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OutputError(f"{path} exists and does not hold JSON lines, so nothing is appended to it. Name another.")


def _holds_figures(path: Path) -> bool:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return False
    # Profiles and records of checkpoints name the version too; they are sealed, and no figures.
    return isinstance(data, dict) and WRITTEN_BY in data and "sha256" not in data


def _same(path: Path, other: str | Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
