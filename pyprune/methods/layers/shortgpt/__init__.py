"""ShortGPT: remove the layers that turn the residual stream least (Men et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyprune.config.run import PruneConfig
from pyprune.methods.layers import EdgeOptions, removal_config, removal_method
from pyprune.methods.training import LESS_TEXT, make_forms


@dataclass(frozen=True)
class ShortGptOptions(EdgeOptions):
    """Options of ShortGPT; the paper removes whole layers and keeps none in particular."""


def _shortgpt_paper() -> PruneConfig:
    """ShortGPT: 25 % of the layers, those of the smallest block influence; 16 samples of 2,048 tokens (ours).

    The paper's calibration text is PG19.
    """
    return removal_config("shortgpt", ShortGptOptions(), samples=16, sequence_length=2048)


def _shortgpt() -> PruneConfig:
    """ShortGPT: 25 % of the layers, those of the smallest block influence on a mixture of texts (ours)."""
    return replace(_shortgpt_paper(), data=LESS_TEXT)


METHOD = removal_method(
    "shortgpt",
    "ShortGPT: remove the layers whose output has nearly the direction of their input.",
    f"{__name__}.score:decide",
    ShortGptOptions,
    presets=make_forms(_shortgpt, _shortgpt_paper),
)
