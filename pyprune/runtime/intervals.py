"""Confidence intervals of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
"""Share of such intervals that hold the true mean."""


def half_width(values: Sequence[float]) -> float:
    """Return half of the t interval (:data:`CONFIDENCE`) of the mean of two values or more."""
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
