"""Relative noise, and T steps on the displacement: shared by MoreauPruner, MoreauPruner-GS and SmoothGrad.

Algorithm 1 and appendix B.2 of the paper, for delta = w - w0 instead of w:

    g      = mean over m draws of grad f(w0 + delta + z),   z ~ N(0, (sigma |w0 + delta|)^2) elementwise
    delta <- (1 - gamma/rho) delta - gamma g
    GS:  delta <- GroupSoftThreshold_{gamma eta}(delta), a group being a row of a matrix (one channel)
    I      = |delta w0| / rho

Iterating on w itself would lose the scores: in bfloat16 or float16 the steps are far below the spacing of numbers at w,
and nearly every w - w0 is exactly zero. delta is float32 (float64 for float64 models) whatever the model's dtype. For a
model on disk it is stored in memory-mapped files, so that only one layer's need be in memory at a time. Theorem 1 of
the paper assumes isotropic noise, N(0, sigma^2 I); it does not cover the noise of the experiments, which is relative to
each weight.

The noise of a parameter is never stored: it is numbered by (draw, position), and computed again from the seed in the
forward and in the backward pass. Parameters that own no open structure remain at w0 without noise: everything outside
of the open layers, and norms, unless the hidden axis is open. In later rounds of an iterative run exactly zero weights
remain zero.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pyprune.errors import ScoreError
from pyprune.families import NamedParam
from pyprune.methods.base import own_options
from pyprune.methods.score._gradients import GradientReport, GradientSum, take_gradients
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.moreau import MoreauOptions
from pyprune.methods.score.smoothgrad import SmoothGradOptions
from pyprune.ops import moreau_step, perturb
from pyprune.ops.moreau_step import StepSums

RECENT = 10
"""Number of the last steps from which oscillation is detected."""
USUAL_RISES = 2
"""Number of them that may raise the residual; of steps that are too long, 3 to 7 were seen to raise it."""


def wide_dtype(param: NamedParam) -> torch.dtype:
    """Return the dtype of a parameter's displacement: float32 (float64 for float64)."""
    return torch.float64 if param.parameter.dtype == torch.float64 else torch.float32


class Noise:
    """Noisy weights of the open parameters; the normals of all parameters and draws are disjoint.

    Args:
        open_params: the open parameters, in the model's order.
        sigma: standard deviation relative to the weight.
        seed: seed of the noise.
    """

    def __init__(self, open_params: tuple[NamedParam, ...], sigma: float, seed: int) -> None:
        self.sigma = sigma
        self.seed = seed
        self.starts: dict[str, int] = {}
        self.total = 0
        for param in open_params:
            self.starts[param.name] = self.total
            self.total += param.parameter.numel()

    @torch.no_grad()
    def weights(self, param: NamedParam, delta: Tensor | None, draw: int) -> Tensor:
        """Return ``w + sigma |w| z`` with ``w = w0 + delta``, in the parameter's dtype and shape.

        Args:
            param: an open parameter.
            delta: its displacement, float32 or float64; None is zero.
            draw: number of the draw, counted through all steps.
        """
        w0 = param.parameter.detach()
        if delta is None:
            moved = torch.zeros_like(w0, dtype=wide_dtype(param), memory_format=torch.contiguous_format)
        else:
            moved = delta.to(w0.device)
        w0 = w0.to(moved.dtype)
        offset = draw * self.total + self.starts[param.name]
        out = moved if delta is None else None
        return perturb(w0, moved, self.sigma, self.seed, offset, out=out).to(param.parameter.dtype)


