"""Definition of the group soft-threshold."""

from __future__ import annotations

import torch


def group_soft_threshold(
    w: torch.Tensor, index: torch.Tensor, axis: int, threshold: float, offset: float = 0.0
) -> torch.Tensor:
    """Shrink the selected slices in place; see :func:`pyprune.ops.group_soft_threshold`."""
    shrunk = soft_threshold(w.index_select(axis, index), axis, threshold, offset)
    return w.index_copy_(axis, index, shrunk)


def soft_threshold(x: torch.Tensor, axis: int, threshold: float, offset: float = 0.0) -> torch.Tensor:
    """The group soft-threshold of every slice of ``x`` along ``axis``, as a new tensor.

    Norms are taken in float64, the rest in float32 (float64 for float64), and the result is rounded once.
    """
    value = (x if x.dtype == torch.float64 else x.float()) + offset
    others = tuple(d for d in range(x.dim()) if d != axis)
    if others:
        norms = torch.linalg.vector_norm(value, dim=others, dtype=torch.float64, keepdim=True)
    else:
        norms = value.double().abs()
    # "norm <= threshold" is false for NaN, so that a NaN reaches the whole group instead of vanishing.
    removed = norms <= threshold
    shorter = value * (1 - threshold / norms).to(value.dtype)
    # Written, not multiplied: what is removed is exactly +0, whatever its sign was.
    result: torch.Tensor = (shorter.masked_fill(removed, 0.0) - offset).to(x.dtype)
    return result
