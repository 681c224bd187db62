"""Tensors of a training checkpoint that several processes wrote (torch.distributed.checkpoint).

They are named ``group/entry``. What is a part of one parameter is stored as that parameter, so that it can be divided
anew; moments in 8 bits are blocks of a part, which only the same part of the same number of processes can use: their
names end in ``@PROCESS/PROCESSES``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pyprune.errors import CheckpointError, shown
from pyprune.runtime import processes

Tensors = dict[str, dict[str, Tensor]]
"""group -> entry -> tensor."""
SHARDS = "shards"
"""Folder of the parts inside a checkpoint."""
BLOCKS = ("_codes", "_scale")
"""What entries of moments in 8 bits end in."""

Empty = Callable[[str, str, torch.Size, torch.dtype], Any]
"""(group, entry, whole shape, dtype) -> the tensor to read an entry into."""


def read_shards(folder: Path, empty: Empty | None = None) -> Tensors:
    """Read what several processes wrote: parts by ``empty``, in all processes at once; without it whole tensors.

    Raises:
        CheckpointError: moments in 8 bits of another number of processes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    for entry, facts in cast(dict[str, Any], stored).items():
        name, _, owner = entry.partition("@")
        if owner and not owner.endswith(f"/{processes.count()}"):
            raise of_other_processes(folder.parent, int(owner.partition("/")[2]))
        if not owner or own_name(name) == entry:
            group, _, key = name.partition("/")
            size, dtype = facts.size, facts.properties.dtype
            wanted[entry] = torch.empty(size, dtype=dtype) if empty is None else empty(group, key, size, dtype)
    try:
        with quietly():
            load(wanted, checkpoint_id=folder, no_dist=empty is None)
    except CheckpointException as error:  # no Exception: it would pass by all who handle errors
        raise CheckpointError(f"The parts in {folder} cannot be read: {shown(error)}.") from error
    found: Tensors = {}
    for entry, tensor in wanted.items():
        group, _, key = entry.partition("@")[0].partition("/")
        found.setdefault(group, {})[key] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def of_other_processes(folder: Path, count: int) -> CheckpointError:
    """The refusal of a state of so many processes: blocks of moments end elsewhere in the parts of others."""
    of = "one process" if count == 1 else f"{count} processes"
    return CheckpointError(
        f"{folder} holds moments in 8 bits of {of}, which only as many can continue; these are {processes.count()}. "
        "Start as many, or train with memory 'full'."
    )


def is_blocks(entry: str) -> bool:
    """Whether an entry is a moment in 8 bits, or its scales."""
    return entry.startswith("optimizer/") and entry.endswith(BLOCKS)


def own_name(entry: str) -> str:
    """The name of an entry; of what no other process can use, with this process's number."""
    return f"{entry}@{processes.number()}/{processes.count()}" if is_blocks(entry) else entry


@contextmanager
def quietly() -> Iterator[None]:
    """Torch says that it saves and loads in one process where that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
