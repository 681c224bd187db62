"""Gradients of the language-model loss at changed weights, one decoder layer in memory at a time.

The forward pass runs every layer with its changed weights without recording a graph and keeps only the layer's input.
The backward pass makes the same weights once more, layer by layer from the last to the first open one, and hands each
gradient over as soon as it exists: beside the model, what is held is one layer's changed weights and gradients, every
layer's input [B, T, H] and the logits. Open parameters outside of the layers (hidden axis: embedding, final norm,
head) are changed for the whole pass. Layers before the first open one are run as they are and never differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyprune.errors import DataError
from pyprune.families import NamedParam
from pyprune.methods.score.base import Scoring
from pyprune.probe.activations import still
from pyprune.train.loss import causal_loss

Weights = Callable[[NamedParam, int], Tensor]
"""(parameter, draw) -> the values at which the gradient is taken: shape and dtype of the parameter, no graph. Asked
twice a pass, and must give the same values both times."""

Consume = Callable[[NamedParam, Tensor, bool], None]
"""(parameter, part of its gradient, whether this is its last part); the parts of a parameter sum to the mean gradient
over samples and draws. When the last part of a parameter comes, its values are not asked for any more."""


@dataclass(frozen=True)
class GradientReport:
    """How a mean gradient was taken.

    Attributes:
        loss: mean loss over samples and draws at the changed weights, nats a token.
        passes: forward and backward passes.
        layerwise: whether one layer was held at a time; otherwise the changed weights and gradients of all open
            parameters were.
    """

    loss: float
    passes: int
    layerwise: bool


def own_values(param: NamedParam, draw: int) -> Tensor:
    """The values as they are: :data:`Weights` that change nothing."""
    return param.parameter.detach()


class Summed:
    """A consumer that wants whole gradients: sums the parts of each parameter and passes the sum on.

    Holds nothing while there is one part a parameter, else the sums of all parameters whose last part is to come.
    """

    def __init__(self, consume: Callable[[NamedParam, Tensor], None]) -> None:
        self.consume = consume
        self.held: dict[str, Tensor] = {}

    def __call__(self, param: NamedParam, part: Tensor, last: bool) -> None:
        held = self.held.pop(param.name, None)
        total = part if held is None else held.add_(part)
        if last:
            self.consume(param, total)
        else:
            self.held[param.name] = total


def take_gradients(
    run: Scoring, weights: Weights, consume: Consume, *, draws: int = 1, per_sample: bool = False
) -> GradientReport:
    """Take the mean gradient over the samples and ``draws`` changed weights of all open parameters.

    Args:
        run: model, samples [N, T], options (``score.batch_size``, ``score.layerwise``) and open parameters.
        weights: the changed weights.
        consume: gets the gradients; float32 (float64 for float64 models), whatever the model's dtype.
        draws: how many changed weights to average over.
        per_sample: one part a sample, each divided by the number of samples.

    Raises:
        DataError: there is no sample.
    """
    samples = run.samples.to(run.model.device)
    if not samples.numel():
        raise DataError(f"{run.request.method} reads gradients on calibration text; give samples.")
    batches = samples.split(run.score.batch_size or len(samples))
    passes = [(draw, batch) for draw in range(draws) for batch in batches]
    layerwise = run.score.layerwise
    loss = 0.0
    with still(run.model):
        for number, (draw, batch) in enumerate(passes):
            share = len(batch) / (len(samples) * draws)
            one = _Pass(run, lambda p, d=draw: weights(p, d), consume, number == len(passes) - 1, per_sample)  # type: ignore[misc]
            try:
                loss += one.layerwise(batch, share) if layerwise else one.whole(batch, share)
            except _NotLayerwiseError:
                layerwise = False
                loss += one.whole(batch, share)
    return GradientReport(loss, len(passes), layerwise)


class _NotLayerwiseError(Exception):
    """A layer is not a function from hidden states to hidden states."""


class _Pass:
    """One forward and backward pass over one batch at one draw of the weights."""

    def __init__(
        self, run: Scoring, weights: Callable[[NamedParam], Tensor], consume: Consume, last: bool, per_sample: bool
    ) -> None:
        self.model = run.model
        self.family = run.request.family
        self.layers = self.family.layers(run.model)
        self.weights = weights
        self.consume = consume
        self.last = last
        self.per_sample = per_sample
        self.opened: dict[int | None, list[NamedParam]] = {}
        for param in run.opened:
            self.opened.setdefault(param.layer, []).append(param)

    def leaves(self, params: Sequence[NamedParam], *, graph: bool = True) -> dict[str, Tensor]:
        """Changed weights by parameter name."""
        return {p.name: self.weights(p).detach().requires_grad_(graph) for p in params}

    def hand_over(self, params: Sequence[NamedParam], parts: Sequence[Tensor], last: bool) -> None:
        """Give one part of each parameter's gradient away."""
        for param, part in zip(params, parts, strict=True):
            wide = part if part.dtype == torch.float64 else part.float()
            self.consume(param, wide, last)

    def whole(self, batch: Tensor, share: float) -> float:
        """Differentiate with respect to all open parameters at once."""
        params = [p for group in self.opened.values() for p in group]
        rows = batch.split(1) if self.per_sample else (batch,)
        loss = 0.0
        for number, part in enumerate(rows):
            leaves = self.leaves(params)
            value = causal_loss(_AtWeights(self.model, leaves), part) * (share * len(part) / len(batch))
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            loss += float(value.detach())
            del leaves, value
            self.hand_over(params, grads, self.last and number == len(rows) - 1)
        return loss

    def layerwise(self, batch: Tensor, share: float) -> float:
        """Differentiate one layer at a time."""
        outer = self.opened.get(None, [])
        first = 0 if outer else min(layer for layer in self.opened if layer is not None)
        if self.per_sample and outer:
            return self._per_row(batch, share)
        leaves = self.leaves(outer)
        with self._segments(first):
            at = _AtWeights(self.model, leaves) if leaves else self.model
            loss = causal_loss(at, batch) * share
            loss.backward()
        self.hand_over(outer, [cast(Tensor, leaf.grad) for leaf in leaves.values()], self.last)
        return float(loss.detach())

    def _per_row(self, batch: Tensor, share: float) -> float:
        """Outer parameters see all rows at once, so that parts a sample need a pass a sample."""
        loss, last = 0.0, self.last
        self.per_sample = False
        for number, row in enumerate(batch.split(1)):
            self.last = last and number == len(batch) - 1
            loss += self.layerwise(row, share / len(batch))
        self.last, self.per_sample = last, True
        return loss

    @contextmanager
    def _segments(self, first: int) -> Iterator[None]:
        """Let the layers from ``first`` on keep their input only."""
        anchor = torch.zeros((), requires_grad=True, device=self.model.device)
        segments = [_Segment(self, layer, i) for i, layer in enumerate(self.layers) if i >= first]
        for segment in segments:
            segment.patch(anchor)
        try:
            yield
        finally:
            for segment in segments:
                segment.restore()


