"""Files: read within bounds, written whole, and replaced only if pyprune wrote them.

An output folder appears complete or not at all: it is filled next to its place, in a hidden folder that one run at a
time may hold, flushed to the disk and renamed. ``--overwrite`` replaces only files that the folder's own manifest
names (``pruning.json`` of a checkpoint, ``metrics.json`` of a report): those that pyprune wrote.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyprune.errors import OutputError, shown
from pyprune.runtime.disk import disk_errors, existing_parent, is_written_in_place, reason, sync, umask

CHECKPOINT_MANIFEST = "pruning.json"
REPORT_MANIFEST = "metrics.json"
CARD_NAME = "README.md"
"""The model card of a checkpoint: for people, who may edit it, so it has no checksum."""
MANIFESTS = (CHECKPOINT_MANIFEST, REPORT_MANIFEST)
MARK = ".pyprune"
"""Marks a hidden work folder as pyprune's own."""
JSON_BYTES = 256 << 20
"""Limit of JSON files: no record, plan or state of pyprune comes near it."""

# --- reading -------------------------------------------------------------------------------------


def read_bounded(path: str | Path, limit: int = JSON_BYTES) -> str:
    """Read a UTF-8 file of at most ``limit`` bytes.

    Raises:
        OSError: the file is missing or may not be read.
        ValueError: it is longer, or not UTF-8.
    """
    data = bytearray()
    with Path(path).open("rb") as stream:
        # In pieces: one call for the whole limit would allocate it for a file of a few bytes.
        while len(data) <= limit and (piece := stream.read(1 << 20)):
            data += piece
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes, the most that are read")
    return data.decode("utf-8")


def read_json(path: str | Path, limit: int = JSON_BYTES) -> Any:
    """Read a JSON file of at most ``limit`` bytes.

    Raises:
        OSError: the file is missing or may not be read.
        ValueError: it is longer, not UTF-8, not JSON, or nested too deeply.
    """
    return parse_json(read_bounded(path, limit))


def parse_json(text: str) -> Any:
    """Parse JSON as ``json.loads`` does, but raise ValueError for nesting that Python cannot follow, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain JSON data with a checksum over its own content under "sha256"."""
    return {**body, "sha256": _checksum(body)}


def unseal(data: Any) -> dict[str, Any]:
    """Return the data that :func:`seal` got.

    Raises:
        ValueError: it is no JSON object, has no checksum, or was changed.
    """
    if not isinstance(data, dict) or "sha256" not in data:
        raise ValueError("it holds no checksum")
    body = {key: value for key, value in data.items() if key != "sha256"}
    if data["sha256"] != _checksum(body):
        raise ValueError("its checksum does not match")
    return body


def _checksum(body: Mapping[str, Any]) -> str:
    # As read back: a key that is a number is text then, and sorts otherwise.
    plain = json.loads(json.dumps(body))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_report_manifest(folder: Path, figures: Mapping[str, Any]) -> None:
    """Write a report's manifest: the figures, and the names of all files, so that the folder may be replaced later.

    Raises:
        OutputError: it cannot be written.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    write_text(folder / REPORT_MANIFEST, json.dumps(seal({**figures, "files": names}), indent=2) + "\n")


# --- one file ------------------------------------------------------------------------------------


def check_file(path: Path) -> None:
    """Raise :class:`OutputError` before any work when a file can surely not be written there."""
    _check_name(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file.")
    if path.is_block_device():
        raise OutputError(f"{path} is a block device; name a file.")
    if is_written_in_place(path):
        return
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir():
        raise OutputError(f"Cannot write {path}: there is no folder {place.parent}. Create it, or name another file.")
    if not os.access(place.parent, os.W_OK | os.X_OK) or (place.exists() and not os.access(place, os.W_OK)):
        raise OutputError(f"Cannot write {path}: permission denied. Name another file.")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file so that it is either the old one or the whole new one, never a part.

    Symbolic links are followed. Devices and pipes are written to, and so is every path of /dev (but /dev/shm) and
    /proc: replacing /dev/stdout would cut off its target.

    Raises:
        OutputError: the file cannot be written (a full disk, a missing permission).
    """
    try:
        if is_written_in_place(path):
            sys.stdout.flush()
            with os.fdopen(_open_descriptor(path), "w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise OutputError(f"Cannot write {path}: {reason(error, path)}. {path} is as it was.") from error


def _open_descriptor(path: Path) -> int:
    """Open a descriptor to write to; the process's own stdout or stderr if the path is that, to keep its position."""
    there = path.stat()
    for number in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), there):
                return os.dup(number)
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:200]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~umask()
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


