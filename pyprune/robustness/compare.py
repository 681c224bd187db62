"""How far the result of a scoring method depends on tiny changes of the weights (MoreauPruner, table 1).

Every variant of a model (``perturbations.py``) is scored once a method and calibration seed. The scores
are ranked to every ratio, and each plan is measured on the masked variant: fine ratios, no legal sizes needed. All
methods and variants read the same calibration samples. Compared with the unchanged float32 model, and as in the paper
float16 with bfloat16: the perplexity after pruning, and the overlap of the removed units (Jaccard: common / all).

* ``smoothgrad`` gets the noise of ``moreau``: sigma, seed and the numbers of all its draws (steps x draws). The two
  then differ only by the steps on the displacement.
* On the hidden axis (``axes=("hidden",)``, the paper's channel-wise table) the ratio is a share of the hidden
  channels, not rounded to legal sizes; otherwise it is a share of the parameters.
* Memory: the model and one copy of its weights, the originals. Variants and masked models are made inside the model
  itself, from the originals, one after the other. The scorer's memory comes on top (moreau: a float32 displacement of
  the open parameters).

Finished work is appended to a file of JSON lines, from which the same call continues. The key of a line covers all that
its result depends on: weights, configuration, options, the text and its tokens. It does not cover the code: after a
change of pyprune, use another file.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig
from pyprune.cut.mask import mask_, restored
from pyprune.data.sampling import sample_sequences
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.data.tokens import Batch
from pyprune.errors import ConfigError, OutputError
from pyprune.families import begins_with_bos, family_for, parameter_shapes
from pyprune.methods.base import PlanRequest, own_options
from pyprune.methods.ratio import share_of_parameters
from pyprune.methods.registry import get_method
from pyprune.methods.score import ScoreMethod
from pyprune.methods.score.base import Scoring, make_ranking, score_spread
from pyprune.methods.score.smoothgrad import SmoothGradOptions
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import EvaluationText, evaluate_perplexity, evaluation_text
from pyprune.robustness.options import READ_OPTIONS, RobustnessConfig
from pyprune.robustness.perturbations import DENSE, VariantReport, set_variant_
from pyprune.robustness.result import TITLE, RobustnessResult, RobustnessRow, ScoringFacts
from pyprune.runtime.disk import is_written_in_place
from pyprune.runtime.files import check_file, write_text
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import to_markdown

NOT_COMPUTED = ("_name_or_path", "dtype", "transformers_version")
"""Fields of a configuration that do not change what the weights compute."""


def check_robustness(
    model: PreTrainedModel, tokenizer: Any, config: RobustnessConfig, *, out: Path | None = None
) -> RobustnessResult:
    """Score, rank and measure every variant with every method. The model is unchanged afterwards.

    Args:
        model: dense, float32, of a known family.
        tokenizer: of the model.
        config: the variants, methods, ratios and texts to compare.
        out: file of JSON lines that keeps finished work (read first, if it exists); the tables are written next to it
            as Markdown (same name, .md). None keeps nothing.

    Raises:
        ConfigError: invalid options, or a model that is not float32.
        DataError: text that cannot be used.
        OutputError: see :func:`check_rows_file`.
        CheckpointError: ``out`` exists and is no such file.
        PypruneError: a stage failed; finished work is kept.
    """
    config.validate()
    if out is not None:
        check_rows_file(out)
    records = RecordFile(out, program="pyprune robustness", option="--out")
    texts = [evaluation_text(tokenizer, source) for source in config.texts]
    with restored(model) as originals:
        result = RobustnessRun(model, tokenizer, config, texts, originals, records).result()
    if out is not None:
        write_text(out.with_suffix(".md"), to_markdown(result.report()))
    return result


def check_rows_file(out: Path) -> None:
    """Refuse a file of rows that cannot be written, or whose tables would replace another file.

    Raises:
        OutputError: ``out`` is no regular file; it ends in .md, as the tables' file does; one of the two cannot be
            written; or the tables' file exists and holds something else.
    """
    check_file(out)
    if is_written_in_place(out):
        raise OutputError(f"{out} is no regular file, so no tables can be written next to it; give --out another name.")
    tables = out.with_suffix(".md")
    if out == tables:
        raise OutputError(f"{out} is where the tables are written; give the rows another name, for example .jsonl.")
    check_file(tables)
    if tables.is_file() and tables.stat().st_size:
        with tables.open("rb") as stream:
            first = stream.readline(1000)
        if first.strip() != f"# {TITLE}".encode():
            raise OutputError(
                f"{tables}, where the tables are written, is not a report of robustness; give --out another name."
            )


@dataclass(eq=False)
class RobustnessRun:
    """The one model in memory, and its measurements."""

    model: PreTrainedModel
    tokenizer: Any
    config: RobustnessConfig
    texts: Sequence[EvaluationText]
    originals: Mapping[str, Tensor]
    records: RecordFile
    holds: str | None = None
    samples: dict[DataConfig, Tensor] = field(default_factory=dict)
    reports: dict[str, VariantReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = (DENSE, *self.config.variants)
        self.methods = {name: self.config.of(name) for name in self.config.methods}
        both = {"bfloat16", "float16"} <= set(self.names)
        self.pairs = [*((DENSE, v) for v in self.config.variants), *([("bfloat16", "float16")] if both else [])]

    def result(self) -> RobustnessResult:
        """Compute the missing rows, then assemble the result."""
        config = self.config
        self._check_goals()
        self.use(DENSE)
        total = len(config.seeds) * len(config.methods) * len(self.names)
        unpruned = {(t.source, v): self.perplexity(None, v, t) for v in self.names for t in self.texts}
        scored: dict[tuple[int, str, str], Json] = {}
        measured: dict[tuple[str, int, str, float, str], float] = {}
        for seed in config.seeds:
            for method in config.methods:
                for variant in self.names:
                    record = self.scores(seed, method, variant, f"{len(scored) + 1}/{total}")
                    scored[seed, method, variant] = record
                    for ratio in config.ratios:
                        for text in self.texts:
                            value = self.perplexity((record, ratio), variant, text)
                            measured[text.source, seed, method, ratio, variant] = value
        rows = tuple(
            self._row(scored, measured, (text.source, seed, method, ratio), pair)
            for text in self.texts
            for seed in config.seeds
            for method in config.methods
            for ratio in config.ratios
            for pair in self.pairs
        )
        facts = tuple(
            ScoringFacts(*at, r["zeros"], r["seconds"], tuple(r["warnings"]), r.get("steps"), r.get("residual"))
            for at, r in scored.items()
        )
        reports = tuple(self.report_of(name) for name in self.names)
        return RobustnessResult(config, rows, facts, reports, unpruned, self._conditions())

    def _check_goals(self) -> None:
        """Refuse, before anything is computed, a ratio that cannot be reached or a text that is too long."""
        for options in self.methods.values():
            check_sequence_length(self.model.config, options.data.sequence_length)
            for ratio in self.config.ratios:
                make_ranking(self.model, PlanRequest.of(self.model, replace(options, ratio=ratio))).check_goal()

    def _row(
        self,
        scored: Mapping[tuple[int, str, str], Json],
        measured: Mapping[tuple[str, int, str, float, str], float],
        at: tuple[str, int, str, float],
        pair: tuple[str, str],
    ) -> RobustnessRow:
        _, seed, method, ratio = at
        against, variant = pair
        plans = [_plan(scored[seed, method, name], ratio) for name in pair]
        removed = [removed_units(plan) for plan in plans]
        return RobustnessRow(
            *at,
            *pair,
            removed=share_of_parameters(family_for(self.model), self.shapes, plans[1]),
            reference=measured[(*at, against)],
            perplexity=measured[(*at, variant)],
            jaccard={axis: jaccard(removed[0][axis], removed[1][axis]) for axis in self.config.axes},
            zeros=scored[seed, method, variant]["zeros"],
        )

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter name -> shape."""
        return parameter_shapes(self.model)

    @cached_property
    def weights_digest(self) -> str:
        """SHA-256 of the original weights."""
        digest = hashlib.sha256()
        for name, weight in self.originals.items():
            digest.update(name.encode())
            digest.update(weight.contiguous().cpu().numpy().data)
        return digest.hexdigest()

    def use(self, variant: str) -> None:
        """Put the unmasked weights of a variant into the model."""
        if self.holds != variant:
            self.reports[variant] = set_variant_(self.model, self.originals, variant, self.config.adapter)
            self.holds = variant

    def mask(self, variant: str, plan: PrunePlan | None) -> PreTrainedModel:
        """Mask a variant in place, without a further copy of the weights; the next :meth:`use` undoes it."""
        self.use(variant)
        if plan is not None:
            self.holds = None
            mask_(self.model, plan)
        return self.model

    def report_of(self, variant: str) -> VariantReport:
        """Return how far a variant changed the weights."""
        if variant not in self.reports:
            self.use(variant)
        return self.reports[variant]

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 of the configuration, which decides what the weights compute."""
        options = json.loads(self.model.config.to_json_string(use_diff=False))
        return digest({name: value for name, value in options.items() if name not in NOT_COMPUTED})

    @cached_property
    def ids_digests(self) -> dict[str, str]:
        """Text -> SHA-256 of its token ids, which change with the tokenizer."""
        return {text.source: hashlib.sha256(text.token_ids.numpy().data).hexdigest() for text in self.texts}

    def _weights_of(self, variant: str) -> Json:
        adapter = asdict(self.config.adapter) if variant == "lora" else None
        return {"weights": self.weights_digest, "model": self.model_digest, "variant": variant, "adapter": adapter}

    def scores(self, seed: int, method: str, variant: str, number: str) -> Json:
        """Score once, and return the plans of every ratio."""
        config = replace(self.methods[method], data=replace(self.methods[method].data, seed=seed))
        options = {name: value for name, value in config.to_dict().items() if name in (*READ_OPTIONS, config.method)}
        reserved = sorted(t.text_sha256 for t in self.texts)
        key = _key("scores", self._weights_of(variant), {"options": options, "reserved": reserved})
        samples = self._samples(config)
        digest = Batch.of(samples).digest()
        record = self.records.of("scores").get(key) or {"plans": {}}
        if record.get("samples", digest) != digest:  # the file of the calibration text was changed since
            record = {"plans": {}}
        if all(repr(ratio) in record["plans"] for ratio in self.config.ratios):
            return record
        self.use(variant)
        start = time.perf_counter()
        run = self.score(samples, config)
        seconds = time.perf_counter() - start
        say(f"[{number}] seed {seed}, {method}, {variant}: scored in {seconds:.1f} s", "dim")
        plans = {
            repr(ratio): _rank(self.model, run, replace(config, ratio=ratio)).to_dict() for ratio in self.config.ratios
        }
        return self.records.add(
            {
                "kind": "scores",
                "key": key,
                "seed": seed,
                "method": method,
                "variant": variant,
                "seconds": seconds,
                "zeros": {axis: values["zeros"] for axis, values in score_spread(run).items()},
                "warnings": list(run.warnings),
                "steps": run.details.get("steps"),
                "residual": (run.details.get("residuals") or [None])[-1],
                "samples": digest,
                "plans": record["plans"] | plans,
            }
        )

    def score(self, samples: Tensor, config: PruneConfig) -> Scoring:
        """Score the structures of the model by the method of ``config``."""
        method = get_method(config.method)
        if not isinstance(method, ScoreMethod):
            raise ConfigError(f"method {config.method!r} does not score; robustness compares scoring methods.")
        run = Scoring.of(self.model, samples, PlanRequest.of(self.model, config))
        method.scorer(run)
        return run

    def _samples(self, config: PruneConfig) -> Tensor:
        """Draw the calibration samples of a method, int64 [N, T], none of them part of a test text."""
        data = config.data
        if data not in self.samples:
            reserved = [text.spans for text in self.texts]
            bos = begins_with_bos(self.model.config)
            drawn = sample_sequences(self.tokenizer, data, exclude=reserved, bos=bos).ids
            check_token_ids(self.model.config, drawn)
            self.samples[data] = drawn
        return self.samples[data]

    def perplexity(self, pruned: tuple[Json, float] | None, variant: str, text: EvaluationText) -> float:
        """Perplexity on one text of a variant, pruned by the plan of (scores, ratio) or whole."""
        record, ratio = pruned or (None, 0.0)
        plan = _plan(record, ratio) if record else None
        measured = {"text": self.ids_digests[text.source], "windows": text.max_windows}
        measured |= {"protocol": self.config.protocol, "tokens": self.config.max_tokens}
        measured |= {"bos": True} if begins_with_bos(self.model.config) else {}
        key = _key("perplexity", self._weights_of(variant), {"plan": plan and plan.to_dict(), **measured})
        entry = self.records.of("perplexity").get(key)
        if entry is None:
            start = time.perf_counter()
            model = self.mask(variant, plan)
            result = evaluate_perplexity(
                model, self.tokenizer, text, self.config.protocol, max_tokens=self.config.max_tokens
            )
            entry = self.records.add(
                {
                    "kind": "perplexity",
                    "key": key,
                    "seed": record and record["seed"],
                    "method": record and record["method"],
                    "ratio": ratio,
                    "variant": variant,
                    "text": text.source,
                    "protocol": result.protocol,
                    "tokens": result.tokens,
                    "perplexity": result.perplexity,
                    "seconds": time.perf_counter() - start,
                }
            )
        return float(entry["perplexity"])

    def _conditions(self) -> dict[str, str]:
        config, methods = self.config, self.methods
        first = next(iter(methods.values()))
        tokens = "all" if config.max_tokens is None else f"the first {config.max_tokens:,}"
        conditions = {
            "calibration": f"{first.data.samples} samples x {first.data.sequence_length} tokens of {first.data.source} "
            f"({first.data.split}), seeds {', '.join(map(str, config.seeds))}; the same for all",
            "open": f"axes {', '.join(config.axes)}; layers {_layers(first)}; {first.score_options.ranking} ranking; "
            f"ratio of {first.ratio_of or 'parameters'}",
            "perplexity": f"{config.protocol} on {', '.join(config.texts)}, {tokens} tokens, masked models, float32",
        }
        if compensated := [name for name, method in methods.items() if method.adds_biases]:
            conditions["compensation"] = f"left out of {', '.join(compensated)}: masked models have no biases for it"
        if solved := [name for name, method in methods.items() if method.cut.reconstruct == "least_squares"]:
            conditions["reconstruction"] = f"left out of {', '.join(solved)}: masked models keep their weights"
        if noisy := [method for method in methods.values() if method.method == "smoothgrad"]:
            of = own_options(noisy[0], SmoothGradOptions)
            conditions["smoothgrad"] = (
                f"{of.draws} draws, numbered and seeded as moreau's (sigma {of.sigma}, seed {of.seed})"
            )
        if "lora" in config.variants:
            of_lora = config.adapter
            conditions["lora"] = (
                f"random update of rank {of_lora.rank} and relative Frobenius size {of_lora.size:g} of every matrix of "
                f"the decoder layers, seed {of_lora.seed}"
            )
        if "int8" in config.variants:
            conditions["int8"] = (
                "matrices of the decoder layers, symmetric, one scale an output channel, round to nearest"
            )
        return conditions


def _layers(config: PruneConfig) -> str:
    score = config.score_options
    return ", ".join(map(str, score.layers)) if score.layers else f"{score.first_layer} to {score.last_layer}"


def _rank(model: PreTrainedModel, run: Scoring, config: PruneConfig) -> PrunePlan:
    config.validate()
    ranking = make_ranking(model, PlanRequest.of(model, config))
    return ranking.plan(run.scores, ranking.identity, Fraction(1))


def _plan(record: Mapping[str, Any], ratio: float) -> PrunePlan:
    return PrunePlan.from_dict(record["plans"][repr(ratio)])


def removed_units(plan: PrunePlan) -> dict[str, frozenset[tuple[int, int]]]:
    """Axis -> (layer, index) of the removed query heads and FFN channels, and (-1, index) of the hidden channels."""
    hidden = frozenset((-1, unit) for unit in plan.removed_hidden)
    return {"heads": _removed_inside(plan, "query_heads"), "ffn": _removed_inside(plan, "ffn"), "hidden": hidden}


def _removed_inside(plan: PrunePlan, axis: str) -> frozenset[tuple[int, int]]:
    """Return (layer, index) of the removed units of an axis."""
    dense = plan.dense
    whole = {(layer, unit) for layer in range(dense.num_layers) for unit in range(dense.units(axis, layer))}
    return frozenset(whole - {(layer.index, unit) for layer in plan.layers for unit in layer.units(axis)})


def jaccard(first: frozenset[tuple[int, int]], second: frozenset[tuple[int, int]]) -> float | None:
    """Units in both sets over units in either, in [0, 1]; None when both are empty."""
    either = first | second
    return len(first & second) / len(either) if either else None


def _key(kind: str, weights: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    return digest([kind, weights, part])[:32]
