"""Calls with limits: what is too much is stopped, and every limit is afterwards what it was before."""

from __future__ import annotations

import resource
import signal
import threading
from typing import Any

import pytest

from pyprune.errors import ConfigError, DataError
from pyprune.runtime.limits import bounded_call, brief, foreign_errors


def limits() -> tuple[Any, ...]:
    return (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.getsignal(signal.SIGPROF),
        signal.getitimer(signal.ITIMER_PROF),
    )


def endless() -> None:
    while True:
        pass


def fails() -> None:
    raise KeyError("x")


def interrupted() -> None:
    raise KeyboardInterrupt


def bounded(call: Any, seconds: float = 5, extra_bytes: int = 256 << 20) -> Any:
    return bounded_call(call, seconds=seconds, extra_bytes=extra_bytes)


@pytest.mark.parametrize(
    ("call", "seconds", "error"),
    [
        (endless, 0.3, TimeoutError),
        # Taking 256 MiB has taken more than 0.3 seconds of a slow machine's time.
        (lambda: "x" * 10**10, 60, MemoryError),
        (lambda: [bytearray(2**20) for _ in range(10**6)], 60, MemoryError),
        (fails, 60, KeyError),
        (interrupted, 60, KeyboardInterrupt),
    ],
)
def test_what_takes_too_much_is_stopped_and_the_limits_are_put_back(
    call: Any, seconds: float, error: type[BaseException]
) -> None:
    before = limits()
    with pytest.raises(error):
        bounded(call, seconds=seconds)
    assert limits() == before
    assert len("x" * (300 << 20)) == 300 << 20, "memory is to be had again"


def test_the_limits_hold_during_the_call_and_not_after_it() -> None:
    before = limits()
    inside = bounded(limits)
    assert inside[0][0] < before[0][0] or before[0][0] == resource.RLIM_INFINITY
    assert inside[0][0] != resource.RLIM_INFINITY
    assert inside[0][1] == before[0][1]
    assert 0 < inside[2][0] <= 5.1
    assert limits() == before


def test_an_alarm_and_a_limit_that_were_there_are_kept() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, lambda number, frame: None)
    low = (bounded(limits, extra_bytes=1 << 30)[0][0], before[1])
    try:
        signal.setitimer(signal.ITIMER_PROF, 1000, 70)
        resource.setrlimit(resource.RLIMIT_AS, low)
        ours = signal.getsignal(signal.SIGPROF)
        assert bounded(limits, extra_bytes=1 << 40)[0] == low, "a lower limit is not raised"
        assert resource.getrlimit(resource.RLIMIT_AS) == low
        assert signal.getsignal(signal.SIGPROF) is ours
        left, interval = signal.getitimer(signal.ITIMER_PROF)
        assert left == pytest.approx(1000, abs=60)
        assert interval == pytest.approx(70, abs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_a_finaliser_swallows_comes_again() -> None:
    class Stubborn:
        def __del__(self) -> None:
            endless()

    def call() -> None:
        Stubborn()
        endless()

    with pytest.raises(TimeoutError, match=r"more than 0\.2 seconds"):
        bounded(call, seconds=0.2)


def test_calls_inside_calls_and_in_other_threads() -> None:
    before = limits()
    with pytest.raises(TimeoutError):
        bounded(lambda: bounded(endless, seconds=0.2))
    assert limits() == before
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(bounded(limits)))
    thread.start()
    thread.join()
    assert found == [before], "another thread's call changes nothing of the process"


class PanicException(BaseException):
    """As pyo3's: no Exception."""


@pytest.mark.parametrize("error", [TypeError("a\nb"), KeyError("k"), OverflowError(), PanicException("boom")])
def test_whatever_a_library_raises_is_one_line(error: BaseException) -> None:
    with pytest.raises(DataError) as caught, foreign_errors(DataError, "It failed", "Do that."):
        raise error
    assert str(caught.value) == f"It failed: {brief(error)}. Do that."
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt(), SystemExit(3)])
def test_our_own_errors_and_the_end_of_the_process_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, foreign_errors(DataError, "It failed", "Do that."):
        raise error
    assert caught.value is error


def test_words_of_an_error_are_bounded() -> None:
    assert brief(MemoryError()) == "MemoryError"
    assert len(brief(ValueError("ab " * 10**6))) < 400
