"""Bounded calls into other people's code on damaged or hostile input, with their errors in one line."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pyprune.errors import PypruneError
from pyprune.runtime.progress import printable

T = TypeVar("T")

_AGAIN = 0.25
"""Seconds between two alarms: an exception raised in a finaliser is lost, so one alarm is not enough."""
_LONGEST = 300


class _OutOfTime(BaseException):
    """Raised by the alarm; not an Exception, so that no handler in between catches it."""


def bounded_call(call: Callable[[], T], *, seconds: float, extra_bytes: int) -> T:
    """Return ``call()``, stopped when it takes too much processor time or memory.

    The limits are the process's own, so no other thread may compute meanwhile; they, the alarm and its handler are
    restored afterwards. In the main thread only, where Python delivers signals: in another one the call is
    not bounded. Python code is stopped at once, code in C when it returns or asks for memory.

    Args:
        seconds: of processor time.
        extra_bytes: of address space in addition to the present one (on Linux, which reports it).

    Raises:
        TimeoutError: it took longer.
        MemoryError: it needed more.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_lower(before[0], extra_bytes), before[1]))
        return _call_in_time(call, seconds)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _lower(limit: int, extra_bytes: int) -> int:
    """Return the address space in use plus ``extra_bytes``, unless the limit is lower already."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return limit
    raised = pages * resource.getpagesize() + extra_bytes
    return raised if limit == resource.RLIM_INFINITY else min(limit, raised)


def _call_in_time(call: Callable[[], T], seconds: float) -> T:
    armed = True

    def stop(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _OutOfTime

    # Processor time, not time on the clock: a busy machine must not make a good input look like a bad one.
    handler = signal.signal(signal.SIGPROF, stop)
    timer = signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN)
    try:
        try:
            return call()
        finally:
            armed = False
    except _OutOfTime:
        raise TimeoutError(f"it took more than {seconds:g} seconds") from None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, *timer)
        signal.signal(signal.SIGPROF, signal.SIG_DFL if handler is None else handler)


@contextmanager
def foreign_errors(kind: type[PypruneError], what: str, advice: str) -> Iterator[None]:
    """Turn errors of a library on hostile input into one: "``what``: the library's words. ``advice``".

    Only for blocks that hold nothing but the call. Errors of pyprune, Ctrl-C and the end of the process pass.

    Raises:
        PypruneError: of the given kind.
    """
    try:
        yield
    except (PypruneError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in a Rust library is no Exception
        raise kind(f"{what}: {brief(error)}. {advice}") from error


def brief(error: BaseException) -> str:
    """Format kind and words of an error on one line of bounded length."""
    return f"{type(error).__name__}: {one_line(str(error), _LONGEST)}".removesuffix(": ").rstrip(".")


def one_line(text: str, most: int = 600) -> str:
    """Format text of another program for a message: one line of at most ``most`` printable characters."""
    line = printable(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most else f"{line[:most]} ..."