@dataclass
class Descent:
    """The state of the T steps.

    Attributes:
        deltas: parameter name -> displacement.
        losses: mean loss at the noisy weights of each step.
        residuals: after each step, rho/gamma |step| / |delta| over all parameters together. Without the group norm
            the step is -gamma/rho (delta + rho g). The residual is then the distance to the minimiser of the envelope,
            delta = -rho g, relative to delta, whatever the step size.
    """

    config: MoreauOptions
    noise: Noise
    deltas: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, run: Scoring) -> Descent:
        """Return zero displacements of every open parameter; in files if the weights are in files."""
        config = own_options(run.request, MoreauOptions)
        zeros = partial(torch.zeros, device=run.device) if run.stored is None else run.stored.zeros
        deltas = {p.name: zeros(p.parameter.shape, dtype=wide_dtype(p)) for p in run.open_params}
        return cls(config, Noise(run.open_params, config.sigma, config.seed), deltas)

    def step(self, run: Scoring, number: int) -> GradientReport:
        """Take one step of Algorithm 1 on every open parameter, each as soon as its gradient exists."""
        config = self.config
        first_draw = number * config.draws if config.redraw else 0
        sums: list[StepSums] = []

        def weights(param: NamedParam, draw: int) -> Tensor:
            return self.noise.weights(param, self.deltas[param.name], first_draw + draw)

        def advance(param: NamedParam, grad: Tensor) -> None:
            if run.masked:
                grad = grad.masked_fill(param.parameter == 0, 0.0)
            delta = self.deltas[param.name]
            moved = delta.to(grad.device)
            sums.append(moreau_step(moved, grad, config.gamma, config.rho, config.group_weight, axis=0))
            if moved is not delta:
                delta.copy_(moved)

        report = take_gradients(run, weights, GradientSum(advance), draws=config.draws)
        if not math.isfinite(report.loss):
            raise ScoreError(
                f"The loss at the noisy weights is {report.loss} in step {number + 1}: "
                f"use a smaller {run.request.method}.gamma or {run.request.method}.sigma, or dtype float32."
            )
        # Read the sums once at the end: earlier reads would wait for a GPU at every parameter.
        moved, size = sum(float(s.moved) for s in sums), sum(float(s.size) for s in sums)
        self.losses.append(report.loss)
        self.residuals.append(config.rho / config.gamma * math.sqrt(moved / size) if size else 0.0)
        return report

    @property
    def rises(self) -> int:
        """Return how many of the last steps raised the residual."""
        recent = self.residuals[-RECENT - 1 :]
        return sum(after > before for before, after in itertools.pairwise(recent))

    @property
    def has_converged(self) -> bool:
        """Check whether the last step was within the tolerance."""
        tolerance = self.config.tolerance
        return tolerance is not None and bool(self.residuals) and self.residuals[-1] < tolerance


def score_by_descent(run: Scoring) -> None:
    """Add I = |delta_T w0| / rho of every open parameter."""
    config = own_options(run.request, MoreauOptions)
    with measure_memory(run) as account:
        descent = Descent.start(run)
        for number in range(config.steps):
            report = descent.step(run, number)
            account.gradients(report, copies=1 if report.passes == 1 else 2, changed=True)
            if descent.has_converged:
                break
    for param in run.open_params:
        run.add(param, descent.deltas.pop(param.name).to(run.device) / config.rho)
    if run.stored is not None:
        run.note(
            "The displacements of all open weights were stored in memory-mapped files; the peak counts the pages that "
            "the system kept in memory."
        )
    run.details |= {"losses": descent.losses, "residuals": descent.residuals, "steps": len(descent.residuals)}
    if config.tolerance is not None and not descent.has_converged:
        advice = _advice(descent, run.request.method)
        run.warn(
            f"The displacement did not converge: after {config.steps} steps the optimality condition is still off by "
            f"{descent.residuals[-1]:.2%} of its norm (tolerance {config.tolerance:.2%}). {advice}"
        )


def _advice(descent: Descent, method: str) -> str:
    if descent.config.redraw:
        return f"Set {method}.redraw to false, because new noise never converges, and use more {method}.steps."
    if descent.rises > USUAL_RISES:
        return (
            f"{descent.rises} of the last {RECENT} steps led away from it, so they are too long for the loss's "
            f"curvature: use a smaller {method}.gamma, or a smaller {method}.rho, whose minimiser is closer."
        )
    return f"Use more {method}.steps or a larger {method}.gamma."


def score_by_smooth_gradient(run: Scoring) -> None:
    """Add |mean over m draws of grad f(w0 + z) * w0| of every open parameter."""
    config = own_options(run.request, SmoothGradOptions)
    noise = Noise(run.open_params, config.sigma, config.seed)
    with measure_memory(run) as account:
        report = take_gradients(
            run, lambda param, draw: noise.weights(param, None, draw), GradientSum(run.add), draws=config.draws
        )
        account.gradients(report, copies=0 if report.passes == 1 else 1, changed=True)
    run.details |= {"loss": report.loss, "draws": config.draws}
