"""The loss that is left without an expert, after the others were solved to make up for it.

With f_j the output of expert j, h_j the input of its down projection, and g_j its weight under the router of the layer
without expert i and those that went before it,

    L_i = min over D of  || Y - sum_j g_j f_j - sum_j g_j (h_j Q_j) D_j ||^2  +  ridge * || D ||^2

Y is what the experts of the dense layer add to the same tokens, each of which reads as many as in the dense model. The
expert of the smallest L_i goes, and then the next one. Q_j are main directions of h_j, so that all experts together
have :data:`INPUTS` inputs; Y and f_j are taken along :data:`OUTPUTS` random directions of more. D is solved on one half
of the sequences, and L_i is measured on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.cut.least_squares import NormalEquations
from pyprune.errors import DataError
from pyprune.families.mixtures import experts_read
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.experts import RankedOptions
from pyprune.methods.experts._choice import Choice, in_turn
from pyprune.methods.layers._units import layer_runner, micro_batches
from pyprune.probe.activations import frozen_eval
from pyprune.probe.experts import ExpertSums, expert_inner, expert_modules, expert_output
from pyprune.probe.routers import close_experts, routers
from pyprune.probe.streams import replaced_forwards
from pyprune.runtime.progress import track

TOKENS = 4096
"""Most tokens that are read, of sequences that are evenly spaced in the text."""
INPUTS = 512
"""Inputs of all experts of a layer together that are solved."""
OUTPUTS = 512
"""Most outputs that are solved for."""
RIDGE = 0.1
"""Relative to the mean of the diagonal of the inputs' products."""
ROUNDS = 8
"""Most times that the losses of a layer are computed; where more experts go, several go at a time."""