class _AtWeights(nn.Module):
    """A model with some parameters replaced, by name."""

    def __init__(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.leaves = dict(leaves)

    def forward(self, **kwargs: Any) -> Any:
        return functional_call(self.model, self.leaves, kwargs=kwargs)


class _Plain(nn.Module):
    """A layer called by its class's own forward, past whatever the instance was patched with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, hidden, **kwargs)


class _Segment:
    """One decoder layer that is run twice: without a graph forwards, with one backwards."""

    def __init__(self, owner: _Pass, layer: nn.Module, index: int) -> None:
        self.owner = owner
        self.layer = layer
        self.plain = _Plain(layer)
        self.params = owner.opened.get(index, [])
        prefix = f"{owner.family.layers_path}.{index}."
        self.names = {p.name: "layer." + p.name.removeprefix(prefix) for p in self.params}

    def patch(self, anchor: Tensor) -> None:
        """Route the layer's calls through :class:`_Replay`; ``anchor`` makes its output differentiable."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            named = dict(kwargs)
            hidden = args[0] if args else named.pop("hidden_states", None)
            if len(args) > 1 or not isinstance(hidden, Tensor):
                raise _NotLayerwiseError
            return cast(Tensor, _Replay.apply(hidden, anchor, self, named))

        self.layer.forward = forward

    def restore(self) -> None:
        """Undo :meth:`patch`."""
        self.layer.__dict__.pop("forward", None)

    def run(self, leaves: Mapping[str, Tensor], hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """The layer's output [B, T, H] at changed weights."""
        named = {self.names[name]: leaf for name, leaf in leaves.items()}
        output = functional_call(self.plain, named, (hidden,), dict(kwargs))
        if not isinstance(output, Tensor):
            raise _NotLayerwiseError
        return output

    def backward(self, hidden: Tensor, kwargs: Mapping[str, Any], grad: Tensor, wanted: bool) -> Tensor | None:
        """Hand the layer's gradients over and return that of its input (None unless ``wanted``)."""
        owner = self.owner
        single = owner.per_sample and self.params
        parts = [slice(i, i + 1) for i in range(len(hidden))] if single else [slice(None)]
        before: list[Tensor] = []
        leaves = owner.leaves(self.params)
        for number, part in enumerate(parts):
            given = hidden[part].detach().requires_grad_(wanted)
            with torch.enable_grad():
                output = self.run(leaves, given, _rows_of(kwargs, part, len(hidden)))
            inputs = [*([given] if wanted else []), *leaves.values()]
            grads = torch.autograd.grad(output, inputs, grad[part], materialize_grads=True)
            if wanted:
                before.append(grads[0])
            del output, given
            last = number == len(parts) - 1
            if last:
                leaves, inputs = {}, []
            owner.hand_over(self.params, grads[1:] if wanted else grads, owner.last and last)
        return torch.cat(before) if wanted else None


def _rows_of(value: Any, part: slice, batch: int) -> Any:
    """The same rows of every batched tensor in a layer's keyword arguments (masks, position embeddings)."""
    if part == slice(None):
        return value
    if isinstance(value, Mapping):
        return {k: _rows_of(v, part, batch) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows_of(v, part, batch) for v in value)
    batched = isinstance(value, Tensor) and value.dim() > 1 and len(value) == batch
    return value[part] if batched else value


class _Replay(torch.autograd.Function):
    """Forward without a graph; backward runs the layer again. What checkpointing does, with changing weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, segment: _Segment, kwargs: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.segment, ctx.kwargs = segment, kwargs
        ctx.autocast = torch.is_autocast_enabled(hidden.device.type)
        return segment.run(segment.owner.leaves(segment.params, graph=False), hidden, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (hidden,) = ctx.saved_tensors
        kind = hidden.device.type
        # Devices run backward in a thread of their own, which does not know of autocast.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=ctx.autocast):
            return ctx.segment.backward(hidden, ctx.kwargs, grad, ctx.needs_input_grad[0]), None, None, None
