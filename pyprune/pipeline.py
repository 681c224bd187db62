"""The whole flow on one screen: load -> calibrate -> decide -> regularise -> compact -> recover -> write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.load import load_model, stored_dtype, weights_identity
from pyprune.checkpoint.record import has_record, inherited_facts, read_pruning_json, take_measured
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.trained_on import marked_passages, training_marks, unguarded
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, RecoverRunConfig, StageAction
from pyprune.config.train import RecoverConfig
from pyprune.cut.compact import CompactReport, compact_
from pyprune.cut.compensate import compensate_, target_of
from pyprune.cut.mask import masked
from pyprune.data.sampling import TokenSamples, sample_sequences, split_disjoint
from pyprune.data.sources import check_source
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, PlanError
from pyprune.families import check_plan, count_parameters, family_for
from pyprune.methods.base import PlanDecision, RunOptions
from pyprune.methods.registry import check_run, get_method
from pyprune.plan import PrunePlan
from pyprune.probe.effects import EffectReport, compare, snapshot
from pyprune.quality.perplexity import perplexity
from pyprune.run_folder import RunFolder, run_folder
from pyprune.runtime.files import check_output, read_bounded
from pyprune.runtime.progress import warn
from pyprune.train.lora import check_rank, projection_names
from pyprune.train.objective import TrainReport
from pyprune.train.recover import finetune, recover
from pyprune.train.samples import check_trainable

PROBE_SAMPLES = 2
"""Calibration samples on which activations and cosines are compared before and after regularisation."""

NO_SAMPLES = torch.empty(0, 0, dtype=torch.int64)

Teacher = PreTrainedModel | Callable[[], PreTrainedModel]
"""The dense model for distillation, or what makes it at the moment it is needed (and is dropped after that stage)."""


@dataclass
class PruneResult:
    """What a run did. JSON-able through :meth:`to_dict`.

    Attributes:
        plan: what stayed.
        compact: sizes before and after, and the architecture; None when the plan was not applied.
        notes: roundings and choices a reader must know.
        warnings: what the user should worry about.
        decision: how the plan came about; "seconds" is the wall time of a new one.
        stages: one report for each action before and after the cut, in order.
        effects: what regularisation did to the weights, activations and layers; None without it.
        verified: perplexity of the masked model before the cut and of the compacted one after it, on the same
            calibration text; None unless ``verify`` was on.
        out: the written folder; None for a run in memory.
    """

    plan: PrunePlan
    compact: CompactReport | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    decision: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    effects: EffectReport | None = None
    verified: dict[str, float] | None = None
    out: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, without the plan (a checkpoint's record holds that separately)."""
        return {
            "compact": vars(self.compact) if self.compact is not None else None,
            "notes": self.notes,
            "warnings": self.warnings,
            "decision": self.decision,
            "stages": self.stages,
            "effects": self.effects.to_dict() if self.effects is not None else None,
            "verified": self.verified,
        }


