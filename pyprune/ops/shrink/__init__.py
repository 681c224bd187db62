"""Multiplicative shrink of selected slices: the annealed schedule of DReSS."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pyprune.ops._dispatch import OpError, checked_axis, checked_index, choose
from pyprune.ops.shrink.reference import shrink as reference


@torch.no_grad()
def shrink(w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, factor: float) -> torch.Tensor:
    """Multiply the selected slices of ``w`` by ``factor``, in place and without gradient.

    Args:
        w: any shape, floating point; parameters are fine.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along.
        factor: finite, >= 0. Exactly 0 writes +0 over everything selected, NaN and infinities included; any
            other factor lets them propagate.

    Returns:
        ``w``.

    Raises:
        OpError: a bad axis, index or factor.
        BackendError: PYPRUNE_BACKEND names a backend that this op does not have.
    """
    axis = checked_axis(axis, w.dim())
    positions = checked_index(index, w.shape[axis], w)
    if not math.isfinite(factor) or factor < 0:
        raise OpError(f"factor is {factor}, must be finite and >= 0")
    choose("shrink", {})
    return reference(w, positions, axis, factor)
