"""EAN: remove the experts whose outputs have the smallest sum of norms (Jaiswal et al. 2025).

The sum over the tokens that are routed to an expert of ||f_j(x)||_2, the criterion of Jaiswal et al. ("Finding
Fantastic Experts in MoEs"). Router weights do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.methods.experts import FURTHER_TEXT, by_sums, expert_method

if TYPE_CHECKING:
    from torch import Tensor

    from pyprune.probe.experts import ExpertSums


def score(sums: ExpertSums) -> Tensor:
    """Return the sum of the norms of every expert's outputs, float64 [experts]."""
    return sums.norms


METHOD = expert_method(
    "expert_norm",
    "EAN: remove the experts with the smallest sum of the norms of their outputs.",
    by_sums(f"{__name__}:score"),
    choice="25 % of the experts of every layer, those with the smallest sum of the norms of their outputs.",
    further_text=FURTHER_TEXT,
)
