"""The stages of one run on a model in memory: decide, train before the cut, cut, train after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.record import read_pruning_json, read_record
from pyprune.checkpoint.stored import StoredModel
from pyprune.checkpoint.tokenizer import no_tokenizer
from pyprune.checkpoint.trained_on import unguarded
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageAction
from pyprune.cut.compact import CompactReport, become_shapes_, compact_
from pyprune.cut.compensate import CompensationReport, compensate_, target_of
from pyprune.cut.mask import masked
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_
from pyprune.data.sampling import TokenSamples, split_disjoint
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import IGNORED, Batch
from pyprune.errors import ConfigError, PlanError
from pyprune.families import begins_with_bos, check_plan, count_parameters, family_for
from pyprune.methods.base import PlanDecision, PlanRequest, Prepare, Regularise, RunOptions, StageReport
from pyprune.methods.registry import get_method
from pyprune.plan import PrunePlan
from pyprune.probe.effects import EffectReport, EffectSnapshot, compare, snapshot
from pyprune.probe.streams import LayerRunner
from pyprune.quality.perplexity import perplexity
from pyprune.run.resume import RunFolder
from pyprune.runtime import processes
from pyprune.runtime.files import read_bounded
from pyprune.runtime.processes import Division, dividing, from_first
from pyprune.runtime.progress import say, warn
from pyprune.train.distill import check_pair
from pyprune.train.lora import check_rank, target_names
from pyprune.train.recover import finetune, recover
from pyprune.train.samples import check_trainable

PROBE_SAMPLES = 2
"""Calibration samples on which activations and cosines are compared before and after regularisation."""

ROTATED = "rotated"
"""Entry of a decision's details: the hidden channels that the plan counts are those of a rotated stream."""

STAGES_OF_TEXT = ("regularise", "cut", "recover")
"""What text is given for, by name."""
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
        reconstruction: what the reconstruction by least squares did, layer by layer; None without it.
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
    reconstruction: dict[str, Any] | None = None
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
            "reconstruction": self.reconstruction,
            "effects": self.effects.to_dict() if self.effects is not None else None,
            "verified": self.verified,
        }


@dataclass(frozen=True)
class StageText:
    """The text of a run's stages.

    Attributes:
        before: what the method reads, what is trained on before the cut, and what the cut is measured on.
        cut: what the cut is reconstructed on.
        after: what is trained on after the cut.
        drawn: the samples that were drawn from a source, for the marks of what was trained on.
    """

    before: Batch
    cut: Batch
    after: Batch
    drawn: tuple[TokenSamples, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Batch | Tensor]) -> StageText:
        """Take token ids, int64 [N, T], under "regularise" and, where they are others, "cut" and "recover".

        Raises:
            ConfigError: they are under another name.
        """
        if unknown := sorted(set(data) - set(STAGES_OF_TEXT)):
            raise ConfigError(
                f"data has {unknown[0]!r}, which no stage reads; the names are {', '.join(STAGES_OF_TEXT)}."
            )
        before = data.get("regularise", NO_SAMPLES)
        drawn = tuple(samples for samples in data.values() if isinstance(samples, TokenSamples))
        return cls(Batch.of(before), Batch.of(data.get("cut", before)), Batch.of(data.get("recover", before)), drawn)

    @property
    def probe(self) -> Tensor:
        """The few samples that single measurements are taken on, int64 [N, T]."""
        return self.before.ids[:PROBE_SAMPLES]


def draw_samples(model: PreTrainedModel, tokenizer: Any, config: PruneConfig) -> dict[str, TokenSamples]:
    """Draw the text of every stage; text of different stages is disjoint.

    Nothing is read when a saved plan is only applied and not verified.

    Raises:
        CheckpointError: the model has no tokenizer.
        DataError: the text cannot be used, or the sequences are longer than the model allows.
    """
    wanted = wanted_text(config)
    if wanted and tokenizer is None:
        raise no_tokenizer(model.name_or_path or "The model")
    for data in wanted.values():
        check_sequence_length(model.config, data.sequence_length)
    drawn = split_disjoint(tokenizer, wanted, bos=begins_with_bos(model.config)) if wanted else {}
    for samples in drawn.values():
        check_token_ids(model.config, samples.ids[samples.ids != IGNORED])
    return drawn


