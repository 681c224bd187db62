"""How fast a pruned model is compared with its dense one: interleaved turns, warmed up, every sample kept.

Two columns, as in the papers (after Song et al., 2024): token generation (a batch of prompts, a fixed number of new
tokens each, in tokens/s) and prompt processing (one long prompt, one new token, latency in ms).
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pyprune.errors import ConfigError
from pyprune.runtime.progress import say, track
from pyprune.runtime.records import append_jsonl
from pyprune.serving.checkpoints import Checkpoint, read_checkpoint
from pyprune.serving.engines import Engine, EngineName, choose_engine
from pyprune.serving.stats import environment_record, mad, median

Column = Literal["generation", "prompt"]
COLUMNS: tuple[Column, ...] = ("generation", "prompt")
SHORT_PROMPT_TOKENS = 16
"""Prompts of the generation column have 1 to this many random tokens."""
SETTLE_S = 1.5
"""vLLM's workers poll for one second after their last request; the next engine's turn starts after that."""
IDLE_SHARE = 0.05
"""Share of a turn's wall time in CPU time of the waiting engines above which the report warns."""
FIRST_TOKEN_ID = 3
"""Ids below this are special tokens in most vocabularies."""


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        batch_size: prompts in one generation request.
        new_tokens: tokens generated for each of them.
        prompt_tokens: length in tokens of the prompt-processing prompt.
        repeats: timed turns of each model and column, after one warm-up turn.
        dtype: of weights and activations.
        seed: of the random prompts; both models get the same ones, every repeat another set.
    """

    batch_size: int = 64
    new_tokens: int = 128
    prompt_tokens: int = 2048
    repeats: int = 3
    dtype: str = "bfloat16"
    seed: int = 0

    def validate(self) -> None:
        """Raise :class:`ConfigError` with every invalid option."""
        found = [
            f"{name} is {getattr(self, name)}; it must be at least 1."
            for name in ("batch_size", "new_tokens", "prompt_tokens", "repeats")
            if getattr(self, name) < 1
        ]
        if self.dtype not in ("bfloat16", "float16", "float32"):
            found.append(f"dtype is {self.dtype!r}; it must be bfloat16, float16 or float32.")
        if found:
            raise ConfigError(found)

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens that the workload makes."""
        return max(self.prompt_tokens + 1, SHORT_PROMPT_TOKENS + self.new_tokens)

    def new_tokens_of(self, column: Column) -> int:
        """Return how many tokens a turn of ``column`` generates for each prompt."""
        return self.new_tokens if column == "generation" else 1

    def prompts(self, column: Column, repeat: int, vocab_size: int) -> list[list[int]]:
        """Return the token ids of one turn: the same for every model, others for every repeat.

        Args:
            column: generation (``batch_size`` prompts of 1 to 16 tokens) or prompt (one long prompt).
            repeat: number of the turn; -1 is the warm-up.
            vocab_size: ids are below it.
        """
        source = random.Random(f"{self.seed}/{column}/{repeat}")
        first = min(FIRST_TOKEN_ID, vocab_size - 1)
        lengths = (
            [source.randint(1, SHORT_PROMPT_TOKENS) for _ in range(self.batch_size)]
            if column == "generation"
            else [self.prompt_tokens]
        )
        return [[source.randrange(first, vocab_size) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Sample:
    """One timed turn.

    Attributes:
        model: its name in the report.
        column: generation or prompt.
        repeat: counted from 0.
        order: position among all turns of the run, counted from 0 (shows the interleaving).
        seconds: wall time of the request, engine start and tokenizer excluded.
        tokens: tokens generated (generation) or read (prompt).
        idle_cpu_seconds: CPU time that the waiting engines used meanwhile; should be near 0.
    """

    model: str
    column: Column
    repeat: int
    order: int
    seconds: float
    tokens: int
    idle_cpu_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this turn."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class MeasuredModel:
    """A model of the report: its checkpoint, stored parameters and bytes of weights."""

    path: str
    architecture: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """Median and median absolute deviation, in the unit of the samples, and their number."""

    median: float
    mad: float
    count: int


@dataclass(frozen=True)
class SpeedReport:
    """Every sample of a run and the summaries the table needs. The first model is the baseline.

    Attributes:
        engine: vllm or transformers.
        note: why the engine is not the best one, or what to distrust; None when there is nothing to say.
        workload: what was timed.
        models: name -> sizes, in the order given.
        samples: in the order taken.
        environment: commit, device, ISA flags, versions, time.
    """

    engine: str
    note: str | None
    workload: Workload
    models: dict[str, MeasuredModel]
    samples: tuple[Sample, ...]
    environment: dict[str, Any]

    @property
    def baseline(self) -> str:
        """Name of the model that the others are compared with."""
        return next(iter(self.models))

    def tokens_per_second(self, model: str) -> Summary:
        """Generation throughput in tokens/s."""
        return _summary([s.tokens_per_second for s in self._of(model, "generation")])

    def latency_ms(self, model: str) -> Summary:
        """Latency of processing one prompt, in ms."""
        return _summary([1000 * s.seconds for s in self._of(model, "prompt")])

    def throughput_increase(self, model: str) -> float:
        """The papers' TI: median generation throughput over the baseline's."""
        return self.tokens_per_second(model).median / self.tokens_per_second(self.baseline).median

    def speedup(self, model: str) -> float:
        """The papers' Speedup: the baseline's median prompt latency over the model's."""
        return self.latency_ms(self.baseline).median / self.latency_ms(model).median

    def pruning_ratio(self, model: str) -> float:
        """Share of the baseline's parameters that was removed, in [0, 1)."""
        return 1 - self.models[model].parameters / self.models[self.baseline].parameters

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: everything, with the summaries and the samples."""
        return {
            **asdict(self),
            "summary": {
                name: {
                    "tokens_per_second": asdict(self.tokens_per_second(name)),
                    "latency_ms": asdict(self.latency_ms(name)),
                    "throughput_increase": self.throughput_increase(name),
                    "speedup": self.speedup(name),
                    "pruning_ratio": self.pruning_ratio(name),
                }
                for name in self.models
            },
        }

    def _of(self, model: str, column: Column) -> list[Sample]:
        return [s for s in self.samples if s.model == model and s.column == column]


def measure(
    models: Mapping[str, str | Path],
    *,
    engine: str = "auto",
    batch_size: int = 64,
    new_tokens: int = 128,
    prompt_tokens: int = 2048,
    repeats: int = 3,
    dtype: str = "bfloat16",
    seed: int = 0,
    jsonl: Path | None = None,
) -> SpeedReport:
    """Time token generation and prompt processing of several models side by side.

    Turns are interleaved (A, B, A, B, ...), so that a drift of the machine hits every model alike. Each model runs
    in its own process; prefix caching is off, prompts are random token ids, different in every repeat and the same
    for every model. After one warm-up turn of each column, every sample is kept.

    Args:
        models: name -> checkpoint folder or hub id; the first is the baseline.
        engine: auto (vLLM if installed, else Transformers), vllm or transformers.
        batch_size: prompts in a generation request.
        new_tokens: tokens generated for each.
        prompt_tokens: length of the prompt-processing prompt, in tokens.
        repeats: timed turns of each model and column.
        dtype: bfloat16, float16 or float32.
        seed: of the prompts.
        jsonl: file to which every sample is appended at once, with the environment.

    Raises:
        ConfigError: an invalid option, no model, or a workload longer than a model's context.
        CheckpointError: a folder that is no checkpoint.
        MissingDependencyError: ``engine="vllm"`` without vLLM.
        EngineError: an engine failed; its last log lines are in the message.
    """
    workload = Workload(batch_size, new_tokens, prompt_tokens, repeats, dtype, seed)
    workload.validate()
    if not models:
        raise ConfigError("No model to measure was given; name at least one checkpoint folder.")
    chosen, note = choose_engine(engine)
    if note:
        say(note, "yellow")
    checkpoints = {name: read_checkpoint(source) for name, source in models.items()}
    _check_lengths(checkpoints, workload)
    run = _Run(chosen, workload, checkpoints, jsonl)
    run.take()
    return run.report(note)


def _check_lengths(checkpoints: Mapping[str, Checkpoint], workload: Workload) -> None:
    found = [
        f"{name} reads at most {limit} tokens, the workload needs {workload.max_length}; lower prompt_tokens "
        f"({workload.prompt_tokens}) or new_tokens ({workload.new_tokens})."
        for name, checkpoint in checkpoints.items()
        if (limit := checkpoint.max_length) is not None and limit < workload.max_length
    ]
    if found:
        raise ConfigError(found)


class _Run:
    """State of one measurement: the engines, the samples so far and where they are written."""

    def __init__(
        self, engine: EngineName, workload: Workload, checkpoints: dict[str, Checkpoint], jsonl: Path | None
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.checkpoints = checkpoints
        self.jsonl = jsonl
        self.vocab_size = min(c.vocab_size for c in checkpoints.values())
        self.samples: list[Sample] = []
        self.environment = environment_record()
        self.id = uuid.uuid4().hex[:12]

    def take(self) -> None:
        """Take every sample, column by column, repeat by repeat, model by model."""
        with ExitStack() as stack:
            pool = stack.enter_context(_Pool(self))
            turns = [(c, r, m) for c in COLUMNS for r in range(self.workload.repeats) for m in self.checkpoints]
            for column, repeat, name in track(turns, f"timing with {self.engine}"):
                self._record(self._turn(pool, column, repeat, name))

    def _turn(self, pool: _Pool, column: Column, repeat: int, name: str) -> Sample:
        prompts = self.workload.prompts(column, repeat, self.vocab_size)
        with pool.awake(name) as (engine, others):
            before = sum(other.cpu_seconds() for other in others)
            seconds, tokens = engine.generate(prompts, self.workload.new_tokens_of(column))
            idle = sum(other.cpu_seconds() for other in others) - before
        if column == "prompt":
            tokens = self.workload.prompt_tokens
        return Sample(name, column, repeat, len(self.samples), seconds, tokens, idle)

    def _record(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self.jsonl is None:
            return
        record = {
            "run": self.id,
            "engine": self.engine,
            **asdict(sample),
            "tokens_per_second": sample.tokens_per_second,
            "checkpoint": self._measured(sample.model),
            "workload": asdict(self.workload),
            "environment": self.environment,
        }
        append_jsonl(self.jsonl, [record])

    def _measured(self, name: str) -> dict[str, Any]:
        c = self.checkpoints[name]
        return asdict(MeasuredModel(str(c.folder), c.architecture, c.parameters, c.bytes))

    def report(self, note: str | None) -> SpeedReport:
        """Return the report, with a warning when a waiting engine was not idle."""
        busy = max(s.idle_cpu_seconds / s.seconds for s in self.samples)
        if busy > IDLE_SHARE:
            warning = f"Waiting engines used up to {busy:.0%} of a CPU while another was timed; distrust these figures."
            note = f"{note} {warning}" if note else warning
        models = {name: MeasuredModel(**self._measured(name)) for name in self.checkpoints}
        return SpeedReport(self.engine, note, self.workload, models, tuple(self.samples), self.environment)


class _Pool:
    """The engines of a run: all loaded at once where memory allows, else one at a time, reloaded every turn."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._engines: dict[str, Engine] = {}
        self._resident = len(run.checkpoints) == 1 or _fits(run)

    def __enter__(self) -> _Pool:
        if self._resident:
            try:
                for name in track(list(self._run.checkpoints), "loading engines"):
                    self._engines[name] = self._start(name)
            except BaseException:
                self.__exit__()
                raise
        else:
            say("Not enough memory for all engines at once: each turn loads its own.")
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()

    @contextmanager
    def awake(self, name: str) -> Iterator[tuple[Engine, list[Engine]]]:
        """Give the warmed engine of ``name`` and the others, which have come to rest."""
        if self._resident:
            if len(self._engines) > 1:
                time.sleep(SETTLE_S)
            yield self._engines[name], [e for n, e in self._engines.items() if n != name]
            return
        engine = self._start(name)
        try:
            yield engine, []
        finally:
            engine.close()

    def _start(self, name: str) -> Engine:
        workload = self._run.workload
        engine = Engine(self._run.engine, _options(self._run.checkpoints[name], workload))
        try:
            for column in COLUMNS:
                prompts = workload.prompts(column, -1, self._run.vocab_size)
                engine.generate(prompts, workload.new_tokens_of(column))
        except BaseException:
            engine.close()
            raise
        if engine.device:
            self._run.environment["device"] = engine.device
        return engine


def _options(checkpoint: Checkpoint, workload: Workload) -> dict[str, Any]:
    return {
        "model": str(checkpoint.folder),
        "dtype": workload.dtype,
        "seed": workload.seed,
        "max_length": workload.max_length,
        "max_sequences": workload.batch_size,
        "max_batched_tokens": max(workload.max_length, workload.batch_size * SHORT_PROMPT_TOKENS),
        "kv_cache_bytes": kv_cache_bytes(checkpoint.config, workload),
    }


KV_BLOCK_TOKENS = 128
"""vLLM's block size on the CPU; a sequence occupies whole blocks."""


def kv_cache_bytes(config: Mapping[str, Any], workload: Workload) -> int:
    """Return the bytes of key-value cache that hold the whole workload, with a quarter to spare.

    Args:
        config: config.json as plain data. Layers that were made narrower are counted at full width.
        workload: decides the number and length of the sequences.
    """

    def blocks(tokens: int) -> int:
        return -(-tokens // KV_BLOCK_TOKENS)

    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    item = 4 if workload.dtype == "float32" else 2
    token_bytes = 2 * config["num_hidden_layers"] * heads * head_dim * item
    generation = workload.batch_size * blocks(SHORT_PROMPT_TOKENS + workload.new_tokens)
    needed = max(generation, blocks(workload.prompt_tokens + 1)) + 2
    return max(64 * 2**20, int(1.25 * needed * KV_BLOCK_TOKENS * token_bytes))


PROCESS_BYTES = 3 * 2**30
"""What an engine's processes take in addition to weights and cache (measured for vLLM on the CPU, rounded up)."""


def _fits(run: _Run) -> bool:
    need = sum(PROCESS_BYTES + 2 * c.bytes + kv_cache_bytes(c.config, run.workload) for c in run.checkpoints.values())
    return need < _available_bytes()


def _available_bytes() -> int:
    """Return the memory that is free for new processes (without limit where the system does not say)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**62
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 2**62)


def _summary(values: Sequence[float]) -> Summary:
    return Summary(median(values), mad(values), len(values))
