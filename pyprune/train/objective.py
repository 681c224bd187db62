"""The loss and penalties that a training run minimises, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyprune.config.train import TrainConfig
from pyprune.data.tokens import Batch
from pyprune.ops.regularised_adamw import Penalty
from pyprune.train.loss import causal_loss


@dataclass(frozen=True)
class LossTerms:
    """One micro batch's loss.

    Attributes:
        lm: scalar, mean of -log p over the micro batch's predicted tokens, nats.
        penalty: scalar mean over the micro batch's tokens without padding of an activation penalty (already times
            its weight), or None. It is weighted by the number of these tokens.
        total: scalar mean over the predicted tokens that is minimised instead of ``lm``, which is then only
            reported; None = ``lm`` itself.
        parts: terms of ``total``, for the report: name -> scalar mean over the predicted tokens.
    """

    lm: Tensor
    penalty: Tensor | None = None
    total: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def main_loss(self) -> Tensor:
        """The scalar mean over the predicted tokens that is minimised together with the penalty."""
        return self.lm if self.total is None else self.total


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate and a weight decay.

    Attributes:
        parameters: name -> tensor; the names key the checkpoint.
        learning_rate: peak learning rate of the group.
        weight_decay: decoupled weight decay per unit learning rate.
    """

    parameters: dict[str, nn.Parameter]
    learning_rate: float
    weight_decay: float = 0.0


class Objective:
    """The loss and penalties of a training run; the base class is plain language-model fine-tuning.

    Steps count from 1. :func:`train` calls, in order: ``setup``;
    ``parameter_groups``; ``optimizer_penalties``; ``load_state_dict`` when resuming; then per step ``before_step``,
    ``micro_loss`` for every micro batch, ``apply_step_penalty`` once, ``before_optimizer_step`` and
    ``after_optimizer_step``; at a regular end ``finish``; and always ``teardown``.
    """

    name = "finetune"

    def run_facts(self) -> dict[str, Any]:
        """Plain JSON options that must be equal for a resumed run to be the same run."""
        return {}

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Prepare the model (register hooks, freeze parameters)."""

    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[ParameterGroup]:
        """Return the trained parameters: by default all that require a gradient; vectors are not decayed."""
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {n: p for n, p in trainable.items() if p.ndim >= 2}
        vectors = {n: p for n, p in trainable.items() if p.ndim < 2}
        groups = [
            ParameterGroup(matrices, config.learning_rate, config.weight_decay),
            ParameterGroup(vectors, config.learning_rate),
        ]
        return [g for g in groups if g.parameters]

    def optimizer_penalties(self, model: nn.Module, config: TrainConfig) -> dict[nn.Parameter, Penalty]:
        """Return weight penalties for the optimizer's own pass; called only if the optimizer is pyprune's.

        ``apply_step_penalty`` and ``after_optimizer_step`` must not apply them as well.
        """
        return {}

    def reads_gradients(self) -> bool:
        """Check whether the objective needs all gradients of a step at once, so that none can be used in backward."""
        names = ("step_penalty", "apply_step_penalty", "before_optimizer_step")
        return any(getattr(type(self), name) is not getattr(Objective, name) for name in names)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Prepare a step, before its first micro batch; depends on ``step`` and the state only.

        A resumed run that has to validate the checkpoint's step first calls it with that step.
        """

    def micro_loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        """Return the loss of one micro batch.

        Args:
            model: the model, in training or evaluation mode.
            batch: B sequences of T tokens, on the model's device.
        """
        return LossTerms(causal_loss(model, batch))

    def step_penalty(self, model: nn.Module) -> Tensor | None:
        """Return the penalty on the weights (times its weight), differentiable; or None."""
        return None

    def apply_step_penalty(self, model: nn.Module) -> Tensor | None:
        """Add the gradient of :meth:`step_penalty` to the gradients, once per optimizer step, and return its value.

        Gradients of the loss are clipped before; those added here are not.
        """
        penalty = self.step_penalty(model)
        if penalty is None:
            return None
        penalty.backward()
        return penalty.detach()

    def validation_penalty(self, model: nn.Module) -> float:
        """Return the weight penalty to add to the validation loss; overridden if a solver hides it from the loss."""
        with torch.no_grad():
            penalty = self.step_penalty(model)
        return 0.0 if penalty is None else float(penalty)

    def before_optimizer_step(self, model: nn.Module, step: int, gradient_scale: float) -> None:
        """Read the step's complete gradients, finite, while the weights are still those they belong to.

        Args:
            model: the model; the optimizer steps along ``parameter.grad * gradient_scale``.
            step: counts from 1.
            gradient_scale: the part of clipping that the optimizer does in its own pass (``fused_adamw``); else 1.
        """

    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        """Change the weights after the smooth step (under ``no_grad``)."""

    def allows_early_stop(self, step: int) -> bool:
        """Check whether early stopping may keep a state after ``step`` (False while a schedule runs)."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """State beyond the trained parameters that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""

    def finish(self, model: nn.Module) -> None:
        """Finish, once, at a regular end (all steps done or stopped early), before :meth:`teardown`."""

    def teardown(self, model: nn.Module) -> None:
        """Undo :meth:`setup`; called on every way out."""


@dataclass
class StepRecord:
    """One optimizer step: language-model loss (nats a token), penalty, learning rate, gradient norm, other terms."""

    step: int
    lm_loss: float
    penalty: float
    learning_rate: float
    grad_norm: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainReport:
    """Report of a training run. JSON-able through :meth:`to_dict`.

    Attributes:
        objective: name of the objective.
        dtype: of the computation.
        steps: optimizer steps done in all (including those before a resume).
        tokens: tokens fed in those steps.
        seconds: wall-clock time of this process's part.
        stopped: reason of its end.
        history: one record a step.
        validation: (step, validation loss) pairs; the loss includes the penalties.
        best_step: the step whose weights were kept, when early stopping was on.
        resumed_from: the step of the checkpoint this process started from.
        warnings: for the user.
    """

    objective: str
    dtype: str
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stopped: Literal["steps", "early_stop", "interrupted", "failed"] = "steps"
    history: list[StepRecord] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_step: int | None = None
    resumed_from: int | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Language-model loss of each step, nats a token."""
        return [r.lm_loss for r in self.history]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)
