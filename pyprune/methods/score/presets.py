"""Presets of the scoring methods. Plain data; importing this file imports no torch.

Calibration is MoreauPruner's 10 samples of 128 tokens where a preset says nothing else. The calibration source, the
global ranking and the ratio are ours; the other constants are the papers', and nothing better is known, so that
``<method>`` and ``<method>-paper`` give the same options. Recipes hold the papers' protocols for their models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.score import LoraPruneConfig, MoreauConfig, ScoreConfig


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


def _wanda() -> PruneConfig:
    """Wanda, structured: sum |w| |x| over the coupled matrices; 128 samples as in the paper, of 128 tokens (ours)."""
    base = scoring("wanda")
    return replace(base, data=replace(base.data, samples=128))


def _flap() -> PruneConfig:
    """FLAP: the standardised fluctuation, with bias compensation; 1,024 samples of 128 tokens as the authors use."""
    base = scoring("flap")
    score = replace(base.score, aggregation="mean", compensate=True)
    return replace(base, data=replace(base.data, samples=1024), score=score)


def _taylor() -> PruneConfig:
    """LLM-Pruner's Taylor score, sum |w g|."""
    return scoring("taylor")


def _loraprune() -> PruneConfig:
    """LoRAPrune's score with the authors' LoRA (r=8, alpha=16, lr 1e-4, momentum 0.9); 32 steps of 8 x 128 (ours)."""
    base = scoring("loraprune")
    return replace(base, data=replace(base.data, samples=128), loraprune=LoraPruneConfig())


def _moreau() -> PruneConfig:
    """MoreauPruner with the paper's constants: T 10, rho 0.05, gamma 1e-3, sigma 0.05, one draw a step."""
    moreau = MoreauConfig(steps=10, rho=0.05, gamma=1e-3, eta=0.0, sigma=0.05, draws=1)
    return replace(scoring("moreau"), moreau=moreau)


def _moreau_gs() -> PruneConfig:
    """MoreauPruner-GS with the paper's constants: T 10, rho 0.2, gamma 2e-4, eta 5e-6, sigma 0.05."""
    moreau = MoreauConfig(steps=10, rho=0.2, gamma=2e-4, eta=5e-6, sigma=0.05, draws=1)
    return replace(scoring("moreau_gs"), moreau=moreau)


def _moreau_converged() -> PruneConfig:
    """MoreauPruner run to the minimiser of the envelope (within 5 %), with fixed noise and larger steps (ours)."""
    moreau = MoreauConfig(steps=100, rho=0.05, gamma=1e-2, eta=0.0, sigma=0.05, redraw=False, tolerance=0.05)
    return replace(scoring("moreau"), moreau=moreau)


def _smoothgrad() -> PruneConfig:
    """SmoothGrad with the paper's constants: 100 noisy passes, sigma 0.05."""
    return replace(scoring("smoothgrad"), moreau=MoreauConfig(sigma=0.05, draws=100))


SCORE_PRESETS: dict[str, Callable[[], PruneConfig]] = {
    "magnitude": _magnitude,
    "random": _random,
    "wanda": _wanda,
    "flap": _flap,
    "taylor": _taylor,
    "loraprune": _loraprune,
    "moreau": _moreau,
    "moreau-converged": _moreau_converged,
    "moreau_gs": _moreau_gs,
    "smoothgrad": _smoothgrad,
}
"""Scorer -> function that builds its options (whose docstring describes it); each of them is different."""

NO_PAPER = ("magnitude", "random", "moreau-converged")
"""Scorers that are no method with a paper's own constants."""

PRESETS: dict[str, Callable[[], PruneConfig]] = {
    **SCORE_PRESETS,
    **{f"{name}-paper": make for name, make in SCORE_PRESETS.items() if name not in NO_PAPER},
}
"""Preset name -> function that builds its options."""
