"""Measure servers of several models in turn, under every load, in an order that is drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyprune.checkpoint.record import has_record
from pyprune.checkpoint.shards import weight_files
from pyprune.checkpoint.verify import SERVER, is_verification_on, new_server
from pyprune.errors import ConfigError, MissingDependencyError
from pyprune.runtime.host import available_memory
from pyprune.runtime.progress import say
from pyprune.serving.checkpoints import Checkpoint, read_checkpoint
from pyprune.serving.comparison import Comparison, check_models, length_problems
from pyprune.serving.engines import EngineError, engine_bytes, vllm_installed
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
from pyprune.serving.load.results import LoadReport, ServedModel, Turn
from pyprune.serving.load.server import Server, server_environment
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
    run.take("measuring servers")
    return run.report()


def check_servers(models: Mapping[str, str | Path], options: LoadOptions) -> dict[str, Path]:
    """Refuse what :func:`measure_serving` cannot serve or measure; only sizes are read.

    Returns:
        Name -> folder that would be served, downloaded as the options ask for a hub id.

    Raises:
        ConfigError, CheckpointError, MissingDependencyError: as there.
    """
    options.validate()
    check_models(models)
    if not vllm_installed():
        raise MissingDependencyError("vllm", "vllm", "Measuring servers")
    read = {name: servable(source, options.asked_of_vllm, verify=False) for name, source in models.items()}
    _check_lengths(read, options)
    return {name: checkpoint.folder for name, checkpoint in read.items()}


def _check_lengths(models: Mapping[str, Checkpoint], options: LoadOptions) -> None:
    longest = max(options.prompts)
    needed = longest + options.new_tokens
    limits = {name: model.max_length for name, model in models.items()}
    problems = length_problems(limits, needed, "load", longest, options.new_tokens)
    # The length of the measurement replaces that of a file of options, which comes first.
    limit = context_tokens(given_options(options.vllm_args, with_file=False).max_model_len, 0)
    if 0 < limit < needed:
        problems.append(f"--max-model-len in vllm_args is {limit}, the load needs {needed}; raise it, or leave it out.")
    if problems:
        raise ConfigError(problems)


class _Run(Comparison):
    """State of one measurement: the servers, and the turns so far."""

    def __init__(self, models: dict[str, Checkpoint], options: LoadOptions, jsonl: Path | None) -> None:
        accelerator, self.ranks = accelerator_name(), parallel_ranks(options.vllm_args)
        each = self.ranks * engine_bytes("vllm", 0, options.kv_bytes)
        needed = sum(each + 2 * c.bytes for c in models.values()) + CLIENT_BYTES
        resident = len(models) == 1 or (accelerator is None and needed < available_memory())
        if not resident:
            say("One server is up at a time; each is started when its turn comes.")
        environment = environment_record(accelerator, server_environment())
        super().__init__("vllm serve", "servers", jsonl, environment, models, resident=resident)
        self.models, self.options = models, options
        self.engines = max(1, given_options(options.vllm_args).data_parallel_size)
        self.served = {
            name: ServedModel(str(c.folder), c.architecture, c.parameters, c.bytes) for name, c in models.items()
        }
        self.on_gpu = accelerator is not None
        self.gpu_memory_before: int | None = None

    def plan(self) -> Iterator[tuple[int, Load, str]]:
        """Yield round by round: resident servers take turns under each load, others run all loads at each start."""
        o = self.options
        for repeat in o.rounds(self.report, o.loads):
            if self.resident:
                yield from ((repeat, load, name) for load in o.loads for name in self._drawn(f"{repeat}/{load}"))
            else:
                yield from ((repeat, load, name) for name in self._drawn(str(repeat)) for load in o.loads)

    def _drawn(self, moment: str) -> list[str]:
        names = list(self.models)
        random.Random(f"{self.options.seed}/{moment}").shuffle(names)
        return names

    def turn(self, repeat: int, load: Load, name: str) -> Turn:
        """Run the client once against the server of a model."""
        result, seconds, idle = self.measure(name, lambda server: self._run_client(server, load, repeat))
        model, taken = self.served[name], 0
        if self.gpu_memory_before is not None:
            # vLLM's processes return no GPU memory, so that the memory in use after a turn is the peak.
            taken = (memory_in_use() or 0) - self.gpu_memory_before
        self.served[name] = replace(
            model, memory=self.memory[name] or None, gpu_memory=max(model.gpu_memory or 0, taken) or None
        )
        return read_turn(
            result,
            model=name,
            load=str(load),
            repeat=repeat,
            order=len(self.turns),
            client_seconds=seconds,
            idle_cpu_seconds=idle,
        )

    def _run_client(self, server: Server, load: Load, repeat: int) -> dict[str, Any]:
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

    def facts(self, turn: Turn) -> dict[str, Any]:
        """See :meth:`Comparison.facts`."""
        checkpoint, options = asdict(self.served[turn.model]), self.options.to_dict()
        return {"checkpoint": checkpoint, "options": options, "resident": self.resident}

    def start(self, name: str) -> Server:
        """Start the server of a model, and keep the facts that it reports."""
        say(f"Starting the server of {name}.")
        checkpoint, verified_by = self.models[name], new_server()
        command = self.server_command(name, verified_by)
        read_once(checkpoint)
        self.gpu_memory_before = memory_in_use() if self.on_gpu else None
        environment = {**server_environment(), SERVER: verified_by}
        server = Server(command, str(checkpoint.folder), environment=environment)
        model, facts = self.served[name], server.facts
        # Only vLLM knows which part of a token one of several ranks holds.
        size = token_bytes(checkpoint.config, self.options.dtype) if self.ranks == 1 else 0
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
        return server

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
        note = self.distrust_warning(turn.idle_cpu_seconds / turn.client_seconds for turn in self.turns)
        return LoadReport(self.options, self.served, tuple(self.turns), self.resident, note, self.environment)


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
