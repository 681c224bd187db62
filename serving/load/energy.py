"""Measure energy with the machine's counters: CPU packages and memory (powercap), NVIDIA GPUs (NVML)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from pyprune.serving.load.gpus import visible_gpus

POWERCAP = Path("/sys/class/powercap")
SAMPLE_S = 0.2
"""Seconds between two samples; powercap's counters move every millisecond, NVML's every 20 to 100."""


@dataclass(frozen=True)
class Counter:
    """One counter that grows.

    Attributes:
        name: of the part that it measures.
        read: its value now, in joules.
        wraps_at: value in joules at which it starts again from 0; None = it does not.
    """

    name: str
    read: Callable[[], float]
    wraps_at: float | None = None

    def since(self, before: float, now: float) -> float:
        """Return the joules between an earlier and a later value."""
        return now - before if now >= before or self.wraps_at is None else now + self.wraps_at - before


def find_counters(powercap: Path = POWERCAP) -> list[Counter]:
    """Return every counter that can be read here; powercap's are for root alone on most machines."""
    return [*_cpu_counters(powercap), *_gpu_counters()]


def _cpu_counters(powercap: Path) -> list[Counter]:
    """Return the counters of CPU packages and of memory that is not part of a package."""
    counters = []
    for zone in sorted(
        powercap.glob("intel-rapl:*")
    ):  # AMD's have this name too; intel-rapl-mmio counts everything twice
        try:
            name = (zone / "name").read_text().strip()
            wraps_at = int((zone / "max_energy_range_uj").read_text()) / 1e6
            counter = Counter(f"CPU {name}", partial(_cpu_joules, zone / "energy_uj"), wraps_at)
            counter.read()
        except (OSError, ValueError):
            continue
        if name.startswith("package") or name == "dram":
            counters.append(counter)
    return counters


def _cpu_joules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _gpu_counters() -> list[Counter]:
    """Return the counters of all visible GPUs; [] unless all of them report their energy."""
    counters = [Counter(gpu.name, gpu.joules) for gpu in visible_gpus()]
    try:
        for counter in counters:
            counter.read()
    except OSError:  # older than Volta
        return []
    return counters


class EnergyMeter:
    """Samples counters in a thread while it is open.

    Args:
        counters: their values are added up; () = nothing is sampled.
        clock: seconds; the default is shared by all processes of a Linux machine.
    """

    def __init__(self, counters: Sequence[Counter], clock: Callable[[], float] = time.perf_counter) -> None:
        self._counters, self._clock = tuple(counters), clock
        self._last: list[float] = []
        self._times: list[float] = []
        self._joules: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self._counters:
            self.sample()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._counters:
            self._thread.join()
            self.sample()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Read every counter once; take no sample if one cannot be read."""
        try:
            values = [counter.read() for counter in self._counters]
        except (OSError, ValueError):  # a failure must not stop the measurement
            return
        before = self._last or values
        used = sum(c.since(a, b) for c, a, b in zip(self._counters, before, values, strict=True))
        self._last = values
        self._times.append(self._clock())
        self._joules.append(used + (self._joules[-1] if self._joules else 0.0))

    def joules(self, start: float, end: float) -> float | None:
        """Return the energy between two times of the clock, interpolated from samples; None outside of the samples."""
        import numpy as np

        if len(self._times) < 2 or start < self._times[0] or end > self._times[-1]:
            return None
        before, after = np.interp([start, end], self._times, self._joules)
        return float(after - before)
