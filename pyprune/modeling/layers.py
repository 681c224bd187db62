"""Modules of a pruned architecture that no stock one has."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from typing_extensions import override

from pyprune.ops import layer_norm_virtual


class VirtualLayerNorm(nn.LayerNorm):
    """LayerNorm over d' stored channels that divides by the original d, the removed channels being zero.

    mean = sum(x) / d, variance = (sum((x - mean)^2) + (d - d') mean^2) / d: exactly what a LayerNorm over d
    channels computes when d - d' of them are zero (docs/reference/compaction.md, "LayerNorm, virtual size").

    Args:
        size: stored channels d'.
        norm_size: the original number of channels d.
        eps: added to the variance.
        affine: whether there are a weight and (with ``bias``) a bias.
        bias: see ``affine``.
    """

    def __init__(self, size: int, norm_size: int, eps: float, *, affine: bool = True, bias: bool = True) -> None:
        super().__init__(size, eps=eps, elementwise_affine=affine, bias=bias)
        self.norm_size = norm_size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [..., d'] in float32, return [..., d'] in the input's dtype."""
        weight, bias = (cast(nn.Parameter | None, p) for p in (self.weight, self.bias))
        scale = input.new_ones(input.shape[-1]) if weight is None else weight
        return layer_norm_virtual(input, scale, bias, self.norm_size, self.eps)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm_size={self.norm_size}"


class SkippedAttention(nn.Module):
    """Stands where a layer's attention was removed: adds nothing, but keeps the cache's bookkeeping right.

    The length of a Transformers cache is read from one of its layers, so a layer that never updates would
    make generation count from zero. One zero channel per token is stored instead.

    Args:
        layer_idx: index of the layer.
        more: how many values it returns besides the zeros, each None.
    """

    def __init__(self, layer_idx: int, more: int = 1) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.more = more

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """[B, T, H] -> zeros [B, T, H]."""
        # By its type: the argument is called past_key_values up to Transformers 5.23 and cache from 5.24 on.
        for cache in (value for value in (*args, *kwargs.values()) if isinstance(value, Cache)):
            placeholder = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(placeholder, placeholder, self.layer_idx)
        return torch.zeros_like(hidden_states), *[None] * self.more


class SkippedModule(nn.Module):
    """Stands where an MLP (or a part of one) was removed: [..., H] -> zeros [..., H].

    Args:
        more: how many values it returns besides them, each None: mixtures return the router's scores to their layer.
    """

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    @override
    def forward(self, hidden_states: Tensor, *args: Any) -> Tensor | tuple[Tensor | None, ...]:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, *[None] * self.more) if self.more else zeros
