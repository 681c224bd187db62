"""The parts of a measurement of speed: the workload, its samples, and the report made of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pyprune.serving.comparison import TurnOptions, TurnReport
from pyprune.serving.stats import mad, median

Column = Literal["generation", "prompt"]
COLUMNS: tuple[Column, ...] = ("generation", "prompt")
SHORT_PROMPT_TOKENS = 16
"""Prompts of the generation column have 1 to this many random tokens."""
FIRST_TOKEN_ID = 3
"""Ids below this are special tokens in most vocabularies."""


@dataclass(frozen=True)
class Workload(TurnOptions):
    """The prompts and turns that are timed.

    Attributes:
        batch_size: prompts in one generation request.
        new_tokens: tokens generated for each of them.
        prompt_tokens: length in tokens of the prompt-processing prompt.
        dtype: of weights and activations; llama.cpp has its own (:attr:`MeasuredModel.format`).
    """

    batch_size: int = 64
    new_tokens: int = 128
    prompt_tokens: int = 2048

    def problems(self, **counts: int) -> list[str]:
        """See :meth:`TurnOptions.problems`."""
        names = ("batch_size", "new_tokens", "prompt_tokens")
        return super().problems(**{name: getattr(self, name) for name in names}, **counts)

    @property
    def max_length(self) -> int:
        """The longest sequence in tokens that the workload makes."""
        return max(self.prompt_tokens + 1, SHORT_PROMPT_TOKENS + self.new_tokens)

    def new_tokens_of(self, column: Column) -> int:
        """Return how many tokens a turn of ``column`` generates for each prompt."""
        return self.new_tokens if column == "generation" else 1

    def prompts(self, column: Column, repeat: int, vocab_size: int, *, count: int = 1) -> list[list[int]]:
        """Return the token ids of one turn: the same for every model, others for every repeat.

        Args:
            column: generation (``batch_size`` prompts of 1 to 16 tokens) or prompt (``count`` long ones).
            repeat: number of the turn; -1 is the warm-up.
            vocab_size: ids are below it.
            count: of long prompts.
        """
        source = random.Random(f"{self.seed}/{column}/{repeat}")
        first = min(FIRST_TOKEN_ID, vocab_size - 1)
        lengths = (
            [source.randint(1, SHORT_PROMPT_TOKENS) for _ in range(self.batch_size)]
            if column == "generation"
            else [self.prompt_tokens] * count
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
    """A model of the report.

    Attributes:
        path: the checkpoint folder, or the GGUF file.
        architecture: the class name that loads it, or "llama.cpp" and its name there.
        parameters: stored parameters.
        bytes: size in bytes of the weight files that the engine reads.
        format: of the weights: the dtype, or a GGUF file's format, such as q8_0.
        load_seconds: from the start of the engine's process until the model was ready, its files having just been read;
            the median of all starts. None before the first.
        memory: most bytes that the engine's processes held, caches and libraries included. None before the end.
    """

    path: str
    architecture: str
    parameters: int
    bytes: int
    format: str = ""
    load_seconds: float | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Summary:
    """Median and median absolute deviation, in the unit of the samples, and their number."""

    median: float
    mad: float
    count: int


@dataclass(frozen=True)
class SpeedReport(TurnReport):
    """Every sample of a run and the summaries the table needs. The first model is the baseline.

    Attributes:
        engine: vllm, transformers or llamacpp.
        note: why the engine is not the best one, or which figures to distrust; None without such a reason.
        workload: the prompts and turns that were timed.
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

    def tokens_per_second(self, model: str) -> Summary:
        """Generation throughput in tokens/s."""
        return summary([s.tokens_per_second for s in self._of(model, "generation")])

    def latency_ms(self, model: str) -> Summary:
        """Latency of processing one prompt, in ms."""
        return summary([1000 * s.seconds for s in self._of(model, "prompt")])

    def throughput_increase(self, model: str) -> float:
        """The papers' TI: median generation throughput over the baseline's."""
        return self.tokens_per_second(model).median / self.tokens_per_second(self.baseline).median

    def speedup(self, model: str) -> float:
        """The papers' Speedup: the baseline's median prompt latency over the model's."""
        return self.latency_ms(self.baseline).median / self.latency_ms(model).median

    def speeds(self, workload: Column) -> dict[tuple[str, int], float]:
        """Return (model, repeat) -> tokens/s of every turn of a column; their ratios are TI and Speedup."""
        return {(s.model, s.repeat): s.tokens_per_second for s in self.samples if s.column == workload}

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
                    "intervals": {
                        column: asdict(interval)
                        for column in COLUMNS
                        if (interval := self.interval(name, column)) is not None
                    },
                }
                for name in self.models
            },
        }

    def _of(self, model: str, column: Column) -> list[Sample]:
        return [s for s in self.samples if s.model == model and s.column == column]


def summary(values: Sequence[float]) -> Summary:
    """Return the median, the median absolute deviation and the number of samples."""
    return Summary(median(values), mad(values), len(values))
