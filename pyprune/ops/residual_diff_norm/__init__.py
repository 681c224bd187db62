"""How much a layer changes its input: what ELDeR and TRSP add to the loss for each layer that will go."""

from __future__ import annotations

import torch

from pyprune.ops._dispatch import OpError, checked_kind, choose
from pyprune.ops.residual_diff_norm.reference import residual_diff_norm as reference


def residual_diff_norm(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> torch.Tensor:
    """Mean over tokens of the norm of ``x_out - x_in``, ELDeR and TRSP stage 2.

    The papers write ``||X_out - X_in||`` for the whole batch; the mean over tokens makes the penalty
    independent of batch and length.

    Args:
        x_in: ``[..., H]``, usually ``[B, T, H]``: the layer's input, floating point.
        x_out: like ``x_in``: the layer's output.
        kind: "l2" (Euclidean norm of each token's difference, not squared) or "l1" (sum of absolute values).

    Returns:
        A scalar in float32 (float64 for float64), differentiable in both. A token whose difference is zero
        has gradient exactly 0.

    Raises:
        OpError: the shapes differ, there is no token, or ``kind`` is unknown.
        BackendError: PYPRUNE_BACKEND names a backend that this op does not have.
    """
    if x_in.shape != x_out.shape:
        raise OpError(f"x_in has shape {tuple(x_in.shape)}, x_out has {tuple(x_out.shape)}; they must be equal")
    if x_in.dim() == 0 or x_in.numel() == 0:
        raise OpError(f"x_in has shape {tuple(x_in.shape)}: there is no token to average over")
    checked_kind(kind)
    choose("residual_diff_norm", {})
    return reference(x_in, x_out, kind)
