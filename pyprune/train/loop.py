"""The one training loop. Fine-tuning, every regulariser, gate learning and LoRA recovery run through it.

They differ in their :class:`Objective`; plain fine-tuning is the base class itself. One optimizer step minimises

    loss = mean over the step's predicted tokens of -log p  +  the objective's penalties.

The loss is accumulated over micro batches with exact token weights. Its gradient is clipped and applied, and then the
objective changes the weights (proximal map, shrinkage, gauge). Penalties on activations are part of the loss that is
clipped. The gradient of a penalty on weights joins after the clipping, in the optimizer's own pass or not.

In lean memory (``config.memory``) the weights are bfloat16 and the moments have 8 bits. Each weight is stepped inside
backward as soon as its gradient is computed (:meth:`RegularisedAdamW.stepping_in_backward`), if a step has one forward
pass and the objective reads no gradients.

The order of samples and all random numbers of step k are functions of (seed, k) alone. So a resumed run equals an
uninterrupted one bit for bit on the same machine with the same number of threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyprune.config.train import TrainConfig
from pyprune.data.tokens import Batch
from pyprune.errors import CheckpointError, ConfigError, OutputError, TrainingError
from pyprune.runtime import processes
from pyprune.runtime.device import warn_of_slow_dtype
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.modes import evaluation_mode, training
from pyprune.runtime.products import products_in
from pyprune.runtime.progress import console
from pyprune.train.compiled import compiled_layers
from pyprune.train.lean import (
    autocast,
    computed_in,
    decide_dtype,
    decide_memory,
    place_of_copies,
    steps_in_backward,
    to_bfloat16,
)
from pyprune.train.objective import LossTerms, Objective, StepRecord, TrainReport
from pyprune.train.optimizer import (
    Clipping,
    RegularisedAdamW,
    _load_optimizer_tensors,
    _optimizer_tensors,
    clip_each_,
    clip_factor,
    make_optimizer,
    uses_own_optimizer,
)
from pyprune.train.progress import StepProgress
from pyprune.train.samples import (
    batch_indices,
    check_gradients_fit,
    check_not_wide,
    check_samples,
    check_trainable,
    hold_out,
)
from pyprune.train.schedule import learning_rate_factor, warm_up_warnings
from pyprune.train.sharded import Whole, make_shards
from pyprune.train.state import TrainState, check_same_run, latest_state
from pyprune.train.sums import Sums, Weight

_log = logging.getLogger(__name__)

_SAME_RESULT = ("checkpoint_interval", "copies", "last_good_interval")
"""Options that do not change the result of a run."""


def train(
    model: nn.Module,
    samples: Tensor | Batch,
    config: TrainConfig,
    objective: Objective | None = None,
    *,
    validation: Tensor | Batch | None = None,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    keep_last_good: bool = True,
    description: str | None = None,
) -> TrainReport:
    """Train ``model`` in place on ``samples`` and report on it.

    Early stopping (``config.early_stop_patience``) validates every ``validation_interval`` steps and at the end,
    on the whole objective (loss and penalties); the weights of the best validation are put back at the end.
    While an objective's schedule is still running nothing is kept or stopped. Without a ``validation`` set, 5 %
    of the samples (the last ones, at least one) are held out for it, with a warning in the report.

    Inside :func:`pyprune.runtime.processes.divide_training` several processes train together
    (:mod:`pyprune.train.sharded`): every one gets the same whole model and samples, and has the same whole model
    afterwards, also after a TrainingError; after any other error the model has no weights. If the model is on the host
    (:class:`pyprune.runtime.processes.Division`), the first process alone gets the trained weights. If it alone has the
    weights before, the others get their shapes.

    Args:
        model: a causal LM with float32 (or float64) trainable weights, on any one device; with ``config.memory`` lean
            (or auto) also bfloat16 ones. Lean turns float32 weights, those of adapters aside, to bfloat16 first.
        samples: token ids, int64 [N, T], :data:`~pyprune.data.tokens.IGNORED` marking right padding; or
            :class:`~pyprune.data.tokens.Batch`, whose labels leave out tokens that are not predicted (the prompt of an
            instruction).
        config: the loop's options. ``memory`` auto is lean for bfloat16 weights and full for others; a run decides it
            by the device's memory (:mod:`pyprune.run.memory`) before a model is loaded.
        objective: the loss and penalties; None = plain fine-tuning.
        validation: token ids, int64 [M, T'], or :class:`Batch`, never trained on.
        checkpoint_dir: folder of resumable checkpoints: every ``checkpoint_interval`` steps, at the end, and (in one
            process) on Ctrl-C or any other exception.
        resume: continue from the newest checkpoint in ``checkpoint_dir``; without one, start from the beginning.
        keep_last_good: hold a copy of the trained weights (on the device of ``config.copies``), made every
            ``last_good_interval`` steps, to return to when the loss or a gradient is not finite.
        description: shown with the progress.

    Raises:
        ConfigError: options that contradict each other or the model.
        DataError: samples that the model cannot be trained on.
        TrainingError: a loss or gradient that is not finite. The weights are put back to the last copy that gave a
            finite loss and gradient, and with ``checkpoint_dir`` it is also written there. Without copies the weights
            are left as they are.
        CheckpointError: a damaged checkpoint, or one of another run.
        OutputError: a checkpoint that cannot be written, or one in the way of a fresh run.
    """
    config.validate()
    tokens, held_out = Batch.of(samples), None if validation is None else Batch.of(validation)
    check_samples(model, tokens, "samples")
    held_out_note = ""
    if config.early_stop_patience is not None and held_out is None:
        tokens, held_out, held_out_note = hold_out(tokens)
    if held_out is not None:
        check_samples(model, held_out, "validation")
    if resume and checkpoint_dir is None:
        raise ConfigError("resume needs checkpoint_dir, the folder of the interrupted run's checkpoints.")
    check_gradients_fit(model)
    config = decide_memory(config, model)
    if config.memory == "lean":
        check_not_wide(model)
        to_bfloat16(model)
    shards = make_shards(model, config)
    run = _Run(shards, tokens, held_out, config, objective or Objective(), checkpoint_dir, keep_last_good)
    run.report.warnings += [held_out_note] if held_out_note else []
    run.report.warnings += warm_up_warnings(config)
    warn_of_slow_dtype(config.dtype, run.device)
    checkpointing = config.gradient_checkpointing
    with (
        products_in(config.dtype),
        shards.training(),
        training(run.model, run.device, gradient_checkpointing=checkpointing),
        compiled_layers(run.model, config),
    ):
        try:
            return run.execute(resume, description or run.objective.name)
        finally:
            run.objective.teardown(run.model)
            run.release()


@dataclass(eq=False)
class _Run:
    """The state of one call of :func:`train`."""

    shards: Whole
    samples: Batch
    validation: Batch | None
    config: TrainConfig
    objective: Objective
    checkpoint_dir: Path | None
    keep_last_good: bool
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    last_good: dict[str, Tensor] = field(default_factory=dict)
    last_good_step: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)
    best_loss: float = math.inf
    bad_validations: int = 0
    updating: bool = False
    changed: bool = False
    done: bool = False
    in_backward: bool = False

    def __post_init__(self) -> None:
        self.model = self.shards.model
        self.device = next(self.model.parameters()).device
        self.config = decide_dtype(self.config, self.model, self.device)
        self.copies = place_of_copies(self.config, self.device)
        self.keep_last_good = self.keep_last_good and self.copies is not None
        self.report = TrainReport(self.objective.name, computed_in(self.config, self.model))

    def execute(self, resume: bool, description: str) -> TrainReport:
        started = time.monotonic()
        processes.check_same_text(self.samples.digest)
        self.objective.setup(self.model, self.config)
        self._make_optimizer()
        self._restore(resume)
        try:
            self._catch_up()
            with self._backward_context(), StepProgress(description, self.config.steps) as progress:
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

    def release(self) -> None:
        """Drop moments and copies, before weights that were divided come back whole."""
        self.last_good.clear()
        self.best.clear()
        if hasattr(self, "optimizer"):
            self.optimizer.state.clear()

    def _make_optimizer(self) -> None:
        groups = self.shards.groups(self.objective.parameter_groups(self.model, self.config))
        self.peaks = [g.learning_rate for g in groups]
        for group in groups:
            self.parameters.update(group.parameters)
        check_trainable(self.parameters, lean=self.config.memory == "lean")
        own = uses_own_optimizer(self.config, self.device)
        penalties = self.objective.optimizer_penalties(self.model, self.config) if own else {}
        self.optimizer = make_optimizer(groups, self.config, penalties)
        if isinstance(self.optimizer, RegularisedAdamW) and not self._clips_itself():
            self.optimizer.max_tensor_norm = None
        self.in_backward = self.shards.processes == 1 and steps_in_backward(self.config, self.objective)

    def _scales_itself(self) -> bool:
        """Check whether the optimizer scales gradients in its own pass: nothing reads or adds to scaled ones before."""
        return isinstance(self.optimizer, RegularisedAdamW) and not self.objective.reads_gradients()

    def _clips_itself(self) -> bool:
        """Check whether the optimizer also finds the scale of each gradient: it has whole gradients."""
        return self._scales_itself() and self.shards.processes == 1

    def _backward_context(self) -> AbstractContextManager[None]:
        """Make the context of the steps, in which weights are updated inside backward, or after it."""
        if not self.in_backward:
            return nullcontext()
        limit = self.config.max_grad_norm
        clipping: Clipping = "none" if limit is None else "per_tensor"
        return cast(RegularisedAdamW, self.optimizer).stepping_in_backward(clipping=clipping, max_grad_norm=limit)

    def _step(self, step: int) -> None:
        config = self.config
        torch.manual_seed(config.seed * 1_000_003 + step + (self.shards.rank << 40))  # other dropout for other rows
        factor = learning_rate_factor(step, config)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.objective.before_step(self.model, step)
        batch = self.samples[batch_indices(len(self.samples), config.batch_size, step, config.seed)]
        forward_backward = self._step_in_backward if self.in_backward else self._step_after_backward
        forward_backward(batch, step, config.learning_rate * factor)

    def _step_after_backward(self, batch: Batch, step: int, rate: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        for micro, weight in self._micro_batches(batch):
            self._loss(micro, weight, sums).backward()
        self.shards.take_gradients()
        sums = self._total_sums(sums)
        self._check_finite(sums.total_loss(), "loss", step)
        norm, scale = self._clip(step)
        self._remember_last_good(step)
        penalty = self._weight_penalty(step)
        with torch.no_grad():
            self.objective.before_optimizer_step(self.model, step, scale)
        with self._update():
            self._finish_step(step, batch, sums, penalty, norm, rate)

    def _step_in_backward(self, batch: Batch, step: int, rate: float) -> None:
        """Step each weight as soon as its gradient is computed, once the loss is known to be finite."""
        sums = Sums()
        ((micro, weight),) = self._micro_batches(batch)
        loss = self._loss(micro, weight, sums)
        self._check_finite(sums.total_loss(), "loss", step)
        penalty = self._weight_penalty(step)
        self._remember_last_good(step)
        with self._update():
            try:
                loss.backward()
            except FloatingPointError:
                self._check_finite(math.nan, "gradient", step)
            norm = math.sqrt(cast(RegularisedAdamW, self.optimizer).squared_norm)
            self._finish_step(step, batch, sums, penalty, norm, rate)

    def _finish_step(self, step: int, batch: Batch, sums: Sums, penalty: float, norm: float, rate: float) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.objective.after_optimizer_step(self.model, self.optimizer, step, rate)
        parts = {name: float(part) for name, part in sums.parts.items()}
        record = StepRecord(step, float(sums.lm), float(sums.penalty) + penalty, rate, norm, parts)
        self.report.history.append(record)
        self.report.steps = step
        self.report.tokens += batch.token_count()

    def _loss(self, micro: Batch, weight: Weight, sums: Sums) -> Tensor:
        """Return a micro batch's share of the step's loss, differentiable, and add the reported terms to ``sums``."""
        return sums.add(self._terms(micro), weight)

    def _terms(self, micro: Batch) -> LossTerms:
        with autocast(self.config, self.device.type):
            return self.shards.loss(lambda: self.objective.micro_loss(self.model, micro))

    def _total_sums(self, sums: Sums) -> Sums:
        """Return the sums over all processes."""
        if self.shards.processes == 1:
            return sums
        names = sorted(sums.parts)
        total = Sums()
        values = [float(v) for v in (sums.lm, sums.total, sums.penalty, *(sums.parts[name] for name in names))]
        total.lm, total.total, total.penalty, *parts = self.shards.total(values)
        total.parts = dict(zip(names, parts, strict=True))
        return total

    def _weight_penalty(self, step: int) -> float:
        """Add the gradient of the penalty on the weights, and return its value, finite."""
        penalty = self.objective.apply_step_penalty(self.model)
        (value,) = self.shards.total([0.0 if penalty is None else float(penalty)])
        self._check_finite(value, "penalty", step)
        return value

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Batch, Weight]]:
        """Yield the micro batches on the model's device, with the weights of their means in those of ``batch``."""
        predicted, fed = max(1, int(batch.predicted.sum())), max(1, batch.token_count())
        for micro, counts in self.shards.shares(batch, self.config):
            weight = Weight(counts * int(micro.predicted.sum()) / predicted, counts * micro.token_count() / fed)
            yield micro.to(self.device), weight

    def _clip(self, step: int) -> tuple[float, float]:
        """Clip; return the gradients' norm before that, finite, and the factor that is left to the optimizer."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        total = self.shards.norm(gradients)
        norm = float(total)
        self._check_finite(norm, "gradient norm", step)
        limit = self.config.max_grad_norm
        if limit is None:
            return norm, 1.0
        if self.config.memory == "lean":  # which clips each gradient by its own norm
            if not self._clips_itself():
                clip_each_(gradients, self.shards.norms(gradients), limit)
            return norm, 1.0
        factor = clip_factor(norm, limit)
        if self._scales_itself():
            cast(RegularisedAdamW, self.optimizer).gradient_scale = factor
            return norm, factor
        nn.utils.clip_grads_with_norm_(list(self.parameters.values()), limit, total)
        return norm, 1.0

    def _check_finite(self, value: float, what: str, step: int) -> None:
        if math.isfinite(value):
            return
        for name, good in self.last_good.items():
            self.parameters[name].data.copy_(good)
        rate = self.config.learning_rate
        raise TrainingError(
            f"The {what} is {value} at step {step} of {self.config.steps} ({self.objective.name}). The weights "
            f"in memory are {self._weights_state(step, what)}. Lower the learning rate "
            f"(now {rate:g}) or max_grad_norm, or compute in float32.",
            step,
        )

    def _weights_state(self, step: int, what: str) -> str:
        if not self.last_good and self.changed:
            return "those that gave it: no copy of earlier ones was kept"
        restored = f"those after step {self.last_good_step}" if self.last_good_step else "the initial ones"
        proven = "a finite loss" if self.in_backward else "a finite loss and gradient"
        return f"{restored}, the last copy with {proven}{self._write_last_good(step, what)}"

    def _write_last_good(self, step: int, what: str) -> str:
        if self.checkpoint_dir is None:
            return ""
        state = TrainState(
            self.last_good_step,
            {"objective": self.objective.name, "failed_step": step, "reason": f"{what} not finite"},
            {"weights": dict(self.parameters)},
        )
        path = self.shards.save(self.checkpoint_dir, state, name="last-good")
        return f" (written to {path})"

    def _remember_last_good(self, step: int) -> None:
        """Copy the weights that have just given a finite loss, those after ``step - 1``."""
        if not self.keep_last_good or (self.last_good and (step - 1) % self.config.last_good_interval):
            return
        self._copy_to(self.last_good)
        self.last_good_step = step - 1

    def _copy_to(self, kept: dict[str, Tensor]) -> None:
        """Copy the trained weights to the device of copies, into the memory of the earlier copy."""
        for name, parameter in self.parameters.items():
            if name in kept:
                kept[name].copy_(parameter.data)
            else:
                kept[name] = parameter.data.to(self.copies, copy=True)

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Delay Ctrl-C until weights, optimizer and objective agree on the step again."""
        with interrupts_deferred():
            self.updating = self.changed = True
            yield
            self.updating = False

    def _catch_up(self) -> None:
        """Validate first, if the run was interrupted between a step and its validation."""
        validated = self.report.validation[-1][0] if self.report.validation else 0
        if 0 < self.report.steps != validated and not self.done:
            # A fresh objective does not know yet how far its schedule is.
            self.objective.before_step(self.model, self.report.steps)
            if (loss := self._loss_if_due()) is not None:
                self._note_validation(loss)

    def _validate_and_checkpoint(self) -> None:
        loss = self._loss_if_due()  # minutes on large texts: Ctrl-C stops it at once
        with interrupts_deferred():
            if loss is not None:
                self._note_validation(loss)
            step, interval = self.report.steps, self.shards.checkpoint_interval(self.config)
            due = interval is not None and step % interval == 0 and step < self.config.steps
            if due and self.checkpoint_dir is not None:
                self._save(self.checkpoint_dir)

    def _loss_if_due(self) -> float | None:
        step, config = self.report.steps, self.config
        due = step == config.steps or step % config.validation_interval == 0
        return self._validation_loss(self.validation) if self.validation is not None and due else None

    def _note_validation(self, loss: float) -> None:
        step = self.report.steps
        self.report.validation.append((step, loss))
        patience = self.config.early_stop_patience
        if patience is None or not self.objective.allows_early_stop(step):
            return
        if loss < self.best_loss - self.config.early_stop_min_delta:
            self.best_loss, self.bad_validations = loss, 0
            if self.copies is None:
                self.best = {}  # an earlier one, of the run that is continued
            else:
                self._copy_to(self.best)
            self.report.best_step = step
            return
        self.bad_validations += 1
        self.done = self.bad_validations >= patience

    @torch.no_grad()
    def _validation_loss(self, samples: Batch) -> float:
        with evaluation_mode(self.model):
            loss = self.objective.validation_penalty(self.model)
            for micro, weight in self._micro_batches(samples):
                terms = self._terms(micro)
                loss += float(terms.main_loss) * weight.predicted
                if terms.penalty is not None:
                    loss += float(terms.penalty) * weight.fed
        return self.shards.total([loss])[0]

    def _end(self) -> None:
        self.report.stopped = "early_stop" if self.done else "steps"
        self.done = True
        if self.checkpoint_dir is not None:
            self._save(self.checkpoint_dir)
        if self.report.best_step is not None and not self.best:
            self.report.warnings.append(
                f"The weights are those of the last step, not of the best validation (step {self.report.best_step}): "
                "copies is 'off'. Set copies to host or device to get the best ones."
            )
        for name, tensor in self.best.items():
            self.parameters[name].data.copy_(tensor)
        with torch.no_grad():
            self.objective.finish(self.model)

    def _save_after_interruption(self) -> None:
        self.report.stopped = "interrupted"
        alone = self.shards.processes == 1  # others are at other steps, or ended
        if self.checkpoint_dir is None or self.updating or self.report.steps == 0 or not alone:
            return
        try:
            path = self._save(self.checkpoint_dir)
        except OutputError as error:
            _log.warning("%s", error)
            return
        console().print(f"Interrupted after step {self.report.steps}; resume from {path}.", highlight=False)

    def _save(self, folder: Path) -> Path:
        meta = {
            "run": self._run_facts(),
            "stopped": self.report.stopped,
            "tokens": self.report.tokens,
            "history": [asdict(r) for r in self.report.history],
            "validation": self.report.validation,
            "best_step": self.report.best_step,
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "bad_validations": self.bad_validations,
        }
        ended = self.done and self.report.stopped != "interrupted"  # no moments are needed then
        tensors = {
            "weights": cast(dict[str, Tensor], self.parameters),
            "optimizer": {} if ended else _optimizer_tensors(self.optimizer),
            "objective": self.objective.state_dict(),
            "best": self.best,
        }
        return self.shards.save(folder, TrainState(self.report.steps, meta, tensors))

    def _run_facts(self) -> dict[str, Any]:
        """Return the facts that must be equal for a resumed run to be the same run."""
        return {
            "objective": self.objective.name,
            **{f"objective.{k}": v for k, v in self.objective.run_facts().items()},
            **{k: v for k, v in asdict(self.config).items() if k not in _SAME_RESULT},
            "samples_sha256": self.samples.digest(),
            "validation_sha256": None if self.validation is None else self.validation.digest(),
            "parameters": self.shards.size(self.parameters.values()),
        }

    def _restore(self, resume: bool) -> None:
        path = latest_state(self.checkpoint_dir) if self.checkpoint_dir is not None else None
        if self.shards.processes > 1:
            path = processes.from_first(path)
        if path is None:
            return
        if not resume:
            raise OutputError(
                f"{self.checkpoint_dir} already holds the checkpoint {path.name} of a run. Continue it with "
                "resume, or remove it or choose another folder to start over."
            )
        state = self.shards.load(path, lambda meta: check_same_run(path, meta["run"], self._run_facts()))
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"The training checkpoint {path} does not fit this run: {error!r}.") from error

    def _load(self, state: TrainState) -> None:
        weights = state.tensors["weights"]
        for name, parameter in self.parameters.items():
            parameter.data.copy_(weights[name])
        _load_optimizer_tensors(self.optimizer, state.tensors.get("optimizer", {}))
        self.objective.load_state_dict(state.tensors.get("objective", {}))
        self.best = {n: t.to(self.copies) for n, t in state.tensors.get("best", {}).items()}
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
