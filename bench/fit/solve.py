r"""Time the search over all layers: SmolLM2, LLaMA-7B and LLaMA-70B shapes with synthetic losses.

    python -m bench.fit.solve                                  # every shape and budget
    python -m bench.fit.solve --shape llama-70b --count 1      # the best solution only

Scores and losses are random: every layer has its own scale, and the loss of a width grows with the removed scores.
Costs are exact for parameters and memory. Seconds have a fixed share for the head; the others of a prefill of 2,048
tokens are proportional to its FLOPs, those of a generation of 64 x 128 to the bytes read. Times are wall and processor
seconds of one call of `pyprune.fit.solve.solve`, which returns --count solutions.

The table goes to stdout, and every row to --jsonl. Exit codes: 0 done, 2 a wrong option, 130 stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench._command import exit_status, read_names
from pyprune.fit.choices import DROPPED, ChoiceOptions, LayerScores, Search, Space, UnitScores
from pyprune.fit.limits import Budget
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.fit.solve import Solution, SolveOptions, plan_of, solve
from pyprune.fit.values import BlockLoss, BlockLosses, ValueOptions, anchors_of, search_of
from pyprune.plan import PrunePlan, Sizes
from pyprune.runtime.records import RecordFile, digest
from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.stats import environment_record

RECORDS = Path(__file__).resolve().parents[1] / "results" / "solve.jsonl"
SEED = 0
COLUMNS = ("shape", "budget", "choices a layer", "solutions", "wall s", "CPU s", "loss", "others' losses", "kept")
SHAPES = {
    "smollm2-135m": Sizes.decoder(30, 576, 9, 3, 64, 1536, 49152),
    "llama-7b": Sizes.decoder(32, 4096, 32, 32, 128, 11008, 32000),
    "llama-70b": Sizes.decoder(80, 8192, 64, 8, 128, 28672, 128256),
}
BUDGETS = (
    "parameters=80%",
    "memory@4096=70%",
    "speedup>=1.3",
    "throughput_increase>=1.2",
    "memory@4096=80%, speedup>=1.2, throughput_increase>=1.1",
)


class SyntheticCosts(CostModel):
    """Costs of a LLaMA of some sizes without any machine.

    Args:
        sizes: of the dense model.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def base(self, quantity: Quantity, hidden_size: int) -> float:
        """Embedding and head."""
        weights = 2.0 * hidden_size * self.sizes.vocab_size
        return {"parameters": weights, "memory": 2 * weights}.get(quantity.kind, 1e-12 * weights)

    def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
        """Weights, cache, products and bytes of one layer."""
        head_dim, attention = self.sizes.head_dim, bool(widths.kv_heads)
        heads = 2 * (widths.query_heads + widths.kv_heads) * head_dim * hidden_size
        weights = float(heads + 3 * hidden_size * widths.ffn + hidden_size * (attention + bool(widths.ffn)))
        cache = 4.0 * widths.kv_heads * head_dim * quantity.tokens * quantity.batch
        match quantity.kind:
            case "parameters":
                return weights
            case "memory":
                return 2 * weights + cache
            case "prefill":
                scores = 4.0 * widths.query_heads * head_dim * quantity.tokens
                return 1e-12 * (quantity.tokens * (2 * weights + scores)) + 1e-4 * (attention + bool(widths.ffn))
            case _:
                return 1e-11 * quantity.tokens * (2 * weights + cache) + 1e-4 * (attention + bool(widths.ffn))

    def head_pair(self, quantity: Quantity) -> float:
        """Nothing."""
        return 0.0


def synthetic(sizes: Sizes, options: ChoiceOptions, seed: int) -> tuple[Search, UnitScores]:
    """Choices with random losses, and the scores that they follow."""
    draw = np.random.default_rng(seed)
    space = Space.of(PrunePlan.identity("llama", sizes), options)

    def values(count: int) -> tuple[float, ...]:
        return tuple(draw.lognormal(sigma=1.0, size=count).tolist())

    heads, groups = sizes.num_attention_heads, sizes.num_key_value_heads
    scores = UnitScores(
        tuple(LayerScores(values(groups), values(heads), values(sizes.intermediate_size)) for _ in space.layers)
    )
    entries = [
        BlockLoss(i, widths, sizes.hidden_size, loss)
        for i, layer in enumerate(space.layers)
        for widths, loss in _anchor_losses(scores.layers[i], anchors_of(layer, ValueOptions()), draw).items()
    ]
    return search_of(BlockLosses(tuple(entries)), scores, space), scores


def _anchor_losses(scores: LayerScores, anchors: Sequence[Widths], draw: np.random.Generator) -> dict[Widths, float]:
    """Draw a loss for every anchor: the removed share of the scores, with a scale of each block and 10 % of noise."""
    attention, mlp = 0.1 * draw.lognormal(size=2)
    heads, ffn = scores.attention_removed(0, 0), scores.ffn_removed(0)

    def loss(widths: Widths) -> float:
        exact = attention * scores.attention_removed(widths.query_heads, widths.kv_heads) / heads
        exact += mlp * scores.ffn_removed(widths.ffn) / ffn
        return float(exact * draw.normal(1, 0.1) * (1.1 if widths == DROPPED else 1.0))

    return {widths: max(0.0, loss(widths)) for widths in anchors}


def run(options: argparse.Namespace) -> None:
    """Print a table of all shapes and budgets, and keep its rows."""
    rows: list[tuple[Cell, ...]] = []
    records, environment = RecordFile(options.jsonl), environment_record()
    how = {"count": options.count, "seed": SEED}
    solving = replace(SolveOptions(), solutions=options.count, head_pairs=4)
    for name in options.shape:
        sizes = SHAPES[name]
        choices = ChoiceOptions(ffn_multiple=64, head_counts=8)
        search, scores = synthetic(sizes, choices, SEED)
        costs = SyntheticCosts(sizes)
        for text in options.budget or BUDGETS:
            began = time.monotonic(), time.process_time()
            found = solve(search, Budget.parse(text), costs, solving)
            wall, cpu = time.monotonic() - began[0], time.process_time() - began[1]
            plan_of(found[0], search, scores)
            row = (name, text, len(search.layers[0]), len(found), wall, cpu, *_describe(found))
            record = {"kind": "solved", **dict(zip(COLUMNS, row, strict=True)), **how, "environment": environment}
            records.add({"key": digest(record)[:16], **record})
            rows.append(row)
    print(markdown_table(Table("Search", COLUMNS, tuple(rows))))


def _describe(found: Sequence[Solution]) -> tuple[float, str, str]:
    best = found[0]
    kept = [widths for widths in best.widths if widths != DROPPED]
    others = ", ".join(f"{solution.variant} {solution.loss:.3f}" for solution in found[1:])
    return best.loss, others, f"{len(kept)} of {len(best.widths)} layers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fit.solve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = partial(read_names, names=list(SHAPES), what="shape")
    parser.add_argument("--shape", type=names, default=list(SHAPES), help="shapes, separated by commas")
    parser.add_argument("--budget", action="append", help="a budget, as `pyprune fit` takes it; repeatable")
    parser.add_argument("--count", type=int, default=5, help="solutions (default: 5)")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    options = parser.parse_args(arguments)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
