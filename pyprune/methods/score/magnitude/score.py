"""The scores of magnitude."""

from __future__ import annotations

import torch

from pyprune.methods.base import own_options
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.magnitude import MagnitudeOptions


@torch.no_grad()
def score(run: Scoring) -> None:
    """Add |w| or w^2 of every open parameter."""
    norm = own_options(run.request, MagnitudeOptions).norm
    with measure_memory(run):
        for param in run.open_params:
            weight = run.weight(param)
            if norm == "l1":
                run.add_elements(param, weight)
            else:
                run.add(param, weight)
