"""Elementwise soft-threshold: the l1 proximal step."""

from __future__ import annotations

import torch

from pyprune.ops._dispatch import checked_threshold, choose
from pyprune.ops.soft_threshold.reference import soft_threshold as reference


def soft_threshold(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """``sign(x) * max(0, |x| - threshold)``, the proximal operator of ``threshold * ||x||_1`` (DReSS, l1).

    Args:
        x: any shape, floating point.
        threshold: finite, >= 0, in the unit of ``x``.

    Returns:
        A new tensor like ``x``. NaN stays NaN, infinities stay infinite, what is not longer than
        ``threshold`` becomes exactly 0. Differentiable: the gradient is 1 outside the threshold and 0 inside.

    Raises:
        OpError: a negative, infinite or NaN threshold.
        BackendError: PYPRUNE_BACKEND names a backend that this op does not have.
    """
    threshold = checked_threshold(threshold)
    choose("soft_threshold", {})
    return reference(x, threshold)
