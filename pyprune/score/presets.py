"""Presets of the scoring methods. Plain data; importing this file imports no torch.

Calibration is the papers' 10 samples of 128 tokens. The calibration source, the global ranking and the ratio are
ours; every other constant is MoreauPruner's. Recipes hold the papers' protocols for their models.
"""

from __future__ import annotations

from collections.abc import Callable

from pyprune.config import DataConfig, PruneConfig, ScoreConfig, StageConfig


def scoring(method: str) -> PruneConfig:
    """What all scoring methods start from: 20 % of the parameters, ranked globally, one shot, no recovery."""
    return PruneConfig(
        method=method,
        ratio=0.2,
        ratio_of="parameters",
        data=DataConfig("wikitext2", "train", samples=10, sequence_length=128),
        stages=StageConfig(before=(), after=()),
        score=ScoreConfig(),
    )


def _magnitude() -> PruneConfig:
    """Magnitude: heads and FFN channels with the smallest sum of |w|."""
    return scoring("magnitude")


def _random() -> PruneConfig:
    """Random heads and FFN channels: the control."""
    return scoring("random")


SCORE_PRESETS: dict[str, Callable[[], PruneConfig]] = {
    "magnitude": _magnitude,
    "random": _random,
}
"""Preset name -> function that builds its options (whose docstring describes it)."""