# --- a folder ------------------------------------------------------------------------------------


def check_output(out: str | Path, *, overwrite: bool = False, reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before anything is computed, an output folder that may not be written.

    Args:
        out: the folder that a command would create.
        overwrite: whether an existing one may be replaced; it is only if pyprune wrote everything in it.
        reads: files and folders that the command reads (hub ids and None are passed over).

    Raises:
        OutputError: ``out`` is a file or a symbolic link; it exists (without ``overwrite``); it is or holds the current
            folder or a source that is read; it holds a file or folder that pyprune did not write; or its parent cannot
            be written.
    """
    out = Path(out)
    _check_name(out, work_folder(out))  # its name is longer
    if out.is_symlink():
        raise OutputError(f"{out} is a symbolic link to {os.readlink(out)}; name the folder itself.")
    if not out.exists():
        _check_parent(out)
        return
    place = out.resolve()
    for source in reads:
        if source is not None:
            _check_not_read(place, out, Path(source))
    if not overwrite:
        raise OutputError(f"{out} exists already. Choose another folder or give --overwrite.")
    if not out.is_dir():
        raise OutputError(f"{out} is a file, not a folder; it is not replaced.")
    if place in (here := Path.cwd().resolve(), *here.parents):
        raise OutputError(f"{out} is or holds the current folder, which is not replaced. Choose another folder.")
    _refuse_foreign(out)
    _check_parent(out)


def _check_name(*paths: Path) -> None:
    """Refuse names that no file system takes: too long, with a NUL, a link to itself."""
    for path in paths:
        try:
            os.lstat(path)
            if path.is_symlink():
                os.path.realpath(path, strict=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"{shown(str(path))} cannot be written: {reason}. Choose another name.") from error


def _check_parent(out: Path) -> None:
    parent = existing_parent(out.absolute().parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"Cannot create {out}: {parent} is no folder that may be written. Choose another folder.")


def _check_not_read(place: Path, out: Path, source: Path) -> None:
    try:
        read = source.resolve(strict=True)
    except (OSError, ValueError):
        return
    if place == read:
        raise OutputError(f"{out} is what the command reads; it is not replaced. Choose another folder.")
    if place in read.parents:
        raise OutputError(f"{out} holds {source}, which the command reads; it is not replaced. Choose another folder.")


def _refuse_foreign(folder: Path, shown_as: Path | None = None) -> None:
    foreign = next(foreign_names(folder), None)
    if foreign is not None:
        where = shown_as or folder
        raise OutputError(
            f"{where} holds {foreign}, which no record of pyprune in it names; the folder is not replaced, even with "
            "--overwrite. Move that away, or choose another folder."
        )


def foreign_names(folder: Path) -> Iterator[str]:
    """Yield names in a folder that its manifests do not list: files, links, and folders without a listed file."""
    owned = _owned_names(folder)
    inside = {str(parent) for name in owned for parent in Path(name).parents}
    for root, folders, files in os.walk(folder):
        base = Path(root)
        for name in [*files, *folders]:
            path = base / name
            is_folder = path.is_dir() and not path.is_symlink()
            relative = path.relative_to(folder).as_posix()
            if relative not in (inside if is_folder else owned):
                yield relative


def _owned_names(folder: Path) -> set[str]:
    owned: set[str] = set()
    for manifest in MANIFESTS:
        try:
            names = unseal(read_json(folder / manifest)).get("files", ())
        except (OSError, ValueError):
            continue
        if isinstance(names, Mapping | list):
            owned |= {manifest, *map(str, names)}
            owned |= {CARD_NAME} if manifest == CHECKPOINT_MANIFEST else set()
    return owned


def written_at(out: str | Path) -> tuple[int, int] | None:
    """Return an identity of the folder or file at ``out``, which a replacement changes; None if there is none."""
    try:
        status = os.stat(out)
    except (TypeError, OSError, ValueError):  # does not exist, or is no path
        return None
    return status.st_dev, status.st_ino


def work_folder(out: str | Path) -> Path:
    """Return the hidden folder next to ``out`` in which it is made."""
    path = Path(out).absolute()
    return path.with_name(f".{path.name}.work")


_claims: set[tuple[int, Path]] = set()
"""(thread, work folder) of every claim that this process holds, so that claims of one thread nest."""


@contextmanager
def claim_work_folder(out: str | Path) -> Iterator[Path]:
    """Hold the work folder of ``out`` in the block, so that no other process writes to ``out``.

    The lock is the system's, on the folder itself, so it ends with the process. After the block the folder is removed
    if it is empty, and so are the parents that were made for it.

    Raises:
        OutputError: another run holds it, another file has its name, or it cannot be made.
    """
    folder = work_folder(out)
    claim = (threading.get_ident(), folder)
    if claim in _claims:
        yield folder
        return
    made = [p for p in (folder.parent, *folder.parent.parents) if not p.exists()]
    try:
        with disk_errors(out):
            folder.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(folder, Path(out))
    except BaseException:
        _remove_empty(made)
        raise
    _claims.add(claim)
    try:
        with disk_errors(out):
            _settle_swap(folder, Path(out).absolute())
        yield folder
    finally:
        _claims.discard(claim)
        if set(os.listdir(folder)) <= {MARK}:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        _remove_empty(made)


def _lock(folder: Path, out: Path) -> int:
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
        if folder.is_symlink() or not folder.is_dir():
            raise OutputError(f"{folder} is in the way, and pyprune did not write it. Move it away.")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _take(descriptor, folder, out)
            held = os.fstat(descriptor)
            with suppress(FileNotFoundError):  # the holder before may just have removed it
                if os.path.samestat(held, folder.stat()):
                    _mark(folder)
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(descriptor: int, folder: Path, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"Another run is writing to {out} (it holds {folder}). Wait for it, or choose another folder."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        # A file system without locks: every other program continues there, too.


def _mark(folder: Path) -> None:
    names = os.listdir(folder)
    if names and MARK not in names:
        raise OutputError(f"{folder} holds {names[0]}, which pyprune did not write. Move it away.")
    (folder / MARK).touch()


def _settle_swap(folder: Path, out: Path) -> None:
    """Finish the replacement of ``out`` by a run that was killed."""
    old = folder / "old"
    if old.is_dir() and not os.path.lexists(out):
        old.rename(out)
    elif old.is_dir():
        _refuse_foreign(old)
        shutil.rmtree(old)
    shutil.rmtree(folder / "part", ignore_errors=True)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:  # the deepest first
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def atomic_folder(out: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to fill; it becomes ``out`` when the block ends without error.

    Raises:
        OutputError: ``out`` may not be written (see :func:`check_output`), now or when the block has ended; or it
            cannot be (the disk is full).
    """
    out = Path(out).absolute()
    check_output(out, overwrite=overwrite)
    place = partial(_swap, out=out, overwrite=overwrite)
    with claim_work_folder(out) as folder, disk_errors(out), whole_folder(folder / "part", place) as part:
        yield part
        _let_others_read(part)


@contextmanager
def whole_folder(part: Path, place: Callable[[Path], None]) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends without error it is flushed to the disk and renamed.

    Args:
        part: the folder; an earlier one, of a killed process, is removed first.
        place: renames it.
    """
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        for path in [*part.rglob("*"), part]:
            sync(path)
        place(part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _swap(part: Path, out: Path, *, overwrite: bool) -> None:
    check_output(out, overwrite=overwrite)  # hours may have passed
    if not out.exists():
        part.rename(out)  # the system refuses if a folder with content appears at this moment
    elif exchange(part, out):  # so that another process finds one of the two at any time
        try:
            _refuse_foreign(part, shown_as=out)
        except BaseException:
            exchange(part, out)
            raise
    else:
        old = part.with_name("old")
        out.rename(old)
        try:
            _refuse_foreign(old, shown_as=out)
            part.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(out.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths at once; False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), both)) == 0


def _let_others_read(folder: Path) -> None:
    """Give files the usual permissions: servers of other accounts read checkpoints; safetensors makes private files."""
    mask = umask()
    for path in filter(Path.is_file, folder.rglob("*")):
        path.chmod(0o666 & ~mask)
