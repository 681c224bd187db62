"""Frequency: remove the experts to which the fewest tokens are routed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.methods.experts import FURTHER_TEXT, by_sums, expert_method

if TYPE_CHECKING:
    from torch import Tensor

    from pyprune.probe.experts import ExpertSums


def score(sums: ExpertSums) -> Tensor:
    """Return the number of tokens of every expert, float64 [experts]."""
    return sums.tokens


METHOD = expert_method(
    "expert_frequency",
    "Frequency: remove the experts to which the fewest tokens are routed.",
    by_sums(f"{__name__}:score"),
    choice="25 % of the experts of every layer, those to which the fewest tokens are routed.",
    further_text=FURTHER_TEXT,
)
