"""MoreauPruner: scores from the gradient of the loss's Moreau envelope (Wang et al., equations 9 and 10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, LARGEST_WEIGHT, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.errors import shown
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config, with_local_ranking


@dataclass(frozen=True)
class MoreauOptions(MethodOptions):
    """Options of MoreauPruner (Wang et al., "MoreauPruner", Algorithm 1); the defaults are the paper's constants.

    Attributes:
        steps: T, gradient steps on the Moreau envelope; with a tolerance, the most steps.
        rho: weight of the proximal term.
        gamma: step size.
        sigma: standard deviation of the noise, relative to each weight.
        draws: m, noise draws averaged in one step.
        redraw: new noise at every step; False repeats the first step's, which a converging run needs.
        tolerance: stop once the error of the envelope's optimality condition, delta = -rho g, is below this share of
            the displacement's norm; None = all steps.
        seed: of the noise.
    """

    steps: int = option(10, at_least=1, at_most=1_000_000)
    rho: float = option(0.05, above=0, at_most=LARGEST_WEIGHT)
    gamma: float = option(1e-3, above=0, at_most=LARGEST_WEIGHT)
    sigma: float = option(0.05, at_least=0, at_most=1e30)
    draws: int = option(1, at_least=1, at_most=1_000_000)
    redraw: bool = True
    tolerance: float | None = option(None, above=0, below=1, otherwise=", or null for all steps")
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)

    @property
    def group_weight(self) -> float:
        """Return the weight of the group norm on the displacement (the paper's eta): 0."""
        return 0.0

    @override
    def problems(self) -> Iterator[str]:
        if self.gamma > self.rho:
            yield f"gamma is {shown(self.gamma)} and rho is {shown(self.rho)}; gamma must not exceed rho."


def _moreau_paper() -> PruneConfig:
    """MoreauPruner with the paper's constants: T 10, rho 0.05, gamma 1e-3, sigma 0.05, one draw a step."""
    return scoring_config("moreau", MoreauOptions())


def _moreau_converged() -> PruneConfig:
    """MoreauPruner run to the minimiser of the envelope (within 5 %), with fixed noise and larger steps (ours)."""
    return scoring_config("moreau", MoreauOptions(steps=100, gamma=1e-2, redraw=False, tolerance=0.05))


METHOD = score_method(
    "moreau",
    "MoreauPruner: robust scores from the gradient of the Moreau envelope.",
    "pyprune.methods.score._descent:score_by_descent",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=MoreauOptions,
    presets={**equal_layer_forms(_moreau_paper), "moreau-converged": with_local_ranking(_moreau_converged)},
)
