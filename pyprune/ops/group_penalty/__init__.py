"""Group penalty over a selected index set: what DReSS adds to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyprune.ops._dispatch import checked_axis, checked_index, checked_kind, choose
from pyprune.ops.group_penalty.reference import group_penalty as reference


def group_penalty(w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, kind: str) -> torch.Tensor:
    """Sum over the selected slices of ``w`` of their norm: one tensor's share of the DReSS regulariser.

    ``sum_{j in index} ||w along axis = j||``, DReSS, equations of the regularisation objective. The l2 norm
    is not squared.

    Args:
        w: any shape, floating point.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along. For ``w[out, in]``, 1 selects input columns.
        kind: "l2" (norm of each slice) or "l1" (sum of absolute values).

    Returns:
        A scalar in float32 (float64 for float64), differentiable in ``w``. The gradient at an all-zero slice
        is exactly 0, and it is exactly 0 outside ``index``. NaN and infinities propagate.

    Raises:
        OpError: a bad axis, kind or index.
        BackendError: PYPRUNE_BACKEND names a backend that this op does not have.
    """
    axis = checked_axis(axis, w.dim())
    positions = checked_index(index, w.shape[axis], w)
    checked_kind(kind)
    choose("group_penalty", {})
    return reference(w, positions, axis, kind)
