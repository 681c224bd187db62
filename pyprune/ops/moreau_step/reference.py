"""Definition of one step of MoreauPruner on the displacement from the pretrained weight."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pyprune.ops.group_soft_threshold.reference import soft_threshold


class StepSums(NamedTuple):
    """How far a step moved the displacement; float64 scalars on its device, not waited for.

    Attributes:
        moved: sum of squares of the change of every element.
        size: sum of squares of the elements after the step.
    """

    moved: torch.Tensor
    size: torch.Tensor


def moreau_step(
    delta: torch.Tensor, grad: torch.Tensor, decay: float, gamma: float, threshold: float, axis: int
) -> StepSums:
    """``GroupSoftThreshold_threshold(decay * delta - gamma * grad)`` into ``delta``.

    Computed in float32 (float64 for float64) and rounded once, after the threshold. A threshold of 0 is the plain
    step, in which groups do not interact. The sums are those of the stored values: differences in float32, their
    squares in float64.
    """
    before = delta.to(torch.float64 if delta.dtype == torch.float64 else torch.float32, copy=True)
    stepped = before * decay - grad.to(before.dtype) * gamma
    if threshold > 0:
        stepped = soft_threshold(stepped, axis, threshold)
    after = delta.copy_(stepped).to(before.dtype)
    return StepSums(*(x.double().square().sum() for x in (after - before, after)))
