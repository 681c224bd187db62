"""What a plan took beside the dense model, as benches record it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyprune.fit.measured import relative_seconds
from pyprune.fit.profile import DENSE, Timing
from pyprune.fit.quantities import Quantity


def beside_dense(turns: Sequence[Timing], name: str, quantity: Quantity) -> dict[str, Any]:
    """Every sample of a model and of the dense one, in seconds, its share of the dense model's time, and the spread.

    Args:
        turns: of a group of engines.
        name: of the model.
        quantity: the workload.
    """
    seconds, spread = relative_seconds(turns, quantity)
    return {
        "seconds": [t.seconds for t in turns if t.probe == name and t.quantity == quantity],
        "dense_seconds": [t.seconds for t in turns if t.probe == DENSE and t.quantity == quantity],
        "share_of_dense": seconds[name] / seconds[DENSE],
        "spread": spread[name],
    }
