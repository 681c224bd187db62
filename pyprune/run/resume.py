"""The work folder of an interrupted run, hidden next to its output, and the checks before it is resumed.

* ``run.json`` identifies the run: model, digest of its weights, every option.
* ``arithmetic.json`` holds the faster dtype, where options leave the dtype to the machine (``dtype: auto``).
* ``text.json`` holds a digest of the text of each use, ``decision.json`` the plan.
* Each training has a folder of checkpoints.

All carry checksums: a file that was changed is not resumed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.config.train import OF_NO_RESULT
from pyprune.errors import CheckpointError, ConfigError, OutputError, PlanError, shown
from pyprune.methods.base import PlanDecision
from pyprune.plan import PrunePlan
from pyprune.runtime import processes
from pyprune.runtime.device import bfloat16_as, bfloat16_is_faster, resolve_device
from pyprune.runtime.disk import disk_errors
from pyprune.runtime.files import MARK, claim_work_folder, read_json, seal, unseal, work_folder, write_text, written_at
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.records import differences
from pyprune.train.state import is_step

Run = TypeVar("Run", PruneConfig, RecoverCheckpointConfig)
AnyRun = PruneConfig | RecoverCheckpointConfig | ReconstructCheckpointConfig

LAST_GOOD = "the last good weights"
"""Kept by a training that began with a value that was not finite; it cannot be continued."""
RUN, ARITHMETIC, TEXT, DECISION = "run.json", "arithmetic.json", "text.json", "decision.json"


def kept_of_a_run(out: str | Path) -> str | None:
    """Name what an interrupted run to ``out`` kept to resume from; None where it kept nothing."""
    kept = _kept_in(work_folder(out))
    return None if kept == LAST_GOOD else kept


def refuse_kept(folder: Path) -> None:
    """Refuse to start where a work folder holds what an interrupted run can continue from.

    Raises:
        OutputError: it does.
    """
    kept = _kept_in(folder)
    if kept == LAST_GOOD:
        raise OutputError(
            f"A run whose training failed has kept {kept} in {folder}. Give --overwrite to drop them and start again."
        )
    if kept:
        raise OutputError(
            f"An interrupted run has kept {kept} in {folder}. Give --resume to continue it, or --overwrite to drop it "
            "and start again."
        )


def interrupted_run(out: str | Path, config: Run) -> bool:
    """Check whether an interrupted run to ``out`` with the same options can be resumed."""
    kept = _kept_options(out)
    alike = result_facts(kept) == result_facts(_with_kept_memory(config, kept).to_dict())
    return alike and kept_of_a_run(out) is not None


def with_kept_memory(out: str | Path, config: Run) -> Run:
    """Return the options with ``memory: auto`` as the interrupted run to ``out`` chose it.

    The choice depends on the free memory of the device, which may differ when the run is resumed.
    """
    return _with_kept_memory(config, _kept_options(out))


@contextmanager
def arithmetic_of(out: str | Path, *, resume: bool) -> Iterator[None]:
    """Keep the meaning that ``dtype: auto`` had when the interrupted run to ``out`` began, for the time of a block."""
    faster = _kept_value(out, ARITHMETIC, "bfloat16") if resume else None
    with bfloat16_as(faster if isinstance(faster, bool) else None):
        yield


def _kept_options(out: str | Path) -> Any:
    """Return the options of the interrupted run to ``out``."""
    return _kept_value(out, RUN, "config")


def _kept_value(out: str | Path, name: str, key: str) -> Any:
    """Return a value that the interrupted run to ``out`` kept; None if unreadable (resuming reports why)."""
    try:
        return unseal(read_json(work_folder(out) / name)).get(key)
    except (OSError, ValueError):
        return None


def _with_kept_memory(config: Run, kept: Any) -> Run:
    """Return the options with ``memory: auto`` replaced by the kept choice."""
    for training in [t for t in config.trainings() if t.train.memory == "auto"]:
        memory = _at(kept, f"{training.name}.memory")
        if memory in ("full", "lean"):
            config = config.with_training(training.action, replace(training.train, memory=memory))
    return config


def _at(options: Any, name: str) -> Any:
    """Return the option of a dotted name, or None."""
    for part in name.split("."):
        options = options.get(part) if isinstance(options, Mapping) else None
    return options


def _leaves_dtypes(options: Any) -> bool:
    """Check whether options leave a dtype to the machine."""
    if not isinstance(options, Mapping):
        return False
    return any(options.get(name) == "auto" for name in ("dtype", "teacher_dtype")) or any(
        map(_leaves_dtypes, options.values())
    )


def result_facts(facts: Any) -> Any:
    """Drop options that do not affect the result."""
    if not isinstance(facts, Mapping):
        return facts
    return {name: result_facts(value) for name, value in facts.items() if name not in OF_NO_RESULT}


def _kept_in(folder: Path) -> str | None:
    if not (folder / RUN).is_file():
        return None  # what is left of a folder whose clearing was killed
    states = _states_in(folder)
    kept = ["training checkpoints"] if any(map(is_step, states)) else []
    kept += ["its plan"] if (folder / DECISION).is_file() else []
    return " and ".join(kept) or (LAST_GOOD if states else None)


def _states_in(folder: Path) -> list[str]:
    """Return the names of the folders of training states in a work folder.

    Path.glob fails on a folder that another process renames meanwhile; os.walk skips it.
    """
    return [os.path.basename(path) for path, _, names in os.walk(folder) if "state.json" in names]


@contextmanager
def run_folder(
    out: Path, source: Mapping[str, Any], config: AnyRun, *, resume: bool, overwrite: bool
) -> Iterator[RunFolder]:
    """Hold the work folder of ``out`` for one run.

    It is removed when the run is complete, even if it was interrupted after its output was written, and when a new run
    stopped with nothing to resume from. After a ConfigError, a plan alone is removed too: other options need another.

    Args:
        out: the run's output.
        source: names, revisions and digests of the inputs; plain JSON data.
        config: every option.
        resume: continue the run that the folder holds.
        overwrite: drop a run that the folder holds.

    Raises:
        ConfigError: ``resume`` without a kept run, or with other options or other weights than the kept run's.
        CheckpointError: a kept file is damaged.
        OutputError: another run holds the folder, it cannot be written, or it holds a plan or training checkpoints and
            ``overwrite`` is off.
    """
    faster = bfloat16_is_faster(resolve_device(config.device)) if _leaves_dtypes(config.to_dict()) else None
    if not processes.first():
        with _shared_folder(out, resume=resume) as work:
            yield work
        return
    with claim_work_folder(out) as path:
        work = RunFolder(path, resume)
        facts = {**source, "config": config.to_dict()}
        if resume:
            work.check_same(facts, asks=faster is not None)
        else:
            work.begin(facts, out, faster, overwrite=overwrite)
        processes.barrier()
        before = written_at(out)
        try:
            yield work
            processes.barrier()
            work.clear()
        except BaseException as error:
            if written_at(out) not in (None, before):
                with interrupts_deferred():
                    work.clear()
                raise
            reached = _states_in(path) if isinstance(error, ConfigError) else _kept_in(path)
            if not (reached or resume):
                work.clear()
            raise


@contextmanager
def _shared_folder(out: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Give the folder that the first of several processes holds; all leave it together."""
    processes.barrier()
    yield RunFolder(work_folder(out), resume)
    processes.barrier()


