"""Stage 1 of ELDeR and TRSP (one method, two names): learn layer gates and choose the layers to remove.

One scalar S_i a layer is trained on  LM loss + lambda1 * sum over unmasked layers of |S_i|  with the model frozen
(equation 1); the layer whose S is closest to zero is masked, and so on. The papers scale the layer's output
(``placement="output"``); before a final RMSNorm the last layer's scale then has no LM gradient at all, so the l1 term
alone drives the last layers out. The default scales the residual branch, h + S (layer(h) - h), for which S = 0 is
removal. ``weighed_share`` below 1 is not in the papers: gates are then learnt for the layers of the smallest block
influence alone, and the backward pass ends at the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.config.train import TrainConfig
from pyprune.errors import ConfigError, DataError
from pyprune.families import decoder_layers, family_for, removable_layers
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers.shortgpt.score import block_influence
from pyprune.methods.ratio import decide_layer_count
from pyprune.methods.regularise.elder import ElderOptions, GateConfig
from pyprune.plan import PrunePlan
from pyprune.probe.hooks import LayerHooks
from pyprune.probe.streams import LayerRunner
from pyprune.runtime import processes
from pyprune.runtime.modes import disable_dropout, frozen
from pyprune.train.loop import train
from pyprune.train.objective import Objective, ParameterGroup, TrainReport
from pyprune.train.sharded import is_divided

UNMOVED_STEPS = 5
"""An Adam step moves a gate by about its learning rate, whatever the layer is worth; gates that spread by less than
this many learning rates when the first layer is chosen say little about the layers."""

INFLUENCE_TOKENS = 2048
"""Block influence is measured on about this many tokens: it differs between layers by far more than between texts."""


@dataclass(frozen=True)
class GateRound:
    """One choice: the step after which it was made, all gates then (0 where masked, 1 where there is none), and the
    layers masked.
    """

    step: int
    gates: tuple[float, ...]
    masked: tuple[int, ...]


@dataclass
class GateReport:
    """The result of stage 1. JSON-able through :meth:`to_dict`.

    Attributes:
        removed: the layers to remove, in the order in which they were masked.
        weighed: the layers that had a gate, ascending.
        rounds: one entry a choice.
        train: the training report; the penalty is lambda1 * sum |S|.
        warnings: gates that did not move.
    """

    removed: tuple[int, ...]
    weighed: tuple[int, ...]
    rounds: list[GateRound]
    train: TrainReport
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)


def gate_output(gate: Tensor, before: Tensor, after: Tensor, placement: str) -> Tensor:
    """Return the output of a layer with a gate; a gate of 1 returns ``after`` bit for bit.

    Args:
        gate: scalar.
        before: the layer's input [B, T, H].
        after: the layer's output [B, T, H].
        placement: residual (``before + gate * (after - before)``) or output (``gate * after``).
    """
    if placement == "output":
        return after * gate.to(after.dtype)
    # lerp is exact at both ends, which before + 1 * (after - before) is not.
    return torch.lerp(before.to(after.dtype), after, gate.to(after.dtype))


class GateObjective(Objective):
    """Stage 1: LM loss + lambda1 * sum |S_i| over the gates of a model that is frozen already.

    Greedy masks one layer after ``first_round_steps`` and after every ``round_steps`` more, keeping the other
    gates and the optimizer's state; one-shot masks all of them at the end of the first round.

    Args:
        count: layers to choose.
        config: stage 1's options.
        weighed: the layers that get a gate, ascending; None = all.
    """

    name = "layer-gates"

    def __init__(self, count: int, config: GateConfig, weighed: Sequence[int] | None = None) -> None:
        self.count = count
        self.config = config
        self.weighed = weighed
        self.removed: list[int] = []
        self.rounds: list[GateRound] = []
        self.gates = nn.Parameter(torch.empty(0))
        self.hooks: LayerHooks | None = None
        self.quiet = ExitStack()

    @property
    def steps(self) -> int:
        """Optimizer steps of all rounds."""
        later = self.count - 1 if self.config.search == "greedy" else 0
        return self.config.first_round_steps + later * self.config.round_steps

    def run_facts(self) -> dict[str, Any]:
        """Return the number of layers, stage 1's options, and the layers with a gate unless all have one."""
        weighed = {} if self.weighed is None else {"weighed": list(self.weighed)}
        return {"count": self.count, **self.config.to_dict(), **weighed}

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Put a gate of 1 on every weighed layer of a frozen model, and switch dropout off."""
        dense = cast(PreTrainedModel, model)
        layers = family_for(dense).layers(dense)
        self.gates = nn.Parameter(torch.ones(len(layers), device=dense.device))
        self.hooks = LayerHooks(layers, self._with_gate(), self._gate)
        if config.gradient_checkpointing:  # which Transformers only does in training mode
            self.quiet.enter_context(disable_dropout(model))
        else:
            model.eval()

    def _gate(self, index: int, before: Tensor, after: Tensor) -> Tensor | None:
        if index in self.removed:
            return None
        return gate_output(self.gates[index], before, after, self.config.placement)

    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[ParameterGroup]:
        """Return the gates, with the learning rate of stage 1."""
        return [ParameterGroup({"gates": self.gates}, self.config.learning_rate)]

    def step_penalty(self, model: nn.Module) -> Tensor | None:
        """Return lambda1 * sum of |S_i| over the layers that are not masked."""
        return self.config.penalty_weight * self.gates[self._active()].abs().sum()

    def apply_step_penalty(self, model: nn.Module) -> Tensor | None:
        """Add the gradient of :meth:`step_penalty`. Processes that all hold the gates return a share of the value."""
        penalty = super().apply_step_penalty(model)
        return penalty / processes.count() if penalty is not None and is_divided(model) else penalty

    def _with_gate(self) -> Sequence[int]:
        return range(len(self.gates)) if self.weighed is None else self.weighed

    def _active(self) -> list[int]:
        gone = set(self.removed)
        return [i for i in self._with_gate() if i not in gone]

    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        """At the end of a round, mask the layer(s) whose gate is closest to zero."""
        # Adam's momentum still moves a masked gate, which nothing reads; it is reported as zero.
        self.gates[self.removed] = 0.0
        done = step - self.config.first_round_steps
        if done >= 0 and (self.config.search == "one_shot" or done % self.config.round_steps == 0):
            chosen = self.count if self.config.search == "one_shot" else 1
            order = sorted(self._active(), key=lambda i: (abs(float(self.gates[i])), i))[:chosen]
            self.rounds.append(GateRound(step, tuple(self.gates.tolist()), tuple(order)))
            self._mask(order)

    def _mask(self, chosen: Sequence[int]) -> None:
        for index in chosen:
            self.removed.append(index)
            if self.hooks is not None:
                self.hooks.skip(index)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the rounds so far."""
        if not self.rounds:
            return {}
        width = self.count
        return {
            "steps": torch.tensor([r.step for r in self.rounds]),
            "gates": torch.tensor([r.gates for r in self.rounds], dtype=torch.float64),
            "masked": torch.tensor([[*r.masked, *[-1] * (width - len(r.masked))] for r in self.rounds]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Mask the layers of earlier rounds again."""
        if not state:
            return
        rows = zip(state["steps"].tolist(), state["gates"].tolist(), state["masked"].tolist(), strict=True)
        for step, gates, masked in rows:
            chosen = tuple(i for i in masked if i >= 0)
            self.rounds.append(GateRound(step, tuple(gates), chosen))
            self._mask(chosen)

    def teardown(self, model: nn.Module) -> None:
        """Remove the gates, and switch dropout on again."""
        self.quiet.close()
        if self.hooks is not None:
            self.hooks.remove()


def learn_layer_gates(
    model: PreTrainedModel,
    samples: Tensor,
    count: int,
    config: ElderOptions,
    seed: int = 0,
    run: RunOptions = NO_RUN,
) -> GateReport:
    """Stage 1: learn layer gates and choose ``count`` layers. The model is unchanged afterwards.

    Args:
        model: a dense model; its weights are frozen during the training.
        samples: token ids, int64 [N, T].
        count: layers to choose, 0 < count < number of layers.
        config: the method's options; ``gates`` are those of stage 1, ``train`` has dtype and gradient checkpointing.
        seed: of the order of samples.
        run: checkpoints and resuming.

    Raises:
        ConfigError: a count that leaves no layer.
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError("The gates of layers are learnt on calibration text; give samples.")
    total = len(family_for(model).layers(model))
    if not 0 < count < total:
        raise ConfigError(f"{count} of {total} layers cannot be removed; use 1 to {total - 1}.")
    weighed = layers_to_weigh(model, samples, count, config.gates)
    learnt = GateObjective(count, config.gates, weighed if len(weighed) < total else None)
    training = replace(config.gate_training(samples.shape[1]), steps=learnt.steps, seed=seed)
    # Before the model is divided, so that its weights stay where they are.
    with frozen(model):
        trained = train(
            model,
            samples,
            training,
            learnt,
            checkpoint_dir=run.folder("gates"),
            resume=run.resume,
            keep_last_good=False,
            description="layer gates",
        )
    warnings = trained.warnings + _gate_warnings(learnt, weighed)
    return GateReport(tuple(learnt.removed), weighed, learnt.rounds, trained, warnings)


def layers_to_weigh(model: PreTrainedModel, samples: Tensor, count: int, config: GateConfig) -> tuple[int, ...]:
    """Return the layers that get a gate, ascending: ``weighed_share`` of them, of the smallest block influence.

    Args:
        model: a dense model.
        samples: token ids, int64 [N, T]; those that hold the first :data:`INFLUENCE_TOKENS` tokens are read.
        count: layers to remove; at least that many get a gate.
        config: stage 1's options.
    """
    able, layers = removable_layers(model), len(decoder_layers(model))
    number = max(count, math.ceil(config.weighed_share * layers))
    if number >= len(able):
        return able
    chosen: tuple[int, ...] = ()
    if processes.first():  # which always has the weights
        few = samples[: max(1, INFLUENCE_TOKENS // samples.shape[1])]
        influence = block_influence(LayerRunner.of(model), [few.clamp(min=0).to(model.device)])
        chosen = tuple(sorted(sorted(able, key=influence.__getitem__)[:number]))
    return processes.from_first(chosen)


def objective(plan: PrunePlan, options: ElderOptions) -> GateObjective:
    """Return the objective of :func:`decide`, for as many layers as a plan removes."""
    return GateObjective(plan.dense.num_layers - len(plan.layers), options.gates)


def _gate_warnings(objective: GateObjective, weighed: Sequence[int]) -> list[str]:
    gates = [objective.rounds[0].gates[index] for index in weighed]
    spread = max(gates) - min(gates)
    if spread >= UNMOVED_STEPS * objective.config.learning_rate:
        return []
    return [
        f"The layer gates hardly moved: when the first layer was chosen they spread by {spread:.4f} only, so the "
        "choice is close to noise. Use more first_round_steps or a larger gate learning rate."
    ]


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Choose the layers by their gates, or take the layers of the options."""
    identity = request.identity
    options = own_options(request, ElderOptions)
    if options.layers:
        note = f"the layers {list(options.layers)} were given; the ratio and the gates were not used."
        return PlanDecision(identity.drop_layers(options.layers), (note,))
    decision = decide_layer_count(request)
    gates = learn_layer_gates(model, samples, decision.count, options, request.seed, run)
    return PlanDecision(
        identity.drop_layers(gates.removed), decision.notes, {"gates": gates.to_dict()}, tuple(gates.warnings)
    )
