"""DReSS: regularise a set R of hidden channels, so that slicing them off afterwards loses little (Feng et al.).

The objective is  LM loss + lambda * sum over tensors with a hidden axis of sum_{j in R} ||W along hidden = j||
(equations 2 to 4; the norm is not squared, a bias or norm weight counts elementwise, a tied embedding once, and
Gemma's norms through 1 + w). Three ways to minimise it:

* ``solver="subgradient"``: the penalty joins the loss, as in the paper. The l1 form of its Proposition 2
  (-y <= x <= y) is the epigraph of the same problem and needs no code.
* ``solver="prox"``: an optimizer step on the LM loss, then the proximal map of the l2 penalty, the Euclidean group
  soft-threshold at lambda * ``prox_step`` (the map in the diagonal metric of Adam has no closed form for l2).
* ``schedule="anneal"``: no penalty; R is multiplied by a factor that falls from 1 to exactly 0.

pyprune's own optimizer (``optimizer="fused_adamw"``, and lean memory) adds the subgradient in its own pass over the
weights, unless some of them are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import TrainConfig
from pyprune.cut.mask import gauge_
from pyprune.errors import ConfigError
from pyprune.families import NamedParam, family_for, named_axes
from pyprune.methods.base import NO_RUN, RunOptions, StageReport, warn_if_nothing_penalised
from pyprune.methods.regularise.dress import DressOptions
from pyprune.ops import add_group_penalty_, group_penalty, group_soft_threshold
from pyprune.ops.regularised_adamw import Penalty
from pyprune.ops.rounding import changed_to_bfloat16
from pyprune.plan import PrunePlan
from pyprune.probe.effects import Sums, preserved_ratio, preserved_warnings, weight_sums
from pyprune.runtime import processes
from pyprune.train.loop import train
from pyprune.train.objective import Objective, TrainReport
from pyprune.train.sharded import channels_of, is_divided, part_of


@dataclass
class DressReport:
    """The result of DReSS's training. JSON-able through :meth:`to_dict`.

    Attributes:
        removed: the channels R.
        preserved_ratio: sum |W| over R after / before, all tensors; None when R is empty.
        target_preserved_ratio: the option of that name.
        penalty_before: the penalty (not weighted) before training.
        penalty_after: the penalty after training.
        train: the training report.
        warnings: an effect that was missed, and the training's own warnings.
    """

    removed: tuple[int, ...]
    preserved_ratio: float | None
    target_preserved_ratio: float
    penalty_before: float
    penalty_after: float
    train: TrainReport
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class _Slices:
    """Slices of a tensor along its hidden axis: the dimension, the selected channels, and the ops' offset."""

    param: NamedParam
    dim: int
    index: Tensor
    offset: float

    def penalty(self, norm: str) -> Tensor:
        """Return the sum of the selected channels' norms; differentiable."""
        return group_penalty(self.param.parameter, self.index, self.dim, norm, offset=self.offset)

    def add_gradient(self, norm: str, penalty_weight: float) -> Tensor:
        """Return the penalty, and add ``penalty_weight`` times its gradient to the parameter's, unless it is frozen."""
        parameter = self.param.parameter
        if not parameter.requires_grad:
            return self.penalty(norm)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return add_group_penalty_(
            parameter.grad, parameter, self.index, self.dim, norm, penalty_weight, offset=self.offset
        )  # fmt: skip

    @torch.no_grad()
    def soft_threshold(self, threshold: float) -> None:
        """Apply the proximal map of ``threshold`` times the l2 penalty, unless the parameter is frozen.

        bfloat16 would round small steps to nothing: there the result is float32, rounded stochastically.
        """
        parameter = self.param.parameter
        if not parameter.requires_grad:
            return
        if parameter.dtype != torch.bfloat16:
            group_soft_threshold(parameter, self.index, self.dim, threshold, offset=self.offset)
            return
        part = parameter.index_select(self.dim, self.index).float()
        every = torch.arange(len(self.index), device=part.device)
        group_soft_threshold(part, every, self.dim, threshold, offset=self.offset)
        parameter.index_copy_(self.dim, self.index, changed_to_bfloat16(part, self.param.name))

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """Multiply the selected slices by ``factor``, in float32. 0 writes zeros, also over NaN and infinities."""
        parameter = self.param.parameter
        if factor == 0:
            parameter.index_fill_(self.dim, self.index, 0.0 - self.offset)
            return
        part = parameter.index_select(self.dim, self.index)
        wide = part if part.dtype == torch.float64 else part.float()
        parameter.index_copy_(self.dim, self.index, ((wide + self.offset) * factor - self.offset).to(part.dtype))


