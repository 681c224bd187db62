"""The options of the cut itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.base import Config, option
from pyprune.config.train import LARGEST_BATCH


@dataclass(frozen=True)
class CutConfig(Config):
    """What happens at the moment of the cut.

    Attributes:
        reconstruct: how the parts that stay make up for what is removed: none, or bias (the mean of what the output
            projections lose, given back as a bias: FLAP's, :mod:`pyprune.cut.compensate`).
        batch_size: sequences in one forward pass of that; None = as many as make 2,048 tokens.
    """

    reconstruct: Literal["none", "bias"] = "none"
    batch_size: int | None = option(None, at_least=1, at_most=LARGEST_BATCH)
