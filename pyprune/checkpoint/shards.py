"""Read and write safetensors files one tensor at a time.

The library's writer takes all tensors at once. Here the headers are written first, from shapes alone. The tensors
follow piece by piece as they are made, so that a checkpoint far larger than memory can be rewritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from pyprune.errors import CheckpointError, shown
from pyprune.runtime.files import read_bounded
from pyprune.runtime.progress import track

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors format's own limit on its header; a larger length field is a damaged file."""
MAX_DIMENSIONS = 16

SHARD_BYTES = 5_000_000_000
"""Size of the shards on the hub, and of those that a single file is split into."""

FLUSH_BYTES = 64 << 20
"""Bytes after which a flush to the disk begins; a smaller checkpoint is flushed once, when it is complete."""

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
class Place:
    """The place of a tensor: its file, the first byte of its data there, and its entry."""

    path: Path
    begin: int
    entry: Entry


class TensorFiles:
    """The tensors of a checkpoint folder, in one safetensors file or in shards.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: see :func:`weight_files`; a header is damaged, or two files hold the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = _tensor_places(weight_files(folder))

    def names(self) -> list[str]:
        """Return the names of all tensors, file by file in the order of their data."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return self._places[name].entry.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, from the header."""
        return self._places[name].entry.dtype

    def read(self, name: str) -> Tensor:
        """Map the tensor from its file; its pages are released with it."""
        return map_tensor(self._places[name])


def map_tensor(place: Place) -> Tensor:
    """Map the tensor at a place from its file; its pages are released with it."""
    entry = place.entry
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    # Copy on write: nothing writes to it, but torch warns about read-only memory.
    raw: Any = np.memmap(place.path, np.uint8, "c", place.begin, (entry.nbytes,))
    if place.begin % entry.dtype.itemsize:
        raw = np.array(raw)
    return torch.from_numpy(raw).view(entry.dtype).view(entry.shape)


def _tensor_places(files: Iterable[Path]) -> dict[str, Place]:
    """Return the place of every tensor of these files, by name."""
    places: dict[str, Place] = {}
    for path in files:
        for place in read_header(path):
            name = place.entry.name
            if name in places:
                raise CheckpointError(
                    f"{path.parent} holds the tensor {shown(name)} twice, in {places[name].path.name} and in "
                    f"{path.name}; it is unclear which one is valid. Fetch or write the checkpoint again."
                )
            places[name] = place
    return places


def has_safetensors(folder: Path) -> bool:
    """Check whether a path is a folder with weights in safetensors."""
    return any(os.path.isfile(folder / name) for name in (SINGLE, INDEX))


def weight_files(folder: Path, *, pickled: bool = False) -> list[Path]:
    """Return the weight files of a folder that are loaded; it may hold the same weights in other layouts too.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.
        pickled: return ``pytorch_model.bin`` (or the files of its index) where there are no safetensors.

    Raises:
        CheckpointError: there are none; the index is damaged, names a file outside the folder, one that is missing, or
            other tensors than the safetensors files hold; or the folder has both a single file and an index, of which
            readers take different ones.
    """
    kinds = [(SINGLE, INDEX), (PICKLED, PICKLED_INDEX)] if pickled else [(SINGLE, INDEX)]
    for single, index in kinds:
        alone = os.path.isfile(folder / single)
        where = _read_index(folder / index) if os.path.isfile(folder / index) else {}
        names = sorted(set(where.values()))
        if alone and names not in ([], [single]):
            raise CheckpointError(
                f"{folder} holds {single} and {index}, which names other files: some readers take the one, some the "
                "other. Remove what does not belong to the model."
            )
        if names and not alone and index == INDEX:
            _check_indexed(folder, where)
        if alone or names:
            return [folder / name for name in names or [single]]
    advice = "" if pickled else ". Only safetensors are read here; convert others with `pyprune export`"
    missing = f"neither {SINGLE} nor {INDEX}" + (f" nor {PICKLED}" if pickled else "")
    raise CheckpointError(f"{folder} holds {missing}{advice}.")


def largest_shard(folder: Path) -> int:
    """Return the bytes of a checkpoint's largest shard, for writing shards of the same size; 5 GB for a single file.

    Raises:
        CheckpointError: see :func:`weight_files`.
    """
    files = weight_files(folder)
    return max(path.stat().st_size for path in files) if len(files) > 1 else SHARD_BYTES


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor -> file of the folder, as an index names them."""
    try:
        data = json.loads(read_bounded(index, HEADER_LIMIT_BYTES), object_pairs_hook=_distinct)
        where = dict(data["weight_map"].items())
        names = sorted(set(where.values()))
        outside = [name for name in names if Path(name).name != name or name == ".."]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is damaged ({shown(error)}); fetch or write the checkpoint again.") from error
    if outside:
        raise CheckpointError(f"{index} names {shown(outside[0])}, a file outside its folder; it was not read.")
    if not names:
        raise CheckpointError(f"{index} is damaged: it names no file. Fetch or write the checkpoint again.")
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        listed = ", ".join(missing[:3])
        raise CheckpointError(f"{index.parent} lacks {listed}, which {index.name} names; fetch it again.")
    return where


def _check_indexed(folder: Path, where: Mapping[str, str]) -> None:
    """Compare an index with the tensors of its files: some readers follow the one, some the other."""
    files = [folder / name for name in sorted(set(where.values()))]
    held = {name: place.path.name for name, place in _tensor_places(files).items()}
    wrong = min((name for name in {*held, *where} if held.get(name) != where.get(name)), default=None)
    if wrong is not None:
        by_index, by_files = (shown(names[wrong]) if wrong in names else "no file" for names in (where, held))
        raise CheckpointError(
            f"{folder / INDEX} does not fit the weight files: by the index, {shown(wrong)} is in {by_index}; by the "
            f"files themselves, in {by_files}. Fetch or write the checkpoint again."
        )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; refuse a repeated key, which readers take differently."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key occurs twice")
    return data


def read_header(path: Path) -> list[Place]:
    """Return the places of a safetensors file's tensors, in the order of their data, which is complete and has no gaps.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
                raise ValueError(f"the file has {size:,} bytes, and its header claims {length:,}")
            header = json.loads(stream.read(length).decode("utf-8"), object_pairs_hook=_distinct)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        facts = [(name, fact) for name, fact in header.items() if name != "__metadata__"]
        places = sorted((_place(path, 8 + length, *fact) for fact in facts), key=lambda p: (p.begin, p.entry.nbytes))
        end = _data_end(places, 8 + length)
        if size != end:
            raise ValueError(f"the file has {size:,} bytes, its header says {end:,}")
    except (OSError, ValueError, RecursionError) as error:
        text = str(error)[:300]
        raise CheckpointError(
            f"{path} could not be read: {text}. The file is truncated or damaged; fetch or write the checkpoint again."
        ) from error
    return places


