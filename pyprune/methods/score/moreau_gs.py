"""MoreauPruner-GS: MoreauPruner with a group norm on the displacement (Wang et al., definition 3 and equation 11)."""

from __future__ import annotations

from pyprune.errors import ConfigError
from pyprune.methods.score._descent import score_by_descent
from pyprune.methods.score.base import Scoring, score_method


def score(run: Scoring) -> None:
    """T steps of Algorithm 1 with the group soft-threshold.

    Raises:
        ConfigError: eta is 0.
    """
    if run.config.moreau.eta == 0:
        raise ConfigError("moreau.eta is 0, which is method moreau; moreau_gs needs eta > 0 (the paper: 5e-6).")
    score_by_descent(run)


METHOD = score_method("moreau_gs", "MoreauPruner-GS: MoreauPruner with group sparsity of the displacement.", score)
