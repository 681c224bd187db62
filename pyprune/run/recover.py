"""Recover an already pruned checkpoint by training; its plan does not change."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyprune.checkpoint.load import ModelSource, Reading
from pyprune.config.run import RecoverCheckpointConfig
from pyprune.data.sources import look_up_samples
from pyprune.errors import ConfigError
from pyprune.run.memory import TrainedModels, learns_from_files, within_memory
from pyprune.run.resume import arithmetic_of, with_kept_memory
from pyprune.run.rework import ADAPTER, check_inputs, refuse_rotated, rework
from pyprune.run.source import TEACHER_DTYPE, HostCopy, load_teacher, report_copies, teacher_dtype
from pyprune.run.text import say_warnings
from pyprune.runtime import processes
from pyprune.runtime.device import resolve_device
from pyprune.runtime.processes import Division
from pyprune.train.objective import TrainReport
from pyprune.train.recover import recover


def recover_checkpoint(
    pruned: str | Path | ModelSource,
    config: RecoverCheckpointConfig,
    *,
    out: str | Path,
    teacher: str | Path | ModelSource | None = None,
    teacher_gguf_file: str | None = None,
    teacher_revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> TrainReport:
    """Recover a pruned checkpoint, and write another one with the same plan.

    The record keeps everything it held; this run is added under "recoveries", the training text's marks are
    joined, and quality and speed that were measured before move into the run's entry. An interrupted run keeps its
    training checkpoints in a hidden folder next to ``out``. With ``config.keep_adapter`` the folder :data:`ADAPTER`
    inside ``out`` holds the adapters alone, for use on ``pruned``.

    Args:
        pruned: checkpoint folder (or hub id) of the model to recover.
        config: every option.
        out: the folder to create.
        teacher: folder or hub id of the dense model; needed exactly when ``config.recover.distill`` is set.
        teacher_gguf_file: a GGUF file inside the teacher's folder or repository.
        teacher_revision: hub revision of the teacher.
        trust_remote_code: run the repositories' own code.
        resume: continue an interrupted run of the same options.
        overwrite: replace an existing ``out``.

    Raises:
        ConfigError: invalid options, distillation without a teacher or a teacher without distillation, or distillation
            of hidden states that were rotated.
        PypruneError: the error that stopped a stage; nothing is left at ``out``.
    """
    reading: Reading = {"trust_remote_code": trust_remote_code}
    dense = teacher_source(teacher, teacher_gguf_file, teacher_revision, trust_remote_code)
    source = ModelSource.of(pruned, **reading)
    _check_teacher(source, config, dense)
    check_inputs(source, config, dense, out, overwrite=overwrite)
    with arithmetic_of(out, resume=resume):
        return _recover(source, config, dense, out, resume=resume, overwrite=overwrite)


def teacher_source(
    teacher: str | Path | ModelSource | None, gguf_file: str | None, revision: str | None, trust_remote_code: bool
) -> ModelSource | None:
    """Return the source of the teacher; options of a teacher that was not named would do nothing, and are refused."""
    options = {"teacher_gguf_file": gguf_file, "teacher_revision": revision}
    unused = [name for name, value in options.items() if value is not None]
    if teacher is None and unused:
        raise ConfigError(f"{' and '.join(unused)} without a teacher would do nothing; give the teacher too.")
    if teacher is None:
        return None
    return ModelSource.of(teacher, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code)


def _recover(
    pruned: ModelSource,
    config: RecoverCheckpointConfig,
    dense: ModelSource | None,
    out: str | Path,
    *,
    resume: bool,
    overwrite: bool,
) -> TrainReport:
    if resume:
        config = with_kept_memory(out, config)
    config = within_memory(_trained_models(pruned, dense), config)
    copies = [HostCopy(pruned, "dtype", config.dtype)]
    if dense is not None and not learns_from_files(config):
        copies.append(HostCopy(dense, TEACHER_DTYPE, teacher_dtype(config)))
    report_copies(copies)
    # For several processes the model is on the host, mapped from its files, until it is trained.
    place = "cpu" if processes.count() > 1 else config.device
    with rework(pruned, config, dense, out, "recoveries", place, resume=resume, overwrite=overwrite) as work:
        if config.keep_adapter:
            work.adapter = work.folder.path / ADAPTER
            if processes.first():
                shutil.rmtree(work.adapter, ignore_errors=True)  # of a run that was interrupted while it wrote
        say_warnings(work.warnings)
        loaded = None if dense is None else load_teacher(dense, config, device=place, dtype=teacher_dtype(config))
        with processes.divide_training(Division(resolve_device(config.device), "files")):
            report = recover(
                work.model,
                work.samples,
                config.recover,
                teacher=loaded,
                plan=work.plan,
                checkpoint_dir=work.folder.path / "recover",
                resume=resume,
                adapter_out=work.adapter if processes.first() else None,
            )
        say_warnings(report.warnings)
        report.warnings += work.warnings
        work.report = report.to_dict()
    return report


def check_recovery(
    pruned: ModelSource, config: RecoverCheckpointConfig, *, teacher: ModelSource | None = None
) -> RecoverCheckpointConfig:
    """Print the memory that :func:`recover_checkpoint` would need; nothing is loaded, computed or written.

    Args:
        pruned: source of the checkpoint to recover.
        config: every option.
        teacher: source of the dense model; needed exactly when ``config.recover.distill`` is set.

    Returns:
        The options with ``memory`` and the teacher's place decided.

    Raises:
        ConfigError: invalid options, a teacher that is missing or unused, or a training that the device cannot hold,
            with the options that would help.
        PypruneError: a model or a text that is missing.
    """
    _check_teacher(pruned, config, teacher)
    look_up_samples([config.data])
    return within_memory(_trained_models(pruned, teacher), config, always=True)


def _trained_models(pruned: ModelSource, dense: ModelSource | None) -> TrainedModels:
    """Return the models of a recovery."""
    return TrainedModels(pruned, dense, pruned.record.plan if pruned.record else None, on_host=True)


def _check_teacher(pruned: ModelSource, config: RecoverCheckpointConfig, dense: ModelSource | None) -> None:
    """Refuse invalid options of a recovery, and a dense model that does not go with them."""
    config.validate()
    if (dense is None) != (config.recover.distill is None):
        raise ConfigError(
            "recover.distill needs the dense model; give --teacher MODEL (or teacher=...)."
            if dense is None
            else f"The teacher {dense} would not be used: recover.distill is null. Set recover.distill (for "
            "example recover.distill.alpha=0.5), or leave the teacher out."
        )
    if config.recover.distill is not None and config.recover.distill.hidden:
        refuse_rotated(pruned, "recover.distill.hidden", "Set it to 0 and compare the logits (alpha).")
