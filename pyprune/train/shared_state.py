"""Training checkpoints that several processes write together, and any number of processes reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pyprune.errors import shown
from pyprune.runtime import processes
from pyprune.train.shards import (
    SHARDS,
    Empty,
    Tensors,
    is_blocks,
    read_shards,
    refuse_blocks,
    silence_torch,
    stored_name,
)
from pyprune.train.state import Check, TrainState, load_state, read_whole, save_state


def save_shared(folder: Path, state: TrainState, tensors: Mapping[str, Any], *, name: str | None = None) -> Path:
    """Write a checkpoint from all processes at once; they continue once it has its name.

    Args:
        folder: of the run's checkpoints, the same in all processes.
        state: the other data; that of the first process is written.
        tensors: ``group/entry`` -> the divided tensor (DTensor), or a plain one that is equal in all processes.
        name: see :func:`pyprune.train.state.save_state`.

    Raises:
        OutputError: it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    named = {stored_name(entry): tensor for entry, tensor in tensors.items()}

    def write(part: Path | None) -> None:
        place = processes.from_first(None if part is None else str(part / SHARDS))
        try:
            with silence_torch():
                save(named, checkpoint_id=place)
        except CheckpointException as error:  # a BaseException, which handlers of errors would miss
            raise OSError(f"in one of {processes.count()} processes: {shown(error)}") from error

    written: Path | None = None
    if processes.first():
        written = save_state(folder, replace(state, tensors={}), name=name, write_tensors=lambda part, _: write(part))
    else:
        write(None)
    return Path(processes.from_first(str(written)))


def load_shared(
    path: Path,
    empty: Empty,
    part: Callable[[str, str, Tensor], Tensor],
    check: Check | None = None,
) -> TrainState:
    """Read a checkpoint; every process gets its parts.

    Args:
        path: of the checkpoint, written by one process or by any number.
        empty: makes the tensor that an entry is read into, from shards.
        part: (group, entry, whole tensor) -> this process's part, for a checkpoint of one process.
        check: see :func:`pyprune.train.state.load_state`.

    Raises:
        CheckpointError: it is damaged, of another training, or of a lean one in another number of processes.
    """

    def read(folder: Path) -> Tensors:
        if (folder / SHARDS).is_dir():
            return read_shards(folder / SHARDS, empty)
        whole = read_whole(folder)
        if any(is_blocks(f"{group}/{key}") for group, entries in whole.items() for key in entries):
            refuse_blocks(folder, 1)
        return {group: {key: part(group, key, t) for key, t in entries.items()} for group, entries in whole.items()}

    return load_state(path, read, check)
