"""Read and write the tensors of training checkpoints: of one process, or of several (torch.distributed.checkpoint).

Those of several are named ``group/entry``. A part of one parameter is stored as that parameter, so that it can be
divided again. Moments in 8 bits are blocks of 128 elements of a part, and their names end in ``@PROCESS/PROCESSES``.
Only the same number of processes reads them: a part of another size has other blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from pyprune.errors import CheckpointError, shown
from pyprune.runtime import processes

Tensors = dict[str, dict[str, Tensor]]
"""group -> entry -> tensor."""
SHARDS = "shards"
"""Folder of the parts inside a checkpoint."""
OPTIMIZER = "optimizer"
"""Group of the moments."""
BLOCKS = ("_codes", "_scale")
"""Ends of the names of a moment's two entries in 8 bits."""
Empty = Callable[[str, str, torch.Size, torch.dtype], Any]
"""(group, entry, whole shape, dtype) -> the tensor to read an entry into."""


def read_shards(folder: Path, empty: Empty | None = None) -> Tensors:
    """Read tensors that several processes wrote: parts by ``empty``, in all processes at once; else whole tensors.

    Args:
        folder: of the parts.
        empty: makes the tensor that an entry is read into; None = whole tensors.

    Raises:
        CheckpointError: the parts cannot be read, or hold moments in 8 bits of another number of processes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    tensors: dict[str, Any] = {}
    for entry, facts in cast(dict[str, Any], reader.read_metadata().state_dict_metadata).items():
        name, _, owner = entry.partition("@")
        if owner and not owner.endswith(f"/{processes.count()}"):
            refuse_blocks(folder.parent, int(owner.partition("/")[2]))
        if not owner or stored_name(name) == entry:
            group, _, key = name.partition("/")
            size, dtype = facts.size, facts.properties.dtype
            tensors[entry] = torch.empty(size, dtype=dtype) if empty is None else empty(group, key, size, dtype)
    try:
        with silence_torch():
            load(tensors, storage_reader=reader, no_dist=empty is None)
    except CheckpointException as error:  # a BaseException, which handlers of errors would miss
        raise CheckpointError(f"The parts in {folder} cannot be read: {shown(error)}. Start the run again.") from error
    groups: Tensors = {}
    for entry, tensor in tensors.items():
        group, _, key = entry.partition("@")[0].partition("/")
        groups.setdefault(group, {})[key] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return groups


def read_whole(folder: Path) -> Tensors:
    """Read the whole tensors of a checkpoint that any number of processes wrote.

    Raises:
        CheckpointError: as :func:`read_shards`.
    """
    if (folder / SHARDS).is_dir():
        return read_shards(folder / SHARDS)
    return {file.stem: load_file(file) for file in folder.glob("*.safetensors")}


def read_parts(folder: Path, empty: Empty, part: Callable[[str, str, Tensor], Tensor]) -> Tensors:
    """Read the parts of this process of a checkpoint that any number of processes wrote.

    Args:
        folder: of the checkpoint.
        empty: makes the tensor that an entry is read into, from shards.
        part: (group, entry, whole tensor) -> this process's part, for a checkpoint of one process.

    Raises:
        CheckpointError: as :func:`read_shards`.
    """
    if (folder / SHARDS).is_dir():
        return read_shards(folder / SHARDS, empty)
    whole = read_whole(folder)
    if any(is_blocks(f"{group}/{key}") for group, entries in whole.items() for key in entries):
        refuse_blocks(folder, 1)
    return {group: {key: part(group, key, t) for key, t in entries.items()} for group, entries in whole.items()}


def write_parts(folder: Path, tensors: dict[str, Any]) -> None:
    """Write tensors from all processes at once.

    Args:
        folder: of the parts, the same in all processes.
        tensors: ``group/entry`` -> the divided tensor (DTensor), or a plain one that is equal in all processes.

    Raises:
        OSError: they cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with silence_torch():
            save({stored_name(entry): tensor for entry, tensor in tensors.items()}, checkpoint_id=folder)
    except CheckpointException as error:  # a BaseException, which handlers of errors would miss
        raise OSError(f"in one of {processes.count()} processes: {shown(error)}") from error


def refuse_blocks(path: Path, count: int) -> NoReturn:
    """Refuse moments in 8 bits that another number of processes wrote.

    Args:
        path: of the checkpoint.
        count: of the processes that wrote it.

    Raises:
        CheckpointError: always.
    """
    number = "1 process" if count == 1 else f"{count} processes"
    raise CheckpointError(
        f"{path} holds the 8-bit moments of a lean training in {number}. Their blocks are of parts of each process: "
        f"continue it in {number}, or start again."
    )


def is_blocks(entry: str) -> bool:
    """Check whether an entry is a moment in 8 bits, or its scales."""
    return entry.startswith(f"{OPTIMIZER}/") and entry.endswith(BLOCKS)


def stored_name(entry: str) -> str:
    """Return the stored name of an entry; that of blocks, which are of this process's parts, has its number."""
    return f"{entry}@{processes.number()}/{processes.count()}" if is_blocks(entry) else entry


@contextmanager
def silence_torch() -> Iterator[None]:
    """Silence torch's warnings about saving and loading in one process, as it should here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
