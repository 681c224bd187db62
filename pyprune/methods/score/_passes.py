"""One pass over a batch: the model forwards and backwards at changed weights, and a decoder layer by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyprune.families import NamedParam
from pyprune.methods.score.base import Scoring
from pyprune.train.loss import causal_loss

Weights = Callable[[NamedParam, int], Tensor]
"""(parameter, draw) -> the values at which the gradient is taken: shape and dtype of the parameter, no graph. Asked
twice a pass or more often, and must give the same values each time."""

Consume = Callable[[NamedParam, Tensor, bool], None]
"""(parameter, part of its gradient, whether this is its last part); the parts of a parameter sum to the mean gradient
over samples and draws. When the last part of a parameter comes, its values are not asked for any more."""


class NotLayerwiseError(Exception):
    """A layer is not a function from hidden states to hidden states."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over one batch at one draw of the weights.

    Attributes:
        run: the open parameters, and the model where it is in memory.
        batch: token ids, int64 [B, T], on the run's device.
        share: of the batch in the mean loss, in (0, 1].
        weights: the values at which gradients are taken.
        consume: gets the gradients.
        last: whether no pass comes after this one.
        per_sample: one part a sample; where parameters outside of the layers are open, which see all rows at once, of
            a batch of one.
    """

    run: Scoring
    batch: Tensor
    share: float
    weights: Callable[[NamedParam], Tensor]
    consume: Consume
    last: bool
    per_sample: bool

    @cached_property
    def opened(self) -> dict[int | None, list[NamedParam]]:
        """The open parameters of each layer, and under None those outside of the layers."""
        found: dict[int | None, list[NamedParam]] = {}
        for param in self.run.opened:
            found.setdefault(param.layer, []).append(param)
        return found

    @property
    def outer(self) -> list[NamedParam]:
        """The open parameters outside of the layers."""
        return self.opened.get(None, [])

    @property
    def first(self) -> int:
        """The first layer that is differentiated."""
        return 0 if self.outer else min(layer for layer in self.opened if layer is not None)

    def leaves(self, params: Sequence[NamedParam], *, graph: bool = True) -> dict[str, Tensor]:
        """Changed weights by parameter name."""
        return {p.name: self.weights(p).detach().requires_grad_(graph) for p in params}

    def hand_over(self, params: Sequence[NamedParam], parts: Sequence[Tensor], last: bool) -> None:
        """Give one part of each parameter's gradient away."""
        for param, part in zip(params, parts, strict=True):
            wide = part if part.dtype == torch.float64 else part.float()
            self.consume(param, wide, last)

    def whole(self) -> float:
        """Differentiate with respect to all open parameters at once; return the share of the loss."""
        params = [p for group in self.opened.values() for p in group]
        rows = self.batch.split(1) if self.per_sample else (self.batch,)
        loss = 0.0
        for number, part in enumerate(rows):
            leaves = self.leaves(params)
            one = replace(self, batch=part, share=self.share * len(part) / len(self.batch))
            value = one.loss(self.run.model, leaves)
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            loss += float(value.detach())
            del leaves, value
            self.hand_over(params, grads, self.last and number == len(rows) - 1)
        return loss

    def layerwise(self) -> float:
        """Differentiate one layer at a time; return the share of the loss."""
        leaves = self.leaves(self.outer)
        with self._segments():
            loss = self.loss(self.run.model, leaves)
            loss.backward()
        self.hand_over(self.outer, [cast(Tensor, leaf.grad) for leaf in leaves.values()], self.last)
        return float(loss.detach())

    def loss(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> Tensor:
        """The batch's share of the mean loss of a model, some of whose parameters are replaced, by name."""
        return causal_loss(_AtWeights(model, leaves) if leaves else model, self.batch) * self.share

    @contextmanager
    def _segments(self) -> Iterator[None]:
        """Let the layers from the first differentiated one on keep their input only."""
        model = self.run.model
        anchor = torch.zeros((), requires_grad=True, device=model.device)
        layers = enumerate(self.run.request.family.layers(model))
        segments = [Segment(self, layer, i, self.opened.get(i, [])) for i, layer in layers if i >= self.first]
        for segment in segments:
            segment.patch(anchor)
        try:
            yield
        finally:
            for segment in segments:
                segment.restore()


def at_weights(model: nn.Module, leaves: Mapping[str, Tensor], function: Callable[..., Tensor], *args: Any) -> Tensor:
    """What a function that runs parts of a model gives while some of its parameters are replaced, by name."""
    named = {f"model.{name}": leaf for name, leaf in leaves.items()}
    return cast(Tensor, functional_call(_Calling(model), named, (function, *args)))


class _Calling(nn.Module):
    """Calls whatever runs parts of a model, as a module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        return function(*args)


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


class Segment:
    """One decoder layer that is run twice: without a graph forwards, with one backwards.

    Args:
        owner: the pass.
        layer: with its weights.
        index: of the layer.
        params: its open parameters.
    """

    def __init__(self, owner: Pass, layer: nn.Module, index: int, params: Sequence[NamedParam]) -> None:
        self.owner = owner
        self.layer = layer
        self.plain = _Plain(layer)
        self.params = params
        prefix = f"{owner.run.request.family.layers_path}.{index}."
        self.names = {p.name: "layer." + p.name.removeprefix(prefix) for p in self.params}

    def patch(self, anchor: Tensor) -> None:
        """Route the layer's calls through :class:`_Replay`; ``anchor`` makes its output differentiable."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            named = dict(kwargs)
            hidden = args[0] if args else named.pop("hidden_states", None)
            if len(args) > 1 or not isinstance(hidden, Tensor):
                raise NotLayerwiseError
            return cast(Tensor, _Replay.apply(hidden, anchor, self, named))

        self.layer.forward = forward

    def restore(self) -> None:
        """Undo :meth:`patch`."""
        self.layer.__dict__.pop("forward", None)

    def forward(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """The layer's output [B, T, H] at changed weights, without a graph."""
        return self.run(self.owner.leaves(self.params, graph=False), hidden, kwargs)

    def run(self, leaves: Mapping[str, Tensor], hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """The layer's output [B, T, H] at these weights."""
        named = {self.names[name]: leaf for name, leaf in leaves.items()}
        output = functional_call(self.plain, named, (hidden,), dict(kwargs))
        if not isinstance(output, Tensor):
            raise NotLayerwiseError
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
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, segment: Segment, kwargs: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.segment, ctx.kwargs = segment, kwargs
        ctx.autocast = torch.is_autocast_enabled(hidden.device.type)
        return segment.forward(hidden, kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (hidden,) = ctx.saved_tensors
        kind = hidden.device.type
        # Devices run backward in a thread of their own, which does not know of autocast.
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=ctx.autocast):
            return ctx.segment.backward(hidden, ctx.kwargs, grad, ctx.needs_input_grad[0]), None, None, None
