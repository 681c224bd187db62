"""LoRAPrune: the Taylor score with a gradient that LoRA factors give for free (Zhang et al. 2023).

Adapters B [out, r] and A [r, in] of every open projection are trained on the calibration text; the gradient of its
frozen weight is never computed. A step of size 1 on both factors changes their product by

    g = gB A + B gA - gB gA      (gA and gB are the gradients of A and B).

This replaces the gradient of W (the paper's LoRA-guided criterion). A step's element score is ((W + scale B A) g)^2.
The authors' code takes the absolute value instead and divides each module's scores by their norm; this module does not.
A moving average joins the steps: I <- momentum I + (1 - momentum) I_t. Elements are summed to structures within the
step, and the average is taken of the sums, which gives the same result and keeps no matrix after a step. At the first
step B is 0, so that g = scale G A^T A, the gradient G seen through a random A; B grows with the steps.

The factors are dropped afterwards and the model is unchanged (LoRAPrune itself keeps them: use a recovery instead). In
later rounds of an iterative run the factors are held at zero in the rows and columns that earlier rounds removed.
Vectors (biases, norms), the embedding and the head have no factors and do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.errors import DataError
from pyprune.families import NamedParam
from pyprune.methods.base import own_options
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score._structures import LayerAxis, StructureScores
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.loraprune import LoraPruneOptions
from pyprune.train.loop import train
from pyprune.train.lora import adapters
from pyprune.train.objective import Objective


def score(run: Scoring) -> None:
    """Train LoRA factors on the samples and add the moving average of their steps' scores.

    Raises:
        DataError: there is no calibration sample.
        MissingDependencyError: PEFT is not installed.
        TrainingError: a loss or gradient is not finite.
        UnsupportedModelError: the model is a mixture of experts.
    """
    if not run.samples.numel():
        raise DataError("loraprune trains factors on calibration text; give samples.")
    run.request.family.refuse_experts("loraprune", run.request.identity.dense.layers)
    config = own_options(run.request, LoraPruneOptions)
    projections = _projections(run)
    lora = RecoverConfig(rank=config.rank, alpha=config.alpha, dropout=config.dropout, train=config.train)
    objective = GuidedTraining(run, projections, config)
    with measure_memory(run) as account, adapters(run.model, list(projections), lora) as adapted:
        try:
            # Weights, gradients and both moments of the factors are held through all steps.
            account.state = 4 * sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
            # Full memory for the factors alone: the model's weights are frozen.
            training = replace(config.train, memory="full")
            report = train(
                adapted, run.samples, training, objective, keep_last_good=False, description="LoRAPrune's factors"
            )
        finally:
            adapted.unload()
    for (layer, axis), modules in objective.average.items():
        for module, values in modules.items():
            run.add_units(layer, axis, values, part=module)
    run.details |= {"losses": report.losses, "steps": report.steps, "projections": len(projections)}


def guided_gradient(a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> Tensor:
    """Return ``gB A + B gA - gB gA``: the decrease of B A when both factors step against their gradients.

    Args:
        a: A, [r, in].
        b: B, [out, r].
        grad_a: gradient of A, [r, in].
        grad_b: gradient of B, [out, r].

    Returns:
        [out, in].
    """
    # (gB)(A - gA) + B gA: two products instead of three.
    return grad_b @ (a - grad_a) + b @ grad_a


def _projections(run: Scoring) -> dict[str, NamedParam]:
    """Return module name -> weight of every open linear projection of the layers."""
    weights = {p.name.rpartition(".")[0]: p for p in run.open_params if p.layer is not None and not p.row.is_bias}
    return {name: p for name, p in weights.items() if isinstance(run.model.get_submodule(name), nn.Linear)}


class GuidedTraining(Objective):
    """Plain language-model training of the factors that reads their gradients."""

    name = "loraprune"

    def __init__(self, run: Scoring, projections: Mapping[str, NamedParam], config: LoraPruneOptions) -> None:
        self.run = run
        self.projections = projections
        self.momentum = config.momentum
        self.average: dict[LayerAxis, dict[str, Tensor]] = {}

    @override
    def run_facts(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    @override
    def setup(self, model: nn.Module, config: TrainConfig) -> None:
        with torch.no_grad():
            self._hold_removed_at_zero()

    @override
    def before_optimizer_step(self, model: nn.Module, step: int, gradient_scale: float) -> None:
        now = StructureScores(self.run.scope, self.run.score.aggregation)
        for module, param in self.projections.items():
            a, b, scale = self._factors(module)
            if a.grad is None or b.grad is None:
                raise RuntimeError(f"The factors of {module} got no gradient. This is a bug.")
            guided = guided_gradient(a, b, a.grad * gradient_scale, b.grad * gradient_scale)
            weight = param.parameter.detach().to(guided.dtype) + scale * (b @ a)
            now.add_elements(param, guided.mul_(weight).square_())
        self._join(now)

    @override
    def after_optimizer_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, learning_rate: float
    ) -> None:
        self._hold_removed_at_zero()

    def _join(self, now: StructureScores) -> None:
        for place, modules in now.sums.items():
            held = self.average.setdefault(place, {})
            for module, values in modules.items():
                before = held[module] * self.momentum if module in held else 0.0
                held[module] = before + values * (1 - self.momentum)

    def _factors(self, module: str) -> tuple[Tensor, Tensor, float]:
        """Return (A [r, in], B [out, r], scale) of an adapted module."""
        adapted: Any = self.run.model.get_submodule(module)
        return adapted.lora_A["default"].weight, adapted.lora_B["default"].weight, adapted.scaling["default"]

    def _hold_removed_at_zero(self) -> None:
        if not self.run.masked:
            return
        for module, param in self.projections.items():
            a, b, _ = self._factors(module)
            gone = param.parameter == 0
            b[gone.all(1)] = 0.0
            a[:, gone.all(0)] = 0.0
