"""Definition of the group penalty of DReSS and of its gradient."""

from __future__ import annotations

import torch


def group_penalty(w: torch.Tensor, index: torch.Tensor, axis: int, kind: str, offset: float = 0.0) -> torch.Tensor:
    """``sum_{j in index} ||w + offset along axis = j||``; see :func:`pyprune.ops.group_penalty`.

    Norms are taken and added in float64. torch defines the gradient of abs and of the 2-norm at zero as 0, which is
    the subgradient wanted here.
    """
    selected = _wide(w.index_select(axis, index)) + offset
    if kind == "l1":
        return selected.abs().sum(dtype=torch.float64).to(selected.dtype)
    norms: torch.Tensor = torch.linalg.vector_norm(selected, dim=_others(w, axis), dtype=torch.float64)
    return norms.sum().to(selected.dtype)


def add_gradient(
    grad: torch.Tensor,
    w: torch.Tensor,
    index: torch.Tensor,
    axis: int,
    kind: str,
    penalty_weight: float | torch.Tensor,
    offset: float = 0.0,
) -> torch.Tensor:
    """Add ``penalty_weight`` times the gradient of the penalty to ``grad``, in place, and return the penalty.

    The gradient is the sign for l1 (0 for NaN), and v / ||v|| for l2, computed in float32 (float64 for float64) and
    rounded once, after it has been added.
    """
    selected = _wide(w.index_select(axis, index)) + offset
    if kind == "l1":
        value = selected.abs().sum(dtype=torch.float64)
        # The comparison is false for 0 and for NaN.
        slope = (selected.sign() * _as(penalty_weight, selected.dtype)).masked_fill(~(selected.abs() > 0), 0.0)
    else:
        norms = torch.linalg.vector_norm(selected, dim=_others(w, axis), dtype=torch.float64, keepdim=True)
        value = norms.sum()
        slope = selected * slope_scales(norms, penalty_weight, selected.dtype)
    total = _wide(grad.index_select(axis, index)) + slope
    grad.index_copy_(axis, index, total.to(grad.dtype))
    return value.to(selected.dtype)


def slope_scales(norms: torch.Tensor, penalty_weight: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``penalty_weight / norms`` in ``dtype``: 0 for a norm of 0, and never infinite unless ``penalty_weight`` is."""
    factor = torch.as_tensor(penalty_weight, dtype=torch.float64, device=norms.device)
    largest = torch.finfo(dtype).max
    scales = factor / norms
    scales = torch.where(factor.isfinite(), scales.clamp(-largest, largest), scales)
    return scales.masked_fill(norms == 0, 0.0).to(dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _as(penalty_weight: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
    return penalty_weight.to(dtype) if isinstance(penalty_weight, torch.Tensor) else penalty_weight


def _others(w: torch.Tensor, axis: int) -> tuple[int, ...]:
    return tuple(d for d in range(w.dim()) if d != axis)
