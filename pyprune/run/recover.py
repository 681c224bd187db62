"""What is done to a checkpoint that is cut already: it is recovered, or reconstructed; its plan stays."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from pyprune.checkpoint.layers import stored_layers, why_loaded_whole
from pyprune.checkpoint.load import load_model, stored_dtype, weights_version
from pyprune.checkpoint.record import read_record, take_measured
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.trained_on import marked_passages, training_marks, unguarded
from pyprune.config.run import PruneConfig, ReconstructCheckpointConfig, RecoverCheckpointConfig
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_compacted_
from pyprune.data.sampling import TokenSamples, sample_sequences
from pyprune.data.sources import look_up_samples
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import IGNORED
from pyprune.errors import ConfigError
from pyprune.families import begins_with_bos
from pyprune.plan import PrunePlan
from pyprune.probe.streams import LayerRunner
from pyprune.run.memory import Source, learns_from_files, within_memory
from pyprune.run.resume import RunFolder, arithmetic_of, run_folder, with_kept_memory
from pyprune.run.stages import one_kind_of_text, say_warnings, was_rotated
from pyprune.runtime import processes
from pyprune.runtime.device import resolve_device, working_dtype
from pyprune.runtime.files import check_output
from pyprune.runtime.processes import Division
from pyprune.runtime.progress import say
from pyprune.train.objective import TrainReport
from pyprune.train.recover import recover

ADAPTER = "adapter"
"""Name of the folder inside a recovered checkpoint that holds the adapters by themselves."""

TEACHER_DTYPE = "recover.distill.teacher_dtype"


@dataclass(frozen=True)
class Dense:
    """The dense model of a checkpoint, by where it is read from.

    Attributes:
        model: folder or hub id; None where none is needed.
        gguf_file: a GGUF file inside it.
        revision: of the hub.
        trust_remote_code: run the repository's own code.
    """

    model: str | Path | None = None
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def reading(self) -> dict[str, Any]:
        """How it is read."""
        return {
            "gguf_file": self.gguf_file,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
        }

    @property
    def weights(self) -> str:
        """What its weights are known by; empty where there is none."""
        return weights_version(self.model, **self.reading) if self.model is not None else ""

    def load(self, *, dtype: str, device: str) -> PreTrainedModel:
        """The model in memory.

        Raises:
            ConfigError: no dense model was named.
        """
        if self.model is None:
            raise ConfigError("This needs the dense model, and none was named.")
        return load_model(self.model, dtype=dtype, device=device, **self.reading)[0]

    def walk(self, *, dtype: str, device: str) -> PreTrainedModel | LayerRunner:
        """The model for one pass through its layers: of safetensors, one layer in memory at a time."""
        if self.model is None or why_loaded_whole(self.model, **self.reading):
            return self.load(dtype=dtype, device=device)
        return stored_layers(self.model, dtype=dtype, device=device, **self.reading)

    def teacher(self, config: PruneConfig | RecoverCheckpointConfig, *, place: str, dtype: str) -> PreTrainedModel:
        """The model as ``recover.distill`` of a run has it.

        Args:
            config: of the run, ``teacher_placement`` decided.
            place: device to load it to, where it is loaded.
            dtype: of its weights, see :func:`teacher_dtype`.

        Raises:
            ConfigError: no dense model was named.
        """
        if self.model is None or not learns_from_files(config):
            return self.load(dtype=dtype, device=place)
        return stored_layers(self.model, dtype=dtype, device=config.device, **self.reading).whole()


@dataclass
class _Work:
    """A checkpoint in work.

    Attributes:
        model: what is changed, in place.
        samples: text for it.
        plan: what it was cut with; None where the record has none.
        folder: where an interrupted run is kept.
        report: of what was done, as plain data; to be filled in.
        warnings: what was found about the text.
        adapter: the trained adapters in PEFT's format, to be written into the checkpoint; None = none.
    """

    model: PreTrainedModel
    samples: TokenSamples
    plan: PrunePlan | None
    folder: RunFolder
    report: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    adapter: Path | None = None

    def add_adapter(self, checkpoint: Path) -> None:
        """Move the adapters into the checkpoint's folder."""
        if self.adapter is not None:
            self.adapter.rename(checkpoint / ADAPTER)


