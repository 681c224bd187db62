"""Return freed memory to the system at once, for work on many large tensors one after the other."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE_BYTES = 1 << 20
"""Blocks from this size on are returned at once meanwhile."""
USUAL_BYTES = 32 << 20
"""The threshold that glibc reaches in a process that frees large tensors."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Take large blocks from the system one by one in the block, and return each when it is freed.

    After a large block was freed, glibc keeps blocks of up to 32 MiB in its heap. Tensors of several sizes leave gaps
    there that the next one does not fit, so most of a checkpoint that is read tensor by tensor would stay in memory.
    Other C libraries are not changed.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, USUAL_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * USUAL_BYTES)


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
