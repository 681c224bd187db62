"""Magnitude: a structure is worth the size of its weights, sum of |w| (l1) or of w^2 (l2)."""

from __future__ import annotations

import torch

from pyprune.methods.score._memory import measured
from pyprune.methods.score.base import Scoring, score_method


@torch.no_grad()
def score(run: Scoring) -> None:
    """Add |w| or w^2 of every open parameter."""
    with measured(run):
        for param in run.opened:
            weight = run.weight(param)
            if run.config.score.magnitude == "l1":
                run.add_elements(param, weight)
            else:
                run.add(param, weight)


METHOD = score_method("magnitude", "Remove the heads and channels with the smallest weights.", score, text=False)