def wanted_text(config: PruneConfig) -> dict[str, DataConfig]:
    """The text of every stage that needs one."""
    if not (shapes_the_result(config) or config.verify):
        return {}
    wanted = {"regularise": config.data} if _reads_usual_text(config) else {}
    if config.reads_text_at_the_cut and config.cut.data is not None:
        wanted["cut"] = config.cut.data
    if config.stages.after:
        wanted["recover"] = config.recovery_data or config.data
    return wanted


def shapes_the_result(config: PruneConfig) -> bool:
    """Whether text shapes the result: by training, by what a method reads to decide, or by what the cut makes of it."""
    trains = bool(config.stages.before or config.stages.after)
    return trains or config.reads_text_at_the_cut or _decides_by_text(config)


def _decides_by_text(config: PruneConfig) -> bool:
    if config.plan is not None:
        return False
    return config.method == "none" or get_method(config.method).reads_text_with(config.options)


def _reads_usual_text(config: PruneConfig) -> bool:
    """Whether ``data`` is read: other stages than these may have text of their own."""
    at_the_cut = config.reads_text_at_the_cut and config.cut.data is None
    after = bool(config.stages.after) and config.recovery_data is None
    return bool(config.stages.before) or config.verify or _decides_by_text(config) or at_the_cut or after


def planning(config: PruneConfig) -> PruneConfig:
    """The options of a run that stops at the plan: without stages, and so without what only they need."""
    return replace(config, stages=replace(config.stages, before=(), after=()), verify=False)


def prepared_in_memory(
    prepare: Prepare, model: PreTrainedModel, plan: PrunePlan, samples: Tensor, details: Mapping[str, Any]
) -> Sequence[str]:
    """What a method does before the cut, on a model in memory; see :class:`pyprune.methods.base.Prepare`."""
    return prepare(LayerRunner.of(model), plan, samples, details)


def _itself(model: PreTrainedModel) -> PreTrainedModel:
    return model


@dataclass(frozen=True)
class Cutting:
    """What makes the cut of a run; for weights that lie on disk, others than the functions for a model in memory.

    Attributes:
        prepare: calls what a method does to the weights before the cut.
        compact: cuts, or plans the cut.
        compensate: gives biases for what is lost.
        reconstruct: solves what stays by least squares.
        masked: gives the masked model, which ``verify`` measures before the cut, for the time of a block.
        compacted: gives the model that ``verify`` measures after it.
    """

    prepare: Callable[..., Sequence[str]] = prepared_in_memory
    compact: Callable[[PreTrainedModel, PrunePlan], CompactReport] = compact_
    compensate: Callable[..., CompensationReport] = compensate_
    reconstruct: Callable[..., ReconstructionReport] = reconstruct_
    masked: Callable[[PreTrainedModel, PrunePlan], AbstractContextManager[PreTrainedModel]] = masked
    compacted: Callable[[PreTrainedModel], PreTrainedModel] = _itself


