"""Ctrl-C and polite kills: when they may come, and what they mean."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM (docker stop, Slurm, Kubernetes) raises KeyboardInterrupt in the block, as Ctrl-C does.

    In the main thread only, where Python delivers signals.
    """
    with _handled({signal.SIGTERM: signal.default_int_handler}):
        yield


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended, and SIGTERM where Python handles it.

    In the main thread only, where Python delivers signals.
    """
    received: list[tuple[int, Any]] = []
    # What Python does not handle (ignored, the system's default, or another library's) stays as it is.
    handlers = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}
    with _handled(dict.fromkeys(handlers, lambda number, frame: received.append((number, frame)))):
        yield
    if received:
        first, frame = received[0]
        handlers[signal.Signals(first)](first, frame)


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[int, Any], object]]) -> Iterator[None]:
    """These handlers in the block, and those before it afterwards; nothing in other threads than the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
