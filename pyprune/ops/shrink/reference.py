"""Definition of the multiplicative shrink of the annealed schedule."""

from __future__ import annotations

import torch


def shrink(w: torch.Tensor, index: torch.Tensor, axis: int, factor: float, offset: float = 0.0) -> torch.Tensor:
    """Multiply the selected slices of ``w + offset`` in place; see :func:`pyprune.ops.shrink`."""
    if factor == 0:
        # Filled, not multiplied: 0 * inf would be NaN, and -0 is not the zero that a cut leaves behind.
        return w.index_fill_(axis, index, 0.0 - offset)
    selected = w.index_select(axis, index)
    wide = selected if selected.dtype == torch.float64 else selected.float()
    return w.index_copy_(axis, index, ((wide + offset) * factor - offset).to(w.dtype))