@torch.no_grad()
def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN, /) -> PlanDecision:
    """Remove the experts that the others can best replace, layer by layer.

    Raises:
        ConfigError: the model has no experts, or the goal cannot be reached.
        DataError: fewer than two sequences.
        UnsupportedModelError: the experts show no tokens that each of them reads.
    """
    choice = Choice.of(model, request)
    local, notes = choice.local_counts()
    ranked = own_options(request, RankedOptions).ranking == "global"
    counts = choice.most() if ranked else local
    if len(samples) < 2:
        raise DataError(f"{request.method} judges experts on text that it does not solve on; give two samples.")
    many = min(len(samples), max(2, TOKENS // samples.shape[1]))
    chosen = torch.linspace(0, len(samples) - 1, many).round().long()
    runner = layer_runner(model, run)
    batches = micro_batches(runner.model, samples[chosen], request.method)
    experts, modules = expert_modules(runner.model), dict(routers(runner.model))
    removed: dict[int, list[int]] = {}
    losses: dict[int, Tensor] = {}
    sums: dict[int, ExpertSums] = {}
    with frozen_eval(runner.model):
        streams = [runner.embed(batch) for batch in batches]
        for index in track(range(len(runner.layers)), "replacing experts"):
            with runner.layer(index) as layer:
                if index not in experts:
                    runner.run_(layer, runner.whole_layer(index), streams)
                    continue
                mixture = Mixture(runner.model, experts[index], modules[index], run.dense_experts)
                with mixture.recording():
                    runner.run_(layer, runner.whole_layer(index), streams)
                losses[index], removed[index] = mixture.remove(counts[index], choice.groups, samples.shape[1])
                sums[index] = mixture.sums
    if ranked:
        removed = choice.shortest(removed, losses, local)
    return choice.decision_of(removed, notes, losses, sums)


class _WeightsRead(Exception):
    """Ends a block whose router has chosen: a shared expert would take most of the time of a choice."""


class Mixture:
    """The experts of one layer and what they read on some text.

    Args:
        model: whose layer has its weights.
        experts: name of the module of the experts.
        router: the module that holds the matrix of the router.
        dense_experts: experts that a token of the dense model reads; None = as many as the configuration says.

    Attributes:
        sums: over the tokens of each expert.
    """

    def __init__(
        self, model: PreTrainedModel, experts: str, router: nn.Module, dense_experts: int | None = None
    ) -> None:
        self.sums = ExpertSums()
        self._experts: Any = model.get_submodule(experts)
        self._block = model.get_submodule(experts.rpartition(".")[0])
        self._router = router
        self._reading_all = partial(experts_read, model.config, self._block, dense_experts)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._inputs: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of the block, and what the experts read, meanwhile."""

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._calls.append((args, kwargs))

        def read(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.sums(module, args)
            self._inputs.append(args[0].flatten(0, -2))

        handles = [self._block.register_forward_pre_hook(keep, with_kwargs=True)]
        handles.append(self._experts.register_forward_pre_hook(read))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def remove(self, count: int, groups: int, length: int) -> tuple[Tensor, list[int]]:
        """Return the loss without each expert, when it was last computed, and those that go, in order.

        Args:
            count: how many go.
            groups: into which the router divides them, and each of which loses as many.
            length: tokens of a sequence.
        """
        replacement = self._replacement(length)
        total = len(self._experts.down_proj)
        losses, gone = torch.zeros(total, dtype=torch.float64), list[int]()
        step = -(-count // ROUNDS // groups) * groups or groups
        while len(gone) < count:
            left = [expert for expert in range(total) if expert not in gone]
            for expert in left:
                losses[expert] = replacement.loss(self._weights([*gone, expert]), [e for e in left if e != expert])
            gone += in_turn(left, losses.tolist(), groups)[: min(step, count - len(gone))]
        return losses, gone

    def _replacement(self, length: int) -> Replacement:
        """Return what the experts make of all tokens, whether they read them or not."""
        x = torch.cat(self._inputs)
        generator = torch.Generator(x.device).manual_seed(0)
        total, hidden = len(self._experts.down_proj), x.shape[1]
        sketch = torch.randn(hidden, OUTPUTS, generator=generator, device=x.device) / math.sqrt(OUTPUTS)
        inner, outputs = [], []
        for expert in range(total):
            h = expert_inner(self._experts, expert, x).float()
            size = h.shape[1], min(h.shape[1], max(1, INPUTS // total))
            start = torch.randn(size, generator=generator, device=x.device)
            directions, _ = torch.linalg.qr(h.T @ (h @ start))
            inner.append(h @ directions)
            out = expert_output(self._experts, expert, x).float()
            outputs.append(out @ sketch if hidden > OUTPUTS else out)
        solves = torch.arange(len(x), device=x.device) // length % 2 == 0
        with self._reading_all():
            dense = self._weights(())
        return Replacement(torch.stack(inner, 1), torch.stack(outputs, 1), dense, solves)

    def _weights(self, removed: Sequence[int]) -> Tensor:
        """Return the weight of every expert for every token without the removed ones, float32 [tokens, experts]."""
        calls: list[tuple[Tensor, ...]] = []

        def read(*args: Tensor) -> Tensor:
            calls.append(args)
            raise _WeightsRead

        total = len(self._experts.down_proj)
        close_experts(self._router, removed, total)
        try:
            with replaced_forwards({self._experts: read}):
                for args, kwargs in self._calls:
                    with suppress(_WeightsRead):
                        self._block(*args, **kwargs)
        finally:
            close_experts(self._router, (), total)
        chosen, weights = (torch.cat([call[i] for call in calls]) for i in (1, 2))
        return torch.zeros(len(chosen), total, device=chosen.device).scatter_add_(1, chosen, weights.float())


class Replacement:
    """Solves experts for what the dense layer gives, by weights of a router without some of them.

    Args:
        inner: float32 [tokens, experts, inputs that are solved], of the down projections.
        outputs: float32 [tokens, experts, outputs].
        dense: the weights of the dense layer, float32 [tokens, experts].
        solves: bool [tokens]; the others judge.
    """

    def __init__(self, inner: Tensor, outputs: Tensor, dense: Tensor, solves: Tensor) -> None:
        self._inner, self._outputs, self._solves = inner, outputs, solves
        self._target = self._sum(dense)

    def loss(self, weights: Tensor, kept: Sequence[int]) -> float:
        """Return the squared error that solved experts leave, relative to the dense layer's output.

        Args:
            weights: of every expert, float32 [tokens, experts].
            kept: the experts that are solved.
        """
        x = (weights[:, kept, None] * self._inner[:, kept]).flatten(1)
        rest = self._target - self._sum(weights)
        equations = NormalEquations(x.new_zeros(x.shape[1], rest.shape[1]), constant=False)
        equations.add(x[self._solves], rest[self._solves])
        solution, judges = equations.solve(RIDGE), ~self._solves
        left = rest[judges] if solution is None else rest[judges] - x[judges] @ solution.to(x.dtype)
        size = self._target[judges].square().sum(dtype=torch.float64)
        return float(left.square().sum(dtype=torch.float64) / size.clamp(min=1e-12))

    def _sum(self, weights: Tensor) -> Tensor:
        """Return the sum of the experts' outputs with these weights, [tokens, outputs]."""
        return torch.einsum("te,teo->to", weights, self._outputs)
