"""Scoring methods: find the structures that matter least and remove them.

To add one, write a folder here with the method's name. A file will do, and so does a module in another package, named
by an entry point of the group ``pyprune.methods``. Nothing is registered by hand. It declares ``METHOD``, without an
import of torch:

    METHOD = score_method("NAME", "One line.", f"{__name__}.score:score", options=NameOptions, presets={"NAME": _name})

where ``score(run)`` adds the scores of one round; :mod:`pyprune.methods.score.base` lists what it may call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pyprune.config.cut import CutConfig
from pyprune.config.data import DataConfig
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.score import ScoreAxis, ScoreConfig
from pyprune.methods.base import NO_RUN, Deferred, Method, PlanDecision, PlanRequest, RunOptions
from pyprune.methods.training import LESS_TEXT, make_forms

if TYPE_CHECKING:
    from pyprune.methods.score.base import Scoring

Scorer = Callable[["Scoring"], None]
"""Adds the scores of every open structure to the run."""


@dataclass(frozen=True, kw_only=True)
class ScoreMethod(Method):
    """A method that scores structures.

    Attributes:
        scorer: adds the scores of one round; for callers that rank the same scores to several goals.
        disk_axes: axes that it scores without the model in memory.
        gradients: whether it takes gradients, and so reads ``score.layerwise`` (of one layer or of all at once).
        holds: the data of all layers that it holds at once, if it cannot score from disk for that reason; empty = none.
        batches: whether it takes text in passes of ``score.batch_size`` sequences.
    """

    scorer: Scorer
    disk_axes: tuple[ScoreAxis, ...] = ()
    gradients: bool = False
    holds: str = ""
    batches: bool = True

    @override
    def default_config(self) -> PruneConfig:
        return scoring_config(self.name, self.options())

    @override
    def unread_options(self, config: PruneConfig) -> dict[str, str]:
        reasons, axes = super().unread_options(config), config.score_options.axes
        if "hidden" not in axes:
            reasons["hidden_multiple"] = f"removes none of the hidden size with score.axes {list(axes)}"
        if not self.gradients:
            reasons["score.layerwise"] = "takes no gradients of layers"
        if not (self.batches and self.reads_text):
            reasons["score.batch_size"] = "does not read text in batches"
        return reasons

    @override
    def streaming_obstacle(self, config: PruneConfig) -> str | None:
        axes = [axis for axis in config.score_options.axes if axis not in self.disk_axes]
        if self.from_disk and axes:
            return f"{self.name} scores {', '.join(axes)} of the model as a whole"
        if self.holds:
            return f"{self.name} holds {self.holds}"
        if self.gradients and not config.score_options.layerwise:
            return "score.layerwise is false, which takes the gradients of all layers at once"
        return super().streaming_obstacle(config)


def _decide(
    scorer: Scorer, model: Any, samples: Any, request: PlanRequest, run: RunOptions = NO_RUN, /
) -> PlanDecision:
    from pyprune.methods.score.base import decide_by_scores

    return decide_by_scores(scorer, model, samples, request, stored=run.stored)


def score_method(
    name: str,
    summary: str,
    scorer: Scorer | str,
    *,
    text: bool = True,
    from_disk: tuple[ScoreAxis, ...] = (),
    seed: bool = False,
    **fields: Any,
) -> ScoreMethod:
    """Return the registry's entry of a scoring method; without presets a run starts from :func:`scoring_config`.

    Args:
        name: name of the file or folder.
        summary: one line for people.
        scorer: adds the scores; "module:name" for a function that is imported when it is first called.
        text: whether the scorer reads calibration text.
        from_disk: axes for which the scorer takes weights, statistics and gradients only from ``run``
            (:class:`Scoring`), which reads a tensor or a layer at a time if the model is not in memory.
        seed: whether the scorer reads ``run.request.seed``, instead of a seed among the method's options.
        fields: other fields of :class:`ScoreMethod`: gradients, holds, batches, removes, options, presets.
    """
    function = Deferred(scorer) if isinstance(scorer, str) else scorer
    return ScoreMethod(
        name=name,
        axis="structures",
        summary=summary,
        scorer=function,
        decide=partial(_decide, function),
        reads_text=text,
        from_disk=bool(from_disk),
        disk_axes=from_disk,
        reads_seed=seed,
        **fields,
    )


CLOSED_ENDS = 2
"""Layers at each end that the recommended forms keep whole."""
BATCH = 8
"""Sequences in one pass of the recommended forms, whose memory does not grow with the text."""


def choose_by_score(paper: PruneConfig, **score: Any) -> PruneConfig:
    """Return the best known choice by a score: on a mixture of texts, and closed at both ends.

    Args:
        paper: the preset with the paper's constants.
        score: options that all scoring methods share.
    """
    shared = {"closed_ends": CLOSED_ENDS, "batch_size": BATCH, **score}
    return replace(paper, data=LESS_TEXT, cut=CutConfig(), score=replace(paper.score_options, **shared))


def equal_layer_forms(paper: Callable[[], PruneConfig], **changes: Any) -> dict[str, Callable[[], PruneConfig]]:
    """Return the presets of a score whose raw sums do not compare across layers and axes: the paper's and ours.

    In one order over heads and FFN channels none of these scores removes a head. A KV group has many times the weights
    of a channel, so its sum is larger, and the layers of the smallest sums lose too much. The recommended form removes
    the same share of every axis in every open layer (``score.ranking`` local), as the papers' runs on LLaMA do;
    docs/results/heads-or-channels.md has the measurements.

    Args:
        paper: makes the preset with the paper's constants and the one order (``NAME-paper``).
        changes: fields of :class:`PruneConfig` in which the recommended form differs from the paper's.
    """

    def choose() -> PruneConfig:
        return replace(choose_by_score(paper(), ranking="local"), **changes)

    choose.__doc__ = f"{paper().method}'s score on a mixture of texts; as many units of every layer but the outer ones."
    return make_forms(choose, paper)


def with_local_ranking(start: Callable[[], PruneConfig]) -> Callable[[], PruneConfig]:
    """Return the preset with a local ranking: every open layer loses the same count."""

    def make() -> PruneConfig:
        base = start()
        return replace(base, score=replace(base.score_options, ranking="local"))

    make.__doc__ = f"{str(start.__doc__).splitlines()[0].rstrip('.')}; the same count in every layer."
    return make


def scoring_config(
    method: str, options: MethodOptions | None = None, *, samples: int = 10, **changes: Any
) -> PruneConfig:
    """Return the start of all scoring methods: 20 % of the parameters, ranked globally, one shot, no recovery.

    Calibration is MoreauPruner's 10 samples of 128 tokens. The calibration source, the global ranking and the ratio are
    ours.

    Args:
        method: name of the method.
        options: the method's own options; None = it has none.
        samples: sequences of WikiText-2 that it reads.
        changes: other fields of :class:`PruneConfig`.
    """
    start = PruneConfig(
        method=method,
        ratio=0.2,
        ratio_of="parameters",
        data=DataConfig("wikitext2", "train", samples=samples, sequence_length=128),
        stages=StageConfig(before=()),
        score=ScoreConfig(),
        options=options or MethodOptions(),
    )
    return replace(start, **changes)
