"""The stages of one run: decide, train before the cut, cut, train after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.stored import StoredModel
from pyprune.checkpoint.tower import tower_of
from pyprune.checkpoint.trained_on import unmarked_text_warnings
from pyprune.config.run import PruneConfig, StageAction
from pyprune.cut.compact import CompactReport, become_shapes_, compact_
from pyprune.cut.compensate import CompensationReport, compensate_, target_of
from pyprune.cut.mask import masked
from pyprune.cut.proof import assert_proven
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_
from pyprune.cut.shorter import check_shorter
from pyprune.cut.target import Target
from pyprune.data.tokens import Batch
from pyprune.errors import ConfigError
from pyprune.families import check_plan, count_parameters, family_for
from pyprune.families.mixtures import chosen_experts, read_fewer_experts_
from pyprune.methods.base import PlanDecision, PlanRequest, Prepare, Regularise, RunOptions, StageReport
from pyprune.methods.registry import get_method
from pyprune.plan import PrunePlan
from pyprune.probe.effects import EffectSnapshot, compare, snapshot
from pyprune.probe.streams import LayerRunner
from pyprune.quality.perplexity import perplexity
from pyprune.run.replay import ROTATED, preparation_warnings, read_plan, reconstruction_warnings
from pyprune.run.result import PruneResult
from pyprune.run.resume import RunFolder
from pyprune.run.text import RunText, one_kind_warnings, say_warnings, shapes_the_result
from pyprune.runtime import processes
from pyprune.runtime.processes import Division, divide_training, from_first
from pyprune.runtime.progress import say
from pyprune.train.distill import check_pair
from pyprune.train.lora import check_rank, target_names
from pyprune.train.recover import finetune, recover
from pyprune.train.samples import check_trainable

Teacher = PreTrainedModel | Callable[[], PreTrainedModel]
"""The dense model for distillation, or a function that loads it when it is needed; it is dropped after that stage."""


@dataclass
class Stages:
    """The stages of a run on a model in memory; each method is one stage and adds to ``result``.

    Runs whose weights are in files override the steps of the cut, from :meth:`_prepare_weights` on.

    Attributes:
        model: dense, changed in place.
        text: of the run.
        config: every option, checked.
        work: where an interrupted run is kept; None keeps nothing.
        teacher: for distillation.
        division: how several processes divide a training, and which of them has the weights in between.
        stored: files that the method reads the weights from, instead of the model; None = from the model.
        result: of the stages until now.
        dense_experts: experts that a token of the dense model reads, where the cut one reads fewer; else None.

    Raises:
        ConfigError: a stage lacks an input; raised before anything is computed.
    """

    model: PreTrainedModel
    text: RunText
    config: PruneConfig
    work: RunFolder | None = None
    teacher: Teacher | None = None
    division: Division = field(default_factory=Division)
    stored: StoredModel | None = None
    result: PruneResult = field(init=False)
    dense_experts: int | None = field(init=False, default=None)

    def decide(self) -> PlanDecision:
        """Decide what to remove, or take the decision of an interrupted run or a saved plan."""
        assert_proven(family_for(self.model), compact_)
        if self.work is not None:
            self.work.check_text(self.text.digests())
        kept = self.work.read_decision() if self.work is not None else None
        decision = cast(PlanDecision, from_first(kept or self.new_decision()))
        check_plan(decision.plan, family_for(self.model), self.model.config)
        if self.work is not None:
            self.work.write_decision(decision)
        self.result = PruneResult(
            decision.plan, notes=list(decision.notes), warnings=list(decision.warnings), decision=decision.details
        )
        if shapes_the_result(self.config):
            self.result.warnings += unmarked_text_warnings(self.text.drawn)
        if self.config.stages.prune:
            target = check_target(self.model, decision.plan, self.config)
            if tower := tower_of(self.model):
                self.result.notes += tower.notes(decision.plan)
            if self._has_weights and family_for(self.model).layers_alone:
                check_shorter(self.model, decision.plan, target.config)
        return decision

    @property
    def _has_weights(self) -> bool:
        """Check whether this process has weights between trainings: on the host, the first one has them for all."""
        return processes.first() or not self.division.on_host

    def _alone(self) -> AbstractContextManager[None]:
        """Enclose the work of the first process while the others wait for it."""
        return processes.alone() if self.division.on_host else nullcontext()

    def _dividing_the_cut(self) -> AbstractContextManager[None]:
        """Enclose the work of all processes on the weights that each of them has."""
        return nullcontext() if self.division.on_host else divide_training()

    def new_decision(self) -> PlanDecision | None:
        """Return the decision of this process; None where the first one decides."""
        config = self.config
        if config.plan is not None:
            note = f"Plan replayed from {config.plan}; ratio and the method's own options decide nothing."
            warnings = (*reconstruction_warnings(config), *preparation_warnings(config))
            return PlanDecision(read_plan(config.plan), (note,), warnings=warnings)
        if config.method == "none":
            raise ConfigError("method is 'none', which decides nothing; give a plan (--plan FILE) to apply.")
        config = with_equal_widths(self.model, config)
        method = get_method(config.method)
        config = check_axes_open(self.model, config)
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
        run = self._run("decide") if together or processes.first() else RunOptions()
        kinds = self.text.data.kinds + self.text.further.kinds
        further, dense_experts = self.text.further.ids, self.dense_experts
        run = replace(run, stored=self.stored, further=further, kinds=kinds, dense_experts=dense_experts)
        with divide_training(self.division) if together else self._alone():
            decision = method.decide(model, self.text.data.ids, request, run)
        return replace(decision, details={**decision.details, "seconds": time.monotonic() - started})

    def train_before_the_cut(self) -> None:
        """Regularise towards the plan, and report the effect on weights and activations."""
        actions = self.config.stages.before
        seen = "regularise" in actions and self._has_weights
        untouched = self._snapshot() if seen else None
        for number, action in enumerate(actions):
            self._act(action, self.text.data, f"before-{number}-{action}")
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
        """Give the other processes the shapes of the model that the first one has cut."""
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
        result.compact = replace(self._compact(), dense_parameters=dense_parameters)
        if result.verified is not None:
            result.verified["compacted_perplexity"] = self._perplexity(self._cut_model())
        if result.compact.reasons:
            result.notes.append("No stock architecture fits: " + "; ".join(result.compact.reasons) + ".")

    def _prepare(self) -> None:
        """Change the weights as the method asks for before its cut."""
        method = get_method(self.config.method) if self.config.method != "none" else None
        if method is None or method.prepare is None:
            return
        if self.config.plan is not None:
            self.result.warnings.append(
                f"The plan is replayed without what {method.name} does to the weights before it cuts: the kept weights "
                "are those of the dense model. Run the method without a plan to have both."
            )
            return
        ids, result = self.text.data.ids, self.result
        with self._dividing_the_cut():
            result.notes += self._prepare_weights(method.prepare, ids)
        if method.rotates:
            self.result.decision[ROTATED] = True

    def _reconstruct(self) -> None:
        """Fit the kept weights to the dense model's activations, to make up for the removed ones."""
        cut, result = self.config.cut, self.result
        family, model_type = family_for(self.model), self.model.config.model_type
        reason = (
            f"{model_type!r} models have no table that names the projections to solve" if family.layers_alone else ""
        )
        if family.gives_more(self.model.config):
            reason = f"layers of this {model_type!r} model read more than the stream, which the cut one has otherwise"
        if cut.reconstruct != "none" and reason:
            result.warnings.append(
                f"The cut was not reconstructed ({cut.reconstruct}): {reason}. --method {self.config.method}-plain "
                "leaves this step out."
            )
            return
        if cut.reconstruct == "bias":
            means = self._compensate()
            (result.notes if means.blocks else result.warnings).extend(means.notes())
            result.decision["compensation"] = vars(means)
        elif cut.reconstruct == "least_squares":
            with self._dividing_the_cut():
                solved = self._solve()
            (result.notes if solved.solved else result.warnings).extend(solved.notes())
            result.notes += one_kind_warnings(self.text.cut_data)
            result.reconstruction = solved.to_dict()

    def train_after_the_cut(self) -> None:
        """Recover."""
        for number, action in enumerate(self.config.stages.after):
            self._act(action, self.text.recovery_data, f"after-{number}-{action}")

    def run(self) -> PruneResult:
        """Run all stages."""
        self.decide()
        self.train_before_the_cut()
        self.cut()
        self.train_after_the_cut()
        return self.finish()

    def finish(self) -> PruneResult:
        """Print the warnings, and return the result."""
        # The regulariser and the comparison of effects may say the same about a preserved ratio.
        self.result.warnings = list(dict.fromkeys(self.result.warnings))
        say_warnings(self.result.warnings)
        return self.result

    def _act(self, action: StageAction, samples: Batch, name: str) -> None:
        with divide_training(self.division):
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
        with self._masked() as model:
            return self._perplexity(model)

    def _perplexity(self, model: PreTrainedModel) -> float:
        probe = self.text.probe
        return perplexity(
            model, probe.flatten(), window=probe.shape[1], batch_size=1, source="calibration text"
        ).perplexity

    def _layers(self) -> LayerRunner:
        """Return the dense model to walk through its layers and change their weights."""
        return LayerRunner.of(self.model)

    def _prepare_weights(self, prepare: Prepare, ids: Tensor) -> Sequence[str]:
        return prepare(self._layers(), self.result.plan, ids, self.result.decision)

    def _solve(self) -> ReconstructionReport:
        plan, cut = self.result.plan, self.config.cut
        return reconstruct_(
            self._layers(),
            plan,
            self.text.cut_data,
            options=cut.least_squares,
            batch_size=cut.batch_size,
            dense_experts=self.dense_experts,
        )

    def _compensate(self) -> CompensationReport:
        ids, batch_size = self.text.cut_data.ids, self.config.cut.batch_size
        return compensate_(self.model, self.result.plan, ids, batch_size=batch_size)

    def _compact(self) -> CompactReport:
        return compact_(self.model, self.result.plan)

    def _masked(self) -> AbstractContextManager[PreTrainedModel]:
        """Give the masked model for the time of a block; ``verify`` measures it before the cut."""
        return masked(self.model, self.result.plan)

    def _cut_model(self) -> PreTrainedModel:
        """Return the model that ``verify`` measures after the cut."""
        return self.model

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        if (count := config.cut.experts_per_token) is not None:
            if "experts" not in family_for(model).sizes(model.config).axes:
                raise ConfigError(
                    f"cut.experts_per_token is {count}, and this {model.config.model_type!r} model has no mixtures of "
                    "experts. Leave it out."
                )
            files = getattr(self, "files", self.stored)
            if files is not None and files.config is not model.config:
                read_fewer_experts_(files.config, (), count)
            self.dense_experts = chosen_experts(model.config)
            read_fewer_experts_(model.config, model.modules(), count)
        before, after = self.text.data, self.text.recovery_data
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
        if config.cut.reconstruct == "bias" and not self.text.cut_data.counts_every_token:
            raise ConfigError("cut.reconstruct is 'bias', whose means count every token; give a text without padding.")
        if config.verify and not before.ids.numel():
            raise ConfigError("verify is on, which measures on calibration text; give samples under 'data'.")


