"""Run what a user types, from Gemma 3 270M as a GGUF file to two servers, and record what each command takes.

The dense model and one model of each method are evaluated, exported as a stock checkpoint and as a GGUF file; vLLM and
llama.cpp then serve each pruned model and the dense one turn by turn. Seconds and CPU seconds are of whole commands,
and memory is the peak of a command's largest process. A command needs what those before it left in --out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench._command import run_command
from bench._texts import ELSEWHERE
from bench.quality.grid import (
    Axis,
    Case,
    Column,
    Grid,
    Layout,
    figure,
    first,
    gemma_options,
    spent_columns,
    text_identity,
)
from pyprune.errors import ConfigError
from pyprune.runtime.records import Json

GOALS = {"elder": "--ratio 0.223", "taylor": "--ratio 0.2 --uniform"}
"""Method -> what it removes: 4 of 18 layers, or 20 % of the parameters of all layers with equal widths."""
TOKENS = 16384
TEXTS = {name: ELSEWHERE[name] for name in ("wikitext-2", "novel")}
EVALUATE = " ".join((*(f"--ppl DATA/{path}" for path in TEXTS.values()), f"--max-tokens {TOKENS} --dtype float32"))
CALIBRATION = "--samples 16 --sequence-length 512 --calibration DATA/c4_sample/train.jsonl.gz"
TURNS = "--batch-size 16 --new-tokens 64 --prompt-tokens 1024 --repeats 5 --precision 0"
DENSE = {
    "export": "export GEMMA --dtype float32 --out OUT/dense",
    "export as GGUF": "export OUT/dense --format gguf --quantise q8_0 --out OUT/dense.gguf",
    "evaluate": f"eval OUT/dense {EVALUATE} --json JSON",
}
PRUNED = {
    "prune": f"prune GEMMA --method METHOD GOAL {CALIBRATION} --out OUT/METHOD",
    "evaluate": f"eval OUT/METHOD {EVALUATE} --json JSON",
    "export": "export OUT/METHOD --target stock --out OUT/METHOD-stock",
    "export as GGUF": "export OUT/METHOD --format gguf --quantise q8_0 --out OUT/METHOD.gguf",
    "serve with vLLM": f"bench OUT/METHOD-stock --against OUT/dense --engine vllm {TURNS} --json JSON",
    "serve with llama.cpp": f"bench OUT/METHOD.gguf --against OUT/dense.gguf --engine llamacpp {TURNS} --json JSON",
}
"""Step -> the command; words in capitals are replaced."""


class Commands:
    """The folder that the commands write to.

    Raises:
        ConfigError: no file of Gemma is given.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        if options.gemma is None:
            raise ConfigError("The commands are of Gemma 3 270M; give its GGUF file with --gemma.")
        self.options = options
        self.places = folders(options)
        self.places["GEMMA"] = f"{options.gemma.parent} --gguf-file {options.gemma.name}"
        self.setting: Json = {"dtype": "float32", "texts": {name: text_identity(TOKENS, "") for name in TEXTS}}

    def cases(self) -> list[Case]:
        """Return the commands of the dense model, then those of each method."""
        commands = {("dense", step): words for step, words in DENSE.items()}
        for method in self.options.method:
            for step, words in PRUNED.items():
                commands[method, step] = words.replace("GOAL", GOALS[method]).replace("METHOD", method)
        chosen = {names: words for names, words in commands.items() if names[1] in self.options.step}
        return [Case({"method": method, "step": step}, task=words) for (method, step), words in chosen.items()]

    def measure(self, case: Case) -> Json:
        """Run one command; read its figures from the JSON that it writes."""
        return run_step(case.task, self.places)

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        """Nothing is freed: later commands read what this one wrote."""


def folders(options: argparse.Namespace) -> dict[str, str]:
    """Return word of a command -> the place that it means, and make the folder that commands write to.

    Args:
        options: out and data.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    return {"OUT": str(options.out), "JSON": str(options.out / "figures.json"), "DATA": str(options.data)}


def run_step(command: str, places: Mapping[str, str]) -> Json:
    """Run a command; return the command, what it took, and the figures of the JSON that it writes.

    Args:
        command: without "pyprune"; words in capitals are replaced.
        places: word -> what it is replaced by.

    Raises:
        PypruneError: it failed.
    """
    typed = command
    for word, place in places.items():
        typed = typed.replace(word, place)
    spent = run_command([sys.executable, "-m", "pyprune", *shlex.split(typed)])
    written = Path(places["JSON"])
    found = _figures(json.loads(written.read_text(encoding="utf-8"))) if "JSON" in command else {}
    return {"command": f"pyprune {command.replace(' --json JSON', '')}", **spent, **found}


def _figures(data: Json) -> Json:
    """Return the perplexities of `pyprune eval`, or the ratios to the dense model of `pyprune bench`."""
    if "summary" not in data:
        pairs = zip(TEXTS, data["perplexity"], strict=True)
        return {"perplexity": {name: round(found["perplexity"], 2) for name, found in pairs}}
    models = sorted(data["summary"], key=lambda name: float(data["summary"][name]["pruning_ratio"]))
    dense, pruned = (data["summary"][name] for name in models)
    return {
        **{name: round(pruned[name], 3) for name in ("throughput_increase", "speedup")},
        "tokens_per_second": [round(found["tokens_per_second"]["median"], 2) for found in (dense, pruned)],
        "prompt_ms": [round(found["latency_ms"]["median"], 1) for found in (dense, pruned)],
        "memory": [data["models"][name]["memory"] for name in models],
    }


def _result(row: Json) -> Any:
    found = row["figures"]
    if "perplexity" in found:
        return ", ".join(f"{name} {value}" for name, value in found["perplexity"].items())
    if "speedup" in found:
        return f"generation {found['throughput_increase']:.2f}, prompt {found['speedup']:.2f} times dense"
    return None


def command_columns(result: Callable[[Json], Any], rows: Sequence[Json]) -> list[Column]:
    """Return columns of wall time, CPU time, memory and the result of each command.

    Args:
        result: of a row, as text.
        rows: of the table.
    """
    return [
        Column("seconds", figure("seconds"), lambda v: round(mean(v))),
        *spent_columns(),
        Column("result", result, first),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    gemma_options(parser)
    parser.add_argument("--out", type=Path, default=Path("out/commands"), metavar="DIR", help="for what they write")


GRID = Grid(
    name="commands",
    description=__doc__,
    open=lambda options, records, work: Commands(options),
    layout=Layout(("method", "step"), partial(command_columns, _result), command=figure("command")),
    axes={"method": Axis([*GOALS]), "step": Axis([*PRUNED])},
    options=_options,
)
