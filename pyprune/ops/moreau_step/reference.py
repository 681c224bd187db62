"""Definition of one step of MoreauPruner on the displacement from the pretrained weight."""

from __future__ import annotations

import torch

from pyprune.ops.group_soft_threshold.reference import group_soft_threshold


def moreau_step(
    delta: torch.Tensor, grad: torch.Tensor, decay: float, gamma: float, threshold: float, axis: int
) -> torch.Tensor:
    """``GroupSoftThreshold_threshold(decay * delta - gamma * grad)`` into ``delta``.

    Computed in float32 (float64 for float64) and rounded once, after the threshold. A threshold of 0 is the plain
    step, in which groups do not interact.
    """
    wide = delta if delta.dtype == torch.float64 else delta.float()
    stepped = wide * decay - grad.to(wide.dtype) * gamma
    if threshold > 0:
        stepped = group_soft_threshold(stepped, threshold, axis)
    return delta.copy_(stepped)
