"""Definition of the group soft-threshold, the proximal operator of ``threshold * sum_g ||g||_2``."""

from __future__ import annotations

import torch

from pyprune.ops._dispatch import checked_axis


def group_soft_threshold(x: torch.Tensor, threshold: float, axis: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``g * max(0, 1 - threshold / ||g||_2)`` for every slice g of ``x`` along ``axis``.

    Norms are taken in float64, the product in float32 (float64 for float64 tensors), and the result is
    rounded once to ``x.dtype``. See :func:`pyprune.ops.group_soft_threshold` for the arguments.
    """
    axis = checked_axis(axis, x.dim())
    others = tuple(d for d in range(x.dim()) if d != axis)
    wide = x if x.dtype == torch.float64 else x.float()
    if others:
        norm = torch.linalg.vector_norm(wide, dim=others, keepdim=True, dtype=torch.float64)
    else:
        norm = wide.double().abs()
    # "norm <= threshold" is false for NaN, so that a NaN reaches the whole group instead of vanishing.
    removed = norm <= threshold
    scale = (1 - threshold / norm).to(wide.dtype)
    # Written, not multiplied: a removed group is exactly +0, whatever its signs were.
    result: torch.Tensor = (wide * scale).masked_fill_(removed, 0.0).to(x.dtype)
    if out is None:
        return result
    return out.copy_(result)
