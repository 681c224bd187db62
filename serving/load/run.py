"""Measure servers of several models in turn, under every load, in an order that is drawn."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyprune.checkpoint.record import has_record
from pyprune.checkpoint.shards import weight_files
from pyprune.checkpoint.verify import SERVER, is_verification_on, new_server
from pyprune.errors import ConfigError, MissingDependencyError
from pyprune.runtime.host import available_memory
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.progress import say, track
from pyprune.runtime.records import append_jsonl
from pyprune.serving.checkpoints import Checkpoint, read_checkpoint
from pyprune.serving.engines import EngineError, engine_bytes, let_settle, vllm_installed
from pyprune.serving.load.capacity import Capacity
from pyprune.serving.load.client import (
    bench_command,
    counting_obstacle,
    patience_with,
    read_turn,
    run_client,
)
from pyprune.serving.load.gpus import memory_in_use
from pyprune.serving.load.options import Load, LoadOptions
from pyprune.serving.load.results import LoadReport, ServedModel, Turn, speeds
from pyprune.serving.load.server import Server, server_environment
from pyprune.serving.speed.measure import distrust_warning
from pyprune.serving.speed.precision import Interval, paired_interval, rounds
from pyprune.serving.stats import environment_record
from pyprune.serving.vllm.command import servable, serve_command
from pyprune.serving.vllm.options import context_tokens, given_options, hub_of, parallel_ranks
from pyprune.serving.widths import token_bytes

CLIENT_BYTES = 2 * 2**30
"""Memory of the client while it runs (vLLM and torch, imported; rounded up)."""
READ_BYTES = 2**24
NVIDIA = Path("/proc/driver/nvidia/gpus")


def measure_serving(
    models: Mapping[str, str | Path], options: LoadOptions | None = None, *, jsonl: Path | None = None
) -> LoadReport:
    """Serve every model with `vllm serve` and measure it with vLLM's own `vllm bench serve`.

    On a CPU all servers are up at once where memory allows, and all but the measured one are idle. Otherwise, and on a
    GPU always, one server is up at a time, started when its turn comes. The order of the models is drawn for every
    round and, where all servers are up, for every load of it. Prefix caching is off.

    Args:
        models: name -> checkpoint folder or hub id; the first is the baseline. Each needs a tokenizer.
        options: the load and the lengths; None = the defaults.
        jsonl: file to which every turn is appended at once, with every request of it and the environment.

    Raises:
        ConfigError: an invalid option, no model, or sequences longer than a model's context.
        CheckpointError: a folder that is no checkpoint, or that vLLM does not serve.
        MissingDependencyError: vLLM is not installed.
        EngineError: a server or the client failed; its last log lines are in the message.
    """
    options = options or LoadOptions()
    check_servers(models, options)
    hub = hub_of(options.vllm_args)
    run = _Run({name: read_checkpoint(source, hub=hub) for name, source in models.items()}, options, jsonl)
    run.take()
    return run.report()


def check_servers(models: Mapping[str, str | Path], options: LoadOptions) -> dict[str, Path]:
    """Refuse what :func:`measure_serving` cannot serve or measure; only sizes are read.

    Returns:
        Name -> folder that would be served, downloaded as the options ask for a hub id.

    Raises:
        ConfigError, CheckpointError, MissingDependencyError: as there.
    """
    options.validate()
    if not models:
        raise ConfigError("No model to measure was given; name at least one checkpoint folder.")
    if not vllm_installed():
        raise MissingDependencyError("vllm", "vllm", "Measuring servers")
    read = {name: servable(source, options.asked_of_vllm, verify=False) for name, source in models.items()}
    _check_lengths(read, options)
    return {name: checkpoint.folder for name, checkpoint in read.items()}


def _check_lengths(models: Mapping[str, Checkpoint], options: LoadOptions) -> None:
    longest = max(options.prompts)
    needed = longest + options.new_tokens
    problems = [
        f"{name} reads at most {model.max_length} tokens, the load needs {needed}; lower prompt_tokens "
        f"({longest}) or new_tokens ({options.new_tokens})."
        for name, model in models.items()
        if model.max_length is not None and model.max_length < needed
    ]
    # The length of the measurement replaces that of a file of options, which comes first.
    limit = context_tokens(given_options(options.vllm_args, with_file=False).max_model_len, 0)
    if 0 < limit < needed:
        problems.append(f"--max-model-len in vllm_args is {limit}, the load needs {needed}; raise it, or leave it out.")
    if problems:
        raise ConfigError(problems)


class _Run:
    """State of one measurement: the turns so far and the file that they are written to."""

    def __init__(self, models: dict[str, Checkpoint], options: LoadOptions, jsonl: Path | None) -> None:
        self.models, self.options, self.jsonl = models, options, jsonl
        self.served = {
            name: ServedModel(str(c.folder), c.architecture, c.parameters, c.bytes) for name, c in models.items()
        }
        self.turns: list[Turn] = []
        accelerator = accelerator_name()
        self.environment = environment_record(accelerator, server_environment())
        self.ranks = parallel_ranks(options.vllm_args)
        self.engines = max(1, given_options(options.vllm_args).data_parallel_size)
        self.on_gpu = accelerator is not None
        self.resident = len(models) == 1 or (accelerator is None and self._fits())
        self.id = uuid.uuid4().hex[:12]

    def take(self) -> None:
        """Take every turn, round by round."""
        with ExitStack() as stack:
            pool = stack.enter_context(_Pool(self))
            for repeat, load, name in track(self._plan(), "measuring servers"):
                self._record(self._turn(pool, repeat, load, name))

    def _plan(self) -> Iterator[tuple[int, Load, str]]:
        """Yield every turn to take; earlier turns decide how many rounds follow."""
        o = self.options
        for repeat in rounds(o.repeats, o.most_repeats, o.precision, self._intervals):
            yield from ((repeat, load, name) for load, name in self._round(repeat))

    def _round(self, repeat: int) -> list[tuple[Load, str]]:
        """Order one round: resident servers take turns under each load, others run all loads at each start."""
        if self.resident:
            return [(load, name) for load in self.options.loads for name in self._drawn(f"{repeat}/{load}")]
        return [(load, name) for name in self._drawn(str(repeat)) for load in self.options.loads]

    def _drawn(self, moment: str) -> list[str]:
        names = list(self.models)
        random.Random(f"{self.options.seed}/{moment}").shuffle(names)
        return names

    def _intervals(self) -> list[Interval | None]:
        baseline, *others = self.models
        return [
            paired_interval(speeds(self.turns, load), baseline, name) for load in self.options.loads for name in others
        ]

    def _turn(self, pool: _Pool, repeat: int, load: Load, name: str) -> Turn:
        server, others = pool.server(name)
        let_settle(len(others))
        before, started = sum(other.cpu_seconds() for other in others), time.perf_counter()
        result = self._measure(server, load, repeat)
        model = self.served[name]
        self.served[name] = replace(
            model,
            memory=max(model.memory or 0, server.peak_memory_bytes()) or None,
            gpu_memory=max(model.gpu_memory or 0, pool.gpu_memory()) or None,
        )
        return read_turn(
            result,
            model=name,
            load=str(load),
            repeat=repeat,
            order=len(self.turns),
            client_seconds=time.perf_counter() - started,
            idle_cpu_seconds=sum(other.cpu_seconds() for other in others) - before,
        )

    def _measure(self, server: Server, load: Load, repeat: int) -> dict[str, Any]:
        with TemporaryDirectory(prefix="pyprune-bench-") as folder:
            command = bench_command(server.url, server.model, load, self.options, repeat, Path(folder))
            try:
                result = run_client(command, Path(folder), patience_with(load, self.options), server.tokens)
            except EngineError:
                server.check()  # a server that has ended says more than the client
                raise
        server.check()
        if reason := counting_obstacle(result, self.options.new_tokens):
            raise server.error(f"{server.model}: {reason}")
        return result

    def _record(self, turn: Turn) -> None:
        self.turns.append(turn)
        if self.jsonl is None:
            return
        record = {
            "run": self.id,
            "engine": "vllm serve",
            **asdict(turn),
            "tokens_per_second": turn.tokens_per_second,
            "checkpoint": asdict(self.served[turn.model]),
            "options": self.options.to_dict(),
            "resident": self.resident,
            "environment": self.environment,
        }
        append_jsonl(self.jsonl, [record])

    def add_start(self, name: str, server: Server) -> None:
        """Keep the facts that a server reports after its start."""
        model, facts = self.served[name], server.facts
        # Only vLLM knows which part of a token one of several ranks holds.
        size = token_bytes(self.models[name].config, self.options.dtype) if self.ranks == 1 else 0
        reported = facts.sequences and facts.sequences * self.engines
        capacity = model.capacity
        if facts.block_tokens and facts.context and (size or reported):
            capacity = Capacity(size, facts.block_tokens, self.options.kv_bytes, facts.context, reported)
        self.served[name] = replace(
            model,
            load_seconds=(*model.load_seconds, server.load_seconds),
            compile_seconds=(*model.compile_seconds, *(s for s in [facts.compile_seconds] if s is not None)),
            compilation=facts.compilation,
            max_model_len=facts.max_model_len or self.max_model_len(name),
            capacity=capacity,
        )

    def max_model_len(self, name: str) -> int:
        """Return the tokens of the longest sequence of a model's server: what the loads need, or the model's limit."""
        return min(self.options.longest, self.models[name].max_length or self.options.longest)

    def server_command(self, name: str, server: str) -> list[str]:
        """Return the command line of a model's server, up to its address.

        Args:
            name: of the model.
            server: name that tells its processes that the folder was verified here, before their time counts.
        """
        o, checkpoint = self.options, self.models[name]
        options: dict[str, Any] = {
            "--dtype": o.dtype,
            "--seed": o.seed,
            "--max-model-len": self.max_model_len(name),
            "--kv-cache-memory-bytes": o.kv_bytes,
        }
        words = [str(word) for pair in options.items() for word in pair]
        words += ["--no-enable-prefix-caching", *o.asked_of_vllm]
        return serve_command(checkpoint.folder, words, server=server)

    def report(self) -> LoadReport:
        """Return the report, with a warning when a waiting server was not idle."""
        note = distrust_warning(max(turn.idle_cpu_seconds / turn.client_seconds for turn in self.turns), "servers")
        return LoadReport(self.options, self.served, tuple(self.turns), self.resident, note, self.environment)

    def _fits(self) -> bool:
        each = self.ranks * engine_bytes("vllm", 0, self.options.kv_bytes)
        return sum(each + 2 * c.bytes for c in self.models.values()) + CLIENT_BYTES < available_memory()


class _Pool:
    """The servers of a run: all of them, or the one whose turn it is."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._servers: dict[str, Server] = {}
        self._others_gpu_memory: int | None = None

    def __enter__(self) -> _Pool:
        if not self._run.resident:
            say("One server is up at a time; each is started when its turn comes.")
        return self

    def __exit__(self, *_: object) -> None:
        with interrupts_deferred():
            for server in self._servers.values():
                server.ask_to_end()
            for server in self._servers.values():
                server.close()

    def server(self, name: str) -> tuple[Server, list[Server]]:
        """Return the server of a model, started if necessary, and the others that are up."""
        if name not in self._servers:
            for missing in self._run.models if self._run.resident else [name]:
                self._start(missing)
        return self._servers[name], [server for other, server in self._servers.items() if other != name]

    def gpu_memory(self) -> int:
        """Return the bytes of GPU memory that the server has taken since its start; 0 where no GPU reports it.

        vLLM's processes return no GPU memory, so that the memory in use after a turn is the peak.
        """
        before = self._others_gpu_memory
        return 0 if before is None else max(0, (memory_in_use() or 0) - before)

    def _start(self, name: str) -> None:
        if not self._run.resident:
            while self._servers:
                self._servers.popitem()[1].close()
        say(f"Starting the server of {name}.")
        checkpoint, verified_by = self._run.models[name], new_server()
        command = self._run.server_command(name, verified_by)
        read_once(checkpoint)
        self._others_gpu_memory = memory_in_use() if self._run.on_gpu else None
        environment = {**server_environment(), SERVER: verified_by}
        server = Server(command, str(checkpoint.folder), environment=environment)
        self._servers[name] = server
        self._run.add_start(name, server)


def read_once(checkpoint: Checkpoint) -> None:
    """Read the weight files unless verification, which needs a record, reads them: every start finds them cached."""
    if has_record(checkpoint.folder) and is_verification_on():
        return
    for path in weight_files(checkpoint.folder):
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass


def accelerator_name() -> str | None:
    """Return the name of the GPU that vLLM will use, None for the CPU, without a library that would take its memory.

    On a machine with several kinds it names all of them: only CUDA knows which one CUDA_VISIBLE_DEVICES means.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    lines = (
        line.partition(":")
        for path in NVIDIA.glob("*/information")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
    )
    return " or ".join(sorted({value.strip() for key, _, value in lines if key.strip() == "Model"})) or "GPU"