@dataclass
class StageRun:
    """A model on its way through the stages; each method is one stage and adds to ``result``.

    Attributes:
        model: dense, changed in place.
        text: of the stages.
        config: every option, checked.
        work: where an interrupted run is kept; None keeps nothing.
        teacher: for distillation.
        stored: where a method reads the weights from, instead of the model; None = from the model.
        cutting: what makes the cut.
        division: how several processes divide what trains, and who has the weights in between.
        result: what was done so far.

    Raises:
        ConfigError: a stage lacks what it needs, found out before anything is computed.
    """

    model: PreTrainedModel
    text: StageText
    config: PruneConfig
    work: RunFolder | None = None
    teacher: Teacher | None = None
    stored: StoredModel | None = None
    cutting: Cutting = Cutting()
    division: Division = field(default_factory=Division)
    result: PruneResult = field(init=False)

    def decide(self) -> PlanDecision:
        """Choose what to remove, or take what an interrupted run or a saved plan chose."""
        if self.work is not None:
            parts = {"before": self.text.before, "cut": self.text.cut, "after": self.text.after}
            self.work.check_text({name: samples.digest() for name, samples in parts.items()})
        kept = self.work.read_decision() if self.work is not None else None
        decision = cast(PlanDecision, from_first(kept or self._new_decision()))
        check_plan(decision.plan, family_for(self.model), self.model.config)
        if self.work is not None:
            self.work.write_decision(decision)
        self.result = PruneResult(
            decision.plan, notes=list(decision.notes), warnings=list(decision.warnings), decision=decision.details
        )
        if shapes_the_result(self.config):
            self.result.warnings += unguarded(self.text.drawn)
        if self.config.stages.prune:
            check_target(self.model, decision.plan, self.config)
        return decision

    @property
    def _has_weights(self) -> bool:
        """Whether this process does what is not divided: where weights are on the host, the first does for all."""
        return processes.first() or not self.division.on_host

    def _alone(self) -> AbstractContextManager[None]:
        """Around what the first process does while the others wait for it."""
        return processes.alone() if self.division.on_host else nullcontext()

    def _cutting_together(self) -> AbstractContextManager[None]:
        """Around what all processes do to the weights that each of them has."""
        return nullcontext() if self.division.on_host else dividing()

    def _new_decision(self) -> PlanDecision | None:
        """What this process decides; None where that is left to the first."""
        config = self.config
        if config.plan is not None:
            note = f"Plan replayed from {config.plan}; ratio and the method's own options decide nothing."
            warnings = (*_lost_reconstruction(config), *_lost_preparation(config))
            return PlanDecision(read_plan(config.plan), (note,), warnings=warnings)
        if config.method == "none":
            raise ConfigError("method is 'none', which decides nothing; give a plan (--plan FILE) to apply.")
        method = get_method(config.method)
        trains = config.deciding_training() is not None
        together = self.division.on_host and trains
        if not (together or self._has_weights):
            return None
        say(f"Deciding what to remove: {config.method}.", "dim")
        started = time.monotonic()
        request = PlanRequest.of(self.model, config)
        stored = self.stored if self.division.on_host else None
        model = self.model if stored is None else stored.model()  # without weights, as a method that streams expects
        # Where every process decides for itself the first one's counts: states of the others would be in its way.
        run = replace(self._run("decide") if together or processes.first() else RunOptions(), stored=self.stored)
        with dividing(self.division) if together else self._alone():
            decision = method.decide(model, self.text.before.ids, request, run)
        return replace(decision, details={**decision.details, "seconds": time.monotonic() - started})

    def train_before_the_cut(self) -> None:
        """Regularise towards the plan, and say what that did to the weights and activations."""
        actions = self.config.stages.before
        seen = "regularise" in actions and self._has_weights
        untouched = self._snapshot() if seen else None
        for number, action in enumerate(actions):
            self._act(action, self.text.before, f"before-{number}-{action}")
        if untouched is not None:
            options = self.config.options
            effects = compare(
                untouched,
                self._snapshot(),
                target_preserved_ratio=options.preserved_goal if options else None,
            )
            self.result.effects = effects
            self.result.warnings += effects.warnings

    def _snapshot(self) -> EffectSnapshot:
        with self._alone():
            return snapshot(self.model, self.result.plan, self.text.probe)

    def cut(self) -> None:
        """Remove what the plan names; with ``verify``, measure both sides of the cut."""
        if not self.config.stages.prune:
            return
        if self._has_weights:
            with self._alone():
                self._cut()
        if self.division.on_host:
            self._follow_the_cut()

    def _follow_the_cut(self) -> None:
        """Where the first process alone has cut the model, the others have the shapes of what it has now."""
        here = (self.result.compact, self.model.config) if processes.first() else (None, None)
        self.result.compact, config = from_first(here)
        if config is not None and not processes.first():
            become_shapes_(self.model, config)

    def _cut(self) -> None:
        config, result, model = self.config, self.result, self.model
        dense_parameters = count_parameters(model)
        self._prepare()
        self._reconstruct()
        if config.verify:
            result.verified = {"masked_perplexity": self._perplexity_of_masked()}
        result.compact = replace(self.cutting.compact(model, result.plan), dense_parameters=dense_parameters)
        if result.verified is not None:
            result.verified["compacted_perplexity"] = self._perplexity(self.cutting.compacted(model))
        if result.compact.reasons:
            result.notes.append("No stock architecture fits: " + "; ".join(result.compact.reasons) + ".")

    def _prepare(self) -> None:
        """Let the method change the weights for the cut that it decided."""
        method = get_method(self.config.method) if self.config.method != "none" else None
        if method is None or method.prepare is None:
            return
        if self.config.plan is not None:
            self.result.warnings.append(
                f"The plan is replayed without what {method.name} does to the weights before it cuts: what stays is as "
                "in the dense model. Run the method without a plan to have both."
            )
            return
        ids, result = self.text.before.ids, self.result
        with self._cutting_together():
            result.notes += self.cutting.prepare(method.prepare, self.model, result.plan, ids, result.decision)
        if method.rotates:
            self.result.decision[ROTATED] = True

    def _reconstruct(self) -> None:
        """Let what stays make up for what is removed, by the dense model's activations at the moment of the cut."""
        cut, model, result = self.config.cut, self.model, self.result
        if cut.reconstruct == "bias":
            means = self.cutting.compensate(model, result.plan, self.text.cut.ids, batch_size=cut.batch_size)
            (result.notes if means.blocks else result.warnings).extend(means.notes())
            result.decision["compensation"] = vars(means)
        elif cut.reconstruct == "least_squares":
            with self._cutting_together():
                solved = self.cutting.reconstruct(
                    model, result.plan, self.text.cut, options=cut.least_squares, batch_size=cut.batch_size
                )
            (result.notes if solved.solved else result.warnings).extend(solved.notes())
            result.notes += one_kind_of_text(self.text.cut)
            result.reconstruction = solved.to_dict()

    def train_after_the_cut(self) -> None:
        """Recover."""
        for number, action in enumerate(self.config.stages.after):
            self._act(action, self.text.after, f"after-{number}-{action}")

    def finished(self) -> PruneResult:
        """The result, its warnings said."""
        # The regulariser and the comparison of effects may say the same about a preserved ratio.
        self.result.warnings = list(dict.fromkeys(self.result.warnings))
        say_warnings(self.result.warnings)
        return self.result

    def _act(self, action: StageAction, samples: Batch, name: str) -> None:
        with dividing(self.division):
            self._train(action, samples, name)

    def _train(self, action: StageAction, samples: Batch, name: str) -> None:
        config, run, model, plan = self.config, self._run(name), self.model, self.result.plan
        report: StageReport
        if action == "regularise":
            regularise = cast(Regularise, get_method(config.method).regularise)  # a checked configuration asks no other
            report = regularise(model, samples.ids, plan, config.options, run)
        elif action == "recover":
            report = recover(
                model,
                samples,
                config.recover,
                teacher=self._teacher_in_memory(),
                plan=plan if self.result.compact else None,
                checkpoint_dir=run.checkpoint_dir,
                resume=run.resume,
            )
        else:
            report = finetune(model, samples, config.finetune, checkpoint_dir=run.checkpoint_dir, resume=run.resume)
        self.result.stages.append({"action": action, "name": name, **report.to_dict()})
        self.result.warnings += report.warnings

    def _teacher_in_memory(self) -> PreTrainedModel | None:
        teacher = self.teacher
        return teacher if teacher is None or isinstance(teacher, PreTrainedModel) else teacher()

    def _run(self, name: str) -> RunOptions:
        if self.work is None:
            return RunOptions()
        return RunOptions(checkpoint_dir=self.work.path / name, resume=self.work.resume)

    def _perplexity_of_masked(self) -> float:
        with self.cutting.masked(self.model, self.result.plan) as model:
            return self._perplexity(model)

    def _perplexity(self, model: PreTrainedModel) -> float:
        probe = self.text.probe
        return perplexity(
            model, probe.flatten(), window=probe.shape[1], batch_size=1, source="calibration text"
        ).perplexity

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        before, after = self.text.before, self.text.after
        stages = (*config.stages.before, *config.stages.after)
        adapted = "recover" in stages and config.recover.adapters == "lora"
        if adapted:
            check_rank(model, target_names(model, config.recover), config.recover.rank)
        whole = [training for training in config.trainings() if training.all_weights]
        if whole:
            lean = all(training.may_be_lean for training in whole)
            check_trainable(dict(model.named_parameters()), lean=lean)
        if "recover" in stages and config.recover.distill is not None and self.teacher is None:
            raise ConfigError(
                "recover.distill learns from the dense model, but the model in memory is cut in place. Give teacher: a "
                "second copy (copy.deepcopy(model)), or a function that loads one when it is needed."
            )
        if isinstance(self.teacher, PreTrainedModel):
            check_pair(model, self.teacher)
        regularises_after = "regularise" in config.stages.after and not after.counts_every_token
        if not before.counts_every_token or regularises_after:
            raise ConfigError(
                "Samples with masked prompts are for recovery; calibration and regularise count every token. Draw "
                "theirs with layout 'stream'."
            )
        if config.cut.reconstruct == "bias" and not self.text.cut.counts_every_token:
            raise ConfigError("cut.reconstruct is 'bias', whose means count every token; give a text without padding.")
        if config.verify and not before.ids.numel():
            raise ConfigError("verify is on, which measures on calibration text; give samples under 'regularise'.")


