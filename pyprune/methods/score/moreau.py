"""MoreauPruner: scores from the gradient of the loss's Moreau envelope (Wang et al., equations 9 and 10)."""

from __future__ import annotations

from pyprune.errors import ConfigError
from pyprune.methods.score._descent import score_by_descent
from pyprune.methods.score.base import Scoring, score_method


def score(run: Scoring) -> None:
    """T steps of Algorithm 1 without the group norm.

    Raises:
        ConfigError: eta is not 0.
    """
    if run.config.moreau.eta != 0:
        raise ConfigError(f"moreau.eta is {run.config.moreau.eta}, but method moreau has none; use moreau_gs.")
    score_by_descent(run)


METHOD = score_method("moreau", "MoreauPruner: robust scores from the gradient of the Moreau envelope.", score)
