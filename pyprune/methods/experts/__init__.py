"""Methods that remove whole experts of mixtures, and train nothing.

To add one, write a file here with the method's name. It declares ``METHOD`` by :func:`expert_method`, and imports no
torch. Its decision is :func:`by_sums` of a function that scores the experts of one layer from
:class:`pyprune.probe.experts.ExpertSums`, or its own. ``_choice.py`` has the code that decisions share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pyprune.config.base import LARGEST_INDEX, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.methods.base import NO_RUN, Decide, Deferred, Method, PlanDecision, PlanRequest, RunOptions
from pyprune.methods.training import LESS_TEXT, make_forms

FURTHER_TEXT = 3
"""Times as much text again may be read, until every expert has seen enough tokens to be judged by."""


@dataclass(frozen=True)
class ExpertOptions(MethodOptions):
    """Options of every method that removes experts.

    Attributes:
        keep: experts that stay in every layer; None = by the ratio.
    """

    keep: int | None = option(None, at_least=1, at_most=LARGEST_INDEX)


@dataclass(frozen=True)
class RankedOptions(ExpertOptions):
    """Options of methods whose scores compare experts of several layers.

    Attributes:
        ranking: local (as many of every layer, which a stock architecture holds) or global (one order over all layers,
            of scores relative to their layer).
    """

    ranking: Literal["local", "global"] = "local"


def expert_method(
    name: str,
    summary: str,
    decide: Decide,
    *,
    choice: str,
    options: type[ExpertOptions] = RankedOptions,
    **fields: Any,
) -> Method:
    """Return the registry's entry of a method of this folder.

    Args:
        name: name of the file.
        summary: one line for people.
        decide: the decision.
        choice: what its presets choose, as a sentence.
        options: class of the method's own options.
        fields: other fields of :class:`~pyprune.methods.base.Method`.
    """

    def choose() -> PruneConfig:
        stages = StageConfig(before=())
        return PruneConfig(name, ratio=0.25, ratio_of="experts", data=LESS_TEXT, stages=stages, options=options())

    choose.__doc__ = choice
    presets: dict[str, Callable[[], PruneConfig]] = make_forms(choose)
    return Method(name, "experts", summary, decide, options=options, from_disk=True, presets=presets, **fields)


def by_sums(score: str) -> Decide:
    """Return the decision that removes the experts of the smallest scores.

    Args:
        score: "module:name" of a function (sums of one layer) -> float64 [experts].
    """
    return partial(_decide, Deferred(score))


def _decide(
    score: Deferred, model: Any, samples: Any, request: PlanRequest, run: RunOptions = NO_RUN, /
) -> PlanDecision:
    from pyprune.methods.experts._choice import decide_by_sums

    return decide_by_sums(score, model, samples, request, run)
