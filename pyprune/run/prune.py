"""Prune or plan, a checkpoint or a model in memory: load -> decide -> regularise -> cut -> recover -> write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource, Reading
from pyprune.checkpoint.trained_on import training_marks
from pyprune.config.run import PruneConfig
from pyprune.data.sampling import TokenSamples
from pyprune.data.sources import check_sources, look_up_samples
from pyprune.data.tokens import Batch
from pyprune.families import count_parameters
from pyprune.methods.base import PlanDecision
from pyprune.methods.registry import complete_config
from pyprune.plan import PrunePlan
from pyprune.run.loaded import LoadedRun, load_divided
from pyprune.run.memory import TrainedModels, place_models
from pyprune.run.replay import read_plan
from pyprune.run.result import PruneResult
from pyprune.run.resume import RunFolder, arithmetic_of, run_folder, with_kept_memory
from pyprune.run.source import check_alike
from pyprune.run.stages import Stages, Teacher, planning_config
from pyprune.run.streamed import StreamedRun, decision_obstacle, loading_reason
from pyprune.run.text import (
    RunText,
    draw_samples,
    overlap_warnings,
    repeated_text_warnings,
    say_warnings,
    shapes_the_result,
    text_configs,
    text_sources,
)
from pyprune.runtime import processes
from pyprune.runtime.files import check_output
from pyprune.runtime.processes import Division
from pyprune.runtime.records import digest

SOURCE_FACTS = ("weights", "revision", "gguf_file")
"""Facts of the dense model in a record next to its name, each as source_...; weights are their version."""


def prune_checkpoint(
    model: str | Path | ModelSource,
    config: PruneConfig,
    *,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    placement: str = "auto",
    **reading: Unpack[Reading],
) -> PruneResult:
    """Prune a model from a folder or hub id and write a checkpoint folder.

    An interrupted run keeps its plan and training checkpoints in a hidden folder next to ``out``; ``resume``
    continues from there to the same result. For distillation the dense model is read again after the cut, in the
    training dtype, and dropped when the stage ends: a copy held from the start would cost the memory of the dense
    weights during scoring and regularisation as well.

    A run that trains nothing streams the weights from file to file, where the folder and the method allow it; a note of
    the result reports whether it did, or why not.

    Args:
        model: folder or hub id of a dense model.
        config: every option.
        out: the folder to create.
        resume: continue an interrupted run of the same options.
        overwrite: replace an existing ``out``.
        placement: auto, device or host: where several processes have the model while nothing trains
            (:func:`pyprune.run.memory.division_of`). The result changes by no more than the order of sums.
        reading: ``gguf_file``, ``revision`` and ``trust_remote_code`` (:class:`ModelSource`).

    Raises:
        ConfigError: invalid options, or options that differ from the run to resume.
        PypruneError: the error that stopped a stage; nothing is left at ``out``.
    """
    source, out = ModelSource.of(model, **reading), Path(out)
    with arithmetic_of(out, resume=resume):
        config = complete_config(config)
        check_output(out, overwrite=overwrite, reads=[source.name, config.plan, *text_sources(config)])
        check_sources(text_sources(config))
        if resume:
            config = with_kept_memory(out, config)
        division, config = place_models(TrainedModels(source), config, placement)
        look_up_samples(text_configs(config).values())  # before weights are read
        facts = _run_facts(source, config)
        with run_folder(out, facts, config, resume=resume, overwrite=overwrite) as work:
            run = _open(source, config, division, work)
            warnings = _warn_about_text(config, run.samples, source.marks)
            result = run.execute()
            left_out = run.places.note() if run.places is not None else None
            result.notes += [said for said in (run.note, left_out) if said]
            result.warnings += warnings
            provenance = _provenance(source, config, facts, run, result)
            result.out = run.write(out, provenance, overwrite=overwrite) if processes.first() else out
    return result


def _open(source: ModelSource, config: PruneConfig, division: Division, work: RunFolder) -> StreamedRun | LoadedRun:
    """Decide whether the run streams the weights from file to file or loads the model."""
    note = loading_reason(source, config)
    if note is None and processes.count() > 1:
        note = "The model was loaded: several processes do not stream it from file to file."
    return StreamedRun(source, config, work) if note is None else LoadedRun(source, config, division, work, note)


def _run_facts(source: ModelSource, config: PruneConfig) -> dict[str, Any]:
    """Return the facts that identify an interrupted run; refuse processes that read different weights."""
    facts = {**source.facts, "weights": source.version}
    if config.plan is not None:  # the options hold its name alone, and its content may change before the run resumes
        facts["plan"] = digest(read_plan(config.plan).to_dict())
    check_alike(source.name, source.version)
    return facts


def _warn_about_text(config: PruneConfig, samples: Mapping[str, TokenSamples], marks: str) -> list[str]:
    """Print warnings about the text (trained on before, overlapping) before work starts, and return them."""
    if not shapes_the_result(config):
        return []
    warnings = [text for drawn in samples.values() for text in repeated_text_warnings(marks, drawn)]
    warnings += overlap_warnings(config)
    say_warnings(warnings)
    return warnings


def _provenance(
    source: ModelSource,
    config: PruneConfig,
    facts: Mapping[str, Any],
    run: StreamedRun | LoadedRun,
    result: PruneResult,
) -> dict[str, Any]:
    """Return the provenance of a finished run, for its record."""
    marks = source.marks
    if shapes_the_result(config):
        marks = training_marks(run.samples.values(), marks)
    return {
        "method": config.method,
        "source": source.name,
        **{f"source_{name}": facts[name] for name in SOURCE_FACTS if facts[name] is not None},
        "dense_parameters": result.compact.dense_parameters if result.compact else count_parameters(run.model),
        "config": config.to_dict(),
        "report": result.to_dict(),
        **source.inherited_facts(),
        "training_marks": marks,
    }


def prune_model_(
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
        data: token ids, int64 [N, T], under "data", and under "cut.data" and "recovery_data" where the cut is
            reconstructed or a stage after it trains on other text; empty when a saved plan is only applied.
        config: every option.
        work: where an interrupted run is kept; None keeps nothing.
        teacher: for distillation, the dense model again (or a function that loads it): ``model`` is cut in place.

    Raises:
        ConfigError: distillation without a teacher, or instruction records where every token has to count.
    """
    return Stages(model, RunText.of(data), complete_config(config), work, teacher).run()


