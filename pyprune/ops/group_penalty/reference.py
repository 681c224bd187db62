"""Definition of the group penalty of DReSS."""

from __future__ import annotations

import torch


def group_penalty(w: torch.Tensor, index: torch.Tensor, axis: int, kind: str) -> torch.Tensor:
    """``sum_{j in index} ||w along axis = j||``; see :func:`pyprune.ops.group_penalty`."""
    selected = w.index_select(axis, index)
    if selected.dtype in (torch.bfloat16, torch.float16):
        selected = selected.float()
    # torch defines the gradient of abs and of the 2-norm at zero as 0, which is the subgradient wanted here.
    if kind == "l1" or w.dim() == 1:
        return selected.abs().sum()
    others = tuple(d for d in range(w.dim()) if d != axis)
    norms: torch.Tensor = torch.linalg.vector_norm(selected, dim=others)
    return norms.sum()
