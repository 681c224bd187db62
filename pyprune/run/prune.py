"""The whole flow: load -> calibrate -> decide -> regularise -> cut -> recover -> write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from pyprune.checkpoint.load import load_model, stored_dtype, weights_version
from pyprune.checkpoint.record import inherited_facts
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.checkpoint.trained_on import training_marks
from pyprune.config.run import PruneConfig
from pyprune.data.sampling import TokenSamples
from pyprune.data.sources import check_sources, look_up_samples
from pyprune.data.tokens import Batch
from pyprune.families import count_parameters
from pyprune.methods.base import PlanDecision
from pyprune.methods.registry import complete_config
from pyprune.modeling.shapes import model_of_shapes
from pyprune.plan import PrunePlan
from pyprune.run.memory import Source, learns_from_files, placed
from pyprune.run.recover import (
    TEACHER_DTYPE,
    Dense,
    Loaded,
    check_alike,
    judged_on_read_text,
    say_what_is_copied,
    teacher_dtype,
    trained_before,
)
from pyprune.run.resume import RunFolder, arithmetic_of, run_folder, with_kept_memory
from pyprune.run.stages import (
    PruneResult,
    StageRun,
    StageText,
    Teacher,
    draw_samples,
    planning,
    read_plan,
    say_warnings,
    shapes_the_result,
    wanted_text,
)
from pyprune.run.streamed import StoredRun, beside_files, decides_from_disk, why_loaded
from pyprune.runtime import processes
from pyprune.runtime.device import DTYPES
from pyprune.runtime.files import check_output
from pyprune.runtime.processes import Division
from pyprune.runtime.progress import say
from pyprune.runtime.records import digest

OF_SOURCE = ("weights", "revision", "gguf_file")
"""What a record says of the dense model beside its name, each as source_...; weights are their version."""


def prune(
    model_id: str | Path,
    config: PruneConfig,
    *,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    placement: str = "auto",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PruneResult:
    """Prune a model from a folder or hub id and write a checkpoint folder.

    An interrupted run keeps its plan and training checkpoints in a hidden folder next to ``out``; ``resume``
    continues from there to the same result. For distillation the dense model is read again from ``model_id`` after
    the cut, in the training dtype, and dropped when the stage ends: a copy held from the start would cost the memory
    of the dense weights during scoring and regularisation as well.

    A run that trains nothing streams the weights from file to file, where the folder and the method allow it; a note of
    the result says whether it did, or why not.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option.
        out: the folder to create.
        resume: continue an interrupted run of the same options.
        overwrite: replace an existing ``out``.
        placement: auto, device or host: where several processes have the model while nothing trains
            (:func:`pyprune.run.memory.division_of`). It changes nothing of what a run reaches but the order of sums.
        gguf_file: a GGUF file inside the model's folder or repository.
        revision: hub revision.
        trust_remote_code: run the repository's own code.

    Raises:
        ConfigError: invalid options, or options that differ from the run to resume.
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    reading: dict[str, Any] = {
        "gguf_file": gguf_file,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "placement": placement}
    with arithmetic_of(out, resume=resume):
        return _pruned(model_id, config, Path(out), reading, **how)


def _pruned(
    model_id: str | Path,
    config: PruneConfig,
    out: Path,
    reading: dict[str, Any],
    *,
    resume: bool,
    overwrite: bool,
    placement: str,
) -> PruneResult:
    config = complete_config(config)
    check_output(out, overwrite=overwrite, reads=[model_id, config.plan, *_sources(config)])
    check_sources(_sources(config))
    if resume:
        config = with_kept_memory(out, config)
    division, config = placed(Source(model_id, reading), config, placement)
    look_up_samples(wanted_text(config).values())  # of the model, the configuration alone has been read
    # Decided by all processes together, while the teacher may be wanted by some of them alone.
    taught_in = teacher_dtype(config)

    def dense() -> PreTrainedModel:
        place = "cpu" if division.on_host else config.device
        return Dense(model_id, **reading).teacher(config, place=place, dtype=taught_in)

    revision = reading["revision"]
    source = {"model": str(model_id), "gguf_file": reading["gguf_file"], "revision": revision}
    source["weights"] = weights_version(model_id, **reading)
    # Of a plan the options hold the name alone, and a file of that name may be another when the run goes on.
    source |= {"plan": digest(read_plan(config.plan).to_dict())} if config.plan is not None else {}
    check_alike(str(model_id), str(source["weights"]))
    if division.on_host:
        _say_where(model_id, config, taught_in, **reading)
    earlier = inherited_facts(model_id, revision=revision)
    marks = earlier.get("training_marks", "")
    with run_folder(out, source, config, resume=resume, overwrite=overwrite) as work:
        note = why_loaded(model_id, config, **reading)
        if note is None and processes.count() > 1:
            note = "The model was loaded: several processes do not stream it from file to file."
        stored = StoredRun(model_id, config, revision=revision, work=work) if note is None else None
        if stored is not None:
            model, data = stored.model, stored.data
            again = _of_the_text(config, data, marks)
            result = stored.result()
        else:
            model, tokenizer = _load(model_id, config, division, **reading)
            data = draw_samples(model, tokenizer, config)
            again = _of_the_text(config, data, marks)
            run = StageRun(model, StageText.of(data), config, work, dense if config.recover.distill else None)
            if division.on_host:
                run.division = division
                run.stored, run.cutting = beside_files(model_id, config, work.path, **reading)
            result = _through(run)
            result.notes += [note] if note else []
        result.warnings += again
        if shapes_the_result(config):
            marks = training_marks(data.values(), marks)
        provenance = {
            "method": config.method,
            "source": str(model_id),
            **{f"source_{name}": source[name] for name in OF_SOURCE if source[name] is not None},
            "dense_parameters": result.compact.dense_parameters if result.compact else count_parameters(model),
            "config": config.to_dict(),
            "report": result.to_dict(),
            **earlier,
            "training_marks": marks,
        }
        if not processes.first():
            result.out = out
        elif stored is not None:
            result.out = stored.write(out, provenance, overwrite=overwrite)
        else:
            result.out = save_checkpoint(
                model,
                tokenizer,
                out,
                plan=result.plan if result.compact else None,
                provenance=provenance,
                overwrite=overwrite,
                dtype=config.export_dtype or _stored_dtype(model_id, **reading),
                trained=bool(result.stages),
            )
    return result