class DressObjective(Objective):
    """LM loss and the DReSS penalty on a set of hidden channels.

    Args:
        removed: R, hidden indices; empty means the language-model loss alone.
        config: the method's options.
    """

    name = "dress"

    def __init__(self, removed: Sequence[int], config: DressOptions) -> None:
        self.removed = tuple(sorted(removed))
        self.config = config
        self.slices: list[_Slices] = []
        self.gauge_kept: tuple[int, ...] = ()
        self.anneal_steps = 0
        self.in_optimizer = False

    def run_facts(self) -> dict[str, Any]:
        """Return R and the options of the penalty."""
        options = {k: v for k, v in self.config.to_dict().items() if k not in ("train", "version")}
        return {"removed": list(self.removed), **options}

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Find the tensors of R; gauged families (Phi) are put into the gauge, which changes no output."""
        self.anneal_steps = math.ceil(self.config.anneal_share * config.steps)
        if not self.removed:
            return
        dense = cast(PreTrainedModel, model)
        self.slices = hidden_slices(dense, penalised_channels(dense, self.removed, self.config))
        if family_for(dense).gauges(dense.config):
            gone = set(self.removed)
            self.gauge_kept = tuple(i for i in range(dense.config.hidden_size) if i not in gone)
            self._check_gauge(dense)
            gauge_(dense, self.gauge_kept)

    def _check_gauge(self, model: PreTrainedModel) -> None:
        if is_divided(model):
            raise ConfigError(
                f"DReSS keeps LayerNorm's gauge of {model.config.model_type!r}, a mean over all hidden channels, which "
                "it cannot do while they are divided among processes. Start it in one process."
            )

    @property
    def anneals(self) -> bool:
        """Check whether R is shrunk by a schedule instead of penalised."""
        return self.config.schedule == "anneal"

    def optimizer_penalties(self, model: nn.Module, config: TrainConfig) -> dict[nn.Parameter, Penalty]:
        """Hand the whole penalty to the optimizer's own pass, where that adds the same subgradient."""
        frozen = any(not s.param.parameter.requires_grad for s in self.slices)
        if self.anneals or self.config.solver == "prox" or frozen:
            return {}
        self.in_optimizer = True
        c = self.config
        return {s.param.parameter: Penalty(s.index, s.dim, c.norm, c.penalty_weight, s.offset) for s in self.slices}

    def reads_gradients(self) -> bool:
        """Check whether the subgradient joins the gradients outside the optimizer's pass."""
        return bool(self.removed) and not (self.anneals or self.in_optimizer or self.config.solver == "prox")

    def penalty(self) -> Tensor | None:
        """Sum the group norms over tensors and channels, without the weight; differentiable."""
        terms = [slices.penalty(self.config.norm) for slices in self.slices]
        return torch.stack([t.to(terms[0].device) for t in terms]).sum() if terms else None

    def step_penalty(self, model: nn.Module) -> Tensor | None:
        """Return lambda times the penalty, for the subgradient solver."""
        if self.anneals or self.config.solver == "prox":
            return None
        penalty = self.penalty()
        return None if penalty is None else self.config.penalty_weight * penalty

    @torch.no_grad()
    def apply_step_penalty(self, model: nn.Module) -> Tensor | None:
        """Apply :meth:`step_penalty` without autograd: here in one pass over the slices, or in the optimizer's pass."""
        if self.in_optimizer:
            return self.step_penalty(model)
        if self.anneals or self.config.solver == "prox" or not self.slices:
            return None
        penalty_weight = self.config.penalty_weight
        terms = [slices.add_gradient(self.config.norm, penalty_weight) for slices in self.slices]
        return penalty_weight * torch.stack([t.to(terms[0].device) for t in terms]).sum()

    @torch.no_grad()
    def validation_penalty(self, model: nn.Module) -> float:
        """Return lambda times the penalty for every solver; 0 while annealing, which has no penalty."""
        penalty = None if self.anneals else self.penalty()
        return 0.0 if penalty is None else self.config.penalty_weight * float(penalty)

    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        """Restore the gauge; then shrink (anneal) or apply the proximal map (prox)."""
        if self.gauge_kept:
            gauge_(cast(PreTrainedModel, model), self.gauge_kept)
        if self.anneals:
            self._shrink(step)
        elif self.config.solver == "prox":
            step_size = learning_rate if self.config.prox_step is None else self.config.prox_step
            for slices in self.slices:
                slices.soft_threshold(self.config.penalty_weight * step_size)

    def allows_early_stop(self, step: int) -> bool:
        """Early stopping may keep nothing before the annealed factor is 0."""
        return not (self.anneals and self.removed) or step >= self.anneal_steps

    def factor(self, step: int) -> float:
        """Return the product of R's factors up to ``step``: linear from 1 to exactly 0 at ``anneal_share``."""
        if not self.anneal_steps:
            return 0.0 if step else 1.0
        return max(0.0, 1.0 - step / self.anneal_steps)

    def _shrink(self, step: int) -> None:
        ratios = {dtype: self._ratio(step, dtype) for dtype in {s.param.parameter.dtype for s in self.slices}}
        for slices in self.slices:
            parameter = slices.param.parameter
            ratio = ratios[parameter.dtype]
            if ratio != 1.0:
                slices.shrink(ratio)

    def _ratio(self, step: int, dtype: torch.dtype) -> float:
        """Return R's factor in ``step`` alone."""
        factor = self._coarse_factor if dtype == torch.bfloat16 else self.factor
        before = factor(step - 1)
        return factor(step) / before if before else 0.0

    def _coarse_factor(self, step: int) -> float:
        """Round the factor to steps of 3 %: in bfloat16, which has 8 bits, 0.999 times a number is the number."""
        reached = 1.0
        for earlier in range(1, step + 1):
            factor = self.factor(earlier)
            if factor <= 0.97 * reached:
                reached = factor
        return reached


