"""Definition of the sliced layer's gather."""

from __future__ import annotations

import torch


def slice_gather(
    w: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None, scale: float, offset: float
) -> torch.Tensor:
    """``(w[rows, columns] + offset) * scale - offset``; see :func:`pyprune.ops.slice_gather`."""
    result = w if rows is None else w.index_select(0, rows)
    if columns is not None:
        result = result.index_select(1, columns)
    if scale == 1.0:
        return result.clone(memory_format=torch.contiguous_format) if result is w else result
    wide = result if result.dtype == torch.float64 else result.float()
    return ((wide + offset) * scale - offset).to(w.dtype).contiguous()
