"""Time the parts of a training step: the calls that it consists of, while it runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from pyprune.runtime.report import Cell, Table, markdown_table
from pyprune.serving.stats import median

FORWARD, TEACHER, BACKWARD, PENALTY = "forward and loss", "teacher's layers", "backward", "penalty on weights"
NORM, COPY, OPTIMIZER, REST = "gradient norm", "copy of good weights", "optimizer", "rest"
PARTS = (FORWARD, TEACHER, BACKWARD, PENALTY, NORM, COPY, OPTIMIZER, REST)

Watched = tuple[Any, str, str]
"""Whose attribute is called, its name, and the part that the calls are of."""


@dataclass
class _Stopwatch:
    """Milliseconds by part; a part within another counts once, for itself."""

    device: torch.device
    milliseconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _within: list[float] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._now()
        self._within.append(0.0)
        try:
            yield
        finally:
            whole = self._now() - start
            self.milliseconds[name] += whole - self._within.pop()
            if self._within:
                self._within[-1] += whole

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return wrapper

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e3 * time.perf_counter()


def time_parts(
    step: Callable[[], object], watched: Sequence[Watched], repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the median milliseconds of each part of a step, over ``repeats`` steps after one that does not count.

    On a GPU the device is waited for at both ends of a part, so that parts do not overlap and their sum is more than a
    step takes.

    Args:
        step: does one.
        watched: what is replaced by timed calls meanwhile.
        repeats: steps.
        device: where they run.
    """
    steps = []
    for _ in range(1 + repeats):
        watch = _Stopwatch(device)
        with ExitStack() as replaced:
            for owner, name, part in watched:
                replaced.enter_context(patch.object(owner, name, watch.timed(getattr(owner, name), part)))
            with watch.part(REST):
                step()
        steps.append(watch.milliseconds)
    return {part: median([milliseconds[part] for milliseconds in steps[1:]]) for part in PARTS}


def parts_table(records: Sequence[dict[str, Any]]) -> str:
    """Medians of :func:`time_parts`, one line a record that has them, as Markdown."""
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        if "parts_ms" in record:
            seconds = [record["parts_ms"][part] / 1e3 for part in PARTS]
            cells = (f"{s:.2f}" if s else None for s in seconds)
            rows.append((record["op"], record["implementation"], f"{sum(seconds):.2f}", *cells))
    return markdown_table(Table("Parts of a step, seconds", ("step", "implementation", "sum", *PARTS), tuple(rows)))
