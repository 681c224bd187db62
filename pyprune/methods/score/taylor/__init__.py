"""LLM-Pruner's Taylor scores: the change of the loss when a structure becomes zero (Ma et al., "LLM-Pruner")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config


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


METHOD = score_method(
    "taylor",
    "LLM-Pruner: remove the parts that change the loss least, by its Taylor expansion.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=TaylorOptions,
    presets=equal_layer_forms(_taylor_paper),
)
