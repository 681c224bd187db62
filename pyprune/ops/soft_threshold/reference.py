"""Definition of the elementwise soft-threshold, the proximal operator of ``threshold * ||x||_1``."""

from __future__ import annotations

import torch


def soft_threshold(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """``sign(x) * max(0, |x| - threshold)`` in float32 (float64 for float64), rounded once to ``x.dtype``."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide - wide.clamp(-threshold, threshold)).to(x.dtype)