def hidden_slices(model: PreTrainedModel, channels: Sequence[int]) -> list[_Slices]:
    """Return the slices of every tensor with a hidden axis; tied tensors appear once.

    Where weights are divided among processes, these are the slices of this process's parts.
    """
    family = family_for(model)
    slices = []
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is None:
            continue
        index = torch.tensor(channels_of(param.parameter, dim, channels), device=param.parameter.device)
        if not len(index):
            continue
        part = replace(param, parameter=part_of(param.parameter))
        slices.append(_Slices(part, dim, index, family.offset(param.row)))
    return slices


def regularise_dress(
    model: PreTrainedModel,
    samples: Tensor,
    removed: Sequence[int],
    config: DressOptions,
    run: RunOptions = NO_RUN,
) -> DressReport:
    """Regularise ``model`` in place, so that the channels ``removed`` can be cut.

    Args:
        model: a dense model with float32 weights.
        samples: token ids, int64 [N, T].
        removed: R, hidden indices (of :mod:`.channels`); empty trains the language model alone.
        config: the method's options.
        run: validation samples, checkpoints, resuming.

    Returns:
        The preserved ratio and the training; a missed target is among the warnings.
    """
    objective = DressObjective(removed, config)
    plan = family_for(model).plan(model.config) if removed else None
    if plan is not None:
        plan = plan.keep_hidden(set(plan.hidden) - set(removed))
    before, penalty_before = _measure_effect(model, plan, removed, config)
    trained = train(
        model,
        samples,
        config.train,
        objective,
        validation=run.validation,
        checkpoint_dir=run.folder("dress"),
        resume=run.resume,
        description="DReSS",
    )
    after, penalty_after = _measure_effect(model, plan, removed, config)
    ratio = preserved_ratio(before, after)
    missed = preserved_warnings(ratio, config.target_preserved_ratio) if ratio is not None else []
    return DressReport(
        removed=tuple(sorted(removed)),
        preserved_ratio=ratio,
        target_preserved_ratio=config.target_preserved_ratio,
        penalty_before=penalty_before,
        penalty_after=penalty_after,
        train=trained,
        warnings=missed + trained.warnings,
    )


@torch.no_grad()
def _measure_effect(
    model: PreTrainedModel, plan: PrunePlan | None, removed: Sequence[int], config: DressOptions
) -> tuple[dict[str, Sums], float]:
    """Return |W| of the kept and removed channels, and the penalty; nothing where another process has the weights."""
    if not processes.gets_result():
        return {}, 0.0
    how = processes.division()
    with processes.alone() if how is not None and how.on_host else nullcontext():
        return weight_sums(model, plan) if plan is not None else {}, _plain_penalty(model, removed, config)


def _plain_penalty(model: PreTrainedModel, removed: Sequence[int], config: DressOptions) -> float:
    if not removed:
        return 0.0
    channels = penalised_channels(model, removed, config)
    return sum(float(slices.penalty(config.norm)) for slices in hidden_slices(model, channels))


def penalised_channels(model: PreTrainedModel, removed: Sequence[int], config: DressOptions) -> tuple[int, ...]:
    """Return the penalised hidden channels: R, or all in the full-parameter ablation."""
    return tuple(range(model.config.hidden_size)) if config.penalise == "all" else tuple(removed)


def objective(plan: PrunePlan, options: DressOptions) -> DressObjective:
    """Return the objective of :func:`regularise`."""
    return DressObjective(plan.removed_hidden, options)


def regularise(
    model: PreTrainedModel,
    samples: Tensor,
    plan: PrunePlan,
    options: DressOptions,
    run: RunOptions = NO_RUN,
) -> StageReport:
    """Train towards a plan; see :func:`regularise_dress`."""
    cut_already = int(model.config.hidden_size) != plan.dense.hidden_size
    report = regularise_dress(model, samples, () if cut_already else plan.removed_hidden, options, run)
    return warn_if_nothing_penalised(report, plan.removed_hidden, "hidden channel")
