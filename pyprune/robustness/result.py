"""Results of the robustness study, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pyprune.robustness.options import RobustnessConfig
from pyprune.robustness.perturbations import DENSE, VariantReport
from pyprune.runtime.report import Cell, Report, Table

TITLE = "Robustness of scores against changes of the weights"


@dataclass(frozen=True)
class RobustnessRow:
    """One pruned variant compared with another, usually with the pruned float32 model.

    Attributes:
        text: on which the perplexities were measured.
        seed: of the calibration samples.
        method: name of the scoring preset.
        ratio: share to remove, as configured.
        against: the variant that it is compared with: float32, or bfloat16 for float16.
        variant: of the weights.
        removed: share of the parameters that the variant's plan removes.
        reference: perplexity of ``against`` pruned by its own scores.
        perplexity: of the variant pruned by its own scores.
        jaccard: axis -> overlap of the removed units (heads: query heads, which are removed in whole KV groups unless
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
        """Perplexity of the variant minus that of ``against``, each after pruning."""
        return self.perplexity - self.reference

    @property
    def pair(self) -> str:
        """The names of the two compared variants."""
        return f"{self.variant} - {self.against}"


@dataclass(frozen=True)
class ScoringFacts:
    """One scoring of one variant.

    Attributes:
        seed, method, variant: as in a row.
        zeros: axis -> share of the units whose score is exactly zero.
        seconds: duration.
        warnings: of the scorer.
        steps: of a method that takes steps, else None.
        residual: error of the minimiser's condition after the last step, relative to the displacement.
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
    """All comparisons. JSON-able through :meth:`to_dict`.

    Attributes:
        config: the options.
        rows: in the order of texts, seeds, methods, ratios and variants (float16 against bfloat16 last).
        scorings: in the order of seeds, methods and variants, float32 first.
        variants: how far each changed the weights, float32 first.
        unpruned: (text, variant) -> perplexity before pruning.
        conditions: texts, methods and settings of the measurements.
    """

    config: RobustnessConfig
    rows: tuple[RobustnessRow, ...]
    scorings: tuple[ScoringFacts, ...]
    variants: tuple[VariantReport, ...]
    unpruned: Mapping[tuple[str, str], float]
    conditions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
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
        """Return the tables: a summary, all rows text by text, the variants, the scorings."""
        tables = [self._summary(), *(self._text_table(text) for text in self.config.texts)]
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

    def _text_table(self, text: str) -> Table:
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
