"""Processes that torchrun started to train one model together.

Each does the whole run, on the same text. What is not trained, every process computes for itself, or, where weights are
on the host (:class:`Division`), the first one alone; where results could differ, that of the first is taken by all.
While a model trains, its weights are divided among the processes (:mod:`pyprune.train.sharded`). Only the first writes
files and prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pyprune.errors import ConfigError, DataError, PypruneError
from pyprune.runtime.progress import printing_nothing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=6)
"""How long a process waits for the others: while the first writes a checkpoint, say."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What torch says when another process has gone."""
_WAITED = ("Timed out waiting", "timed out")
"""What it says when one has not come in time."""
_joined = False


@dataclass(frozen=True)
class Division:
    """How a model's training is divided.

    Attributes:
        device: where each process computes and keeps its part; None = where the model is.
        weights: who has them before the training. Everybody, as copies of its own, in memory: those of the first count,
            and all have what was trained. Or on the host, so that no device ever holds a whole model: those of files
            that every process has mapped (:func:`pyprune.checkpoint.load.load_model`, in the dtype that is stored), or
            those of the first process, which sends them layer by layer while the others have shapes alone
            (:mod:`pyprune.runtime.shapes`). What is not trained then stays where it is, and only the first has what was
            trained afterwards.
    """

    device: torch.device | None = None
    weights: Literal["everybody", "files", "first"] = "everybody"

    @property
    def on_host(self) -> bool:
        """Whether weights are on the host, and what was trained is in the first process alone."""
        return self.weights != "everybody"


_division: Division | None = None


def launched() -> int:
    """Processes that torchrun started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined(command: str, *, may_divide: bool) -> Iterator[None]:
    """Be one of the processes of this run in the block; does nothing where there is only one.

    Args:
        command: for the message.
        may_divide: whether it trains.

    Raises:
        ConfigError: several processes were started for something that only one can do.
        PypruneError: another process has gone.
    """
    global _joined
    if launched() == 1:
        yield
        return
    if not may_divide:
        raise ConfigError(
            f"torchrun started {launched()} processes, but '{command}' works in one; start it without torchrun. "
            "prune, recover and reconstruct can be divided."
        )
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda and here > torch.cuda.device_count():
        raise ConfigError(
            f"torchrun started {here} processes on a machine with {torch.cuda.device_count()} GPUs; start one for each "
            "GPU. (To use CPUs alone, hide the GPUs: CUDA_VISIBLE_DEVICES=)"
        )
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=LONGEST_WAIT)
    _joined = True
    try:
        with nullcontext() if first() else printing_nothing():
            yield
            barrier()
    except RuntimeError as error:
        if any(sign in str(error) for sign in _WAITED):
            raise PypruneError(
                f"The other processes of this run did not come within {LONGEST_WAIT}: they hang, or one of them works "
                "alone for longer than that. Look at their messages and at what the machines do."
            ) from error
        lost = any(sign in str(error) for sign in _LOST)
        if not lost and not isinstance(error, dist.DistNetworkError):
            raise
        raise PypruneError(
            f"Another of the {launched()} processes of this run ended, so this one stops too; its own message says "
            "why, unless it was killed."
        ) from error
    finally:
        _joined = False
        dist.destroy_process_group()


def count() -> int:
    """Processes that work together; 1 outside :func:`joined`."""
    return launched() if _joined else 1


def on_this_machine() -> int:
    """Those of them that run on the same machine as this one."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _joined else 1


def number() -> int:
    """Which of them this is, from 0."""
    return int(os.environ["RANK"]) if _joined else 0


def first() -> bool:
    """Whether this process writes and prints."""
    return number() == 0


@contextmanager
def dividing(how: Division = Division()) -> Iterator[None]:
    """What is trained in the block is divided among the processes."""
    global _division
    before, _division = _division, how if count() > 1 else None
    try:
        yield
    finally:
        _division = before


def division() -> Division | None:
    """How a training that starts now is divided; None where it is not."""
    return _division


def divided() -> bool:
    """Whether a training that starts now is divided."""
    return _division is not None


def gets_result() -> bool:
    """Whether this process has the weights that a training in the block comes to."""
    return _division is None or not _division.on_host or first()


@contextmanager
def alone() -> Iterator[None]:
    """Give this process all cores of the machine for as long as the others wait; torchrun gives each process one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def barrier() -> None:
    """Wait until all processes are here."""
    if _joined:
        import torch.distributed as dist

        dist.barrier()


def from_first(value: T) -> T:
    """What the first process has, plain data, for all of them."""
    if not _joined:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def alike(value: object) -> bool:
    """Whether all processes have the same value, plain data."""
    return all(other == value for other in _of_all(value))


def least(value: int) -> int:
    """The smallest of what the processes have."""
    return min(_of_all(value))


def _of_all(value: T) -> list[T]:
    """What each process has, plain data."""
    if not _joined:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def check_same_text(digest: Callable[[], str]) -> None:
    """Refuse to divide a text that is not the same in all processes, which may be on several machines.

    Args:
        digest: gives what the text is known by; called where there are several processes.

    Raises:
        DataError: it differs.
    """
    if divided() and not alike(digest()):
        raise DataError(
            "The processes of this run read different text. Put the same files on all machines, or name a folder that "
            "they share."
        )


def agreed(value: bool) -> bool:
    """Whether all processes that divide the work say so."""
    if not divided():
        return value
    import torch

    return int(summed_(torch.tensor(int(not value)))) == 0


def summed_(tensor: Tensor) -> Tensor:
    """Add up a tensor over the processes, in place; the same in all of them, bit for bit."""
    if _joined:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor
