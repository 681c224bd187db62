"""Tensors that have a shape and a dtype, and the memory of one element: what a process knows of weights of another."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shape_only(like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """A tensor without values of its own, which nothing may be written to.

    Args:
        like: gives dtype, device and, where none is given, the shape.
        shape: of the tensor.
    """
    one = torch.zeros((), dtype=like.dtype, device=like.device)
    return one.expand(like.shape if shape is None else shape)


def to_shapes_(model: nn.Module) -> None:
    """Let the parameters of a model be shapes alone; tied ones stay tied."""
    for parameter in model.parameters():
        parameter.data = shape_only(parameter)
