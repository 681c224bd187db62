"""The one training loop. Fine-tuning, every regulariser, gate learning and LoRA recovery run through it.

What differs between them is an :class:`Objective`; plain fine-tuning is the base class itself. One optimiser
step is

    loss = mean over the step's predicted tokens of -log p  +  the objective's penalties,

accumulated over micro batches with exact token weights, clipped, applied, and then handed to the objective
(proximal map, shrinkage, gauge). The order of samples and all random numbers of step k are functions of
(seed, k) alone, so a resumed run equals an uninterrupted one bit for bit on the same machine with the same
number of threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pyprune.config import TrainConfig, largest_divisor
from pyprune.errors import CheckpointError, ConfigError, DataError, OutputError, TrainingError
from pyprune.interrupts import interrupts_deferred
from pyprune.load import warn_of_slow_dtype
from pyprune.loss import causal_loss
from pyprune.ops import available_isas
from pyprune.ops.regularised_adamw import Penalty
from pyprune.optimizer import RegularisedAdamW, clip_factor
from pyprune.progress import console
from pyprune.resume import TrainState, check_same_run, latest_state, load_state, save_state
from pyprune.tokens import IGNORED as IGNORED
from pyprune.tokens import Tokens as Tokens

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossTerms:
    """One micro batch's loss.

    Attributes:
        lm: scalar, mean of -log p over the micro batch's predicted tokens, nats.
        penalty: scalar mean over the micro batch's tokens without padding of an activation penalty (already times
            its strength), or None. It is weighted by the number of these tokens.
        total: scalar mean over the predicted tokens that is minimised in place of ``lm``, which is then only
            reported; None = ``lm`` itself.
        parts: what ``total`` is made of, for the report: name -> scalar mean over the predicted tokens.
    """

    lm: Tensor
    penalty: Tensor | None = None
    total: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def minimised(self) -> Tensor:
        """The scalar mean over the predicted tokens that is minimised beside the penalty."""
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
    """What a training run minimises; the base class is plain language-model fine-tuning.

    A subclass overrides what it needs. Steps count from 1. :func:`train` calls, in order: ``setup``;
    ``parameter_groups``; ``optimiser_penalties``; ``load_state_dict`` when resuming; then per step ``before_step``,
    ``micro_loss`` for every micro batch, ``apply_step_penalty`` once, ``before_optimizer_step`` and
    ``after_optimizer_step``; at a regular end ``finish``; and always ``teardown``.
    """

    name = "finetune"

    def identity(self) -> dict[str, Any]:
        """Plain JSON options that must be equal for a resumed run to be the same run."""
        return {}

    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        """Prepare the model (register hooks, freeze parameters)."""

    def parameter_groups(self, model: nn.Module, config: TrainConfig) -> list[ParameterGroup]:
        """What is trained: by default every parameter that requires a gradient; vectors are not decayed."""
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {n: p for n, p in trainable.items() if p.ndim >= 2}
        vectors = {n: p for n, p in trainable.items() if p.ndim < 2}
        groups = [
            ParameterGroup(matrices, config.learning_rate, config.weight_decay),
            ParameterGroup(vectors, config.learning_rate),
        ]
        return [g for g in groups if g.parameters]

    def optimiser_penalties(self, model: nn.Module, config: TrainConfig) -> dict[nn.Parameter, Penalty]:
        """Weight penalties that the optimiser handles in its own pass; asked for with ``fused_adamw`` only.

        What is handed over must not be applied by ``apply_step_penalty`` or ``after_optimizer_step`` too. The loop
        clips gradients before such a penalty joins them.
        """
        return {}

    def before_step(self, model: nn.Module, step: int) -> None:
        """Called before the first micro batch of a step; must depend on ``step`` and the state only.

        A resumed run that has to validate the checkpoint's step first calls it with that step.
        """

    def micro_loss(self, model: nn.Module, batch: Tokens) -> LossTerms:
        """Loss of one micro batch.

        Args:
            model: the model, in training or evaluation mode.
            batch: B sequences of T tokens, on the model's device.
        """
        return LossTerms(causal_loss(model, batch))

    def step_penalty(self, model: nn.Module) -> Tensor | None:
        """Penalty on the weights (times its strength), differentiable; or None."""
        return None

    def apply_step_penalty(self, model: nn.Module) -> Tensor | None:
        """Add the gradient of :meth:`step_penalty` to the gradients, once per optimiser step, and return its value."""
        penalty = self.step_penalty(model)
        if penalty is None:
            return None
        penalty.backward()
        return penalty.detach()

    def validation_penalty(self, model: nn.Module) -> float:
        """Weight penalty added to the validation loss; overridden where a solver hides it from the loss."""
        with torch.no_grad():
            penalty = self.step_penalty(model)
        return 0.0 if penalty is None else float(penalty)

    def before_optimizer_step(self, model: nn.Module, step: int, gradient_scale: float) -> None:
        """Read the step's complete gradients, finite, while the weights are still those they belong to.

        Args:
            model: the model; what the optimiser steps along is ``parameter.grad * gradient_scale``.
            step: counts from 1.
            gradient_scale: the part of clipping that the optimiser does in its own pass (``fused_adamw``); else 1.
        """

    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        """Change the weights after the smooth step (under ``no_grad``)."""

    def settled(self, step: int) -> bool:
        """Whether a state after ``step`` may be kept by early stopping (False while a schedule runs)."""
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """State beyond the trained parameters that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""

    def finish(self, model: nn.Module) -> None:
        """Called once at a regular end (all steps done or stopped early), before :meth:`teardown`."""

    def teardown(self, model: nn.Module) -> None:
        """Undo :meth:`setup`; called on every way out."""


