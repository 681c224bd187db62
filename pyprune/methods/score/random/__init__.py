"""Random: the control that every score must beat. Uniform scores, seeded per layer and axis."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_SEED, option
from pyprune.config.method import MethodOptions
from pyprune.methods.score import score_method


@dataclass(frozen=True)
class RandomOptions(MethodOptions):
    """Options of random.

    Attributes:
        seed: of the scores.
    """

    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)


METHOD = score_method(
    "random",
    "Random: the control that every score must beat.",
    f"{__name__}.score:score",
    text=False,
    from_disk=("heads", "ffn", "hidden"),
    options=RandomOptions,
)
