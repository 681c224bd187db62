"""SmoothGrad: the Taylor score with the gradient averaged over noisy weights (Wang et al., section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_SEED, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config


@dataclass(frozen=True)
class SmoothGradOptions(MethodOptions):
    """Options of SmoothGrad.

    Attributes:
        sigma: standard deviation of the noise, relative to each weight.
        draws: noisy passes whose gradients are averaged.
        seed: of the noise.
    """

    sigma: float = option(0.05, at_least=0, at_most=1e30)
    draws: int = option(100, at_least=1, at_most=1_000_000)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)


def _smoothgrad_paper() -> PruneConfig:
    """SmoothGrad with the paper's constants: 100 noisy passes, sigma 0.05."""
    return scoring_config("smoothgrad", SmoothGradOptions(sigma=0.05, draws=100))


METHOD = score_method(
    "smoothgrad",
    "SmoothGrad: first-order scores from gradients averaged over noisy weights.",
    "pyprune.methods.score._descent:score_by_smooth_gradient",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=SmoothGradOptions,
    presets=equal_layer_forms(_smoothgrad_paper),
)