def planning_config(config: PruneConfig) -> PruneConfig:
    """Return the options of a run that stops at the plan: nothing is trained or verified."""
    return replace(config, stages=replace(config.stages, before=(), after=()), verify=False)


def check_axes_open(model: PreTrainedModel, config: PruneConfig) -> PruneConfig:
    """Refuse a method that removes from an axis that is closed in the model, before anything is computed.

    Returns:
        The options without closed axes among ``score.further_axes``.

    Raises:
        ConfigError: the message names the axis, the reason and the open axes.
    """
    method, closed = get_method(config.method), family_for(model).closed_axes(model.config)
    if tower := tower_of(model):
        closed |= tower.closed_axes()
        if method.rotates:
            closed["hidden"] = "the projector of images writes its channels, which the method would rotate"
    for axis in config.score_options.axes if method.scores else (method.axis,):
        if axis in closed:
            names = [name for name in ("layers", "hidden", "heads", "ffn") if name not in closed]
            raise ConfigError(
                f"{config.method} removes from the axis {axis}, which is closed in this {model.config.model_type!r} "
                f"model: {closed[axis]}. Open axes: {', '.join(names)}."
            )
    if config.score is None:
        return config
    further = tuple(axis for axis in config.score.further_axes if axis not in closed)
    return replace(config, score=replace(config.score, further_axes=further))


