"""Ctrl-C and polite kills: when they may come, and what they mean."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM (docker stop, Slurm, Kubernetes) raises KeyboardInterrupt in the block, as Ctrl-C does.

    In the main thread only, where Python delivers signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended, and SIGTERM where Python handles it.

    In the main thread only, where Python delivers signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    # What Python does not handle (ignored, the system's default, or another library's) stays as it is.
    handlers = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        first, frame = received[0]
        handlers[signal.Signals(first)](first, frame)
