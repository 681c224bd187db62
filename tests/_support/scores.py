"""Plans from scores that a test gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.run import PruneConfig
from pyprune.families import family_for, parameter_shapes
from pyprune.methods.base import PlanDecision, PlanRequest
from pyprune.methods.ratio import share_of_parameters
from pyprune.methods.registry import get_method
from pyprune.methods.score.base import Scoring, decide_by_scores
from pyprune.plan import PrunePlan
from tests._support.models import tiny_batch
from tests._support.options import scoring_config

NO_SAMPLES = torch.empty(0, 0, dtype=torch.int64)
"""For methods that read no text."""

Scores = dict[tuple[int | None, str], list[float]]
"""(layer, axis) -> a score for each unit."""


def options(method: str = "magnitude", ratio: float = 0.15, **score: Any) -> PruneConfig:
    return scoring_config(method, ratio, **score)


def decision_of(model: PreTrainedModel, samples: Tensor, config: PruneConfig) -> PlanDecision:
    """Return the decision of the configuration's method."""
    return get_method(config.method).decide(model, samples, PlanRequest.of(model, config))


def scoring_of(model: PreTrainedModel, samples: Tensor, config: PruneConfig, *, masked: bool = False) -> Scoring:
    """One round of scoring, without any scores yet."""
    return Scoring.of(model, samples, PlanRequest.of(model, config), masked=masked)


def injected(model: PreTrainedModel, config: PruneConfig, scores: Scores) -> PlanDecision:
    """Decide with these scores of units; places that are not named score 100 each."""

    def scorer(run: Scoring) -> None:
        places = [(layer, axis) for layer in run.scope.layers for axis in run.scope.axes if axis != "hidden"]
        places += [(None, "hidden")] if "hidden" in run.scope.axes else []
        for layer, axis in places:
            values = torch.full((run.scope.units(axis, layer),), 100.0)
            listed = scores.get((layer, axis))
            run.add_units(layer, axis, values if listed is None else torch.tensor(listed))

    return decide_by_scores(scorer, model, tiny_batch(), PlanRequest.of(model, config))


def share(model: PreTrainedModel, plan: PrunePlan) -> float:
    return share_of_parameters(family_for(model), parameter_shapes(model), plan)


def widths(plan: PrunePlan) -> list[tuple[int, int, int]]:
    return [layer.widths for layer in plan.layers]
