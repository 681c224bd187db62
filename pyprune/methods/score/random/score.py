"""Uniform scores, seeded per layer and axis."""

from __future__ import annotations

import torch
from torch import Tensor

from pyprune.methods.base import own_options
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score._structures import OpenUnits
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.random import RandomOptions


def score(run: Scoring) -> None:
    """Add a number from [0, 1) to every unit; the weights are not read."""
    seed = own_options(run.request, RandomOptions).seed
    with measure_memory(run):
        for layer, axis in run.scope.places:
            # One generator a place, so that opening another layer or axis changes no other scores.
            place = 0 if layer is None else 1 + 2 * layer + (axis == "ffn")
            generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
            run.add_units(layer, axis, _numbers(run.scope, axis, layer, generator))


def _numbers(scope: OpenUnits, axis: str, layer: int | None, generator: torch.Generator) -> Tensor:
    """Draw float64 [units of the axis]; the query heads of a KV group that is removed as a whole share one number."""
    if axis != "heads" or not scope.whole_groups:
        return torch.rand(scope.units(axis, layer), generator=generator, dtype=torch.float64)
    groups = torch.rand(scope.units("kv_heads", layer), generator=generator, dtype=torch.float64)
    return groups.repeat_interleave(scope.group_size(layer)) / scope.group_size(layer)
