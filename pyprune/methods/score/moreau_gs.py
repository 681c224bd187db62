"""MoreauPruner-GS: MoreauPruner with a group norm on the displacement (Wang et al., definition 3 and equation 11)."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from pyprune.config.base import LARGEST_WEIGHT, option
from pyprune.config.run import PruneConfig
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config
from pyprune.methods.score.moreau import MoreauOptions


@dataclass(frozen=True)
class MoreauGsOptions(MoreauOptions):
    """Options of MoreauPruner-GS: those of MoreauPruner, and the weight of the group norm.

    Attributes:
        rho: weight of the proximal term.
        gamma: step size.
        eta: weight of the group norm.
    """

    rho: float = option(0.2, above=0, at_most=LARGEST_WEIGHT)
    gamma: float = option(2e-4, above=0, at_most=LARGEST_WEIGHT)
    eta: float = option(5e-6, above=0, at_most=LARGEST_WEIGHT)

    @property
    @override
    def group_weight(self) -> float:
        return self.eta


def _moreau_gs_paper() -> PruneConfig:
    """MoreauPruner-GS with the paper's constants: T 10, rho 0.2, gamma 2e-4, eta 5e-6, sigma 0.05."""
    return scoring_config("moreau_gs", MoreauGsOptions(steps=10, rho=0.2, gamma=2e-4, eta=5e-6, sigma=0.05, draws=1))


METHOD = score_method(
    "moreau_gs",
    "MoreauPruner-GS: MoreauPruner with group sparsity of the displacement.",
    "pyprune.methods.score._descent:score_by_descent",
    from_disk=("heads", "ffn", "hidden"),
    gradients=True,
    options=MoreauGsOptions,
    presets=equal_layer_forms(_moreau_gs_paper),
)
