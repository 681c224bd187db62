"""Optimal Brain Surgeon for structures: the rise of the loss when one is removed and the others compensate for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.base import option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.score import choose_by_score, score_method, scoring_config
from pyprune.methods.training import make_forms


@dataclass(frozen=True)
class ObsOptions(MethodOptions):
    """Options of Optimal Brain Surgeon.

    Attributes:
        damping: added to the second moments of a module's input, relative to the mean of their diagonal.
        dtype: compute dtype: float32 (that of the weights), bfloat16 (autocast), or auto: bfloat16 if the device
            multiplies faster in it, else float32. Sums over tokens are float32.
    """

    damping: float = option(0.01, above=0.0)
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"


def _obs() -> PruneConfig:
    """Optimal Brain Surgeon over the FFN channels on a mixture of texts; as many of every layer but the outer ones."""
    # Heads are closed where channels suffice: on SmolLM2-135M a cut of 20 % that removes some loses more than was
    # estimated. At 50 % channels alone would keep a sixth, and are far worse (docs/results/names.md). Costs are nats
    # and compare between layers, but they are costs of single layers: one order over all layers lets some lose too much
    # (docs/reference/methods/obs.md).
    paper = scoring_config("obs", ObsOptions(dtype="auto"))
    return choose_by_score(paper, axes=("ffn",), further_axes=("heads",), ranking="local")


METHOD = score_method(
    "obs",
    "Optimal Brain Surgeon: remove the heads and channels that the others can best replace.",
    f"{__name__}.score:score",
    from_disk=("heads", "ffn"),
    gradients=True,
    removes="heads and FFN channels",
    options=ObsOptions,
    presets=make_forms(_obs),
)
