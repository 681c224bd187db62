"""Compare models turn by turn: options, intervals and state of measurements of engines and of servers."""

from __future__ import annotations

import math
import statistics
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyprune.config.base import LARGEST_SEED
from pyprune.errors import ConfigError, shown
from pyprune.runtime.interrupts import interrupts_deferred
from pyprune.runtime.intervals import half_width
from pyprune.runtime.progress import track
from pyprune.runtime.records import append_jsonl
from pyprune.serving.engines import let_settle

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in which an engine may compute."""
IDLE_SHARE = 0.05
"""Share of a turn's wall time in CPU time of the waiting engines above which the report warns."""
MAX_REPEATS = 10
"""Most turns of a comparison that goes on until its interval is narrow, unless the caller says otherwise."""


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a ratio (:data:`pyprune.runtime.intervals.CONFIDENCE`).

    Attributes:
        low: its lower end.
        high: its upper end.
        count: number of ratios that it was computed from.
    """

    low: float
    high: float
    count: int

    @property
    def width(self) -> float:
        """From end to end, as a share of the (geometric) middle: 0.02 is 2 % of the ratio."""
        return (self.high - self.low) / math.sqrt(self.low * self.high)


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the t interval of paired ratios, computed from their logarithms; None for fewer than two.

    Args:
        ratios: one for each pair of turns that were taken one after the other; all above 0.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle, half = statistics.fmean(logs), half_width(logs)
    return Interval(math.exp(middle - half), math.exp(middle + half), len(logs))


def seed_problems(seed: int) -> list[str]:
    """Return the errors in a seed, which engines take too."""
    within = 0 <= seed <= LARGEST_SEED
    return [] if within else [f"seed is {shown(str(seed))}; it must be between 0 and {LARGEST_SEED}."]


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """The options that every measurement of speed has.

    Attributes:
        repeats: timed turns of each model and workload; with ``precision`` the least number.
        dtype: of weights and activations.
        seed: of the prompts, of engines and of drawn orders.
        precision: take turns until the 95 % interval of every model's ratio to the first one is no wider than this
            share of the ratio (0.02 = 2 %); 0 = exactly ``repeats`` turns.
        max_repeats: the most turns; None = :data:`MAX_REPEATS`, or ``repeats`` where that is more.
    """

    repeats: int = 3
    dtype: str = "bfloat16"
    seed: int = 0
    precision: float = 0.0
    max_repeats: int | None = None

    def validate(self) -> None:
        """Raise :class:`ConfigError` with every invalid option."""
        if problems := self.problems():
            raise ConfigError(problems)

    def problems(self, **counts: int) -> list[str]:
        """Return an error for each invalid option, one sentence each.

        Args:
            counts: further options that must be at least 1.
        """
        counts |= {"repeats": self.repeats}
        problems = [f"{name} is {value}; it must be at least 1." for name, value in counts.items() if value < 1]
        problems += seed_problems(self.seed)
        if self.dtype not in DTYPES:
            problems.append(f"dtype is {self.dtype!r}; it must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}.")
        if not 0 <= self.precision < 1:
            problems.append(
                f"precision is {self.precision:g}; it must be at least 0 and below 1: 0.02 is 2 % of the ratio, and 0 "
                "takes exactly repeats turns."
            )
        most = self.max_repeats
        if most is not None and self.precision == 0:
            problems.append(
                f"max_repeats is {most}, but precision is 0, which takes exactly repeats turns; leave it out."
            )
        if most is not None and most < self.repeats:
            problems.append(f"max_repeats is {most}; it must be at least repeats, which is {self.repeats}.")
        return problems

    @property
    def most_repeats(self) -> int:
        """The most turns: ``repeats`` exactly where no precision is asked for."""
        if not self.precision:
            return self.repeats
        return max(self.repeats, MAX_REPEATS) if self.max_repeats is None else self.max_repeats

    def rounds(self, report: Callable[[], TurnReport], workloads: Iterable[Any]) -> Iterator[int]:
        """Yield the numbers of the turns to take, from 0: the least of them, then more until the intervals are narrow.

        Args:
            report: returns the report of all turns so far; asked before each further turn.
            workloads: of the intervals.
        """
        for number in range(self.most_repeats):
            intervals = report().intervals(workloads).values() if number >= self.repeats else [None]
            if all(interval is not None and interval.width <= self.precision for interval in intervals):
                return
            yield number


def check_models(models: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for no model at all."""
    if not models:
        raise ConfigError("No model to measure was given; name at least one checkpoint folder.")


def length_problems(
    limits: Mapping[str, int | None], needed: int, what: str, prompt_tokens: int, new_tokens: int
) -> list[str]:
    """Return an error for each model that does not read sequences of a length.

    Args:
        limits: name of a model -> tokens of its longest sequence; None = any.
        needed: tokens.
        what: needs them: the workload or the load.
        prompt_tokens: of its longest prompt.
        new_tokens: of every answer.
    """
    return [
        f"{name} reads at most {limit} tokens, the {what} needs {needed}; lower prompt_tokens ({prompt_tokens}) or "
        f"new_tokens ({new_tokens})."
        for name, limit in limits.items()
        if limit is not None and limit < needed
    ]


