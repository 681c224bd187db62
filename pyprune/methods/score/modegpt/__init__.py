"""MoDeGPT's score for FFN channels: the ridge leverage of a channel among the inputs of its output projection."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_WEIGHT, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import choose_by_score, score_method, scoring_config
from pyprune.methods.training import make_forms


@dataclass(frozen=True)
class ModeGptOptions(MethodOptions):
    """Options of MoDeGPT's score.

    Attributes:
        ridge: added to the second moments of the inputs, relative to the mean of their diagonal. The paper adds 1 to
            sums over tokens, which means less the more text is read.
    """

    ridge: float = option(0.1, above=0, at_most=LARGEST_WEIGHT)


def _modegpt() -> PruneConfig:
    """MoDeGPT's ridge leverage of FFN channels on a mixture of texts; as many of every layer but the outer ones."""
    start = scoring_config("modegpt", ModeGptOptions())
    return choose_by_score(start, axes=("ffn",), ranking="local")


METHOD = score_method(
    "modegpt",
    "MoDeGPT: remove the FFN channels whose inputs the other channels span best (its Nystrom approximation).",
    f"{__name__}.score:score",
    from_disk=("ffn",),
    removes="FFN channels",
    options=ModeGptOptions,
    presets=make_forms(_modegpt),
)