def prune(
    model_id: str | Path,
    config: PruneConfig,
    *,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PruneResult:
    """Prune a model from a folder or hub id and write a checkpoint folder.

    An interrupted run keeps its plan and training checkpoints in a hidden folder next to ``out``; ``resume``
    continues from there to the same result. For distillation the dense model is read again from ``model_id`` after
    the cut, in the training dtype, and dropped when the stage ends: a copy held from the start would cost the memory
    of the dense weights during scoring and regularisation as well.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option.
        out: the folder to create.
        resume: continue an interrupted run of the same options.
        overwrite: replace an existing ``out``.
        gguf_file: a GGUF file inside the model's folder or repository.
        revision: hub revision.
        trust_remote_code: run the repository's own code.

    Raises:
        ConfigError: invalid options, or options that differ from the run to resume.
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    out = Path(out)
    check_run(config)
    check_output(out, overwrite=overwrite, reads=[model_id, config.plan, *_sources(config)])
    _check_sources(config)
    reading: dict[str, Any] = {
        "gguf_file": gguf_file,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }

    def dense() -> PreTrainedModel:
        return load_model(model_id, dtype=teacher_dtype(config.recover), device=config.device, **reading)[0]

    source = {"model": str(model_id), "gguf_file": gguf_file, "revision": revision}
    source["weights"] = weights_identity(model_id, **reading)
    with run_folder(out, source, config, resume=resume, overwrite=overwrite) as work:
        model, tokenizer = load_model(model_id, dtype=config.dtype, device=config.device, **reading)
        data = draw_samples(model, tokenizer, config)
        earlier = inherited_facts(model_id)
        result = prune_(model, data, config, work=work, teacher=dense if config.recover.distill else None)
        marks = earlier.get("training_marks", "")
        if _shapes_the_result(config):
            _warn(result, [text for samples in data.values() for text in _trained_before(marks, samples)])
            marks = training_marks(data.values(), marks)
        provenance = {
            "method": config.method,
            "source": str(model_id),
            "dense_parameters": result.compact.dense_parameters if result.compact else count_parameters(model),
            "config": config.to_dict(),
            "report": result.to_dict(),
            **earlier,
            "training_marks": marks,
        }
        result.out = save_checkpoint(
            model,
            tokenizer,
            out,
            plan=result.plan if result.compact else None,
            provenance=provenance,
            overwrite=overwrite,
            dtype=config.export_dtype or _stored_dtype(model_id, gguf_file, revision, trust_remote_code),
        )
    return result


def _stored_dtype(model_id: str | Path, gguf_file: str | None, revision: str | None, remote: bool) -> str | None:
    """The dtype to write when none was chosen; GGUF weights are quantised and keep the working dtype."""
    return None if gguf_file else stored_dtype(model_id, revision=revision, trust_remote_code=remote)


def prune_(
    model: PreTrainedModel,
    data: Mapping[str, TokenSamples | Tensor],
    config: PruneConfig,
    *,
    work: RunFolder | None = None,
    teacher: Teacher | None = None,
) -> PruneResult:
    """Decide, regularise, cut and recover a model in memory, in place.

    Args:
        model: a dense model of a known family.
        data: token ids, int64 [N, T], under "regularise" and (when something follows the cut) "recover"; empty
            when a saved plan is only applied.
        config: every option.
        work: where an interrupted run is kept; None keeps nothing.
        teacher: for distillation, the dense model again (or what makes it): ``model`` itself is cut in place.

    Raises:
        ConfigError: distillation without a teacher, or instruction records where every token has to count.
    """
    samples = _ids(data.get("regularise", NO_SAMPLES))
    after_samples = _tokens(data.get("recover", samples))
    _check_stages(model, config, _tokens(data.get("regularise", NO_SAMPLES)), after_samples, teacher)
    decision = _decide(model, samples, config, work)
    result = PruneResult(
        decision.plan, notes=list(decision.notes), warnings=list(decision.warnings), decision=decision.details
    )
    if _shapes_the_result(config):
        result.warnings += unguarded([samples for samples in data.values() if isinstance(samples, TokenSamples)])
    if config.stages.prune:
        _check_target(model, config, decision.plan)
    probe = samples[:PROBE_SAMPLES]
    untouched = snapshot(model, decision.plan, probe) if "regularise" in config.stages.before else None
    for number, action in enumerate(config.stages.before):
        _act(model, Batch.of(samples), config, action, f"before-{number}-{action}", result, work, teacher)
    if untouched is not None:
        result.effects = compare(
            untouched, snapshot(model, decision.plan, probe), target_preserved_ratio=_target_ratio(config)
        )
        result.warnings += result.effects.warnings
    if config.stages.prune:
        _cut(model, config, result, samples)
    for number, action in enumerate(config.stages.after):
        _act(model, after_samples, config, action, f"after-{number}-{action}", result, work, teacher)
    # The regulariser and the comparison of effects may say the same about a preserved ratio.
    warnings, result.warnings = dict.fromkeys(result.warnings), []
    _warn(result, warnings)
    return result


def _warn(result: PruneResult, warnings: Iterable[str]) -> None:
    found = list(warnings)
    result.warnings += found
    for warning in found:
        warn(warning)


def _cut(model: PreTrainedModel, config: PruneConfig, result: PruneResult, samples: Tensor) -> None:
    probe = samples[:PROBE_SAMPLES]
    if config.verify and not probe.numel():
        raise ConfigError("verify is on, which measures on calibration text; give samples under 'regularise'.")
    dense_parameters = count_parameters(model)
    if config.compensates:
        # The dense model's own activations, as they are at the moment of the cut.
        report = compensate_(model, result.plan, samples, batch_size=config.score.batch_size)
        (result.notes if report.blocks else result.warnings).extend(report.notes())
        result.decision["compensation"] = vars(report)
    if config.verify:
        with masked(model, result.plan):
            result.verified = {"masked_perplexity": _perplexity(model, probe)}
    result.compact = replace(compact_(model, result.plan), dense_parameters=dense_parameters)
    if result.verified is not None:
        result.verified["compacted_perplexity"] = _perplexity(model, probe)
    if result.compact.reasons:
        result.notes.append("No stock architecture fits: " + "; ".join(result.compact.reasons) + ".")


def _perplexity(model: PreTrainedModel, samples: Tensor) -> float:
    length = samples.shape[1]
    return perplexity(model, samples.flatten(), window=length, batch_size=1, source="calibration text").perplexity


def make_plan(model: PreTrainedModel, samples: TokenSamples | Tensor, config: PruneConfig) -> PrunePlan:
    """Decide what is removed, without changing the model.

    Args:
        model: a dense model of a known family.
        samples: calibration token ids, int64 [N, T].
        config: the method, the ratio and the method's options; or a saved plan to replay.
    """
    return _decide(model, _ids(samples), config, None).plan


def decision_for(model_id: str | Path, config: PruneConfig, **source: Any) -> PlanDecision:
    """Load a model and its calibration text and decide a plan; nothing is written.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option.
        source: ``gguf_file``, ``revision`` and ``trust_remote_code`` as in :func:`prune`.

    Returns:
        The plan, with the notes and warnings that a cut by it would come with.
    """
    check_run(config)
    _check_sources(config)
    model, tokenizer = load_model(model_id, dtype=config.dtype, device=config.device, **source)
    samples = _ids(draw_samples(model, tokenizer, config).get("regularise", NO_SAMPLES))
    decision = _decide(model, samples, config, None)
    if config.stages.prune:
        _check_target(model, config, decision.plan)
    if not config.compensates:
        return decision
    note = (
        "The plan holds no biases: those of the bias compensation are made when it is cut, also in a replay (--plan) "
        "with score.compensate=true."
    )
    return replace(decision, notes=(*decision.notes, note))


def teacher_dtype(config: RecoverConfig) -> str:
    """The dtype that the teacher's weights are loaded in: the chosen one, else the training dtype."""
    return (config.distill.teacher_dtype if config.distill else None) or config.train.dtype


def recover_checkpoint(
    pruned: str | Path,
    config: RecoverRunConfig,
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
    training checkpoints in a hidden folder next to ``out``.

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
        ConfigError: invalid options, or distillation without a teacher or a teacher without distillation.
        PypruneError: whatever stops a stage; nothing is left at ``out``.
    """
    out = Path(out)
    config.validate()
    if (teacher is None) != (config.recover.distill is None):
        raise ConfigError(
            "recover.distill needs the dense model; give --teacher MODEL (or teacher=...)."
            if teacher is None
            else f"The teacher {teacher} would not be used: recover.distill is null. Set recover.distill (for example "
            "recover.distill.alpha=0.5), or leave the teacher out."
        )
    _check_unused_teacher_options(teacher, gguf_file=teacher_gguf_file, revision=teacher_revision)
    check_output(out, overwrite=overwrite, reads=[pruned, teacher, config.data.source])
    check_source(config.data.source)
    of_teacher: dict[str, Any] = {"gguf_file": teacher_gguf_file, "revision": teacher_revision}
    reading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    source = {"model": str(pruned), "weights": weights_identity(pruned, **reading), "teacher": str(teacher)}
    source["teacher_weights"] = weights_identity(teacher, **of_teacher, **reading) if teacher is not None else ""
    reading["device"] = config.device
    record = read_pruning_json(pruned) if has_record(pruned) else None
    plan, known = (record.plan, dict(record.provenance)) if record else (None, {"source": str(pruned)})
    with run_folder(out, source, config, resume=resume, overwrite=overwrite) as work:
        model, tokenizer = load_model(pruned, dtype=config.dtype, **reading)
        if tokenizer is None:
            raise ConfigError(f"{pruned} has no tokenizer files; add them (tokenizer.json) to use text.")
        check_sequence_length(model.config, config.data.sequence_length)
        samples = sample_sequences(tokenizer, config.data)
        dense = None
        if teacher is not None:
            dense = load_model(teacher, dtype=teacher_dtype(config.recover), **of_teacher, **reading)[0]
        report = recover(
            model,
            samples.tokens,
            config.recover,
            teacher=dense,
            plan=plan,
            checkpoint_dir=work.path / "recover",
            resume=resume,
        )
        report.warnings += [*_trained_before(known.get("training_marks", ""), samples), *unguarded([samples])]
        earlier = take_measured(known)
        entry = {"from": str(pruned), "teacher": str(teacher) if teacher else None, "config": config.to_dict()}
        entry |= {"report": report.to_dict(), "measured_before": earlier}
        provenance = {
            **known,
            "recoveries": [*known.get("recoveries", []), entry],
            "training_marks": training_marks([samples], known.get("training_marks", "")),
        }
        dtype = config.export_dtype or stored_dtype(pruned, trust_remote_code=trust_remote_code)
        save_checkpoint(model, tokenizer, out, plan=plan, provenance=provenance, overwrite=overwrite, dtype=dtype)
    return report


def draw_samples(model: PreTrainedModel, tokenizer: Any, config: PruneConfig) -> dict[str, TokenSamples]:
    """Draw the text of every stage; text of different stages is disjoint.

    Nothing is read when a saved plan is only applied and not verified.

    Raises:
        ConfigError: the model has no tokenizer.
        DataError: the text cannot be used, or the sequences are longer than the model allows.
    """
    wanted = _wanted_text(config)
    if wanted and tokenizer is None:
        raise ConfigError("The model folder has no tokenizer files; add them (tokenizer.json) to use text.")
    for data in wanted.values():
        check_sequence_length(model.config, data.sequence_length)
    drawn = split_disjoint(tokenizer, wanted) if wanted else {}
    for samples in drawn.values():
        check_token_ids(model.config, samples.input_ids[samples.input_ids != IGNORED])
    return drawn


def _wanted_text(config: PruneConfig) -> dict[str, DataConfig]:
    """The text of every stage that needs one."""
    if not (_shapes_the_result(config) or config.verify):
        return {}
    wanted = {"regularise": config.data}
    if config.stages.after:
        wanted["recover"] = config.recovery_data or config.data
    return wanted


def _check_unused_teacher_options(teacher: str | Path | None, **options: str | None) -> None:
    """Options of a teacher that is not there would do nothing."""
    unused = [f"teacher_{name}" for name, value in options.items() if value is not None]
    if teacher is None and unused:
        raise ConfigError(f"{' and '.join(unused)} without a teacher would do nothing; give the teacher too.")


def _sources(config: PruneConfig) -> list[str]:
    return [data.source for data in _wanted_text(config).values()]


def _check_sources(config: PruneConfig) -> None:
    for source in _sources(config):
        check_source(source)


def _decide(model: PreTrainedModel, samples: Tensor, config: PruneConfig, work: RunFolder | None) -> PlanDecision:
    kept = work.read_decision() if work is not None else None
    decision = kept or _new_decision(model, samples, config, work)
    check_plan(decision.plan, family_for(model), model.config)
    if work is not None:
        work.write_decision(decision)
    return decision


def _new_decision(model: PreTrainedModel, samples: Tensor, config: PruneConfig, work: RunFolder | None) -> PlanDecision:
    if config.plan is not None:
        note = f"Plan replayed from {config.plan}; ratio and the method's own options decide nothing."
        return PlanDecision(read_plan(config.plan), (note,), warnings=tuple(_lost_compensation(config)))
    if config.method == "none":
        raise ConfigError("method is 'none', which decides nothing; give a plan (--plan FILE) to apply.")
    started = time.monotonic()
    decision = get_method(config.method).decide(model, samples, config, _run(work, "decide"))
    return replace(decision, details={**decision.details, "seconds": time.monotonic() - started})


def read_plan(path: str | Path) -> PrunePlan:
    """Read a plan from a JSON file, or from the record of a checkpoint folder.

    Raises:
        PlanError: the file is missing or holds no valid plan.
    """
    path = Path(path)
    if path.is_dir():
        plan = read_pruning_json(path).plan
        if plan is None:
            raise PlanError(f"The checkpoint {path} was not cut; its record holds no plan.")
        return plan
    try:
        text = read_bounded(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"The plan {path} cannot be read: {error}.") from error
    return PrunePlan.from_json(text)


def _lost_compensation(config: PruneConfig) -> list[str]:
    """A checkpoint with bias compensation, whose plan is replayed without it."""
    folder = Path(str(config.plan))
    if config.compensates or not folder.is_dir():
        return []
    decided = read_pruning_json(folder).provenance.get("report", {}).get("decision", {})
    if "compensation" not in decided:
        return []
    return [
        f"The bias compensation of {folder} is not replayed: the plan says what stays, not the biases. Turn on "
        "score.compensate to compute them again from this run's calibration text."
    ]


def _check_target(model: PreTrainedModel, config: PruneConfig, plan: PrunePlan) -> None:
    """Find out before hours of training, not after, that no architecture takes the sizes or the biases."""
    target = target_of(model, config, plan)
    if config.target == "stock" and target.stock is None:
        raise ConfigError(
            f"target is 'stock', but no stock architecture takes these sizes ({plan.summary()}): "
            + "; ".join(target.reasons)
            + ". Use the same widths in every layer (score.uniform), other sizes, or target 'auto' for the pruned "
            "architecture."
        )


def _act(
    model: PreTrainedModel,
    samples: Batch,
    config: PruneConfig,
    action: StageAction,
    name: str,
    result: PruneResult,
    work: RunFolder | None,
    teacher: Teacher | None,
) -> None:
    run = _run(work, name)
    report: Any
    if action == "regularise":
        regularise = get_method(config.method).regularise
        if regularise is None:
            raise ConfigError(
                f"method {config.method!r} has nothing to regularise with; take regularise out of stages."
            )
        report = regularise(model, samples.ids, result.plan, config, run)
    elif action == "recover":
        report = recover(
            model,
            samples,
            config.recover,
            teacher=teacher if teacher is None or isinstance(teacher, PreTrainedModel) else teacher(),
            plan=result.plan if result.compact else None,
            checkpoint_dir=run.checkpoint_dir,
            resume=run.resume,
        )
    else:
        report = finetune(model, samples, config.finetune, checkpoint_dir=run.checkpoint_dir, resume=run.resume)
    result.stages.append({"action": action, "name": name, **report.to_dict()})
    result.warnings += report.warnings


def _run(work: RunFolder | None, name: str) -> RunOptions:
    if work is None:
        return RunOptions()
    return RunOptions(checkpoint_dir=work.path / name, resume=work.resume)


def _check_stages(
    model: PreTrainedModel, config: PruneConfig, before: Batch, after: Batch, teacher: Teacher | None
) -> None:
    """Find out before anything is computed that a stage lacks what it needs.

    Raises:
        ConfigError: distillation without a teacher, instruction records where every token has to count, a LoRA rank
            beyond every projection, or half-precision weights that would be trained.
    """
    stages = (*config.stages.before, *config.stages.after)
    adapted = "recover" in stages and config.recover.adapters == "lora"
    if adapted:
        check_rank(model, projection_names(model), config.recover.rank)
    if {"regularise", "finetune"} & {*stages} or ("recover" in stages and not adapted):
        check_trainable(dict(model.named_parameters()))
    if "recover" in stages and config.recover.distill is not None and teacher is None:
        raise ConfigError(
            "recover.distill learns from the dense model, but the model in memory is cut in place. Give teacher: a "
            "second copy (copy.deepcopy(model)), or a function that loads one when it is needed."
        )
    regularises_after = "regularise" in config.stages.after and after.labels is not after.ids
    if before.labels is not before.ids or regularises_after:
        raise ConfigError(
            "Samples with masked prompts are for recovery; calibration and regularise count every token. Draw theirs "
            "with layout 'stream'."
        )


def _trained_before(marks: str, samples: TokenSamples) -> list[str]:
    ids = samples.input_ids
    again = marked_passages(marks, ids[ids >= 0])
    if not again:
        return []
    return [f"{again} passages of this run's text were training text of this checkpoint already; use other text."]


def _ids(samples: TokenSamples | Tensor) -> Tensor:
    return samples if isinstance(samples, Tensor) else samples.input_ids


def _tokens(samples: TokenSamples | Tensor) -> Batch:
    return Batch.of(samples) if isinstance(samples, Tensor) else samples.tokens


def _shapes_the_result(config: PruneConfig) -> bool:
    """Whether text shapes the result: it trains the model, a method reads it to decide, or biases hold its means."""
    decides = config.plan is None and (config.method == "none" or get_method(config.method).reads_text)
    return bool(config.stages.before or config.stages.after) or decides or config.compensates


def _target_ratio(config: PruneConfig) -> float | None:
    return config.dress.target_preserved_ratio if config.method == "dress" else None