class TurnReport(ABC):
    """The part of a report that compares its models, turn by turn; the first model is the baseline."""

    models: Any

    @abstractmethod
    def speeds(self, workload: Any) -> Mapping[tuple[str, int], float]:
        """Return (model, number of the turn) -> its speed under a workload, in any unit."""

    @property
    def baseline(self) -> str:
        """Name of the model that the others are compared with."""
        return str(next(iter(self.models)))

    def interval(self, model: str, workload: Any) -> Interval | None:
        """The 95 % interval of the ratio of speeds, from paired turns; None for the baseline and fewer than two turns.

        Args:
            model: its name.
            workload: of the turns.
        """
        if model == self.baseline:
            return None
        speed, base = self.speeds(workload), self.baseline
        repeats = [repeat for name, repeat in speed if name == model and (base, repeat) in speed]
        return ratio_interval([speed[model, repeat] / speed[base, repeat] for repeat in repeats])

    def intervals(self, workloads: Iterable[Any]) -> dict[tuple[str, Any], Interval | None]:
        """Return (model, workload) -> interval, of every model but the baseline."""
        others = [name for name in self.models if name != self.baseline]
        return {(name, workload): self.interval(name, workload) for name in others for workload in workloads}


def precision_text(intervals: Mapping[str, Interval | None], options: TurnOptions) -> str:
    """Report the interval of every ratio, and which of them are wider than was asked; "" where nothing was asked.

    Args:
        intervals: name of a ratio -> its interval; None where one turn was taken.
        options: of the measurement.
    """
    if not intervals or not options.precision:
        return ""
    known = {name: interval for name, interval in intervals.items() if interval is not None}
    wide = [name for name in intervals if name not in known or known[name].width > options.precision]
    ranges = [f"{name} {i.low:.3f} to {i.high:.3f} ({i.width:.1%} wide)" for name, i in known.items()]
    listed = f"95 % intervals from paired turns: {', '.join(ranges)}. " if ranges else ""
    if not wide:
        return f"{listed}None is wider than {100 * options.precision:g} % of its ratio, as was asked."
    return (
        f"{listed}Wider than the {100 * options.precision:g} % that were asked for, with at most "
        f"{options.most_repeats} turns each: {', '.join(wide)}. Allow more turns (--max-repeats), or let nothing else "
        "run meanwhile."
    )


class Comparison(ABC):
    """The runners of several models (engines or servers), and the turns that were taken with them.

    All runners are up at once where memory allows, idle but for one; else one at a time, started when its turn comes.

    Args:
        engine: name of the engine in records.
        what: engines or servers, for messages.
        jsonl: file to which every turn is appended at once; None = none.
        environment: the record of the machine.
        models: names.
        resident: all runners are up at once.
    """

    def __init__(
        self,
        engine: str,
        what: str,
        jsonl: Path | None,
        environment: dict[str, Any],
        models: Iterable[str],
        *,
        resident: bool,
    ) -> None:
        self.engine, self.what, self.jsonl, self.environment = engine, what, jsonl, environment
        self.names, self.resident = list(models), resident
        self.id = uuid.uuid4().hex[:12]
        self.up: dict[str, Any] = {}
        self.turns: list[Any] = []
        self.load_seconds: dict[str, list[float]] = {name: [] for name in self.names}
        self.memory: dict[str, int] = {}

    @abstractmethod
    def plan(self) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of :meth:`turn` for every turn to take; earlier turns decide how many follow."""

    @abstractmethod
    def turn(self, *which: Any) -> Any:
        """Take one turn."""

    @abstractmethod
    def start(self, name: str) -> Any:
        """Start the engine or server of a model."""

    @abstractmethod
    def facts(self, turn: Any) -> dict[str, Any]:
        """Return what the record of a turn holds in addition to its fields and the environment."""

    def take(self, label: str) -> None:
        """Take and record every turn, then end all runners.

        Args:
            label: of the progress.
        """
        try:
            if self.resident:
                for name in track(self.names, f"loading {self.what}"):
                    self._start(name)
            for which in track(self.plan(), label):
                turn = self.turn(*which)
                self.turns.append(turn)
                if self.jsonl is not None:
                    record = {"run": self.id, "engine": self.engine, **asdict(turn), **self.facts(turn)}
                    record |= {"tokens_per_second": turn.tokens_per_second, "environment": self.environment}
                    append_jsonl(self.jsonl, [record])
        finally:
            self._end()

    def measure(self, name: str, work: Callable[[Any], Any]) -> tuple[Any, float, float]:
        """Let a model's runner work while the others are idle.

        Returns:
            The result, the seconds that it took, and the CPU seconds that the others used.
        """
        if name not in self.up:
            self._end()
            self._start(name)
        runner, others = self.up[name], [other for key, other in self.up.items() if key != name]
        let_settle(len(others), self.engine)
        before, started = sum(other.cpu_seconds() for other in others), time.perf_counter()
        result = work(runner)
        seconds = time.perf_counter() - started
        self.memory[name] = max(self.memory.get(name, 0), runner.peak_memory_bytes())
        return result, seconds, sum(other.cpu_seconds() for other in others) - before

    def distrust_warning(self, busy: Iterable[float]) -> str | None:
        """Return the warning where runners that waited were not idle; None where they were.

        Args:
            busy: CPU seconds of the others for each second of a turn.
        """
        if (most := max(busy)) <= IDLE_SHARE:
            return None
        return f"Waiting {self.what} used up to {most:.0%} of a CPU while another was measured; distrust these figures."

    def _start(self, name: str) -> None:
        self.up[name] = self.start(name)
        self.load_seconds[name].append(self.up[name].load_seconds)

    def _end(self) -> None:
        with interrupts_deferred():
            for runner in self.up.values():
                runner.ask_to_end()
            while self.up:
                self.up.popitem()[1].close()
