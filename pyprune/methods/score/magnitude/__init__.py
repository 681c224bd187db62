"""Magnitude: the score of a structure is the size of its weights, sum of |w| (l1) or of w^2 (l2)."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import Norm
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import score_method, scoring_config, with_local_ranking


@dataclass(frozen=True)
class MagnitudeOptions(MethodOptions):
    """Options of magnitude.

    Attributes:
        norm: l1 = sum of |w|, l2 = sum of w^2.
    """

    norm: Norm = "l1"


def _magnitude() -> PruneConfig:
    """Magnitude, sum of |w|."""
    return scoring_config("magnitude", MagnitudeOptions())


METHOD = score_method(
    "magnitude",
    "Magnitude: remove the heads and channels with the smallest weights.",
    f"{__name__}.score:score",
    text=False,
    from_disk=("heads", "ffn", "hidden"),
    options=MagnitudeOptions,
    presets={"magnitude": with_local_ranking(_magnitude)},
)
