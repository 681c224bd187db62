"""Shared by the ops on selected slices of a tensor: the checked selection, and the matrix for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyprune.ops.dispatch import as_matrix, check_axis, check_dtype, check_index, round_scalar


@dataclass(frozen=True)
class Selection:
    """The slices of a tensor that an op works on.

    Attributes:
        index: positions, int64 on the tensor's device, contiguous.
        axis: the dimension they count along, from the front.
        matrix: (rows, cols, axis) of the tensor as a matrix; None when ``axis`` is in the middle.
        single: every slice is one element, so that its l2 norm is its magnitude.
        offset: added to the weights first (1 for norms that multiply by 1 + w).
    """

    index: torch.Tensor
    axis: int
    matrix: tuple[int, int, int] | None
    single: bool
    offset: float


def select(op: str, w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, offset: float) -> Selection:
    """Check the arguments that select the slices.

    Raises:
        OpError: a dtype, axis, index or offset outside the op's definition.
    """
    check_dtype(op, w)
    axis = check_axis(axis, w.dim())
    positions = check_index(index, w.shape[axis], w).contiguous()
    single = w.numel() == w.shape[axis]
    offset = round_scalar(offset, w.dtype, "offset")
    return Selection(positions, axis, as_matrix(tuple(w.shape), axis), single, offset)


def as_rows(tensor: torch.Tensor, matrix: tuple[int, int, int]) -> torch.Tensor:
    """Return ``tensor`` as a contiguous matrix without gradient: itself, or a copy if it is not contiguous."""
    return tensor.detach().contiguous().view(matrix[0], matrix[1])


def write_back(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy the result of a kernel from ``as_rows(target)`` back, and tell autograd that the target changed."""
    if rows.data_ptr() == target.data_ptr():
        torch.autograd.graph.increment_version(target)
    else:
        target.copy_(rows.view(target.shape))
