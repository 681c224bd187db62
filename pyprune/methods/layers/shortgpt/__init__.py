"""ShortGPT: remove the layers that turn the residual stream least (Men et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.run import PruneConfig
from pyprune.methods.base import Deferred, Method, with_paper
from pyprune.methods.layers import BLOCKS_TOO, BlockOptions, removing


@dataclass(frozen=True)
class ShortGptOptions(BlockOptions):
    """Options of ShortGPT; the paper removes whole layers and keeps none in particular.

    Attributes:
        keep_first: layers at the beginning of the model that stay whole.
        keep_last: layers at its end that stay whole.
    """

    keep_first: int = option(0, at_least=0, at_most=LARGEST_INDEX)
    keep_last: int = option(0, at_least=0, at_most=LARGEST_INDEX)


def _shortgpt() -> PruneConfig:
    """ShortGPT: 25 % of the layers, those of the smallest block influence; 16 samples of 2,048 tokens (ours).

    The paper's calibration text is PG19.
    """
    return removing("shortgpt", ShortGptOptions(), samples=16, sequence_length=2048)


METHOD = Method(
    name="shortgpt",
    axis="layers",
    summary="ShortGPT: remove the layers whose output points most nearly where their input does.",
    decide=Deferred(f"{__name__}.score:decide"),
    regularise=None,
    options=ShortGptOptions,
    from_disk=True,
    removes=BLOCKS_TOO,
    presets=with_paper("shortgpt", _shortgpt),
)