def _place(path: Path, start: int, name: str, facts: Any) -> Place:
    fields: dict[str, Any] = facts if isinstance(facts, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{shown(name)} has the dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape, MAX_DIMENSIONS):
        raise ValueError(f"{shown(name)} has the shape {shown(shape)}")
    entry = Entry(name, DTYPES[dtype], tuple(shape))
    if not _are_sizes(offsets, 2) or len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
        raise ValueError(f"{shown(name)} has the offsets {shown(offsets)}, but {entry.nbytes:,} bytes")
    return Place(path, start + offsets[0], entry)


def _are_sizes(value: Any, most: int) -> TypeGuard[list[int]]:
    """Check whether a value is a list of at most ``most`` sizes."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _data_end(places: Sequence[Place], start: int) -> int:
    """Return the end of the tensors' data; refuse overlaps and gaps."""
    for place in places:
        if place.begin != start:
            raise ValueError(f"{shown(place.entry.name)} overlaps another tensor, or leaves a gap before it")
        start += place.entry.nbytes
    return start


def check_finite(name: str, tensor: Tensor, source: str | Path) -> None:
    """Refuse weights with NaN or infinity in them: every result computed from them would be worthless.

    Args:
        name: of the tensor, for the message.
        tensor: any shape and dtype.
        source: the checkpoint, for the message.

    Raises:
        CheckpointError: a value is not finite.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return
    # One pass without memory for a mask; both ends are NaN as soon as one value is.
    ends = torch.aminmax(tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float())
    if not all(bool(torch.isfinite(end)) for end in ends):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} of {source} holds values that are not finite (NaN or infinity) in {dtype}. The weights are "
            "damaged, or beyond the range of that dtype; fetch the checkpoint again or read it in another dtype."
        )


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterator[tuple[str, Iterable[Tensor]]], max_shard_bytes: int
) -> dict[str, str]:
    """Write tensors as they come; a piece is written and hashed while the next one is made.

    Args:
        folder: where to.
        entries: of the tensors, in this order.
        tensors: (name, values) in the same order, with the values in pieces, split along the first dimension. A piece
            may be overwritten as soon as the one after the next is requested, so that two buffers are enough.
        max_shard_bytes: size at which a new file begins (a larger tensor gets a separate file).

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
    with path.open("wb", buffering=0) as stream, _BackgroundWriter(stream) as writer:
        writer.put(np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8).data)
        for entry in track(entries, f"writing {path.name}"):
            name, pieces = next(tensors)
            _write_tensor(writer, entry, name, pieces)
    return writer.digest.hexdigest()


def _write_tensor(writer: _BackgroundWriter, entry: Entry, name: str, pieces: Iterable[Tensor]) -> None:
    rows, count = 0, entry.shape[0] if entry.shape else 1  # a single number has no rows
    for piece in pieces:
        rows += len(piece) if piece.ndim else 1
        if (name, piece.dtype, *piece.shape[1:]) != (entry.name, entry.dtype, *entry.shape[1:]):
            raise RuntimeError(f"{name} {piece.dtype} {tuple(piece.shape)} came where {entry} was announced.")
        writer.put(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    if (name, rows) != (entry.name, count):
        raise RuntimeError(f"{rows} rows of {name} came where {entry} was announced.")


class _BackgroundWriter:
    """Writes and hashes one piece while the next one is made, and starts writing to the disk early."""

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
            self._wait_for_piece()
            self._wait_for_flush()
        finally:
            self.pool.shutdown()

    def put(self, data: memoryview) -> None:
        """Start on a piece; the one before is done when this returns."""
        self._wait_for_piece()
        # Both release the interpreter's lock, so they overlap with each other and with making the next piece.
        self.pending = (self.pool.submit(self.digest.update, data), self.pool.submit(self._write, data))
        self._flush(len(data))

    def _flush(self, written: int) -> None:
        """Flush to the disk during the work, so that little is left for the last flush."""
        self.unflushed += written
        if self.unflushed >= FLUSH_BYTES and (self.flushing is None or self.flushing.done()):
            # Checked at every flush: the system reports a failed write once, and the next flush may succeed.
            self._wait_for_flush()
            self.flushing, self.unflushed = self.pool.submit(_FLUSH, self.stream.fileno()), 0

    def _wait_for_flush(self) -> None:
        flushing, self.flushing = self.flushing, None
        if flushing is not None:
            flushing.result()

    def _wait_for_piece(self) -> None:
        pending, self.pending = self.pending, ()
        for done in pending:
            done.result()

    def _write(self, data: memoryview) -> None:
        while len(data):
            data = data[self.stream.write(data) :]
