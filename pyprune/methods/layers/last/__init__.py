"""The last layers, or their attention or MLP blocks: the control that reads nothing (Gromov et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.run import PruneConfig
from pyprune.methods.layers import BlockOptions, removal_config, removal_method


@dataclass(frozen=True)
class LastOptions(BlockOptions):
    """Options of removing the last layers, or blocks.

    Attributes:
        keep_last: layers at the end of the model that are kept whole; Gromov et al. keep 1.
    """

    keep_last: int = option(1, at_least=0, at_most=LARGEST_INDEX)


def _last() -> PruneConfig:
    """The last 25 % of the layers but the very last one, which is kept."""
    return removal_config("last", LastOptions(), samples=128, sequence_length=128)


METHOD = removal_method(
    "last",
    "Last: remove the last layers but the very last one; the control that reads nothing.",
    f"{__name__}.choose:decide",
    LastOptions,
    reads_text=False,
    presets={"last": _last, "last-paper": _last},
)