@dataclass
class StepRecord:
    """One optimiser step: language-model loss (nats a token), penalty, learning rate, gradient norm, other terms."""

    step: int
    lm_loss: float
    penalty: float
    learning_rate: float
    grad_norm: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainReport:
    """What a training run did. JSON-able through :meth:`to_dict`.

    Attributes:
        objective: name of the objective.
        steps: optimiser steps done in all (including those before a resume).
        tokens: tokens fed in those steps.
        seconds: wall-clock time of this process's part.
        stopped: why it ended.
        history: one record a step.
        validation: (step, validation loss) pairs; the loss includes the penalties.
        best_step: the step whose weights were kept, when early stopping was on.
        resumed_from: the step of the checkpoint this process started from.
        warnings: what the user should know.
    """

    objective: str
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


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at ``step`` (from 1): linear warm-up, then the configured decay."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def _warm_up_warnings(config: TrainConfig) -> list[str]:
    if config.warmup_steps < config.steps:
        return []
    return [
        f"The warm-up of {config.warmup_steps} steps takes the whole run of {config.steps}: the learning rate rises to "
        "the end and never falls; lower warmup_steps."
    ]


def micro_batch_for(batch_size: int, sequence_length: int, max_tokens: int = 2048) -> int:
    """The largest divisor of ``batch_size`` whose micro batch holds at most ``max_tokens`` (at least 1)."""
    return largest_divisor(batch_size, max(1, max_tokens // sequence_length))


def train(
    model: nn.Module,
    samples: Tensor | Tokens,
    config: TrainConfig,
    objective: Objective | None = None,
    *,
    validation: Tensor | Tokens | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    keep_last_good: bool = True,
    description: str | None = None,
) -> TrainReport:
    """Train ``model`` in place on ``samples`` and return what happened.

    Early stopping (``config.early_stop_patience``) validates every ``validation_interval`` steps and at the end,
    on the whole objective (loss and penalties); the weights of the best validation are put back at the end.
    While an objective's schedule is still running nothing is kept or stopped. Without a ``validation`` set, 5 %
    of the samples (the last ones, at least one) are held out for it and the report says so.

    Args:
        model: a causal LM with float32 (or float64) trainable weights, on any one device.
        samples: token ids, int64 [N, T], :data:`IGNORED` marking right padding; or :class:`Tokens`, whose labels
            leave out what is not to be predicted (the prompt of an instruction).
        config: the loop's options.
        objective: what is minimised; None = plain fine-tuning.
        validation: token ids, int64 [M, T'], or :class:`Tokens`, never trained on.
        checkpoint_dir: where resumable checkpoints go: every ``checkpoint_interval`` steps, at the end, and on
            Ctrl-C or any other exception.
        resume: continue from the newest checkpoint in ``checkpoint_dir``; without one, start from the beginning.
        keep_last_good: hold a copy of the trained weights (4 bytes a parameter) to return to when the loss or a
            gradient is not finite.
        description: shown with the progress.

    Raises:
        ConfigError: options that contradict each other or the model.
        DataError: samples that the model cannot be trained on.
        TrainingError: a loss or gradient that is not finite. The weights go back to the last ones that gave a
            finite loss and gradient, and with ``checkpoint_dir`` they are also written there.
        CheckpointError: a damaged checkpoint, or one of another run.
        OutputError: a checkpoint that cannot be written, or one in the way of a fresh run.
    """
    config.validate()
    tokens, held_out = Tokens.of(samples), None if validation is None else Tokens.of(validation)
    check_samples(model, tokens, "samples")
    held_out_note = ""
    if config.early_stop_patience is not None and held_out is None:
        tokens, held_out, held_out_note = _hold_out(tokens)
    if held_out is not None:
        check_samples(model, held_out, "validation")
    if resume and checkpoint_dir is None:
        raise ConfigError("resume needs checkpoint_dir, the folder of the interrupted run's checkpoints.")
    run = _Run(model, tokens, held_out, config, objective or Objective(), checkpoint_dir, keep_last_good)
    run.report.warnings += [held_out_note] if held_out_note else []
    run.report.warnings += _warm_up_warnings(config)
    warn_of_slow_dtype(config.dtype, run.device)
    with _prepared(model, config, run.device):
        try:
            return run.execute(resume, description or run.objective.name)
        finally:
            run.objective.teardown(model)


@dataclass(frozen=True)
class _Weight:
    """What a micro batch's means count for in the means over all of its batch.

    Attributes:
        predicted: its share of the predicted tokens: the weight of losses.
        fed: its share of the tokens without padding: the weight of an activation penalty.
    """

    predicted: float
    fed: float


class _Run:
    """The state of one call of :func:`train`."""

    def __init__(
        self,
        model: nn.Module,
        samples: Tokens,
        validation: Tokens | None,
        config: TrainConfig,
        objective: Objective,
        checkpoint_dir: Path | None,
        keep_last_good: bool,
    ) -> None:
        self.model = model
        self.samples = samples
        self.validation = validation
        self.config = config
        self.objective = objective
        self.checkpoint_dir = checkpoint_dir
        self.keep_last_good = keep_last_good
        self.device = next(model.parameters()).device
        self.report = TrainReport(objective.name)
        self.parameters: dict[str, nn.Parameter] = {}
        self.last_good: dict[str, Tensor] = {}
        self.last_good_step = 0
        self.best: dict[str, Tensor] = {}
        self.best_loss = math.inf
        self.bad_validations = 0
        self.updating = False
        self.done = False

    def execute(self, resume: bool, description: str) -> TrainReport:
        started = time.monotonic()
        self.objective.setup(self.model, self.config)
        self._make_optimizer()
        self._restore(resume)
        try:
            self._catch_up()
            with _StepProgress(description, self.config.steps) as progress:
                while not self.done and self.report.steps < self.config.steps:
                    self._step(self.report.steps + 1)
                    progress.update(self.report.steps, self.report.history[-1])
                    self._validate_and_checkpoint()
            self._end()
        except TrainingError:
            self.report.stopped = "failed"
            raise
        except (OutputError, CheckpointError):
            raise
        except BaseException:
            self._save_after_interruption()
            raise
        finally:
            self.report.seconds = time.monotonic() - started
            self.optimizer.zero_grad(set_to_none=True)
        return self.report

    def _make_optimizer(self) -> None:
        groups = self.objective.parameter_groups(self.model, self.config)
        self.peaks = [g.learning_rate for g in groups]
        for group in groups:
            self.parameters.update(group.parameters)
        check_trainable(self.parameters)
        own = uses_own_optimiser(self.config, self.device)
        penalties = self.objective.optimiser_penalties(self.model, self.config) if own else {}
        self.optimizer = make_optimizer(groups, self.config, penalties)

    def _step(self, step: int) -> None:
        config = self.config
        torch.manual_seed(config.seed * 1_000_003 + step)
        factor = learning_rate_factor(step, config)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.objective.before_step(self.model, step)
        batch = self.samples[batch_indices(len(self.samples), config.batch_size, step, config.seed)]
        lm, penalty, parts = self._backward(batch, step)
        norm, scale = self._clip(step)
        if self.keep_last_good:
            self._remember_last_good(step)
        with torch.no_grad():
            self.objective.before_optimizer_step(self.model, step, scale)
        with self._update():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                self.objective.after_optimizer_step(self.model, self.optimizer, step, config.learning_rate * factor)
            self.report.history.append(StepRecord(step, lm, penalty, config.learning_rate * factor, norm, parts))
            self.report.steps = step
            self.report.tokens += batch.fed()

    def _backward(self, batch: Tokens, step: int) -> tuple[float, float, dict[str, float]]:
        """Accumulate the gradient of the whole step; returns (LM loss, penalty, other terms)."""
        self.optimizer.zero_grad(set_to_none=True)
        lm_sum, penalty_sum = 0.0, 0.0
        parts: dict[str, float] = {}
        for micro, weight in self._micro_batches(batch):
            with self._autocast():
                terms = self.objective.micro_loss(self.model, micro)
            loss = terms.minimised * weight.predicted
            if terms.penalty is not None:
                share = terms.penalty * weight.fed
                loss = loss + share
                penalty_sum += float(share.detach())
            lm_sum += float(terms.lm.detach()) * weight.predicted
            for name, part in terms.parts.items():
                parts[name] = parts.get(name, 0.0) + float(part.detach()) * weight.predicted
            self._check_finite(lm_sum + penalty_sum + float(loss.detach()), "loss", step)
            loss.backward()
        penalty = self.objective.apply_step_penalty(self.model)
        if penalty is not None:
            penalty_sum += float(penalty)
            self._check_finite(penalty_sum, "penalty", step)
        return lm_sum, penalty_sum, parts

    def _micro_batches(self, batch: Tokens) -> Iterator[tuple[Tokens, _Weight]]:
        """The micro batches on the model's device, with the weights that turn their means into those of ``batch``."""
        predicted, fed = max(1, int(batch.predicted.sum())), max(1, batch.fed())
        for micro in batch.micro_batches(self.config.sequences_per_pass):
            weight = _Weight(int(micro.predicted.sum()) / predicted, micro.fed() / fed)
            yield micro.to(self.device), weight

    def _clip(self, step: int) -> tuple[float, float]:
        """The gradients' norm before clipping, finite, and the factor that is left to the optimiser."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        self._check_finite(float(norm), "gradient norm", step)
        limit = self.config.max_grad_norm
        if limit is not None and isinstance(self.optimizer, RegularisedAdamW):
            self.optimizer.gradient_scale = clip_factor(float(norm), limit)
            return float(norm), self.optimizer.gradient_scale
        if limit is not None:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), limit, norm)
        return float(norm), 1.0

    def _check_finite(self, value: float, what: str, step: int) -> None:
        if math.isfinite(value):
            return
        restored = f"those after step {self.last_good_step}" if self.last_good_step else "the initial ones"
        for name, good in self.last_good.items():
            self.parameters[name].data.copy_(good)
        written = self._write_last_good(step, what)
        rate = self.config.learning_rate
        raise TrainingError(
            f"The {what} is {value} at step {step} of {self.config.steps} ({self.objective.name}). The weights "
            f"in memory are {restored}, the last with a finite loss and gradient{written}. Lower the learning rate "
            f"(now {rate:g}), clip gradients (max_grad_norm), or compute in float32.",
            step,
        )

    def _write_last_good(self, step: int, what: str) -> str:
        if self.checkpoint_dir is None:
            return ""
        state = TrainState(
            self.last_good_step,
            {"objective": self.objective.name, "failed_step": step, "reason": f"{what} not finite"},
            {"weights": dict(self.parameters)},
        )
        path = save_state(self.checkpoint_dir, state, name="last-good")
        return f" (written to {path})"

    def _remember_last_good(self, step: int) -> None:
        """Copy the weights that have just given a finite loss and gradient (those after ``step - 1``)."""
        for name, parameter in self.parameters.items():
            if name in self.last_good:
                self.last_good[name].copy_(parameter.data)
            else:
                self.last_good[name] = parameter.data.clone()
        self.last_good_step = step - 1

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Ctrl-C waits until weights, optimiser and objective agree on the step again."""
        with interrupts_deferred():
            self.updating = True
            yield
            self.updating = False

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _catch_up(self) -> None:
        """A run that was interrupted between a step and its validation validates first."""
        validated = self.report.validation[-1][0] if self.report.validation else 0
        if 0 < self.report.steps != validated and not self.done:
            # A fresh objective does not know yet how far its schedule is.
            self.objective.before_step(self.model, self.report.steps)
            self._validate_if_due()

    def _validate_and_checkpoint(self) -> None:
        with interrupts_deferred():
            self._validate_if_due()
            step, interval = self.report.steps, self.config.checkpoint_interval
            due = interval is not None and step % interval == 0 and step < self.config.steps
            if due and self.checkpoint_dir is not None:
                self._save(self.checkpoint_dir)

    def _validate_if_due(self) -> None:
        step, config = self.report.steps, self.config
        if self.validation is not None and (step == config.steps or step % config.validation_interval == 0):
            self._validate(step, self.validation)

    def _validate(self, step: int, samples: Tokens) -> None:
        loss = self._validation_loss(samples)
        self.report.validation.append((step, loss))
        patience = self.config.early_stop_patience
        if patience is None or not self.objective.settled(step):
            return
        if loss < self.best_loss - self.config.early_stop_min_delta:
            self.best_loss, self.bad_validations = loss, 0
            self.best = {n: p.detach().clone() for n, p in self.parameters.items()}
            self.report.best_step = step
            return
        self.bad_validations += 1
        self.done = self.bad_validations >= patience

    @torch.no_grad()
    def _validation_loss(self, samples: Tokens) -> float:
        was_training = self.model.training
        self.model.eval()
        loss = self.objective.validation_penalty(self.model)
        for micro, weight in self._micro_batches(samples):
            with self._autocast():
                terms = self.objective.micro_loss(self.model, micro)
            loss += float(terms.minimised) * weight.predicted
            if terms.penalty is not None:
                loss += float(terms.penalty) * weight.fed
        self.model.train(was_training)
        return loss

    def _end(self) -> None:
        self.report.stopped = "early_stop" if self.done else "steps"
        self.done = True
        if self.checkpoint_dir is not None:
            self._save(self.checkpoint_dir)
        for name, tensor in self.best.items():
            self.parameters[name].data.copy_(tensor)
        with torch.no_grad():
            self.objective.finish(self.model)

    def _save_after_interruption(self) -> None:
        self.report.stopped = "interrupted"
        if self.checkpoint_dir is None or self.updating or self.report.steps == 0:
            return
        try:
            path = self._save(self.checkpoint_dir)
        except OutputError as error:
            _log.warning("%s", error)
            return
        console().print(f"Interrupted after step {self.report.steps}; resume from {path}.", highlight=False)

    def _save(self, folder: Path) -> Path:
        meta = {
            "run": self._identity(),
            "stopped": self.report.stopped,
            "tokens": self.report.tokens,
            "history": [asdict(r) for r in self.report.history],
            "validation": self.report.validation,
            "best_step": self.report.best_step,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "bad_validations": self.bad_validations,
        }
        tensors = {
            "weights": cast(dict[str, Tensor], self.parameters),
            "optimiser": _optimizer_tensors(self.optimizer),
            "objective": self.objective.state_dict(),
            "best": self.best,
        }
        return save_state(folder, TrainState(self.report.steps, meta, tensors))

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a resumed run to be the same run."""
        return {
            "objective": self.objective.name,
            **{f"objective.{k}": v for k, v in self.objective.identity().items()},
            **{k: v for k, v in asdict(self.config).items() if k != "checkpoint_interval"},
            "samples_sha256": self.samples.digest(),
            "validation_sha256": None if self.validation is None else self.validation.digest(),
            "parameters": sum(p.numel() for p in self.parameters.values()),
        }

    def _restore(self, resume: bool) -> None:
        path = latest_state(self.checkpoint_dir) if self.checkpoint_dir is not None else None
        if path is None:
            return
        if not resume:
            raise OutputError(
                f"{self.checkpoint_dir} already holds the checkpoint {path.name} of a run. Continue it with "
                "resume, or remove it or choose another folder to start over."
            )
        state = load_state(path)
        try:
            check_same_run(path, state.meta["run"], self._identity())
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"The training checkpoint {path} does not fit this run: {error!r}.") from error

    def _load(self, state: TrainState) -> None:
        weights = state.tensors["weights"]
        for name, parameter in self.parameters.items():
            parameter.data.copy_(weights[name])
        _load_optimizer_tensors(self.optimizer, state.tensors.get("optimiser", {}))
        self.objective.load_state_dict(state.tensors.get("objective", {}))
        self.best = {n: t.to(self.device) for n, t in state.tensors.get("best", {}).items()}
        meta, report = state.meta, self.report
        report.steps = report.resumed_from = self.last_good_step = state.step
        report.tokens = int(meta["tokens"])
        report.history = [StepRecord(**r) for r in meta["history"]]
        report.validation = [(int(s), float(v)) for s, v in meta["validation"]]
        report.best_step = meta["best_step"]
        self.best_loss = math.inf if meta["best_loss"] is None else float(meta["best_loss"])
        self.bad_validations = int(meta["bad_validations"])
        # Ctrl-C may have come during the very validation that stopped the run, so the counter decides.
        patience = self.config.early_stop_patience
        self.done = patience is not None and self.bad_validations >= patience


def uses_own_optimiser(config: TrainConfig, device: torch.device) -> bool:
    """Whether "fused_adamw" was asked for and has kernels on this device.

    Without them torch's fused AdamW takes its place: the same to float32 rounding, and faster than plain torch.
    """
    return config.optimiser == "fused_adamw" and (device.type != "cpu" or bool(available_isas()))


def make_optimizer(
    groups: list[ParameterGroup], config: TrainConfig, penalties: Mapping[nn.Parameter, Penalty] | None = None
) -> torch.optim.Optimizer:
    """Build the optimiser (fused kernels, which exist for the CPU and CUDA).

    Args:
        groups: what is trained.
        config: the loop's options.
        penalties: what "fused_adamw" handles in its own pass.
    """
    parameters = [
        {"params": list(g.parameters.values()), "lr": g.learning_rate, "weight_decay": g.weight_decay} for g in groups
    ]
    device = next(iter(groups[0].parameters.values())).device
    if uses_own_optimiser(config, device):
        return RegularisedAdamW(parameters, lr=config.learning_rate, penalties=penalties, seed=config.seed)
    kinds = {p.device.type for g in groups for p in g.parameters.values()}
    fused = kinds <= {"cpu", "cuda"}
    if config.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, fused=fused)
    kind = torch.optim.Adam if config.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, lr=config.learning_rate, fused=fused)


def batch_indices(count: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Sample indices of ``step`` (from 1): consecutive pieces of one seeded permutation an epoch, [batch_size]."""
    first = (step - 1) * batch_size
    positions = range(first, first + batch_size)
    orders: dict[int, Tensor] = {}
    for epoch in {p // count for p in positions}:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(count, generator=generator)
    return torch.stack([orders[p // count][p % count] for p in positions])


def check_samples(model: nn.Module, samples: Tensor | Tokens, what: str) -> None:
    """Refuse samples that the model cannot be trained on.

    Raises:
        DataError: wrong shape or type, an id outside the vocabulary, a length beyond the model's, padding that is
            not on the right or has a label, or nothing to predict.
    """
    tokens = Tokens.of(samples)
    ids, labels = tokens.ids, tokens.labels
    if ids.ndim != 2 or ids.dtype != torch.int64 or len(ids) == 0 or ids.shape[1] < 2:
        raise DataError(
            f"{what} has shape {tuple(ids.shape)} and type {ids.dtype}; expected token ids, int64 [N, T] "
            "with N >= 1 and T >= 2."
        )
    if labels.shape != ids.shape or labels.dtype != torch.int64:
        raise DataError(
            f"{what} has labels of shape {tuple(labels.shape)} and type {labels.dtype}; expected int64 "
            f"{list(ids.shape)}, one for each token id."
        )
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise DataError(
            f"{what} has sequences of {ids.shape[1]} tokens, but the model allows {limit}. "
            "Use a shorter sequence_length."
        )
    vocab, largest = getattr(config, "vocab_size", None), max(int(ids.max()), int(labels.max()))
    if vocab is not None and largest >= vocab:
        raise DataError(
            f"{what} holds the token id {largest}, but the model's vocabulary ends at {vocab - 1}. "
            "Tokenise with the model's own tokenizer."
        )
    padding = ids < 0
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()) or bool((padding & (labels >= 0)).any()):
        raise DataError(f"{what} has padding before a token or a label on padding; pad on the right, with {IGNORED}.")
    if not bool(tokens.predicted.any()):
        raise DataError(f"{what} holds nothing but padding and masked tokens; there is nothing to predict.")


def check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse half-precision trained weights: an update of 2e-5 on a weight of 0.02 rounds to nothing in bfloat16.

    Raises:
        ConfigError: nothing to train, or trained weights of a half type.
    """
    if not parameters:
        raise ConfigError("Nothing to train: no parameter requires a gradient.")
    half = [n for n, p in parameters.items() if p.dtype in (torch.bfloat16, torch.float16)]
    if half:
        raise ConfigError(
            f"{len(half)} trained parameters (first: {half[0]}) are {parameters[half[0]].dtype}; small updates "
            "round to nothing there. Load the model with dtype float32 and set the training dtype to bfloat16."
        )


def _hold_out(samples: Tokens) -> tuple[Tokens, Tokens, str]:
    if len(samples) < 2:
        raise ConfigError(
            "early_stop_patience needs validation samples, and one training sample cannot be split. "
            "Give validation samples or more training samples."
        )
    count = max(1, len(samples) // 20)
    note = f"Early stopping validates on {count} of the {len(samples)} samples, which were held out of training."
    return samples[:-count], samples[-count:], note


@contextmanager
def _prepared(model: nn.Module, config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Training mode, gradient checkpointing and a private random stream, all put back afterwards."""
    was_training = model.training
    changed_checkpointing = config.gradient_checkpointing and not getattr(model, "is_gradient_checkpointing", False)
    if changed_checkpointing:
        cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        model.train(was_training)
        if changed_checkpointing:
            cast(Any, model).gradient_checkpointing_disable()


class _StepProgress:
    """A bar with the loss on a terminal; about ten lines in a log. Silent for runs under two seconds."""

    def __init__(self, description: str, steps: int) -> None:
        self.description = description
        self.steps = steps
        self.started = time.monotonic()
        self.bar: Any = None
        self.printed = 0

    def __enter__(self) -> _StepProgress:
        if console().is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=console(),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.description, total=self.steps, loss="")
        return self

    def update(self, step: int, record: StepRecord) -> None:
        """Show that ``step`` is done."""
        text = f"loss {record.lm_loss:.4f}" + (f" + {record.penalty:.4g}" if record.penalty else "")
        text += "".join(f", {name} {value:.4g}" for name, value in record.parts.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=step, loss=text)
            return
        due = step == self.steps or step >= self.printed + max(1, self.steps // 10)
        if due and time.monotonic() - self.started > 2.0:
            console().print(f"{self.description}: step {step}/{self.steps}, {text}", highlight=False)
            self.printed = step

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value
        for index, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
