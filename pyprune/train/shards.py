"""Tensors of a training checkpoint that several processes wrote (torch.distributed.checkpoint).

They are named ``group/entry``. A part of one parameter is stored as that parameter, so that it can be divided again.
Moments in 8 bits are blocks of a part, and their names end in ``@PROCESS/PROCESSES``. The same number of processes
reads them unchanged, any other through :mod:`pyprune.train.blocks`.
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
from pyprune.train.blocks import CODES, ENDS, Places, recut

Tensors = dict[str, dict[str, Tensor]]
"""group -> entry -> tensor."""
SHARDS = "shards"
"""Folder of the parts inside a checkpoint."""
OPTIMIZER = "optimizer"
"""Group of the moments."""
Empty = Callable[[str, str, torch.Size, torch.dtype], Any]
"""(group, entry, whole shape, dtype) -> the tensor to read an entry into."""


def read_shards(folder: Path, empty: Empty | None = None, places: Places | None = None) -> Tensors:
    """Read tensors that several processes wrote: parts by ``empty``, in all processes at once; else whole tensors.

    Args:
        folder: of the parts.
        empty: makes the tensor that an entry is read into; None = whole tensors.
        places: the parts of the optimizer's parameters that this process holds, for moments in 8 bits of another number
            of processes.

    Raises:
        CheckpointError: the parts cannot be read, or hold such moments while ``places`` is None.
    """
    stored = _Stored(folder)
    tensors: dict[str, Any] = {}
    others: dict[str, int] = {}
    for entry, facts in stored.facts.items():
        name, _, owner = entry.partition("@")
        if owner and not owner.endswith(f"/{processes.count()}"):
            others[name] = int(owner.partition("/")[2])
        elif not owner or stored_name(name) == entry:
            group, _, key = name.partition("/")
            size, dtype = facts.size, facts.properties.dtype
            tensors[entry] = torch.empty(size, dtype=dtype) if empty is None else empty(group, key, size, dtype)
    stored.load(tensors, alone=empty is None)
    groups: Tensors = {}
    for entry, tensor in tensors.items():
        group, _, key = entry.partition("@")[0].partition("/")
        groups.setdefault(group, {})[key] = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    for name, count in others.items():
        if name.endswith(CODES):
            groups.setdefault(OPTIMIZER, {}).update(_recut_moment(stored, name, count, places))
    return groups


def _recut_moment(stored: _Stored, codes: str, count: int, places: Places | None) -> dict[str, Tensor]:
    """Return a moment in 8 bits of another number of processes, in blocks of this process's part."""
    moment = codes.removeprefix(f"{OPTIMIZER}/").removesuffix(CODES)
    if places is None:
        raise CheckpointError(
            f"{stored.folder.parent} holds moments in 8 bits, in parts of {count} processes, which nothing but the "
            "training that wrote them can put together: continue it with resume."
        )
    names = [[f"{OPTIMIZER}/{moment}{end}@{number}/{count}" for end in ENDS] for number in range(count)]
    shapes = [stored.facts[of_codes].size for of_codes, _ in names]
    return recut(moment, shapes, lambda number: stored.read(names[number]), places)


class _Stored:
    """A folder of parts.

    Attributes:
        folder: of the parts.
        facts: name -> size and properties of a tensor, as torch recorded them.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.folder = folder
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        # Each load (one for every moment in 8 bits) would read it again, from a file with all parts of all moments.
        setattr(self._reader, "read_metadata", lambda *_, **__: metadata)  # noqa: B010  (mypy: a method)
        self.facts = cast(dict[str, Any], metadata.state_dict_metadata)

    def load(self, tensors: dict[str, Any], *, alone: bool) -> None:
        """Read entries into tensors: in this process alone, or in all of them at once.

        Raises:
            CheckpointError: they cannot be read.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with silence_torch():
                load(tensors, storage_reader=self._reader, no_dist=alone)
        except CheckpointException as error:  # a BaseException, which handlers of errors would miss
            raise CheckpointError(f"The parts in {self.folder} cannot be read: {shown(error)}.") from error

    def read(self, names: list[str]) -> list[Tensor]:
        """Read entries of any process, in this one alone."""
        facts = {name: self.facts[name] for name in names}
        tensors = {name: torch.empty(f.size, dtype=f.properties.dtype) for name, f in facts.items()}
        self.load(tensors, alone=True)
        return list(tensors.values())


def is_blocks(entry: str) -> bool:
    """Check whether an entry is a moment in 8 bits, or its scales."""
    return entry.startswith(f"{OPTIMIZER}/") and entry.endswith(ENDS)


def stored_name(entry: str) -> str:
    """Return the stored name of an entry; that of blocks, which are of this process's parts, has its number."""
    return f"{entry}@{processes.number()}/{processes.count()}" if is_blocks(entry) else entry


@contextmanager
def silence_torch() -> Iterator[None]:
    """Silence torch's warnings about saving and loading in one process, as it should here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
