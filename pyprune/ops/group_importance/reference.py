"""Definition of the importance of rows, columns and blocks of them."""

from __future__ import annotations

import torch


def member_scores(score: torch.Tensor, w: torch.Tensor, axis: int, signed: bool, offset: float = 0.0) -> torch.Tensor:
    """``sum |score * (w + offset)|`` over each slice along ``axis``, or with ``signed`` ``|sum score * (w + offset)|``.

    Weight and offset are added in float32 (float64 for float64); all else is float64.
    """
    value = (w if w.dtype == torch.float64 else w.float()) + offset
    product = score.double() * value.double()
    others = tuple(d for d in range(w.dim()) if d != axis)
    terms = product if signed else product.abs()
    return (terms.sum(dim=others) if others else terms).abs()


def aggregate(members: torch.Tensor, group_size: int, aggregation: str) -> torch.Tensor:
    """Combine each ``group_size`` consecutive members; see :func:`pyprune.ops.group_importance`."""
    groups = members.view(-1, group_size)
    match aggregation:
        case "max":
            return groups.amax(dim=1)
        case "prod":
            return _fold(groups.log()).div(group_size).exp()
        case "mean":
            return _fold(groups) / group_size
        case _:
            return _fold(groups)


def _fold(groups: torch.Tensor) -> torch.Tensor:
    """Sum of each row in a fixed order: halves are added elementwise, which no number of threads changes."""
    while groups.shape[1] > 1:
        half = groups.shape[1] // 2
        pairs = groups[:, :half] + groups[:, half : 2 * half]
        groups = torch.cat([pairs, groups[:, 2 * half :]], dim=1)
    return groups[:, 0]
