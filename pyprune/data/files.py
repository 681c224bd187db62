"""Read text files that may be missing, closed, damaged, too large or no text: each failure is one clear line."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from pathlib import Path

from pyprune.errors import LONGEST_NAME, DataError, shown

TEXT_BYTES = 2 << 30
"""A local file may have this many bytes, once it is unpacked."""
READ_AT_ONCE = 1 << 24


def check_file(path: Path) -> None:
    """Refuse a file that is unreadable, without reading it.

    Raises:
        DataError: it does not exist, is no regular file, is too large or may not be read.
    """
    name = _shown_path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(f"The file {name} does not exist. Check the path{_seen_from(path)}.") from None
    except (OSError, ValueError) as error:  # a name too long, with a NUL, below a closed folder
        raise DataError(f"{name} cannot be read: {_reason(error)}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{name} is a folder; name one .txt or .jsonl file (optionally .gz).")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name} is a device, pipe or socket; name one .txt or .jsonl file (optionally .gz).")
    if not os.access(path, os.R_OK):
        raise DataError(f"{name} cannot be read: permission denied. Change its permissions, or give another file.")
    if status.st_size > TEXT_BYTES:
        raise DataError(_too_long(name, f"has {status.st_size:,} bytes"))


def local_path(source: str) -> Path:
    """Return the path that a source names, with ~ written out.

    Raises:
        DataError: there is no such home folder.
    """
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(f"{_shown_path(source)} names no home folder: {error}. Give the whole path.") from error


def read_text(path: Path) -> str:
    """Return a (gzipped) file as text, with Unix line ends.

    Raises:
        DataError: it cannot be read, is damaged, too long once it is unpacked, or not UTF-8.
    """
    check_file(path)
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    data = bytearray()
    try:
        with opened(path, "rb") as stream:
            while chunk := stream.read(READ_AT_ONCE):
                _refuse_nul(chunk, len(data), str(path))
                data += chunk
                if len(data) > TEXT_BYTES:
                    raise DataError(_too_long(_shown_path(path), "unpacks to too many bytes"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{_shown_path(path)} cannot be read: {_reason(error)}. Give a readable, complete file."
        ) from error
    return _decode(data, str(path))


def _refuse_nul(chunk: bytes, start: int, name: str) -> None:
    nul = chunk.find(b"\0")
    if nul >= 0:
        raise DataError(f"{_shown_path(name)} is binary: a NUL byte at offset {start + nul}. Give a UTF-8 text file.")


def _decode(data: bytearray, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{_shown_path(name)} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}. "
            "Convert it to UTF-8, or give a text file."
        ) from error
    return text.replace("\r\n", "\n")


def _shown_path(path: str | Path) -> str:
    """Format a path for a message: whole, unless it is very long."""
    return repr(str(path)) if len(str(path)) <= LONGEST_NAME else shown(str(path))


def _seen_from(path: Path) -> str:
    try:
        return "" if path.is_absolute() else f" (it is relative to {Path.cwd()})"
    except OSError:  # the current folder has been removed
        return ""


def _reason(error: Exception) -> str:
    """Return the system's words without the path, which the message has already."""
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _too_long(name: str, seen: str) -> str:
    return f"{name} {seen}; at most {TEXT_BYTES:,} are read. Give a part of it."
