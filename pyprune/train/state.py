"""Resumable training checkpoints: safetensors and JSON in one folder a step, written atomically. No pickle.

A checkpoint folder ``step-000012/`` holds ``weights.safetensors`` (the trained weights), and optionally
``optimizer.safetensors``, ``objective.safetensors`` and ``best.safetensors``. ``state.json`` has everything else, the
SHA-256 of each tensor file and its own checksum, so that a truncated or altered checkpoint is refused. If several
processes train together, the files of torch.distributed.checkpoint are in ``shards/`` instead
(:mod:`pyprune.train.shards`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from pyprune.errors import CheckpointError, OutputError, shown
from pyprune.runtime.disk import reason, sync
from pyprune.runtime.files import file_digest, read_json, seal, unseal, whole_folder
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.records import differences
from pyprune.train.shards import Tensors, read_whole

CHECKPOINT_VERSION = 1
_STEP = re.compile(r"step-(\d{6,})\Z")

Check = Callable[[Mapping[str, Any]], None]
"""Checks the plain data of a checkpoint, and raises an error if it is wrong."""


@dataclass
class TrainState:
    """Everything that a run needs to continue exactly where it stopped.

    Attributes:
        step: optimizer steps done.
        meta: plain JSON data (configuration, history, counters).
        tensors: file stem -> tensor name -> tensor; empty groups are not written.
    """

    step: int
    meta: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)


def save_state(
    folder: Path,
    state: TrainState,
    *,
    name: str | None = None,
    write_tensors: Callable[[Path, Tensors], None] | None = None,
) -> Path:
    """Write ``folder/step-NNNNNN`` (or ``folder/name``) atomically, then remove older steps.

    Args:
        folder: of the run's checkpoints.
        state: the data to write.
        name: of the folder; None = by the step.
        write_tensors: puts the tensors into a folder; None = safetensors files.

    Raises:
        OutputError: the disk is full or the folder cannot be written; nothing half-written is left.
    """
    final = folder / (name or f"step-{state.step:06d}")

    def place(part: Path) -> None:
        """Replace a folder of the same step: it is deleted once the new one has its name."""
        old = folder / f".{final.name}.{os.getpid()}.old"
        with interrupts_deferred():
            if final.exists():
                final.rename(old)
            part.rename(final)
            sync(folder)
        shutil.rmtree(old, ignore_errors=True)

    try:
        with whole_folder(folder / f".{final.name}.{os.getpid()}.tmp", place) as part:
            (write_tensors or _write_tensors)(part, state.tensors)
            files = {str(path.relative_to(part)): file_digest(path) for path in _files(part)}
            meta = {"version": CHECKPOINT_VERSION, "step": state.step, "files": files, **state.meta}
            (part / "state.json").write_text(json.dumps(seal(meta), indent=1))
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"The training checkpoint {final} could not be written: {reason(error, final)}. Earlier checkpoints are "
            "intact."
        ) from error
    if name is None:
        _remove_older(folder, final)
    return final


def _write_tensors(folder: Path, tensors: Tensors) -> None:
    for stem, entries in tensors.items():
        if entries:
            save_file({k: v.detach().contiguous() for k, v in entries.items()}, folder / f"{stem}.safetensors")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_step(name: str) -> bool:
    """Check whether a folder of this name is a state that training continues from; the last good weights are not."""
    return _STEP.match(name) is not None


def latest_state(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, or None."""
    if not folder.is_dir():
        return None
    states = [p for p in folder.iterdir() if is_step(p.name) and (p / "state.json").is_file()]
    return max(states, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def load_state(
    path: Path,
    read_tensors: Callable[[Path], Tensors] | None = None,
    check: Check | None = None,
) -> TrainState:
    """Read and verify one checkpoint; tensors come back on the CPU.

    Args:
        path: of the checkpoint.
        read_tensors: reads the tensors of a folder; None = all of them, whole.
        check: is called before any tensor is read, which may take minutes.

    Raises:
        CheckpointError: a missing, truncated or altered file, or another version.
    """
    try:
        meta = unseal(read_json(path / "state.json"))
        if meta.pop("version") != CHECKPOINT_VERSION:
            raise CheckpointError(f"{path} was written by another version of pyprune; start the run again.")
        step, files = int(meta.pop("step")), dict(meta.pop("files"))
        if check is not None:
            check(meta)
        for name, digest in files.items():
            if ".." in Path(name).parts or Path(name).is_absolute() or file_digest(path / name) != digest:
                raise CheckpointError(_damage_message(path, f"{name} does not match its recorded SHA-256"))
        tensors = (read_tensors or read_whole)(path)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(_damage_message(path, shown(error))) from error
    return TrainState(step, meta, tensors)


def check_same_run(path: Path, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other options or other data.

    Raises:
        CheckpointError: naming every option that differs.
    """
    if different := differences(recorded, current):
        raise CheckpointError(
            f"{path} belongs to another run and cannot be resumed with these settings:\n"
            + "\n".join(f"- {d}" for d in different)
            + "\nUse the same settings, or another checkpoint folder."
        )


def _damage_message(path: Path, why: str) -> str:
    return (
        f"The training checkpoint {path} is damaged: {why}. It cannot be resumed; delete this folder to start "
        "the run again."
    )


def _remove_older(folder: Path, newest: Path) -> None:
    number = int(newest.name.removeprefix("step-"))
    for path in folder.iterdir():
        match = _STEP.match(path.name)
        leftover = path.name.startswith(".step-") and path.name.endswith(".tmp")  # of a killed process
        if leftover or (match and int(match[1]) < number):
            shutil.rmtree(path, ignore_errors=True)
