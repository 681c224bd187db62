"""SLEB: remove one layer after the other, each time the one whose removal costs least (Song et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.run import PruneConfig
from pyprune.methods.layers import EdgeOptions, removal_config, removal_method
from pyprune.methods.training import LESS_TEXT, make_forms


@dataclass(frozen=True)
class SlebOptions(EdgeOptions):
    """Options of SLEB; the authors' code keeps the first and the last layer."""

    keep_first: int = option(1, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int = option(1, at_least=0, at_most=LARGEST_INDEX)


def _sleb_paper() -> PruneConfig:
    """SLEB: 25 % of the layers, one a round, by the perplexity on 128 samples of 2,048 tokens of WikiText-2."""
    return removal_config("sleb", SlebOptions(), samples=128, sequence_length=2048)


def _sleb() -> PruneConfig:
    """SLEB: 25 % of the layers, one a round, by the perplexity on a mixture of texts (ours)."""
    return replace(_sleb_paper(), data=LESS_TEXT)


METHOD = removal_method(
    "sleb",
    "SLEB: remove one layer a round, the one without which the perplexity is smallest.",
    f"{__name__}.score:decide",
    SlebOptions,
    presets=make_forms(_sleb, _sleb_paper),
)
