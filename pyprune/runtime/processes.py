"""Processes that torchrun started to train one model together.

Each does the whole run, on the same text. Work outside of training is done by every process, or by the first one alone
if weights are on the host (:class:`Division`). If results could differ, all take that of the first. While a model
trains, its weights are divided among the processes (:mod:`pyprune.train.sharded`). Only the first writes and prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pyprune.errors import ConfigError, DataError, PypruneError
from pyprune.runtime.progress import print_nothing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=6)
"""Longest time that a process waits for the others, for example while the first writes a checkpoint."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Torch's messages when another process has ended."""
_WAITED = ("Timed out waiting", "timed out")
"""Its messages when one has not come in time."""
_joined = False


@dataclass(frozen=True)
class Division:
    """The division of a model's training.

    Attributes:
        device: of each process's computation and part; None = that of the model.
        weights: place of the weights before the training. everybody: every process has a whole model in memory; that of
            the first counts, and all get the trained weights. files or first: weights are on the host, so that no
            device ever holds a whole model; they are mapped from files by every process
            (:func:`pyprune.checkpoint.load.load_model`, in the stored dtype), or sent layer by layer from the first
            process while the others have shapes alone (:mod:`pyprune.runtime.shapes`). Weights that are not trained are
            then not moved, and only the first process gets the trained ones.
    """

    device: torch.device | None = None
    weights: Literal["everybody", "files", "first"] = "everybody"

    @property
    def on_host(self) -> bool:
        """True if weights are on the host, and the trained ones are in the first process alone."""
        return self.weights != "everybody"


_division: Division | None = None


def launched_count() -> int:
    """Count the processes that torchrun started for this run; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def join_processes(command: str, *, may_divide: bool) -> Iterator[None]:
    """Join the processes of this run for the block; does nothing if there is only one.

    Args:
        command: for the message.
        may_divide: whether it trains.

    Raises:
        ConfigError: several processes were started for something that only one can do.
        PypruneError: another process ended.
    """
    global _joined
    if launched_count() == 1:
        yield
        return
    if not may_divide:
        raise ConfigError(
            f"torchrun started {launched_count()} processes, but '{command}' works in one; start it without torchrun. "
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
        with nullcontext() if first() else print_nothing():
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
            f"Another of the {launched_count()} processes of this run ended, so this one stops too; its own message "
            "says why, unless it was killed."
        ) from error
    finally:
        _joined = False
        dist.destroy_process_group()


def count() -> int:
    """Count the processes that work together; 1 outside :func:`join_processes`."""
    return launched_count() if _joined else 1


def local_count() -> int:
    """Count the processes that run on the same machine as this one."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if _joined else 1


def number() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ["RANK"]) if _joined else 0


def first() -> bool:
    """Check whether this process is the first, which writes and prints."""
    return number() == 0


@contextmanager
def divide_training(how: Division = Division()) -> Iterator[None]:
    """Divide trainings in the block among the processes."""
    global _division
    before, _division = _division, how if count() > 1 else None
    try:
        yield
    finally:
        _division = before


def division() -> Division | None:
    """Return the division of a training that starts now; None if it is not divided."""
    return _division


def is_divided() -> bool:
    """Check whether a training that starts now is divided."""
    return _division is not None


def gets_result() -> bool:
    """Check whether this process gets the weights of a training in the block."""
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
    """Return the first process's value, plain data, in all of them."""
    if not _joined:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def alike(value: object) -> bool:
    """Check whether all processes have the same value, plain data."""
    return all(other == value for other in _gather(value))


def least(value: int) -> int:
    """Return the smallest value of all processes."""
    return min(_gather(value))


def _gather(value: T) -> list[T]:
    """Return the value of each process, plain data."""
    if not _joined:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def check_same_text(digest: Callable[[], str]) -> None:
    """Refuse to divide a text that is not the same in all processes, which may be on several machines.

    Args:
        digest: returns the digest of the text; called if there are several processes.

    Raises:
        DataError: it differs.
    """
    if is_divided() and not alike(digest()):
        raise DataError(
            "The processes of this run read different text. Put the same files on all machines, or name a folder that "
            "they share."
        )


def all_agree(value: bool) -> bool:
    """Check whether the value is true in all processes that divide the work."""
    if not is_divided():
        return value
    import torch

    return int(summed_(torch.tensor(int(not value)))) == 0


def summed_(tensor: Tensor) -> Tensor:
    """Add up a tensor over the processes, in place; the same in all of them, bit for bit."""
    if _joined:
        import torch.distributed as dist

        dist.all_reduce(tensor)
    return tensor
