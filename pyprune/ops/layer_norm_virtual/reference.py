"""Definition of the LayerNorm over d' stored channels that divides by the original d, and of its gradient."""

from __future__ import annotations

import torch


def layer_norm_virtual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float
) -> torch.Tensor:
    """See :func:`pyprune.ops.layer_norm_virtual`; plain torch, differentiable by autograd."""
    return forward(x, weight, bias, d, eps)[0]


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and the mean and the reciprocal deviation of each row, which is what the gradient needs.

    Args:
        x: ``[rows, d']``.
        weight: ``[d']``.
        bias: ``[d']`` or None.
        d: the number of channels that is divided by.
        eps: added to the variance.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    value = x.to(wide)
    mean = value.sum(-1) / d
    centred = value - mean.unsqueeze(-1)
    variance = (centred.square().sum(-1) + (d - x.shape[-1]) * mean.square()) / d
    rstd = torch.rsqrt(variance + eps)
    out = centred * rstd.unsqueeze(-1) * weight.to(wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype), mean, rstd


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias.

    ``dx = rstd (g - sum(g) / d - xhat sum(g xhat) / d)`` with ``g = grad * weight``: what a LayerNorm over d channels
    gives, because the missing channels have no weight.
    """
    wide = mean.dtype
    slope = grad.to(wide)
    normal = (x.to(wide) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = slope * weight.to(wide)
    shift = g.sum(-1, keepdim=True) / d
    tilt = (g * normal).sum(-1, keepdim=True) / d
    grad_x = (rstd.unsqueeze(-1) * (g - shift - normal * tilt)).to(x.dtype)
    return grad_x, (slope * normal).sum(0).to(weight.dtype), slope.sum(0).to(weight.dtype)
