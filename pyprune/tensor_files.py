"""safetensors files read and written one tensor at a time.

The library's writer takes all tensors at once. Here the headers are written first, from shapes alone, and the
tensors follow piece by piece as they are made, so that a checkpoint far larger than memory can be rewritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pyprune.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FLUSH_BYTES = 64 << 20
"""Bytes after which the disk is given work; a smaller checkpoint is flushed once, when it is complete."""

_FLUSH = os.fdatasync if hasattr(os, "fdatasync") else os.fsync  # macOS has only the second


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    path: Path
    begin: int
    entry: Entry


class TensorFiles:
    """The tensors of a checkpoint folder, in one safetensors file or in shards.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: neither is there, or a header is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}
        for path in self._files():
            for place in _read_header(path):
                self._places[place.entry.name] = place

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{index} is damaged: {error!r}. Fetch the checkpoint again.") from error
            if any(Path(name).name != name for name in names):
                raise CheckpointError(f"{index} names a file outside its folder.")
            return [self.folder / name for name in names]
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        raise CheckpointError(f"{self.folder} has no {SINGLE} and no {INDEX}. Save the model as safetensors first.")

    def names(self) -> list[str]:
        """Names of all tensors, file by file in the order of their data."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self._places[name].entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header."""
        return self._places[name].entry.dtype

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from the file: its pages come and go with it."""
        place = self._places[name]
        entry = place.entry
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # Copy on write: nobody writes, but torch warns of memory that nobody may write.
        raw: Any = np.memmap(place.path, np.uint8, "c", place.begin, (entry.nbytes,))
        if place.begin % entry.dtype.itemsize:
            raw = np.array(raw)
        return torch.from_numpy(raw).view(entry.dtype).view(entry.shape)


def _read_header(path: Path) -> list[_Place]:
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > 100_000_000:
                raise CheckpointError(f"{path} is damaged: its header claims {length} bytes. Fetch it again.")
            header = json.loads(stream.read(length))
        size = path.stat().st_size
        places = []
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            begin, end = facts["data_offsets"]
            entry = Entry(name, DTYPES[facts["dtype"]], tuple(int(n) for n in facts["shape"]))
            if begin < 0 or end - begin != entry.nbytes or 8 + length + end > size:
                raise CheckpointError(f"{path} is damaged or truncated: {name} does not fit. Fetch it again.")
            places.append(_Place(path, 8 + length + begin, entry))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} could not be read: {error!r}. The file is missing, damaged or new.") from error
    return sorted(places, key=lambda place: place.begin)


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterator[tuple[str, Iterable[Tensor]]], max_shard_bytes: int
) -> dict[str, str]:
    """Write tensors as they come; a piece is written and hashed while the next one is made.

    Args:
        folder: where to.
        entries: what will come, in this order.
        tensors: (name, values) in the same order; the values come in pieces, split along the first dimension. A piece
            may be overwritten as soon as the next but one is asked for, so that two buffers are enough.
        max_shard_bytes: size at which a new file is begun (a larger tensor has a file of its own).

    Returns:
        File name -> SHA-256 of every file.

    Raises:
        RuntimeError: a tensor is not the one that was announced (a mistake in the caller).
    """
    shards = _shards(entries, max_shard_bytes)
    many = len(shards) > 1
    digests: dict[str, str] = {}
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if many else SINGLE
        digests[name] = _write_file(folder / name, shard, tensors)
        where |= dict.fromkeys((entry.name for entry in shard), name)
    if next(tensors, None) is not None:
        raise RuntimeError("There are more tensors than were announced.")
    if many:
        total = sum(entry.nbytes for entry in entries)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")
    return digests


def _shards(entries: Sequence[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_file(path: Path, entries: Sequence[Entry], tensors: Iterator[tuple[str, Iterable[Tensor]]]) -> str:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.nbytes
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    with path.open("wb", buffering=0) as stream, _Behind(stream) as behind:
        behind.put(np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8).data)
        for entry in entries:
            name, pieces = next(tensors)
            _write_tensor(behind, entry, name, pieces)
    return behind.digest.hexdigest()


def _write_tensor(behind: _Behind, entry: Entry, name: str, pieces: Iterable[Tensor]) -> None:
    rows = 0
    for piece in pieces:
        rows += len(piece)
        if (name, piece.dtype, *piece.shape[1:]) != (entry.name, entry.dtype, *entry.shape[1:]):
            raise RuntimeError(f"{name} {piece.dtype} {tuple(piece.shape)} came where {entry} was announced.")
        behind.put(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    if (name, rows) != (entry.name, entry.shape[0]):
        raise RuntimeError(f"{rows} rows of {name} came where {entry} was announced.")


class _Behind:
    """Writes and hashes one piece while the next one is made, and has the disk begin early."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.pool = ThreadPoolExecutor(3)
        self.pending: tuple[Future[None], ...] = ()
        self.flushing: Future[None] | None = None
        self.unflushed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._settle()
            self._flushed()
        finally:
            self.pool.shutdown()

    def put(self, data: memoryview) -> None:
        """Begin with a piece; the one before is done when this returns."""
        self._settle()
        # Both let go of the interpreter, so they overlap with each other and with the making of the next piece.
        self.pending = (self.pool.submit(self.digest.update, data), self.pool.submit(self._write, data))
        self._flush(len(data))

    def _flush(self, written: int) -> None:
        """Send what the file holds to the disk beside the work, so that the last flush finds little left."""
        self.unflushed += written
        if self.unflushed >= FLUSH_BYTES and (self.flushing is None or self.flushing.done()):
            # Asked of every flush: the system reports a failed write once, and the next flush may succeed.
            self._flushed()
            self.flushing, self.unflushed = self.pool.submit(_FLUSH, self.stream.fileno()), 0

    def _flushed(self) -> None:
        flushing, self.flushing = self.flushing, None
        if flushing is not None:
            flushing.result()

    def _settle(self) -> None:
        pending, self.pending = self.pending, ()
        for done in pending:
            done.result()

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[self.stream.write(data) :]