def plan_model(model: PreTrainedModel, samples: Batch | Tensor, config: PruneConfig) -> PrunePlan:
    """Decide what is removed, without changing the model.

    Args:
        model: a dense model of a known family.
        samples: calibration token ids, int64 [N, T].
        config: the method, the ratio and the method's options; or a saved plan to replay.

    Raises:
        ConfigError: invalid options, or a goal that cannot be reached.
    """
    return Stages(model, RunText.of({"data": samples}), planning_config(complete_config(config))).decide().plan


def plan_checkpoint(model: str | Path | ModelSource, config: PruneConfig, *, placement: str = "auto") -> PlanDecision:
    """Load a model and its calibration text and decide a plan; nothing is written.

    The memory that the trainings of the run would need is printed first.

    Args:
        model: folder or hub id of a dense model.
        config: every option.
        placement: as in :func:`prune_checkpoint`.

    Raises:
        ConfigError: invalid options, or a training that the device cannot hold.

    Returns:
        The plan, with the notes and warnings that a cut by it would come with.
    """
    source, config = ModelSource.of(model), complete_config(config)
    check_sources(text_sources(config))
    division, config = place_models(TrainedModels(source), config, placement, always=True)
    look_up_samples(text_configs(config).values())
    if decision_obstacle(config) is None and source.streaming_obstacle() is None:
        decision = StreamedRun(source, config, only_planning=True).decide()
    else:
        loaded, tokenizer = load_divided(source, config, division)
        text = RunText.of(draw_samples(loaded, tokenizer, config))
        decision = Stages(loaded, text, planning_config(config), division=division).decide()
    if not config.adds_biases:
        return decision
    note = (
        "The plan holds no biases: those of the bias compensation are made when it is cut, also in a replay (--plan) "
        "with cut.reconstruct=bias."
    )
    return replace(decision, notes=(*decision.notes, note))