def _of_the_text(config: PruneConfig, data: Mapping[str, TokenSamples], marks: str) -> list[str]:
    """Say before any work what is wrong with the text (trained on already, overlapping), and return the sentences."""
    if not shapes_the_result(config):
        return []
    found = [text for samples in data.values() for text in trained_before(marks, samples)]
    found += judged_on_read_text(config)
    say_warnings(found)
    return found


def _load(model_id: str | Path, config: PruneConfig, division: Division, **reading: Any) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer; where the first process alone has it, its shapes in the others."""
    if not division.on_host:
        return load_model(model_id, dtype=config.dtype, device=config.device, **reading)
    loaded = load_model(model_id, dtype=config.dtype, device="cpu", **reading) if processes.first() else None
    shapes = processes.from_first(loaded[0].config if loaded else None)
    if loaded is not None:
        return loaded
    model = model_of_shapes(cast(PretrainedConfig, shapes), DTYPES[config.dtype])
    return model, load_tokenizer(str(model_id), **{k: v for k, v in reading.items() if v is not None})


def _say_where(model_id: str | Path, config: PruneConfig, taught_in: str, **reading: Any) -> None:
    """Say that the model is on the host, and whether each process has a copy of the teacher there."""
    say(
        f"The first of {processes.count()} processes has the model on the host; what trains is divided among their "
        "devices, layer by layer."
    )
    if "recover" in config.stages.after and config.recover.distill is not None and not learns_from_files(config):
        say_what_is_copied([Loaded(model_id, TEACHER_DTYPE, taught_in, **reading)])


def _stored_dtype(
    model_id: str | Path, *, gguf_file: str | None, revision: str | None, trust_remote_code: bool
) -> str | None:
    """The dtype to write when none was chosen; GGUF weights are quantised and keep the working dtype."""
    return None if gguf_file else stored_dtype(model_id, revision=revision, trust_remote_code=trust_remote_code)


def prune_(
    model: PreTrainedModel,
    data: Mapping[str, Batch | Tensor],
    config: PruneConfig,
    *,
    work: RunFolder | None = None,
    teacher: Teacher | None = None,
) -> PruneResult:
    """Decide, regularise, cut and recover a model in memory, in place.

    Args:
        model: a dense model of a known family.
        data: token ids, int64 [N, T], under "regularise", and under "cut" and "recover" where the cut is
            reconstructed or something follows it on other text; empty when a saved plan is only applied.
        config: every option.
        work: where an interrupted run is kept; None keeps nothing.
        teacher: for distillation, the dense model again (or what makes it): ``model`` itself is cut in place.

    Raises:
        ConfigError: distillation without a teacher, or instruction records where every token has to count.
    """
    return _through(StageRun(model, StageText.of(data), complete_config(config), work, teacher))


def _through(run: StageRun) -> PruneResult:
    """All stages."""
    run.decide()
    run.train_before_the_cut()
    run.cut()
    run.train_after_the_cut()
    return run.finished()


def make_plan(model: PreTrainedModel, samples: Batch | Tensor, config: PruneConfig) -> PrunePlan:
    """Decide what is removed, without changing the model.

    Args:
        model: a dense model of a known family.
        samples: calibration token ids, int64 [N, T].
        config: the method, the ratio and the method's options; or a saved plan to replay.

    Raises:
        ConfigError: invalid options, or a goal that cannot be reached.
    """
    return _planning(model, {"regularise": samples}, config).decide().plan


def _planning(model: PreTrainedModel, data: Mapping[str, Batch | Tensor], config: PruneConfig) -> StageRun:
    """A run that stops at the plan: without stages, and so without what only they need."""
    return StageRun(model, StageText.of(data), planning(complete_config(config)))


def decision_for(
    model_id: str | Path,
    config: PruneConfig,
    *,
    placement: str = "auto",
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PlanDecision:
    """Load a model and its calibration text and decide a plan; nothing is written.

    What the trainings of the run would hold in memory is printed first.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option.
        placement, gguf_file, revision, trust_remote_code: as in :func:`prune`.

    Raises:
        ConfigError: invalid options, or a training that the device cannot hold.

    Returns:
        The plan, with the notes and warnings that a cut by it would come with.
    """
    config = complete_config(config)
    check_sources(_sources(config))
    reading: dict[str, Any] = {
        "gguf_file": gguf_file,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    division, config = placed(Source(model_id, reading), config, placement, always=True)
    look_up_samples(wanted_text(config).values())
    if decides_from_disk(model_id, config, **reading):
        decision = StoredRun(model_id, config, revision=revision, only_planning=True).decide()
    else:
        model, tokenizer = _load(model_id, config, division, **reading)
        run = _planning(model, draw_samples(model, tokenizer, config), config)
        run.division = division
        decision = run.decide()
    if not config.adds_biases:
        return decision
    note = (
        "The plan holds no biases: those of the bias compensation are made when it is cut, also in a replay (--plan) "
        "with cut.reconstruct=bias."
    )
    return replace(decision, notes=(*decision.notes, note))


def _sources(config: PruneConfig) -> list[str]:
    return [source for data in wanted_text(config).values() for source in data.sources]