def check_target(model: PreTrainedModel, plan: PrunePlan, config: PruneConfig) -> None:
    """Find out before hours of training, not after, that no architecture takes the sizes or the biases.

    Raises:
        ConfigError: target is stock, and no stock architecture fits.
        UnsupportedModelError: nothing carries the biases.
    """
    target = target_of(model, plan, biases=config.adds_biases)
    if config.target == "stock" and target.stock is None:
        raise ConfigError(
            f"target is 'stock', but no stock architecture takes these sizes ({plan.summary()}): "
            + "; ".join(target.reasons)
            + ". Use the same widths in every layer (score.uniform), other sizes, or target 'auto' for the pruned "
            "architecture."
        )


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


def was_rotated(source: str | Path) -> bool:
    """Whether the hidden channels of a checkpoint are none of its dense model's: they were rotated before the cut.

    Raises:
        CheckpointError: as :func:`read_pruning_json`.
    """
    record = read_record(source)
    return record is not None and bool(record.provenance.get("report", {}).get("decision", {}).get(ROTATED))


def _lost_reconstruction(config: PruneConfig) -> list[str]:
    """A checkpoint that was reconstructed, whose plan is replayed without that."""
    folder = Path(str(config.plan))
    if config.cut.reconstruct != "none" or not folder.is_dir():
        return []
    facts = read_pruning_json(folder).provenance
    report = facts.get("report", {})
    kind = "least_squares" if report.get("reconstruction") or facts.get("reconstructions") else "bias"
    if kind == "bias" and "compensation" not in report.get("decision", {}):
        return []
    return [
        f"The reconstruction of {folder} is not replayed: the plan says what stays, not its weights. Set "
        f"cut.reconstruct to {kind} to compute it again from this run's calibration text."
    ]


