"""Tensors that have a shape and a dtype, and the memory of one element: what a process knows of weights of another."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shape_only(like: Tensor, shape: torch.Size | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without values of its own, which nothing may be written to.

    Args:
        like: gives the device, and the rest where none is given.
        shape: of the tensor.
        dtype: of the tensor.
    """
    one = torch.zeros((), dtype=like.dtype if dtype is None else dtype, device=like.device)
    return one.expand(like.shape if shape is None else shape)


def to_shapes_(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Let the parameters of a model be shapes alone, in another dtype where one is given; tied ones stay tied."""
    for parameter in model.parameters():
        parameter.data = shape_only(parameter, dtype=dtype)
