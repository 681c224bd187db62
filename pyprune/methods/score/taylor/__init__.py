"""LLM-Pruner's Taylor scores: what the loss loses when a structure becomes zero (Ma et al., "LLM-Pruner")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreConfig
from pyprune.methods.score import score_method, scoring, with_equal_layers
from pyprune.methods.training import reconstructed


@dataclass(frozen=True)
class TaylorOptions(MethodOptions):
    """Options of the Taylor scores.

    Attributes:
        form: vectorize |sum S|, param_first sum |S| with S = w g; param_second and param_mix use the second-order term.
    """

    form: Literal["vectorize", "param_first", "param_second", "param_mix"] = "param_first"


def _taylor_paper() -> PruneConfig:
    """LLM-Pruner's Taylor score, sum |w g|."""
    return scoring("taylor", TaylorOptions())


def _taylor_recovered() -> PruneConfig:
    """What is recommended for heads and FFN channels: second order, by layer; reconstructed, then trained.

    A unit counts by its share of the mean of its axis in its layer, so that heads go too; the first two layers and the
    last two stay whole (all constants ours).
    """
    base = reconstructed(scoring("taylor", TaylorOptions(form="param_second")))
    score = ScoreConfig(normalise="layer", first_layer=2, last_layer=-3, batch_size=8)
    return replace(base, score=score)


METHOD = score_method(
    "taylor",
    "LLM-Pruner: remove what the loss misses least, by its Taylor expansion.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=TaylorOptions,
    presets={**with_equal_layers("taylor", _taylor_paper), "taylor-recovered": _taylor_recovered},
)
