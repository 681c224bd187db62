"""Triton kernel of the multiplicative shrink. ``reference.py`` is the definition."""

from __future__ import annotations

import torch

from pyprune.ops._triton import multiply_groups


def shrink(w: torch.Tensor, index: torch.Tensor, axis: int, factor: float, offset: float) -> None:
    """Multiply the selected rows or columns in place.

    Args:
        w: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        index: int64, not empty.
        axis: 0 for rows, 1 for columns.
        factor: finite, >= 0; 0 writes ``-offset``.
        offset: added first and taken off again.
    """
    multiply_groups(w, index, torch.full((1,), factor, dtype=torch.float32, device=w.device), axis, offset)
