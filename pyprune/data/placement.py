"""Place windows in a row of tokens, at seeded random positions of the free ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pyprune.data.encoding import Ids

Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]
NO_BREAKS: Ids = np.zeros(0, dtype=np.int64)
NO_BREAKS.setflags(write=False)


@dataclass(frozen=True)
class Windows:
    """The windows of one set.

    Attributes:
        count: number of windows.
        length: tokens in each of them.
        shared: tokens that two of them may have in common at most.
    """

    count: int
    length: int
    shared: int = 0

    @property
    def pitch(self) -> int:
        """Tokens from the beginning of a window to that of the next one, at least."""
        return self.length - self.shared

    @property
    def tokens(self) -> int:
        """The shortest text that holds all of them."""
        return self.count * self.pitch + self.shared if self.count else 0


def place_together(
    free: Mask, sets: Sequence[Windows], rng: np.random.Generator, breaks: Ids = NO_BREAKS
) -> list[list[Span]] | None:
    """Place the windows of one set, or of several that allow no overlap.

    Args:
        free: which tokens may be used, bool [N].
        sets: one for each set.
        rng: advanced.
        breaks: positions that no window may cross, in ascending order.

    Returns:
        For each set the half-open (start, end) of its windows; None if they do not fit.
    """
    lengths = [w.pitch for w in sets for _ in range(w.count)]
    spans = place(free, lengths, rng, breaks=breaks, shared=max((w.shared for w in sets), default=0))
    if spans is None:
        return None
    ends = np.cumsum([0, *(w.count for w in sets)])
    return [spans[start:end] for start, end in pairwise(ends)]


def divide(free: Mask, needs: Sequence[int], rng: np.random.Generator) -> list[Mask]:
    """Cut the free tokens into one stretch for each need, in proportion, in random order; return a mask for each."""
    at = np.flatnonzero(free)
    order = rng.permutation(len(needs))
    ends = np.cumsum([needs[i] for i in order], dtype=np.float64)
    cuts = np.concatenate(([0], np.round(ends / max(ends[-1], 1) * len(at)).astype(np.int64)))
    stretches = [np.zeros_like(free) for _ in needs]
    for i, start, end in zip(order, cuts[:-1], cuts[1:], strict=True):
        stretches[i][at[start:end]] = True
    return stretches


def place(
    free: Mask, lengths: Sequence[int], rng: np.random.Generator, *, breaks: Ids = NO_BREAKS, shared: int = 0
) -> list[Span] | None:
    """Place windows at random places of the free runs; None if they do not fit.

    Windows are dealt to runs, longest first, with a chance proportional to how many still fit there; inside
    a run every arrangement has the same chance.

    Args:
        free: which tokens may be used, bool [N].
        lengths: of the windows, without the tokens that they share with the next one.
        rng: advanced.
        breaks: positions that no window may cross, in ascending order.
        shared: tokens that every window is longer than its ``length``, and may share with the next one.

    Returns:
        Half-open (start, end) for each length, in the order given.
    """
    starts, ends = _runs(free, breaks)
    room = np.maximum(ends - starts - shared, 0)
    members: list[list[int]] = [[] for _ in starts]
    slack = room.copy()
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        weights = slack // lengths[item]
        total = weights.sum()
        if total == 0:
            return None
        run = int(np.searchsorted(np.cumsum(weights), rng.integers(total), side="right"))
        members[run].append(item)
        slack[run] -= lengths[item]
    spans: list[Span] = [(0, 0)] * len(lengths)
    for start, left, items in zip(starts, slack, members, strict=True):
        for item, at in _spread(int(start), int(left), items, lengths, rng):
            spans[item] = (at, at + lengths[item] + shared)
    return spans


def _runs(free: Mask, breaks: Ids) -> tuple[Ids, Ids]:
    """Return starts and ends of the stretches of free tokens that no break divides."""
    divided = np.zeros(len(free) + 1, dtype=np.bool_)
    divided[breaks] = True
    divided[[0, -1]] = True
    padded = np.concatenate(([False], free, [False]))
    starts = np.flatnonzero(free & (divided[:-1] | ~padded[:-2]))
    ends = np.flatnonzero(free & (divided[1:] | ~padded[2:])) + 1
    return starts, ends


def _spread(
    start: int, slack: int, items: list[int], lengths: Sequence[int], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Place the windows of one run in random order, with ``slack`` tokens spread between them: (window, start)."""
    order = rng.permutation(items) if items else ()
    gaps = np.sort(rng.integers(0, slack + 1, size=len(items)))
    starts: list[tuple[int, int]] = []
    used = start
    for item, gap in zip(order, gaps, strict=True):
        starts.append((int(item), used + int(gap)))
        used += lengths[int(item)]
    return starts
