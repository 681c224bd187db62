"""Definition of the proximal map of the group penalty of DReSS, of which the group soft-threshold is the l2 form."""

from __future__ import annotations

import torch


def group_prox(
    w: torch.Tensor, index: torch.Tensor, axis: int, kind: str, threshold: float, offset: float = 0.0
) -> torch.Tensor:
    """The proximal map of ``threshold`` times the group penalty, in place; see :func:`pyprune.ops.group_prox`."""
    shrunk = proximal_map(w.index_select(axis, index), axis, kind, threshold, offset)
    return w.index_copy_(axis, index, shrunk)


def proximal_map(x: torch.Tensor, axis: int, kind: str, threshold: float, offset: float = 0.0) -> torch.Tensor:
    """The proximal map of every slice of ``x`` along ``axis``, out of place.

    Norms are taken in float64, the rest in float32 (float64 for float64), and the result is rounded once.
    """
    value = (x if x.dtype == torch.float64 else x.float()) + offset
    if kind == "l1":
        removed = value.abs() <= threshold
        shorter = value - torch.copysign(torch.full_like(value, threshold), value)
    else:
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
