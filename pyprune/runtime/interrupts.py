"""Handling of Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """A handler that remembers whether a signal asked the process to stop.

    Attributes:
        came: True from the first such signal on.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal as Python handles Ctrl-C, and remember it."""
        self.came = True
        signal.default_int_handler(number, frame)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Raise KeyboardInterrupt for SIGTERM (docker stop, Slurm, Kubernetes) and SIGHUP (a closed terminal), too.

    It may become another error on its way (an import that was stopped halfway), so check ``came`` too. In the main
    thread only, where Python delivers signals; a signal that the process ignores stays ignored.
    """
    interruption = Interruption()
    numbers = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
    with _set_handlers(dict.fromkeys(numbers, interruption)):
        yield interruption


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended, and SIGTERM and SIGHUP if Python handles them.

    In the main thread only, where Python delivers signals.
    """
    received: list[tuple[int, Any]] = []
    # Other handlers (ignored, the system's default, or another library's) are kept.
    handlers = {n: h for n in ENDING if callable(h := signal.getsignal(n))}
    with _set_handlers(dict.fromkeys(handlers, lambda number, frame: received.append((number, frame)))):
        yield
    if received:
        first, frame = received[0]
        handlers[signal.Signals(first)](first, frame)


@contextmanager
def _set_handlers(handlers: Mapping[signal.Signals, Callable[[int, Any], object]]) -> Iterator[None]:
    """Set these handlers in the block, and restore the earlier ones; does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
