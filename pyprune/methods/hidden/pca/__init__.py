"""PCA: rotate the residual stream to its principal directions, and slice off those with the least energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.cut import CutConfig
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.methods.base import Deferred, Method
from pyprune.methods.regularise._training import short_training


@dataclass(frozen=True)
class PcaOptions(MethodOptions):
    """Options of PCA.

    Attributes:
        tokens: how much each token of the calibration text counts: alike (as the norms see it, which divide every token
            by its size) or energy (by the squared norm of its stream, of which a few tokens can have most).
    """

    tokens: Literal["alike", "energy"] = "alike"


def _pca() -> PruneConfig:
    """PCA, then a reconstruction by least squares on a mixture of texts, then fine-tuning (all constants ours)."""
    return PruneConfig(
        method="pca",
        ratio=0.25,
        ratio_of="hidden",
        data=DataConfig("mixture", samples=160, sequence_length=256),
        stages=StageConfig(before=(), after=("finetune",)),
        cut=CutConfig(reconstruct="least_squares"),
        options=PcaOptions(),
        finetune=short_training(),
    )


METHOD = Method(
    name="pca",
    axis="hidden",
    summary="PCA: rotate the residual stream to its principal directions and slice off the weakest (untied heads).",
    decide=Deferred(f"{__name__}.directions:decide"),
    regularise=None,
    options=PcaOptions,
    prepare=Deferred(f"{__name__}.directions:prepare"),
    rotates=True,
    presets={"pca": _pca},
)