def recover_checkpoint(
    pruned: str | Path,
    config: RecoverCheckpointConfig,
    *,
    out: str | Path,
    teacher: str | Path | None = None,
    teacher_gguf_file: str | None = None,
    teacher_revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> TrainReport:
    """Recover a checkpoint that is cut already, and write another one with the same plan.

    The record keeps everything it held; what this run did is added under "recoveries", the training text's marks are
    joined, and quality and speed that were measured before move into the run's entry. An interrupted run keeps its
    training checkpoints in a hidden folder next to ``out``. With ``config.keep_adapter`` the folder :data:`ADAPTER`
    inside ``out`` holds the adapters by themselves, which are for ``pruned``.

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
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    dense = Dense(teacher, teacher_gguf_file, teacher_revision, trust_remote_code)
    _check_teacher(pruned, config, dense)
    _check_places(pruned, config, dense, out, overwrite=overwrite)
    with arithmetic_of(out, resume=resume):
        return _recovered(pruned, config, dense, out, resume=resume, overwrite=overwrite)


def _recovered(
    pruned: str | Path,
    config: RecoverCheckpointConfig,
    dense: Dense,
    out: str | Path,
    *,
    resume: bool,
    overwrite: bool,
) -> TrainReport:
    if resume:
        config = with_kept_memory(out, config)
    config = within_memory(_trained(pruned, dense), config)
    wanted = [Loaded(pruned, "dtype", config.dtype, trust_remote_code=dense.trust_remote_code)]
    if dense.model is not None and not learns_from_files(config):
        wanted.append(Loaded(dense.model, TEACHER_DTYPE, teacher_dtype(config), **dense.reading))
    say_what_is_copied(wanted)
    place = _place_before_training(config.device)
    with _reworked(pruned, config, dense, out, "recoveries", place, resume=resume, overwrite=overwrite) as work:
        if config.keep_adapter:
            work.adapter = work.folder.path / ADAPTER
            if processes.first():
                shutil.rmtree(work.adapter, ignore_errors=True)  # of a run that was interrupted while it wrote
        say_warnings(work.warnings)
        loaded = None if dense.model is None else dense.teacher(config, place=place, dtype=teacher_dtype(config))
        with processes.dividing(Division(resolve_device(config.device), "files")):
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
    pruned: str | Path,
    config: RecoverCheckpointConfig,
    *,
    teacher: str | Path | None = None,
    teacher_gguf_file: str | None = None,
    teacher_revision: str | None = None,
    trust_remote_code: bool = False,
) -> RecoverCheckpointConfig:
    """Print what :func:`recover_checkpoint` would hold in memory; nothing is loaded, computed or written.

    Args:
        pruned: checkpoint folder (or hub id) of the model to recover.
        config: every option.
        teacher: folder or hub id of the dense model; needed exactly when ``config.recover.distill`` is set.
        teacher_gguf_file: a GGUF file inside the teacher's folder or repository.
        teacher_revision: hub revision of the teacher.
        trust_remote_code: run the repositories' own code.

    Returns:
        The options with ``memory`` and the teacher's place decided.

    Raises:
        ConfigError: what :func:`recover_checkpoint` refuses before it loads anything: invalid options, a teacher that
            is missing or unused, or a training that the device cannot hold, with the options that would help.
        PypruneError: a model or a text that is not there.
    """
    dense = Dense(teacher, teacher_gguf_file, teacher_revision, trust_remote_code)
    _check_teacher(pruned, config, dense)
    look_up_samples([config.data])
    return within_memory(_trained(pruned, dense), config, always=True)


def _trained(pruned: str | Path, dense: Dense) -> Source:
    """The models of a recovery."""
    record = read_record(pruned)
    reading = {"trust_remote_code": dense.trust_remote_code}
    return Source(pruned, reading, dense.model, dense.reading, record.plan if record else None, on_host=True)


def reconstruct_checkpoint(
    pruned: str | Path,
    config: ReconstructCheckpointConfig,
    *,
    dense: str | Path,
    out: str | Path,
    dense_gguf_file: str | None = None,
    dense_revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> ReconstructionReport:
    """Reconstruct a checkpoint that is cut already from its dense model, and write another one with the same plan.

    The record keeps everything it held; what this run did is added under "reconstructions". Warnings of the text are
    printed before the work begins.

    Args:
        pruned: checkpoint folder of the cut model, written by pyprune.
        config: every option.
        dense: folder or hub id of the model that it was cut from. Of safetensors one layer is in memory at a time; of
            other formats the whole model.
        out: the folder to create.
        dense_gguf_file: a GGUF file inside the dense model's folder or repository.
        dense_revision: hub revision of the dense model.
        trust_remote_code: run the repositories' own code.
        overwrite: replace an existing ``out``.

    Raises:
        ConfigError: invalid options, or a checkpoint without a plan or with channels that were rotated.
        PlanError: the dense model is not the one that the plan is of.
        PypruneError: whatever stops it; nothing is left at ``out``.
    """
    config.validate()
    _check_same_channels(pruned, "A reconstruction", "Prune the dense model again, with cut.reconstruct=least_squares.")
    source = Dense(dense, dense_gguf_file, dense_revision, trust_remote_code)
    _check_places(pruned, config, source, out, overwrite=overwrite)
    say_what_is_copied([Loaded(pruned, "dtype", config.dtype, trust_remote_code=trust_remote_code)])
    with _reworked(pruned, config, source, out, "reconstructions", "cpu", overwrite=overwrite) as work:
        if work.plan is None:
            raise ConfigError(
                f"{pruned} holds no plan, which says what was removed; give a checkpoint that pyprune prune wrote."
            )
        say_warnings(work.warnings)
        for note in one_kind_of_text(work.samples, "data.source"):
            say(note)
        walked, place = source.walk(dtype=config.dtype, device=config.device), resolve_device(config.device)
        with processes.dividing(Division(place, "files")):
            report = reconstruct_compacted_(
                work.model,
                work.plan,
                walked,
                work.samples,
                options=config.least_squares,
                batch_size=config.batch_size,
                device=place,
            )
        work.report = report.to_dict()
    return report


def _check_same_channels(pruned: str | Path, what: str, instead: str) -> None:
    """Refuse to compare hidden channels with the dense model's where they were rotated before the cut."""
    if was_rotated(pruned):
        raise ConfigError(
            f"{what} compares the hidden channels with the dense model's, but those of {pruned} were rotated before "
            f"they were cut. {instead}"
        )


def _check_places(
    pruned: str | Path,
    config: RecoverCheckpointConfig | ReconstructCheckpointConfig,
    dense: Dense,
    out: str | Path,
    *,
    overwrite: bool,
) -> None:
    """Find out before anything is loaded that the output cannot be written, or that the text is not there."""
    check_output(out, overwrite=overwrite, reads=[pruned, dense.model, *config.data.sources])
    look_up_samples([config.data])


@contextmanager
def _reworked(
    pruned: str | Path,
    config: RecoverCheckpointConfig | ReconstructCheckpointConfig,
    dense: Dense,
    out: str | Path,
    entries: str,
    device: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[_Work]:
    """Load a checkpoint onto a device, and its text; write it with another entry in its record after the block."""
    out = Path(out)
    remote: dict[str, Any] = {"trust_remote_code": dense.trust_remote_code}
    source = {"model": str(pruned), "weights": weights_version(pruned, **remote), "teacher": str(dense.model)}
    source["teacher_weights"] = dense.weights
    check_alike(source["model"], source["weights"], source["teacher_weights"])
    record = read_record(pruned)
    plan, known = (record.plan, dict(record.provenance)) if record else (None, {"source": str(pruned)})
    with run_folder(out, source, config, resume=resume, overwrite=overwrite) as folder:
        model, tokenizer = load_model(pruned, dtype=config.dtype, device=device, **remote)
        if tokenizer is None:
            raise no_tokenizer(pruned)
        check_sequence_length(model.config, config.data.sequence_length)
        samples = sample_sequences(tokenizer, config.data, bos=begins_with_bos(model.config))
        check_token_ids(model.config, samples.ids[samples.ids != IGNORED])
        marks = known.get("training_marks", "")
        warnings = [*_other_weights(known, dense, pruned), *trained_before(marks, samples), *unguarded([samples])]
        warnings += judged_on_read_text(config)
        work = _Work(model, samples, plan, folder, warnings=warnings)
        yield work
        earlier = take_measured(known)
        entry = {"from": str(pruned), "teacher": str(dense.model) if dense.model else None, "config": config.to_dict()}
        entry |= {"report": work.report, "measured_before": earlier}
        provenance = {
            **known,
            entries: [*known.get(entries, []), entry],
            "training_marks": training_marks([samples], marks),
        }
        dtype = config.export_dtype or stored_dtype(pruned, **remote)
        if not processes.first():
            return
        save_checkpoint(
            model,
            tokenizer,
            out,
            plan=plan,
            provenance=provenance,
            overwrite=overwrite,
            dtype=dtype,
            convert=work.add_adapter,
            trained=True,
        )


def _place_before_training(device: str) -> str:
    """Where a model is that is to be trained on a device: for several processes on the host, mapped from its files."""
    return "cpu" if processes.count() > 1 else device


def teacher_dtype(config: PruneConfig | RecoverCheckpointConfig) -> str:
    """The dtype of the dense model's weights where it teaches."""
    return working_dtype(config.recover.teacher_dtype, resolve_device(config.device))


class Loaded(NamedTuple):
    """A model that every process of a run loads on the host.

    Attributes:
        model: folder or hub id.
        option: that gives the dtype.
        dtype: of its weights in memory.
        gguf_file, revision, trust_remote_code: as in :func:`pyprune.checkpoint.load.load_model`.
    """

    model: str | Path
    option: str
    dtype: str
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


def say_what_is_copied(models: Iterable[Loaded]) -> None:
    """Say which models several processes cannot share on the host: what is loaded is not what is stored."""
    if processes.count() == 1:
        return
    copy = f"each of the {processes.count()} processes has a copy of its own on the host"
    for model, option, dtype, gguf_file, revision, remote in models:
        if gguf_file is not None:
            say(f"{gguf_file} of {model} is dequantised: {copy}. Safetensors in {dtype} would be shared.")
            continue
        stored = stored_dtype(model, revision=revision, trust_remote_code=remote)
        if stored is not None and stored != dtype:
            say(
                f"{option} is {dtype}, and {model} is stored in {stored}: {copy}. With {option}={stored} they share "
                "the files' pages."
            )


def check_alike(model: str, *weights: str) -> None:
    """Refuse models that are not the same in all processes, which may be on several machines.

    Args:
        model: for the message.
        weights: what they are known by, the dense model's too.

    Raises:
        ConfigError: they differ.
    """
    if not processes.alike(weights):
        raise ConfigError(
            f"The processes of this run find different weights in {model} or in its dense model. Put the same files on "
            "all machines, or name a folder that they share."
        )


def _check_teacher(pruned: str | Path, config: RecoverCheckpointConfig, dense: Dense) -> None:
    """Refuse invalid options of a recovery, and a dense model that does not go with them."""
    config.validate()
    if (dense.model is None) != (config.recover.distill is None):
        raise ConfigError(
            "recover.distill needs the dense model; give --teacher MODEL (or teacher=...)."
            if dense.model is None
            else f"The teacher {dense.model} would not be used: recover.distill is null. Set recover.distill (for "
            "example recover.distill.alpha=0.5), or leave the teacher out."
        )
    _check_unused_teacher_options(dense.model, gguf_file=dense.gguf_file, revision=dense.revision)
    if config.recover.distill is not None and config.recover.distill.hidden:
        _check_same_channels(pruned, "recover.distill.hidden", "Set it to 0 and compare the logits (alpha).")


def _check_unused_teacher_options(teacher: str | Path | None, **options: str | None) -> None:
    """Options of a teacher that is not there would do nothing."""
    unused = [f"teacher_{name}" for name, value in options.items() if value is not None]
    if teacher is None and unused:
        raise ConfigError(f"{' and '.join(unused)} without a teacher would do nothing; give the teacher too.")


def _other_weights(known: Mapping[str, Any], dense: Dense, pruned: str | Path) -> list[str]:
    """What to warn of where the dense model is another than the one that a checkpoint was made from."""
    made_from = known.get("source_weights")
    if dense.model is None or made_from in (None, dense.weights):
        return []
    if len(made_from) != len(dense.weights):  # a commit of the hub and the digest of a folder do not compare
        return []
    parts = [f"{name} {known[key]}" for name in ("revision", "gguf_file") if (key := f"source_{name}") in known]
    source = f"{known.get('source')}{''.join(f', {part}' for part in parts)}"
    return [
        f"The files of {dense.model} are others than those of the model that {pruned} was made from ({source}). Where "
        "its weights are others too, the result is pulled towards another model."
    ]


def judged_on_read_text(config: PruneConfig | RecoverCheckpointConfig | ReconstructCheckpointConfig) -> list[str]:
    """What to warn of where sequences that are held back share text with the others (``data.overlap``)."""
    if isinstance(config, ReconstructCheckpointConfig):
        judged = {"least_squares.held_back": config.data.overlap}
    else:
        stopped = [t for t in config.trainings() if t.train.early_stop_patience is not None]
        judged = {f"{t.name}.early_stop_patience": t.data.overlap for t in stopped}
        if isinstance(config, PruneConfig) and config.stages.prune and config.cut.reconstruct == "least_squares":
            judged["cut.least_squares.held_back"] = (config.cut.data or config.data).overlap
    return [
        f"The sequences that {name} holds back may share up to {overlap:.0%} of their tokens with each of the others "
        "(overlap): what is measured on them is better than on new text."
        for name, overlap in judged.items()
        if overlap
    ]


def trained_before(marks: str, samples: TokenSamples) -> list[str]:
    """What to warn of where text of a run was training text of the checkpoint already."""
    ids = samples.ids
    again = marked_passages(marks, ids[ids >= 0])
    if not again:
        return []
    return [f"{again} passages of this run's text were training text of this checkpoint already; use other text."]
