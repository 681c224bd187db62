"""PCA: rotate the residual stream to its principal directions, and slice off those with the least energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.methods.base import Deferred, Method
from pyprune.methods.training import MIXTURE, make_forms


@dataclass(frozen=True)
class PcaOptions(MethodOptions):
    """Options of PCA.

    Attributes:
        tokens: weight of each token of the calibration text: alike (like in the norms, which divide every token by its
            size) or energy (the squared norm of its stream; a few tokens can have most of it).
    """

    tokens: Literal["alike", "energy"] = "alike"


def _pca() -> PruneConfig:
    """PCA: 25 % of the hidden directions, those of the least energy on a mixture of texts (all constants ours)."""
    stages = StageConfig(before=())
    return PruneConfig("pca", ratio=0.25, ratio_of="hidden", data=MIXTURE, stages=stages, options=PcaOptions())


METHOD = Method(
    name="pca",
    axis="hidden",
    summary="PCA: rotate the residual stream to its principal directions and slice off the weakest (untied heads).",
    decide=Deferred(f"{__name__}.directions:decide"),
    options=PcaOptions,
    prepare=Deferred(f"{__name__}.directions:prepare"),
    from_disk=True,
    rotates=True,
    presets=make_forms(_pca),
)