def with_equal_widths(model: PreTrainedModel, config: PruneConfig) -> PruneConfig:
    """Return the options with equal widths in every layer for a text tower, unless they name the open layers.

    Equal widths are what the class of a multimodal model has a place for, and vLLM serves no others.
    """
    tower, score = tower_of(model), config.score_options
    if tower is None or not get_method(config.method).scores or score.names_open_layers:
        return config
    say(
        "Every layer of this text tower gets the same widths (--uniform), which the class of "
        f"{tower.config.model_type!r} models asks for; score.layers=[...] opens layers instead."
    )
    return replace(config, score=replace(score, uniform=True))


def check_target(model: PreTrainedModel, plan: PrunePlan, config: PruneConfig) -> Target:
    """Return the architecture of the cut model; refuse sizes or biases that none takes, before hours of training.

    Raises:
        ConfigError: target is stock, and no stock architecture fits.
        UnsupportedModelError: nothing carries the biases.
    """
    target = target_of(model, plan, biases=config.adds_biases)
    tower = tower_of(model)
    if tower and (reason := tower.obstacle(plan) or tower.class_obstacle(target.config)):
        raise ConfigError(f"The {tower.config.model_type!r} model cannot hold its text tower after this cut: {reason}.")
    if config.target == "stock" and target.stock is None:
        raise ConfigError(
            f"target is 'stock', but no stock architecture takes these sizes ({plan.summary()}): "
            + "; ".join(target.reasons)
            + ". Use the same widths in every layer (score.uniform), other sizes, or target 'auto' for the pruned "
            "architecture."
        )
    return target
