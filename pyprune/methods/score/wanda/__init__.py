"""Wanda, structured: the score of a weight is its size times the size of its input (Sun et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config


@dataclass(frozen=True)
class WandaOptions(MethodOptions):
    """Options of Wanda.

    Attributes:
        matrices: coupled (every matrix that a structure owns a part of) or output (its columns of the attention's and
            the MLP's output projections alone).
    """

    matrices: Literal["coupled", "output"] = "coupled"


def _wanda_paper() -> PruneConfig:
    """Wanda, structured: sum |w| |x| over the coupled matrices; 128 samples as in the paper, of 128 tokens (ours)."""
    return scoring_config("wanda", WandaOptions(), samples=128)


METHOD = score_method(
    "wanda",
    "Wanda, structured: remove the heads and channels with the smallest |w| |x|.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn", "hidden"),
    options=WandaOptions,
    presets=equal_layer_forms(_wanda_paper, options=WandaOptions(matrices="output")),
)