def _lost_preparation(config: PruneConfig) -> list[str]:
    """A checkpoint whose method changed the weights before they were cut, whose plan is replayed without that."""
    folder = Path(str(config.plan))
    says_it = config.method != "none" and get_method(config.method).prepare is not None  # in :meth:`StageRun.cut`
    if says_it or not folder.is_dir():
        return []
    decision = read_pruning_json(folder).provenance.get("report", {}).get("decision", {})
    if decision.get(ROTATED):
        return [
            f"The hidden channels that the plan of {folder} keeps are those of a rotated stream, and the rotation is "
            "not replayed: of the dense model, other channels go. Run the method that made it without a plan."
        ]
    if decision.get("layers", {}).get("merges"):
        return [
            f"Layers of {folder} were merged before the cut, which is not replayed: what stays is as in the dense "
            "model. Run the method that made it without a plan."
        ]
    return []


def one_kind_of_text(samples: Batch, option: str = "cut.data.source") -> list[str]:
    """What to say of a reconstruction that read one kind of text; ``option`` names its source."""
    if len(set(samples.kinds)) > 1:
        return []
    return [
        "The reconstruction read one kind of text, which it fits at the cost of others (on Wikipedia alone code came "
        f"out worse than without it). Set {option} to mixture (from the hub) or mixture-offline (from a package)."
    ]


def say_warnings(warnings: Iterable[str]) -> None:
    """Print warnings for the user."""
    for warning in warnings:
        warn(warning)
