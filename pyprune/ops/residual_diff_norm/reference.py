"""Definition of the residual-difference norm of ELDeR and TRSP."""

from __future__ import annotations

import torch


def residual_diff_norm(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> torch.Tensor:
    """Mean over tokens of ``||x_out - x_in||``; see :func:`pyprune.ops.residual_diff_norm`."""
    wide = torch.float64 if x_in.dtype == torch.float64 else torch.float32
    difference = x_out.to(wide) - x_in.to(wide)
    # torch defines the gradient of both norms at zero as 0.
    norms: torch.Tensor = torch.linalg.vector_norm(difference, ord=1 if kind == "l1" else 2, dim=-1)
    return norms.mean()