class RunFolder:
    """The work folder of one run.

    Attributes:
        path: the folder.
        resume: whether the run continues from it.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self.resume = resume

    def begin(self, facts: Mapping[str, Any], out: Path, faster: bool | None, *, overwrite: bool) -> None:
        """Start a new run; ``faster`` is whether bfloat16 is the faster dtype (:func:`run_folder`)."""
        if not overwrite:
            refuse_kept(self.path)
        with disk_errors(out):
            self.clear()
        self._write(RUN, facts)
        if faster is not None:
            self._write(ARITHMETIC, {"bfloat16": faster})

    def clear(self) -> None:
        """Remove everything from the folder except its mark; first what --resume looks for, as this may be killed."""
        for path in sorted(self.path.iterdir(), key=lambda path: path.name != RUN):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARK:
                path.unlink(missing_ok=True)

    def check_same(self, facts: Mapping[str, Any], *, asks: bool) -> None:
        """Refuse to resume another run; see :func:`run_folder`.

        Args:
            facts: of this run.
            asks: whether the options leave a dtype to the machine.
        """
        if not (self.path / RUN).is_file():
            raise ConfigError(f"There is no interrupted run to resume at {self.path}; start without --resume.")
        if asks:
            self._read(ARITHMETIC)  # raises if damaged, which :func:`arithmetic_of` ignored
        if different := differences(result_facts(self._read(RUN)), result_facts(facts)):
            raise ConfigError(
                "The interrupted run had other options or input, so resuming would not reach its result: "
                + ", ".join(different)
                + ". Use the same ones, or start without --resume."
            )

    def check_text(self, digests: Mapping[str, str]) -> None:
        """Keep the digests of the run's text, or compare them with the interrupted run's.

        Args:
            digests: use of the text -> SHA-256 of the drawn samples, hexadecimal.

        Raises:
            ConfigError: the text differs.
        """
        if not (self.resume and (self.path / TEXT).is_file()):
            if processes.first():
                self._write(TEXT, digests)
            return
        kept = self._read(TEXT)
        if other := [name for name, digest in digests.items() if kept.get(name) != digest]:
            raise ConfigError(
                f"The text of this run ({', '.join(other)}) is another than the interrupted run's, so resuming would "
                "not reach its result. Put the old text back, or start without --resume."
            )

    def read_decision(self) -> PlanDecision | None:
        """Return the decision of the interrupted run; None without one."""
        if not (self.resume and (self.path / DECISION).is_file()):
            return None
        data = self._read(DECISION)
        try:
            plan = PrunePlan.from_dict(data["plan"])
            return PlanDecision(plan, tuple(data["notes"]), data["details"], tuple(data["warnings"]))
        except (KeyError, TypeError, PlanError) as error:
            raise self._damage_error(DECISION, error) from error

    def write_decision(self, decision: PlanDecision) -> None:
        """Keep a decision."""
        if not processes.first():
            return
        data = {
            "plan": decision.plan.to_dict(),
            "notes": list(decision.notes),
            "details": decision.details,
            "warnings": list(decision.warnings),
        }
        self._write(DECISION, data)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return unseal(read_json(self.path / name))
        except (OSError, ValueError) as error:
            raise self._damage_error(name, error) from error

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        write_text(self.path / name, json.dumps(seal(data)))

    def _damage_error(self, name: str, why: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / name} is damaged ({shown(why)}), so the run cannot be continued; start without --resume."
        )
