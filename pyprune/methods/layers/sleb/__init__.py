"""SLEB: remove one layer after the other, each time the one whose removal costs least (Song et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.run import PruneConfig
from pyprune.methods.base import paper_presets
from pyprune.methods.layers import EdgeOptions, removal_config, removal_method


@dataclass(frozen=True)
class SlebOptions(EdgeOptions):
    """Options of SLEB; the authors' code keeps the first and the last layer."""

    keep_first: int = option(1, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int = option(1, at_least=0, at_most=LARGEST_INDEX)


def _sleb() -> PruneConfig:
    """SLEB: 25 % of the layers, one a round, by the perplexity on 128 samples of 2,048 tokens of WikiText-2."""
    return removal_config("sleb", SlebOptions(), samples=128, sequence_length=2048)


METHOD = removal_method(
    "sleb",
    "SLEB: remove one layer a round, the one without which the perplexity is smallest.",
    f"{__name__}.score:decide",
    SlebOptions,
    presets=paper_presets("sleb", _sleb),
)
