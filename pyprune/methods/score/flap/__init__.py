"""FLAP: remove channels whose input barely fluctuates, because a bias can replace them (An et al. 2024)."""

from __future__ import annotations

from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreConfig
from pyprune.methods.score import choose_by_score, score_method, scoring_config
from pyprune.methods.training import make_forms


def _flap_paper() -> PruneConfig:
    """FLAP: the standardised fluctuation, with bias compensation; 1,024 samples of 128 tokens as the authors use."""
    bias = CutConfig(reconstruct="bias")
    return scoring_config("flap", samples=1024, score=ScoreConfig(aggregation="mean"), cut=bias)


def _flap() -> PruneConfig:
    """FLAP's fluctuation on a mixture of texts; as many units of every layer but the outer ones."""
    return choose_by_score(_flap_paper(), ranking="local")


METHOD = score_method(
    "flap",
    "FLAP: remove the heads and channels that fluctuate least, and add their mean as a bias.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn"),
    removes="heads and FFN channels",
    presets=make_forms(_flap, _flap_paper),
)
