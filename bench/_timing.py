"""Interleaved timing and peaks of memory, for kernels and training."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyprune.ops import available_isas
from pyprune.runtime.records import append_jsonl
from pyprune.serving.stats import environment_record, mad, median

CEILING = "ceiling"
GPU_CALLS = 10
"""Calls in one sample on a GPU, where a single one takes a fraction of a millisecond."""


@dataclass
class Case:
    """One implementation of one thing, with its samples in milliseconds.

    Attributes:
        op: the operation.
        dtype: of the weights.
        variant: which groups, which penalty; empty if there is only one.
        implementation: "ceiling", a backend, "eager", "compiled", ...
        call: does it once.
        traffic: bytes that it must read and write at least.
        ceiling: the probe of its streams, or None.
        prepare: done before every call, not timed.
        samples: milliseconds a call.
    """

    op: str
    dtype: str
    variant: str
    implementation: str
    call: Callable[[], object]
    traffic: int = 0
    ceiling: Case | None = None
    prepare: Callable[[], object] | None = None
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return median(self.samples)

    @property
    def deviation(self) -> float:
        """Median absolute deviation in milliseconds."""
        return mad(self.samples)

    @property
    def share(self) -> float | None:
        """Ratio of the ceiling's time to this one's: the median over the rounds, because a machine's speed drifts."""
        if self.ceiling is None:
            return None
        return median([ceiling / own for ceiling, own in zip(self.ceiling.samples, self.samples, strict=True)])

    @property
    def speed(self) -> float:
        """GB/s (10^9 bytes) of the traffic that is needed at least."""
        return self.traffic / self.median / 1e6

    def record(self) -> dict[str, Any]:
        """Return the case as a line of the JSONL file: a summary of its samples, if there are any."""
        names = ("op", "dtype", "variant", "implementation", "traffic")
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.samples:
            record |= {"median_ms": self.median, "mad_ms": self.deviation, "samples": len(self.samples)}
        return record


def beside(
    ceiling: Case, variant: str, calls: Mapping[str, Callable[[], object]], traffic: int | None = None
) -> list[Case]:
    """Return the cases of one variant that are compared with a ceiling: implementation -> call.

    Args:
        ceiling: of the same op and dtype, prepared in the same way.
        variant: of the cases.
        calls: by implementation.
        traffic: bytes of each call; None = as many as of the ceiling.
    """
    c, moved = ceiling, ceiling.traffic if traffic is None else traffic
    return [Case(c.op, c.dtype, variant, name, call, moved, c, c.prepare) for name, call in calls.items()]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Select a backend of the ops for the duration of the block."""
    before = os.environ.get("PYPRUNE_BACKEND")
    os.environ["PYPRUNE_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYPRUNE_BACKEND"]
        else:
            os.environ["PYPRUNE_BACKEND"] = before


def run_on_backend(
    name: str, function: Callable[..., object], *args: object, **options: object
) -> Callable[[], object]:
    """Return ``function(*args, **options)`` as a call without arguments, on one backend."""

    def call() -> object:
        with backend(name):
            return function(*args, **options)

    return call


def run_on_one_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call on one thread of the CPU."""

    def alone() -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return call()
        finally:
            torch.set_num_threads(threads)

    return alone


def interleave(cases: Sequence[Case], repeats: int, device: torch.device) -> None:
    """Run every case once unmeasured (it compiles there), then sample each in turn until there are ``repeats``."""
    for number in range(repeats + 1):
        print(f"\r{cases[0].op}: round {number}/{repeats} ", end="", file=sys.stderr, flush=True)
        for case in cases:
            calls = GPU_CALLS if device.type == "cuda" and case.prepare is None else 1
            if case.prepare is not None:
                case.prepare()
            _synchronise(device)
            begin = time.perf_counter()
            for _ in range(calls):
                case.call()
            _synchronise(device)
            if number:
                case.samples.append(1e3 * (time.perf_counter() - begin) / calls)
    print(file=sys.stderr)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def extra_peak(work: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that torch's allocator held during ``work``, beyond those at its start."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    records = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in records if e.name() == "[memory]")
    alive = peak = 0
    for _, size in events:
        alive += size
        peak = max(peak, alive)
    return peak


def last_level_cache() -> int:
    """Return the bytes of all last-level caches of this process's CPUs, as Linux lists them; 64 MiB if unknown."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    sizes: dict[str, int] = {}
    for cpu in cpus:
        levels = sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
        try:
            shared, size = ((levels[-1] / name).read_text().strip() for name in ("shared_cpu_list", "size"))
            sizes[shared] = int(size.removesuffix("K")) << 10
        except (IndexError, OSError, ValueError):
            continue
    return sum(sizes.values()) or 64 << 20


def release(cases: Iterable[Case]) -> None:
    """Drop the calls and the arrays that they hold."""
    for case in cases:
        case.call, case.prepare = int, None


def find(cases: Iterable[Case], op: str, dtype: str, variant: str, implementation: str) -> Case | None:
    """Return the case of this name, or None."""
    name = (op, dtype, variant, implementation)
    return next((c for c in cases if (c.op, c.dtype, c.variant, c.implementation) == name), None)


def conditions(device: torch.device) -> dict[str, object]:
    """Return the machine and the versions that a figure depends on."""
    return {
        **environment_record(torch.cuda.get_device_name() if device.type == "cuda" else None),
        "isas": available_isas(),
        "threads": torch.get_num_threads(),
    }


def keep(path: Path, cases: Iterable[Case], about: dict[str, object]) -> None:
    """Append a summary of every case to the results file."""
    append_jsonl(path, ({**about, **case.record()} for case in cases))
