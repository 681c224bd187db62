"""LLM-Pruner's Taylor scores: the change of the loss when a structure becomes zero (Ma et al., "LLM-Pruner")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreConfig
from pyprune.methods.score import equal_layer_presets, score_method, scoring_config
from pyprune.methods.training import with_reconstruction


@dataclass(frozen=True)
class TaylorOptions(MethodOptions):
    """Options of the Taylor scores.

    Attributes:
        form: vectorize |sum S|, param_first sum |S| with S = w g; param_second and param_mix use the second-order term.
    """

    form: Literal["vectorize", "param_first", "param_second", "param_mix"] = "param_first"


def _taylor_paper() -> PruneConfig:
    """LLM-Pruner's Taylor score, sum |w g|."""
    return scoring_config("taylor", TaylorOptions())


def _taylor_recovered() -> PruneConfig:
    """The recommended form for heads and FFN channels: second order, by layer; reconstructed, then trained.

    A score is divided by the mean of its axis in its layer, so that heads are removed too. The first two layers and the
    last two are kept whole (all constants ours).
    """
    base = with_reconstruction(scoring_config("taylor", TaylorOptions(form="param_second")))
    return replace(base, score=ScoreConfig(normalise="layer", first_layer=2, last_layer=-3, batch_size=8))


METHOD = score_method(
    "taylor",
    "LLM-Pruner: remove the parts that change the loss least, by its Taylor expansion.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=TaylorOptions,
    presets={**equal_layer_presets("taylor", _taylor_paper), "taylor-recovered": _taylor_recovered},
)
