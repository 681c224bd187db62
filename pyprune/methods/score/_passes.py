"""One forward and backward pass over a batch at changed weights, and a single decoder layer at changed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""(parameter, draw) -> the values at which the gradient is taken: shape and dtype of the parameter, no graph. It is
called twice a pass or more often, and must return the same values each time."""

Consume = Callable[[NamedParam, Tensor, bool], None]
"""(parameter, part of its gradient, whether this is its last part); the parts of a parameter sum to the mean gradient
over samples and draws. After the last part of a parameter its values are not read again."""


class NotLayerwiseError(Exception):
    """A layer is not a function from hidden states to hidden states."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over one batch at one draw of the weights.

    Attributes:
        run: the open parameters, and the model if it is in memory.
        batch: token ids, int64 [B, T], on the run's device.
        share: share of the batch in the mean loss, in (0, 1].
        weights: the values at which gradients are taken.
        consume: receives the gradients.
        last: whether this is the last pass.
        per_sample: one part a sample; if parameters outside of the layers are open (they see all rows at once), the
            batch must have one row.
    """

    run: Scoring
    batch: Tensor
    share: float
    weights: Callable[[NamedParam], Tensor]
    consume: Consume
    last: bool
    per_sample: bool

    @cached_property
    def params_by_layer(self) -> dict[int | None, list[NamedParam]]:
        """Return the open parameters of each layer, and under None those outside of the layers."""
        groups: dict[int | None, list[NamedParam]] = {}
        for param in self.run.open_params:
            groups.setdefault(param.layer, []).append(param)
        return groups

    @property
    def outer(self) -> list[NamedParam]:
        """Return the open parameters outside of the layers."""
        return self.params_by_layer.get(None, [])

    @property
    def first(self) -> int:
        """Return the first layer that is differentiated."""
        return 0 if self.outer else min(layer for layer in self.params_by_layer if layer is not None)

    def leaves(self, params: Sequence[NamedParam], *, graph: bool = True) -> dict[str, Tensor]:
        """Return changed weights by parameter name."""
        return {p.name: self.weights(p).detach().requires_grad_(graph) for p in params}

    def hand_over(self, params: Sequence[NamedParam], parts: Sequence[Tensor], last: bool) -> None:
        """Pass one part of each parameter's gradient to the consumer."""
        for param, part in zip(params, parts, strict=True):
            wide = part if part.dtype == torch.float64 else part.float()
            self.consume(param, wide, last)

    def differentiate_whole(self) -> float:
        """Differentiate with respect to all open parameters at once; return the share of the loss."""
        params = [p for group in self.params_by_layer.values() for p in group]
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

    def loss(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the batch's share of the mean loss of a model, some of whose parameters are replaced, by name."""
        return call_with_weights(model, leaves, causal_loss, model, self.batch) * self.share


def call_with_weights(
    model: nn.Module, leaves: Mapping[str, Tensor], function: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Call a function that runs parts of a model while some of the model's parameters are replaced, by name."""
    named = {f"model.{name}": leaf for name, leaf in leaves.items()}
    return cast(Tensor, functional_call(_FunctionOfModel(model), named, (function, *args), kwargs))


class _FunctionOfModel(nn.Module):
    """Wraps a call of a function that runs parts of a model as a module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)


class Segment:
    """One decoder layer that runs twice in a pass: forwards without a graph, and again with one before its backward.

    Args:
        owner: the pass.
        layer: the layer with its weights.
        index: index of the layer.
        params: its open parameters.
    """

    def __init__(self, owner: Pass, layer: nn.Module, index: int, params: Sequence[NamedParam]) -> None:
        self.owner = owner
        self.layer = layer
        self.params = params
        self.prefix = f"{owner.run.request.family.layers_path}.{index}."

    def forward(self, hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Return the layer's output [B, T, H] at changed weights, without a graph."""
        return self.run(self.owner.leaves(self.params, graph=False), hidden, kwargs)

    def run(self, leaves: Mapping[str, Tensor], hidden: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        """Return the layer's output [B, T, H] at these weights."""
        named = {name.removeprefix(self.prefix): leaf for name, leaf in leaves.items()}
        # The class's own forward, without the hooks of the instance.
        output = call_with_weights(self.layer, named, type(self.layer).forward, self.layer, hidden, **kwargs)
        if not isinstance(output, Tensor):
            raise NotLayerwiseError
        return output

    def backward(self, hidden: Tensor, kwargs: Mapping[str, Any], grad: Tensor, needed: bool) -> Tensor | None:
        """Hand the layer's gradients over; return the gradient of its input, or None if it is not ``needed``."""
        owner = self.owner
        single = owner.per_sample and self.params
        parts = [slice(i, i + 1) for i in range(len(hidden))] if single else [slice(None)]
        before: list[Tensor] = []
        leaves = owner.leaves(self.params)
        for number, part in enumerate(parts):
            rows = hidden[part].detach().requires_grad_(needed)
            with torch.enable_grad():
                output = self.run(leaves, rows, _select_rows(kwargs, part, len(hidden)))
            inputs = [*([rows] if needed else []), *leaves.values()]
            grads = torch.autograd.grad(output, inputs, grad[part], materialize_grads=True)
            if needed:
                before.append(grads[0])
            del output, rows
            last = number == len(parts) - 1
            if last:
                leaves, inputs = {}, []
            owner.hand_over(self.params, grads[1:] if needed else grads, owner.last and last)
        return torch.cat(before) if needed else None


def _select_rows(value: Any, part: slice, batch: int) -> Any:
    """Select the rows of every batched tensor in a layer's keyword arguments (masks, position embeddings)."""
    if part == slice(None):
        return value
    if isinstance(value, Mapping):
        return {k: _select_rows(v, part, batch) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_select_rows(v, part, batch) for v in value)
    batched = isinstance(value, Tensor) and value.dim() > 1 and len(value) == batch
    return value[part] if batched else value
