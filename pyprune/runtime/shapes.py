"""Tensors with a shape and a dtype, and the memory of one element: stand-ins for weights of another process."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shape_only(like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Make a tensor of one repeated element, which must not be written to.

    Args:
        like: gives dtype and device.
        shape: of the tensor; None = that of ``like``.
    """
    one = torch.zeros((), dtype=like.dtype, device=like.device)
    return one.expand(like.shape if shape is None else shape)


def to_shapes_(model: nn.Module) -> None:
    """Replace the parameters of a model by shapes alone; tied ones stay tied."""
    for parameter in model.parameters():
        parameter.data = shape_only(parameter)
