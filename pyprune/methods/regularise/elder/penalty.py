"""Stage 2 of ELDeR and TRSP (one method, two names): make the layers that will be removed the identity.

All weights are trained on  LM loss + lambda2 * sum over P of mean over tokens of ||X_out - X_in||  (equation 4; the
papers do not say how tokens are reduced, the mean keeps lambda2 free of batch and length; padding is no token).
``schedule="anneal"`` has no penalty: the residual gates of P fall from 1 to exactly 0 while the LM loss trains the
rest, so that the drop afterwards changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import TrainConfig
from pyprune.cut.mask import mask_
from pyprune.data.tokens import Batch
from pyprune.families import family_for
from pyprune.methods.base import NO_RUN, RunOptions, StageReport, warn_if_nothing_penalised
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.methods.regularise.elder.gates import gate_output
from pyprune.ops import residual_diff_norm
from pyprune.plan import PrunePlan
from pyprune.probe.effects import UNCHANGED_SHARE
from pyprune.probe.hooks import LayerHooks
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from pyprune.train.objective import LossTerms, Objective, TrainReport


@dataclass
class ElderReport:
    """The result of stage 2. JSON-able through :meth:`to_dict`.

    Attributes:
        removed: P, ascending.
        train: the training report; the penalty is lambda2 * sum over P of the mean residual norm.
        warnings: a penalty that did not fall, and the training's own warnings.
    """

    removed: tuple[int, ...]
    train: TrainReport
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


class ElderObjective(Objective):
    """Stage 2: LM loss and the pressure on the layers P to become the identity.

    Args:
        removed: P, dense layer indices; empty means the language-model loss alone.
        config: the method's options.
    """

    name = "elder"

    def __init__(self, removed: Sequence[int], config: ElderOptions) -> None:
        self.removed = tuple(sorted(removed))
        self.config = config
        self.hooks: LayerHooks | None = None
        self.norms: list[Tensor] = []
        self.positions: Tensor | None = None
        self.anneal_steps = 0
        self.gate = 1.0

    def run_facts(self) -> dict[str, Any]:
        """Return P and the options of the penalty."""
        skipped = ("train", "gates", "layers", "version")
        return {
            "removed": list(self.removed),
            **{k: v for k, v in self.config.to_dict().items() if k not in skipped},
        }

    @property
    def anneals(self) -> bool:
        """Check whether the layers of P are faded out by a schedule instead of penalised."""
        return self.config.schedule == "anneal"

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Hook the layers of P."""
        self.anneal_steps = math.ceil(self.config.anneal_share * config.steps)
        if not self.removed:
            return
        dense = cast(PreTrainedModel, model)
        hook = self._fade if self.anneals else self._measure
        self.hooks = LayerHooks(family_for(dense).layers(dense), self.removed, hook)

    def _fade(self, index: int, before: Tensor, after: Tensor) -> Tensor | None:
        if self.gate == 0.0:  # the layer is skipped and ``after`` is its input
            return None
        return gate_output(torch.tensor(self.gate, device=after.device), before, after, "residual")

    def _measure(self, index: int, before: Tensor, after: Tensor) -> Tensor | None:
        before, after = (_tokens_only(x, self.positions) for x in (before, after))
        if len(before) > 0:  # a micro batch of padding alone has no mean
            self.norms.append(residual_diff_norm(before, after, self.config.norm))
        return None

    def gate_at(self, step: int) -> float:
        """Return the gate of P during ``step``: linear from 1 to exactly 0 at step ceil(anneal_share * steps)."""
        return max(0.0, 1.0 - step / self.anneal_steps) if self.anneal_steps else 0.0

    def before_step(self, model: nn.Module, step: int) -> None:
        """Set the annealed gate; at zero the layers are no longer computed."""
        if not self.anneals or self.hooks is None:
            return
        self.gate = self.gate_at(step)
        if self.gate == 0.0:
            for index in self.removed:
                self.hooks.skip(index)

    def micro_loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Return the LM loss, and lambda2 * sum over P of the layer's mean change (equation 4), without padding."""
        # Gradient checkpointing runs the hooks once more in the backward pass, on the same positions; those norms are
        # dropped here.
        self.norms.clear()
        self.positions = batch.real_rows()
        lm = causal_loss(model, batch)
        if not self.norms:
            return LossTerms(lm)
        total = torch.stack([n.to(lm.device) for n in self.norms]).sum()
        self.norms.clear()
        return LossTerms(lm, self.config.penalty_weight * total)

    def allows_early_stop(self, step: int) -> bool:
        """Early stopping may keep nothing before the annealed gate is 0."""
        return not (self.anneals and self.removed) or step >= self.anneal_steps

    def finish(self, model: nn.Module) -> None:
        """Zero the writers of P after annealing: the model without hooks is then the trained one."""
        if self.anneals and self.removed:
            dense = cast(PreTrainedModel, model)
            mask_(dense, family_for(dense).plan(dense.config).drop_layers(self.removed))

    def teardown(self, model: nn.Module) -> None:
        """Remove the hooks."""
        self.norms.clear()
        if self.hooks is not None:
            self.hooks.remove()


def _tokens_only(states: Tensor, positions: Tensor | None) -> Tensor:
    """Return the hidden states [B, T, H] at these positions, [n, H]; unchanged for None."""
    return states if positions is None else states.flatten(0, 1).index_select(0, positions.to(states.device))


def regularise_elder(
    model: PreTrainedModel,
    samples: Tensor,
    removed: Sequence[int],
    config: ElderOptions,
    run: RunOptions = NO_RUN,
) -> ElderReport:
    """Stage 2: train ``model`` in place, so that the layers ``removed`` can be dropped.

    Args:
        model: a dense model with float32 weights.
        samples: token ids, int64 [N, T]; :data:`~pyprune.data.tokens.IGNORED` marks right padding, which counts neither
            in the loss nor in the penalty.
        removed: P, dense layer indices; empty trains the language model alone.
        config: the method's options.
        run: validation samples, checkpoints, resuming.
    """
    trained = train(
        model,
        samples,
        config.train,
        ElderObjective(removed, config),
        validation=run.validation,
        checkpoint_dir=run.folder("elder"),
        resume=run.resume,
        description="ELDeR",
    )
    warnings = _penalty_warnings(trained) if removed and config.schedule == "published" else []
    return ElderReport(tuple(sorted(removed)), trained, warnings + trained.warnings)


def _penalty_warnings(report: TrainReport) -> list[str]:
    tail = report.history[-max(1, len(report.history) // 4) :]
    first, last = report.history[0].penalty, sum(r.penalty for r in tail) / len(tail)
    if last <= (1 - UNCHANGED_SHARE) * first and first > 0:
        return []
    return [
        f"The regulariser had no effect: its penalty went from {first:.4g} to {last:.4g} (mean of the last quarter). "
        "Use more steps, a larger penalty_weight or learning rate, or schedule 'anneal'."
    ]


def objective(plan: PrunePlan, options: ElderOptions) -> ElderObjective:
    """Return the objective of :func:`regularise`."""
    return ElderObjective(plan.removed_layers, options)


def regularise(
    model: PreTrainedModel,
    samples: Tensor,
    plan: PrunePlan,
    options: ElderOptions,
    run: RunOptions = NO_RUN,
) -> StageReport:
    """Run stage 2 for a plan; see :func:`regularise_elder`."""
    cut_already = int(model.config.num_hidden_layers) != plan.dense.num_layers
    report = regularise_elder(model, samples, () if cut_already else plan.removed_layers, options, run)
    return warn_if_nothing_penalised(report, plan.removed_layers, "layer")
