"""REAP: remove the experts that add least to the tokens routed to them (Lasby et al. 2025).

    S_j = mean over the tokens x that are routed to j of  g_j(x) ||f_j(x)||_2

(Lasby et al., "REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression"). g_j(x) is the weight by which the
model multiplies the output f_j(x) of expert j. An expert that saw no token scores 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyprune.methods.experts import FURTHER_TEXT, by_sums, expert_method

if TYPE_CHECKING:
    from torch import Tensor

    from pyprune.probe.experts import ExpertSums


def score(sums: ExpertSums) -> Tensor:
    """Return the mean weighted norm of every expert's output over its tokens, float64 [experts]."""
    return sums.weighted / sums.tokens.clamp(min=1)


METHOD = expert_method(
    "reap",
    "REAP: remove the experts with the smallest mean router weight times norm of their output.",
    by_sums(f"{__name__}:score"),
    choice="25 % of the experts of every layer, those that add least to their tokens (REAP).",
    further_text=FURTHER_TEXT,
)
