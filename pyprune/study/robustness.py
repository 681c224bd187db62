"""How far the result of a scoring method depends on tiny changes of the weights (MoreauPruner, table 1).

Every variant of a model (:mod:`pyprune.study.perturbations`) is scored once a method and calibration seed, the scores
are ranked to every ratio, and each plan is measured on the masked variant: fine ratios, no legal sizes needed. All
methods and variants read the same calibration samples. Compared with the unchanged float32 model, and as in the paper
float16 with bfloat16: the perplexity after pruning, and the overlap (Jaccard: common / all) of what goes.

* ``smoothgrad`` is given the noise of ``moreau``: sigma, seed and the numbers of all its draws (steps x draws), so
  that the two differ by the steps on the displacement alone.
* On the hidden axis (``axes=("hidden",)``, the paper's channel-wise table) the ratio is a share of the hidden
  channels, not rounded to legal sizes; otherwise it is a share of the parameters.
* Memory: the model and ONE copy of its weights, the originals. Variants and masked models are made inside the model
  itself, from the originals, one after the other. What a scorer holds comes on top (moreau: a float32 displacement of
  the open parameters).

Finished work is appended to a file of JSON lines, from which the same call continues. A line is found again by what it
depends on: weights, options, text. Not by the code: after a change of pyprune, use another file.
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
from typing_extensions import override

from pyprune.config.base import LARGEST_SEED, Config, option
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig
from pyprune.config.score import ScoreAxis
from pyprune.cut.mask import mask_, restored
from pyprune.data.sampling import sample_sequences
from pyprune.data.stream import check_sequence_length, check_token_ids
from pyprune.errors import ConfigError, OutputError, did_you_mean, shown
from pyprune.families import family_for, parameter_shapes
from pyprune.methods.base import own_options
from pyprune.methods.ratio import share_of_parameters
from pyprune.methods.registry import get_method, is_of_another, presets, score_presets
from pyprune.methods.score import ScoreMethod
from pyprune.methods.score.base import Scoring, ranking_of, score_spread
from pyprune.methods.score.moreau import MoreauOptions
from pyprune.methods.score.smoothgrad import SmoothGradOptions
from pyprune.plan import PrunePlan
from pyprune.quality.perplexity import WINDOWS, EvaluationText, evaluate_perplexity, evaluation_text
from pyprune.recipe import build_config, dotted_names, parse_setting
from pyprune.report import Cell, Report, Table, to_markdown
from pyprune.runtime.files import check_file, write_text
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile
from pyprune.study.perturbations import DENSE, VARIANTS, Adapter, VariantReport, set_variant_

METHODS = ("taylor", "smoothgrad", "moreau", "moreau-converged")
RATIOS = (0.05, 0.1, 0.15, 0.2)
CALIBRATION = {"data.samples": 10, "data.sequence_length": 128}
"""What every method reads unless the options say otherwise, whatever its preset does: only so are they comparable."""

OPEN_OPTIONS = ("data", "hidden_multiple", "score")
"""What every method may be told, by its first name, in addition to its own options (moreau.rho); nothing else of the
options of `pyprune prune` is read here."""

TITLE = "Robustness of scores against changes of the weights"

OWN_OPTIONS = {"method": "methods", "ratio": "ratios", "data.seed": "seeds", "score.axes": "axes"}
"""Options that the comparison sets itself -> the field of :class:`RobustnessConfig` (and the CLI's option) for them."""



@dataclass(frozen=True)
class RobustnessConfig(Config):
    """What is compared.

    Attributes:
        methods: names of scoring presets.
        ratios: shares to remove, each in (0, 1).
        variants: of :data:`pyprune.study.perturbations.VARIANTS`; float32 is always there.
        seeds: calibration seeds.
        axes: what may go: heads and ffn, or hidden alone.
        texts: test texts.
        protocol: of the perplexities.
        max_tokens: tokens of each test text; None = all.
        adapter: of the variant lora.
        options: further options of every method by dotted name, for example {"data.source": "wikitext2"}; None = not
            given.
        settings: the same as "dotted.name=value" texts, which win.
    """

    methods: tuple[str, ...] = METHODS
    ratios: tuple[float, ...] = RATIOS
    variants: tuple[str, ...] = VARIANTS
    seeds: tuple[int, ...] = option((0,), at_least=0, at_most=LARGEST_SEED)
    axes: tuple[ScoreAxis, ...] = ("heads", "ffn")
    texts: tuple[str, ...] = ("wikitext2",)
    protocol: str = "ppl-128"
    max_tokens: int | None = option(None, at_least=2)
    adapter: Adapter = field(default_factory=Adapter)
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @override
    def problems(self) -> list[str]:
        found = [f"ratio is {r}; it must be strictly between 0 and 1." for r in self.ratios if not 0 < r < 1]
        for what, known in (("method", _known()), ("variant", VARIANTS)):
            found += [did_you_mean(name, known, what) for name in getattr(self, f"{what}s") if name not in known]
        if self.protocol not in WINDOWS:
            found.append(did_you_mean(self.protocol, WINDOWS, "perplexity protocol"))
        for name in ("methods", "ratios", "variants", "seeds", "axes", "texts"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                found.append(f"{name} is {shown(list(values))}; give at least one, and none of them twice.")
        return found

    @override
    def validate(self) -> None:
        """See :class:`Config`; the options of every method too: a wrong one is found before the model is read.

        Raises:
            ConfigError: also options that the comparison sets itself, or does not read.
        """
        super().validate()
        given = [*self.options, *(name for text in self.settings for name in dotted_names(parse_setting(text)))]
        self._refuse_own_options(given)
        for method in self.methods:
            self.of(method)
        self._refuse_unread(given)

    def of(self, method: str) -> PruneConfig:
        """The complete options of a method, but for the ratio and the calibration seed.

        Raises:
            ConfigError: an unknown option, or scoring in several rounds.
        """
        given: Json = {"score.axes": list(self.axes), "hidden_multiple": 1, **CALIBRATION}
        if self.axes == ("hidden",):
            given["ratio_of"] = "hidden"
        # None is an option that was not given, which must not undo what is the same for all.
        given |= {name: value for name, value in self.options.items() if value is not None}
        own = presets()[method]().method
        found = build_config(
            preset=method,
            options={name: value for name, value in given.items() if not is_of_another(name, own)},
            settings=[text for text in self.settings if not is_of_another(text, own)],
        )
        if found.score_options.iterations > 1 or found.score_options.counts:
            raise ConfigError(
                "robustness ranks the scores of one round to several ratios; leave score.iterations at 1 and "
                "score.heads, score.ffn and score.hidden out."
            )
        if found.method == "smoothgrad":
            noise = own_options(self.of("moreau"), MoreauOptions)
            draws = noise.draws * (noise.steps if noise.redraw else 1)
            found = replace(found, options=SmoothGradOptions(draws=draws, sigma=noise.sigma, seed=noise.seed))
            found.validate()
        return found

    def _refuse_own_options(self, given: Sequence[str]) -> None:
        for name in given:
            if name in OWN_OPTIONS:
                own = OWN_OPTIONS[name]
                raise ConfigError(f"{name} is what robustness sets itself, for every row of its tables; use --{own}.")

    def _refuse_unread(self, given: Sequence[str]) -> None:
        """Options that none of the compared methods reads."""
        compared = {presets()[method]().method for method in self.methods}
        if "smoothgrad" in compared:
            compared.add("moreau")  # whose noise it gets
        readable = [*OPEN_OPTIONS, *sorted(compared)]
        for name in given:
            if name.partition(".")[0] not in readable:
                raise ConfigError(
                    f"robustness does not read the option {name}; those of {', '.join(readable)} may be set."
                )


def _known() -> list[str]:
    """The presets that can be compared; a second name of one is known too."""
    return [*score_presets(), *(f"{name}-paper" for name in score_presets() if f"{name}-paper" in presets())]


@dataclass(frozen=True)
class RobustnessRow:
    """One pruned variant beside another, usually the pruned float32 model.

    Attributes:
        text: what the perplexities were measured on.
        seed: of the calibration samples.
        method: name of the scoring preset.
        ratio: share that was asked for.
        against: the variant to compare with: float32, or bfloat16 for float16.
        variant: of the weights.
        removed: share of the parameters that the variant's plan removes.
        reference: perplexity of ``against`` pruned by its own scores.
        perplexity: of the variant pruned by its own scores.
        jaccard: axis -> overlap of the units that go (heads: query heads, which go in whole KV groups unless
            score.heads_unit says otherwise), in [0, 1]; None where neither plan removes any.
        zeros: axis -> share of the units whose score is exactly zero.
    """

    text: str
    seed: int
    method: str
    ratio: float
    against: str
    variant: str
    removed: float
    reference: float
    perplexity: float
    jaccard: Mapping[str, float | None]
    zeros: Mapping[str, float]

    @property
    def difference(self) -> float:
        """Perplexity of the variant minus that of what it is compared with, each after pruning."""
        return self.perplexity - self.reference

    @property
    def pair(self) -> str:
        """Variant and what it is compared with."""
        return f"{self.variant} - {self.against}"


@dataclass(frozen=True)
class ScoringFacts:
    """One scoring of one variant.

    Attributes:
        seed, method, variant: as in a row.
        zeros: axis -> share of the units whose score is exactly zero.
        seconds: it took.
        warnings: of the scorer.
        steps: of a method that takes steps, else None.
        residual: after the last step, how far the minimiser's condition is missed, relative to the displacement.
    """

    seed: int
    method: str
    variant: str
    zeros: Mapping[str, float]
    seconds: float
    warnings: tuple[str, ...]
    steps: int | None = None
    residual: float | None = None


@dataclass(frozen=True)
class RobustnessResult:
    """Everything that was compared. JSON-able through :meth:`to_dict`.

    Attributes:
        config: what was asked for.
        rows: in the order of texts, seeds, methods, ratios and variants (float16 against bfloat16 last).
        scorings: in the order of seeds, methods and variants, float32 first.
        variants: what each did to the weights, float32 first.
        unpruned: (text, variant) -> perplexity before pruning.
        conditions: what was measured on what.
    """

    config: RobustnessConfig
    rows: tuple[RobustnessRow, ...]
    scorings: tuple[ScoringFacts, ...]
    variants: tuple[VariantReport, ...]
    unpruned: Mapping[tuple[str, str], float]
    conditions: Mapping[str, str]

    def to_dict(self) -> Json:
        """Plain JSON data."""
        return {
            "config": self.config.to_dict(),
            "rows": [{**asdict(row), "difference": row.difference} for row in self.rows],
            "scorings": [asdict(s) for s in self.scorings],
            "variants": [asdict(v) for v in self.variants],
            "unpruned": [{"text": t, "variant": v, "perplexity": p} for (t, v), p in self.unpruned.items()],
            "conditions": dict(self.conditions),
        }

    def report(self) -> Report:
        """The tables: a summary, all rows text by text, the variants, the scorings."""
        tables = [self._summary(), *(self._of_text(text) for text in self.config.texts)]
        warned = tuple(f"{s.method}, {s.variant}, seed {s.seed}: {w}" for s in self.scorings for w in s.warnings)
        return Report(
            TITLE,
            tables=(*tables, self._variants(), self._scorings()),
            conditions=self.conditions,
            notes=(*self._remarks(), *warned),
        )

    def _summary(self) -> Table:
        axes = self.config.axes
        rows: list[tuple[Cell, ...]] = []
        for method in self.config.methods:
            for pair in dict.fromkeys(r.pair for r in self.rows):
                of = [r for r in self.rows if (r.method, r.pair) == (method, pair)]
                relative = [abs(r.difference) / r.reference for r in of]
                shared = [_mean([j for r in of if (j := r.jaccard[axis]) is not None]) for axis in axes]
                rows.append((method, pair, _percent(_mean(relative)), _percent(max(relative)), *map(_share, shared)))
        columns = ("method", "compared", "mean |difference|", "largest |difference|", *_jaccard_columns(axes, "mean "))
        note = "Over all texts, seeds and ratios; differences in per cent of the second one's perplexity after pruning."
        return Table("Summary", columns, tuple(rows), note)

    def _of_text(self, text: str) -> Table:
        axes = self.config.axes
        columns = ("seed", "method", "ratio", "compared", "parameters removed", "PPL of the second",
                   "PPL of the first",
                   "difference", *_jaccard_columns(axes))  # fmt: skip
        rows = tuple(
            (str(r.seed), r.method, f"{100 * r.ratio:g}%", r.pair, _percent(r.removed), r.reference, r.perplexity,
             f"{r.difference:+.4f}", *(_share(r.jaccard[axis]) for axis in axes))
            for r in self.rows if r.text == text
        )  # fmt: skip
        note = "Each model is pruned by its own scores. Parameters removed: from the first."
        return Table(f"{self.config.protocol} on {text}", columns, rows, note)

    def _variants(self) -> Table:
        texts = self.config.texts
        rows = tuple(
            (v.name, f"{v.relative_size:.2e}", _percent(v.changed), *(self.unpruned[t, v.name] for t in texts))
            for v in self.variants
        )
        columns = ("variant", "|change| / |weights|", "weights changed", *(f"PPL unpruned, {t}" for t in texts))
        return Table("The variants", columns, rows)

    def _scorings(self) -> Table:
        axes = self.config.axes
        rows = tuple(
            (
                str(s.seed),
                s.method,
                s.variant,
                *(_percent(s.zeros[axis]) for axis in axes),
                f"{s.seconds:.1f}",
                s.steps,
                _percent(s.residual),
            )
            for s in self.scorings
        )
        columns = ("seed", "method", "variant", *(f"scores of {axis} exactly zero" for axis in axes), "seconds",
                   "steps", "condition missed by")  # fmt: skip
        note = "Condition: delta = -rho g at the envelope's minimiser, relative to |delta|."
        return Table("The scores", columns, rows, note)

    def _remarks(self) -> list[str]:
        same = [v.name for v in self.variants if v.name != DENSE and not v.changed]
        return [f"{name} changes no weight: the stored weights are {name} numbers already." for name in same]


def _jaccard_columns(axes: Sequence[str], prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}Jaccard {axis}" for axis in axes)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> Cell:
    return None if value is None else f"{value:.2%}"


def _share(value: float | None) -> Cell:
    return None if value is None else f"{value:.4f}"


def check_robustness(
    model: PreTrainedModel, tokenizer: Any, config: RobustnessConfig, *, out: Path | None = None
) -> RobustnessResult:
    """Score, rank and measure every variant with every method. The model comes back unchanged.

    Args:
        model: dense, float32, of a known family.
        tokenizer: of the model.
        config: what to compare.
        out: file of JSON lines that keeps what is finished (read first, if it exists); the tables are written beside
            it as Markdown (same name, .md). None keeps nothing.

    Raises:
        ConfigError: invalid options, or a model that is not float32.
        DataError: text that cannot be used.
        OutputError: see :func:`check_rows_file`.
        CheckpointError: ``out`` exists and is no such file.
        PypruneError: whatever stops a stage; what was finished is kept.
    """
    config.validate()
    if out is not None:
        check_rows_file(out)
    records = RecordFile(out, program="pyprune robustness", option="--out")
    texts = [evaluation_text(tokenizer, source) for source in config.texts]
    with restored(model) as originals:
        result = _Bench(model, tokenizer, config, texts, originals, records).result()
    if out is not None:
        write_text(out.with_suffix(".md"), to_markdown(result.report()))
    return result


def check_rows_file(out: Path) -> None:
    """Refuse before any work a file of rows that cannot be written, or whose tables would replace somebody's file.

    Raises:
        OutputError: ``out`` ends in .md, where the tables go; it or the tables' file cannot be written; or the latter
            exists and holds something else.
    """
    tables = out.with_suffix(".md")
    if out == tables:
        raise OutputError(f"{out} is where the tables go; give the rows another name, for example .jsonl.")
    check_file(out)
    check_file(tables)
    if tables.is_file() and tables.stat().st_size:
        with tables.open("rb") as stream:
            first = stream.readline(1000)
        if first.strip() != f"# {TITLE}".encode():
            raise OutputError(f"{tables}, where the tables go, is not a report of robustness; give --out another name.")


@dataclass(eq=False)
class _Bench:
    """The one model in memory, and what was found out with it."""

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
        """Do what is missing, then put it together."""
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
        """Find out before anything is computed that a ratio cannot be reached or a text is too long."""
        for options in self.methods.values():
            check_sequence_length(self.model.config, options.data.sequence_length)
            for ratio in self.config.ratios:
                ranking_of(self.model, replace(options, ratio=ratio)).check_goal()

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
        gone = [removed_units(plan) for plan in plans]
        return RobustnessRow(
            *at,
            *pair,
            removed=share_of_parameters(family_for(self.model), self.shapes, plans[1]),
            reference=measured[(*at, against)],
            perplexity=measured[(*at, variant)],
            jaccard={axis: jaccard(gone[0][axis], gone[1][axis]) for axis in self.config.axes},
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
        """Have the unmasked weights of a variant in the model."""
        if self.holds != variant:
            self.reports[variant] = set_variant_(self.model, self.originals, variant, self.config.adapter)
            self.holds = variant

    def pruned(self, variant: str, plan: PrunePlan | None) -> PreTrainedModel:
        """A masked variant, made in place and undone by the next :meth:`use`: no further copy of the weights."""
        self.use(variant)
        if plan is not None:
            self.holds = None
            mask_(self.model, plan)
        return self.model

    def report_of(self, variant: str) -> VariantReport:
        """What a variant did to the weights."""
        if variant not in self.reports:
            self.use(variant)
        return self.reports[variant]

    def _identity(self, variant: str) -> Json:
        adapter = asdict(self.config.adapter) if variant == "lora" else None
        return {"weights": self.weights_digest, "variant": variant, "adapter": adapter}

    def scores(self, seed: int, method: str, variant: str, number: str) -> Json:
        """Plans of every ratio, from one scoring."""
        config = replace(self.methods[method], data=replace(self.methods[method].data, seed=seed))
        options = {name: value for name, value in config.to_dict().items() if name != "ratio"}
        reserved = sorted(t.text_sha256 for t in self.texts)
        key = _key("scores", self._identity(variant), {"options": options, "reserved": reserved})
        known = self.records.of("scores").get(key) or {"plans": {}}
        if all(repr(ratio) in known["plans"] for ratio in self.config.ratios):
            return known
        samples = self._samples(config)
        self.use(variant)
        start = time.perf_counter()
        run = self._score(samples, config)
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
                "plans": known["plans"] | plans,
            }
        )

    def _score(self, samples: Tensor, config: PruneConfig) -> Scoring:
        method = get_method(config.method)
        if not isinstance(method, ScoreMethod):
            raise ConfigError(f"method {config.method!r} scores nothing; robustness compares scoring methods.")
        run = Scoring.of(self.model, samples, config)
        method.scorer(run)
        return run

    def _samples(self, config: PruneConfig) -> Tensor:
        """The calibration samples that a method reads, int64 [N, T], none of them part of a test text."""
        data = config.data
        if data not in self.samples:
            reserved = [text.spans for text in self.texts]
            drawn = sample_sequences(self.tokenizer, data, exclude=reserved).input_ids
            check_token_ids(self.model.config, drawn)
            self.samples[data] = drawn
        return self.samples[data]

    def perplexity(self, pruned: tuple[Json, float] | None, variant: str, text: EvaluationText) -> float:
        """Of a variant, pruned by the plan of (scores, ratio) or whole, on one text."""
        record, ratio = pruned or (None, 0.0)
        plan = _plan(record, ratio) if record else None
        measured = {"text": text.text_sha256, "protocol": self.config.protocol, "tokens": self.config.max_tokens}
        key = _key("perplexity", self._identity(variant), {"plan": plan and plan.to_dict(), **measured})
        known = self.records.of("perplexity").get(key)
        if known is None:
            start = time.perf_counter()
            model = self.pruned(variant, plan)
            found = evaluate_perplexity(
                model, self.tokenizer, text, self.config.protocol, max_tokens=self.config.max_tokens
            )
            known = self.records.add(
                {
                    "kind": "perplexity",
                    "key": key,
                    "seed": record and record["seed"],
                    "method": record and record["method"],
                    "ratio": ratio,
                    "variant": variant,
                    "text": text.source,
                    "protocol": found.protocol,
                    "tokens": found.tokens,
                    "perplexity": found.perplexity,
                    "seconds": time.perf_counter() - start,
                }
            )
        return float(known["perplexity"])

    def _conditions(self) -> dict[str, str]:
        config, methods = self.config, self.methods
        first = next(iter(methods.values()))
        tokens = "all" if config.max_tokens is None else f"the first {config.max_tokens:,}"
        found = {
            "calibration": f"{first.data.samples} samples x {first.data.sequence_length} tokens of {first.data.source} "
            f"({first.data.split}), seeds {', '.join(map(str, config.seeds))}; the same for all",
            "open": f"axes {', '.join(config.axes)}; layers {_layers(first)}; {first.score_options.ranking} ranking; "
            f"ratio of {first.ratio_of or 'parameters'}",
            "perplexity": f"{config.protocol} on {', '.join(config.texts)}, {tokens} tokens, masked models, float32",
        }
        if compensated := [name for name, method in methods.items() if method.adds_biases]:
            found["compensation"] = f"left out of {', '.join(compensated)}: masked models have no biases for it"
        if noisy := [method for method in methods.values() if method.method == "smoothgrad"]:
            of = own_options(noisy[0], SmoothGradOptions)
            found["smoothgrad"] = (
                f"{of.draws} draws, numbered and seeded as moreau's (sigma {of.sigma}, seed {of.seed})"
            )
        if "lora" in config.variants:
            of_lora = config.adapter
            found["lora"] = (
                f"random update of rank {of_lora.rank} and relative Frobenius size {of_lora.size:g} of every matrix of "
                f"the decoder layers, seed {of_lora.seed}"
            )
        if "int8" in config.variants:
            found["int8"] = "matrices of the decoder layers, symmetric, one scale an output channel, round to nearest"
        return found


def _layers(config: PruneConfig) -> str:
    score = config.score_options
    return ", ".join(map(str, score.layers)) if score.layers else f"{score.first_layer} to {score.last_layer}"


def _rank(model: PreTrainedModel, run: Scoring, config: PruneConfig) -> PrunePlan:
    config.validate()
    ranking = ranking_of(model, config)
    return ranking.plan(run.scores, ranking.identity, Fraction(1))


def _plan(record: Mapping[str, Any], ratio: float) -> PrunePlan:
    return PrunePlan.from_dict(record["plans"][repr(ratio)])


def removed_units(plan: PrunePlan) -> dict[str, frozenset[tuple[int, int]]]:
    """Axis -> (layer, index) of the query heads and FFN channels that go, and (-1, index) of the hidden channels."""
    dense = plan.dense
    kept = {layer.index: layer for layer in plan.layers}
    heads: set[tuple[int, int]] = set()
    ffn: set[tuple[int, int]] = set()
    for index in range(dense.num_layers):
        layer = kept.get(index)
        left = (layer.query_heads, layer.ffn) if layer else ((), ())
        heads |= {(index, i) for i in set(range(dense.num_attention_heads)) - set(left[0])}
        ffn |= {(index, i) for i in set(range(dense.intermediate_size)) - set(left[1])}
    hidden = frozenset((-1, i) for i in plan.removed_hidden)
    return {"heads": frozenset(heads), "ffn": frozenset(ffn), "hidden": hidden}


def jaccard(first: frozenset[tuple[int, int]], second: frozenset[tuple[int, int]]) -> float | None:
    """Units in both sets over units in either, in [0, 1]; None when both are empty."""
    either = first | second
    return len(first & second) / len(either) if either else None


def _key(kind: str, identity: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([kind, identity, part], sort_keys=True).encode()).hexdigest()[:32]
