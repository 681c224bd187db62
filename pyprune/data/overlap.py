"""Find the tokens of a text that are copies of another's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyprune.data.encoding import Ids
from pyprune.data.placement import Mask
from pyprune.data.stream import TokenStream

Hashes = npt.NDArray[np.uint64]
SHINGLE = 64
"""Number of tokens in a row that two streams must share to count as the same text."""
BOILERPLATE = 4
"""A shingle found more often than this in one stream (a prompt header, a licence) identifies no passage."""
_DISTINCT = SHINGLE // 4
_BASE = 0xD1342543DE82EF95


@dataclass(frozen=True, eq=False)
class SpanSet:
    """Parts of a stream that are in use.

    Attributes:
        stream: the stream.
        spans: half-open (start, end) token positions.
    """

    stream: TokenStream
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, stream: TokenStream) -> SpanSet:
        """Return all of ``stream`` (test text is evaluated from beginning to end)."""
        return cls(stream, ((0, len(stream.tokens)),))

    def mask(self) -> Mask:
        """Return which tokens of the stream are in use, bool [N]."""
        mask = np.zeros(len(self.stream.tokens), dtype=np.bool_)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def copies_in(self, other: TokenStream) -> Mask:
        """Return which tokens of ``other`` are copies of tokens in use here, bool [len(other.tokens)].

        A token is a copy when both streams agree on at least ``SHINGLE`` tokens in a row around it. So a window of any
        length is found exactly, in any file. Passages repeated all over a stream are left out.
        """
        covered = self.mask()
        if not covered.any():
            return np.zeros(len(other.tokens), dtype=np.bool_)
        same = self.stream.sha256 == other.sha256
        mask = _copies(self.stream.tokens, covered, other.tokens, same)
        return mask | covered if same else mask


def shingle_hashes(tokens: Ids, size: int) -> Hashes:
    """Return a 64-bit polynomial hash of every ``size`` tokens in a row, along the last axis.

    Args:
        tokens: int64 [..., N] with N >= size.
        size: tokens in a shingle.

    Returns:
        uint64 [..., N - size + 1]; the same on every machine, so that hashes can be stored.
    """
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return _combine(mixed ^ (mixed >> np.uint64(29)), size)


def _combine(mixed: Hashes, size: int) -> Hashes:
    """Hash by doubling: the hash of 2m tokens is made of two hashes of m tokens."""
    if size == 1:
        return mixed
    half = size // 2
    parts = _combine(mixed, half)
    count = mixed.shape[-1] - size + 1
    first, second = parts[..., :count], parts[..., half : half + count]
    result = first * np.uint64(pow(_BASE, half, 2**64)) + second
    return result * np.uint64(_BASE) + mixed[..., size - 1 :] if size % 2 else result


def _positions_of(hashes: Hashes, values: Hashes) -> Ids:
    """Return the positions of ``hashes`` whose value occurs in ``values``.

    A hashed bit table drops nearly all others before the exact comparison, which has to sort.
    """
    bits = min(max(int(8 * len(values)).bit_length(), 10), 27)
    shift = np.uint64(64 - bits)
    table = np.zeros(2**bits, dtype=np.bool_)
    table[(values * np.uint64(_BASE)) >> shift] = True
    likely = np.flatnonzero(table[(hashes * np.uint64(_BASE)) >> shift])
    return likely[np.isin(hashes[likely], values)]


def _copies(tokens: Ids, covered: Mask, other: Ids, same: bool) -> Mask:
    """Return which tokens of ``other`` align with a covered token inside a shared run of shingle length.

    Args:
        same: ``other`` is the same stream, so that a passage is not compared with itself.
    """
    mask = np.zeros(len(other), dtype=np.bool_)
    size = min(SHINGLE, len(tokens), len(other))
    if size == 0:
        return mask
    here, there = shingle_hashes(tokens, size), shingle_hashes(other, size)
    sums = np.concatenate(([0], np.cumsum(covered)))
    touched = sums[size:] > sums[:-size]
    at = _positions_of(there, here[touched])
    where = _positions_of(here, there[at])
    order = where[np.argsort(here[where], kind="stable")]
    first = np.searchsorted(here[order], there[at], side="left")
    count = np.searchsorted(here[order], there[at], side="right") - first
    count[_common(at, count, size, len(other))] = 0
    if same:
        count[touched[at]] = 0
    for nth in range(int(count.max(initial=0))):
        chosen = np.flatnonzero(count > nth)
        match, position = order[first[chosen] + nth], at[chosen]
        for offset in range(size):
            mask[position[covered[match + offset]] + offset] = True
    return mask


def _common(at: Ids, count: Ids, size: int, length: int) -> Mask:
    """Return which of the shared shingles identify no passage: those made mostly of frequent shingles.

    The end of a prompt header with the first tokens after it is rare as a shingle, but identifies no more than the
    header does; so a shingle needs tokens that no frequent shingle covers.
    """
    frequent = at[count > BOILERPLATE]
    steps = np.bincount(frequent, minlength=length + 1) - np.bincount(frequent + size, minlength=length + 1)
    rare = np.concatenate(([0], np.cumsum(np.cumsum(steps[:length]) == 0)))
    few: Mask = rare[at + size] - rare[at] < min(_DISTINCT, size)
    return few | (count > BOILERPLATE)
