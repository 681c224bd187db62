"""Take turns of a comparison until the interval of every ratio is narrow enough, up to a limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyprune.runtime.intervals import half_width

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


def paired_interval(speed: Mapping[tuple[str, int], float], baseline: str, model: str) -> Interval | None:
    """Return the interval of a model's speed over the baseline's, turn by turn; None for fewer than two turns.

    Args:
        speed: (model, number of the turn) -> its speed, in any unit.
        baseline: what is divided by.
        model: what is divided.
    """
    repeats = [repeat for name, repeat in speed if name == model and (baseline, repeat) in speed]
    return ratio_interval([speed[model, repeat] / speed[baseline, repeat] for repeat in repeats])


def most_repeats(repeats: int, precision: float, max_repeats: int | None) -> int:
    """Return the most turns: ``repeats`` exactly where no precision is asked for.

    Args:
        repeats: the least number of turns.
        precision: largest width of an interval (:attr:`Interval.width`); 0 = any.
        max_repeats: the most; None = :data:`MAX_REPEATS`, or ``repeats`` where that is more.
    """
    if not precision:
        return repeats
    return max(repeats, MAX_REPEATS) if max_repeats is None else max_repeats


def precision_problems(repeats: int, precision: float, max_repeats: int | None) -> list[str]:
    """Return the errors in these options, one sentence each."""
    problems = []
    if not 0 <= precision < 1:
        problems.append(
            f"precision is {precision:g}; it must be at least 0 and below 1: 0.02 is 2 % of the ratio, and 0 takes "
            "exactly repeats turns."
        )
    if max_repeats is not None and precision == 0:
        problems.append(
            f"max_repeats is {max_repeats}, but precision is 0, which takes exactly repeats turns; leave it out."
        )
    if max_repeats is not None and max_repeats < repeats:
        problems.append(f"max_repeats is {max_repeats}; it must be at least repeats, which is {repeats}.")
    return problems


def narrow(intervals: Iterable[Interval | None], precision: float) -> bool:
    """Check that every interval is known and no wider than ``precision``."""
    return all(interval is not None and interval.width <= precision for interval in intervals)


def rounds(
    least: int, most: int, precision: float, intervals: Callable[[], Iterable[Interval | None]]
) -> Iterator[int]:
    """Yield the numbers of the turns to take, from 0: ``least`` of them, then more until the intervals are narrow.

    Args:
        least: turns that are taken in any case.
        most: turns after which it ends in any case.
        precision: see :func:`narrow`.
        intervals: gives the intervals of all turns so far; asked before each further turn.
    """
    for number in range(most):
        if number >= least and narrow(intervals(), precision):
            return
        yield number
