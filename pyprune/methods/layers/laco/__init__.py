"""LaCo: collapse later layers into an earlier one, which takes over their parameters (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.methods.base import Deferred
from pyprune.methods.layers import removal_config, removal_method


@dataclass(frozen=True)
class LacoOptions(MethodOptions):
    """Options of LaCo. Its threshold T is no option: the search finds the largest one that reaches the ratio.

    Attributes:
        form: paper (the sum of the differences) or code (the formula of the authors' code: the layer gets the
            parameters of the last one that it takes over).
        merge: layers that become one in a merge, at most (the paper's C).
        interval: how many layers further down the search continues after a merge (I).
        lowest: the first layer that may take over others (L); the layers before it do not change.
    """

    form: Literal["paper", "code"] = "paper"
    merge: int = option(7, at_least=2, at_most=LARGEST_INDEX)
    interval: int = option(1, at_least=1, at_most=LARGEST_INDEX)
    lowest: int = option(0, at_least=0, at_most=LARGEST_INDEX)


def _laco_paper() -> PruneConfig:
    """LaCo by the paper's formula; constants of the authors' notebook, whose 5 sentences are 5 x 128 tokens here."""
    return removal_config("laco", LacoOptions(form="paper"), samples=5, sequence_length=128)


def _laco() -> PruneConfig:
    """LaCo as the authors' code merges: 25 % of the layers; the paper's sum of 7 layers ruins a small model."""
    return removal_config("laco", LacoOptions(form="code"), samples=5, sequence_length=128)


METHOD = removal_method(
    "laco",
    "LaCo: collapse later layers into an earlier one by adding up how their parameters differ.",
    f"{__name__}.collapse:decide",
    LacoOptions,
    prepare=Deferred(f"{__name__}.collapse:prepare"),
    presets={"laco": _laco, "laco-paper": _laco_paper},
)
