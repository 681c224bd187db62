"""The system's answers about paths and writes: flushed, failed, existing, special."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyprune.errors import OutputError


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(out: str | Path) -> Iterator[None]:
    """Turn errors of a failed write into an :class:`OutputError` that names ``out`` and the limit."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OutputError(f"Writing {out} failed: {reason(error, Path(out))}. {out} is as it was.") from error


def reason(error: Exception, path: Path) -> str:
    """Describe an error of a write; safetensors gives the system's error number as text only, numpy none."""
    match = re.search(r"os error (\d+)", str(error))
    number = getattr(error, "errno", None) or (int(match[1]) if match else None)
    if re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        number = errno.ENOSPC
    if number == errno.ENOSPC:
        free = shutil.disk_usage(existing_parent(path.absolute())).free
        return f"no room on the disk ({free / 1e6:.0f} MB free); free some space or choose another folder"
    if number == errno.EFBIG:
        return "a file would be larger than this process may write (see ulimit -f)"
    if number == errno.EDQUOT:
        return "the disk quota of this account is used up"
    return str(error)


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest folder above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def is_written_in_place(path: Path) -> bool:
    """Check whether a path is written to, and not replaced: a device, a pipe, or any path of /dev and /proc.

    /dev/shm is a disk in memory, with files like any other.
    """
    place = Path(os.path.abspath(path)).parts
    if place[:2] in (("/", "dev"), ("/", "proc")) and place[2:3] != ("shm",):
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def umask() -> int:
    """Return the permissions that this process removes from new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
