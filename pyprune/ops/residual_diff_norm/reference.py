"""Definition of the residual-difference norm of ELDeR and TRSP."""

from __future__ import annotations

import torch


def residual_diff_norm(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> torch.Tensor:
    """Mean over tokens of ``||x_out - x_in||``; see :func:`pyprune.ops.residual_diff_norm`."""
    return forward(x_in, x_out, kind)[0]


def forward(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean, and the norm of each token, which is all that the gradient needs in addition to the inputs.

    Args:
        x_in: ``[tokens, H]``.
        x_out: like ``x_in``.
        kind: "l1" or "l2".
    """
    wide = torch.float64 if x_in.dtype == torch.float64 else torch.float32
    difference = x_out.to(wide) - x_in.to(wide)
    # torch defines the gradient of both norms at zero as 0.
    norms: torch.Tensor = torch.linalg.vector_norm(difference, ord=1 if kind == "l1" else 2, dim=-1)
    return norms.mean(), norms


def backward(
    x_in: torch.Tensor,
    x_out: torch.Tensor,
    norms: torch.Tensor,
    kind: str,
    upstream: torch.Tensor,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x_in`` and ``x_out``, those that are wanted.

    ``upstream / tokens`` times sign(d) for l1, and d / ||d|| (0 where d is 0) for l2.
    """
    wide = norms.dtype
    difference = x_out.to(wide) - x_in.to(wide)
    scale = upstream.to(wide) / len(norms)
    if kind == "l1":
        slope = difference.sign() * scale
    else:
        slope = difference * (scale / norms).masked_fill(norms == 0, 0.0).unsqueeze(-1)
    return (-slope).to(x_in.dtype) if wanted[0] else None, slope.to(x_out.dtype) if wanted[1] else None
