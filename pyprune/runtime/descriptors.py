"""Redirect what libraries print past Python's streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO


@contextmanager
def redirect(number: int, file: BinaryIO) -> Iterator[None]:
    """Write into a file, in the block, what is printed to a descriptor; do nothing in a process without it.

    Args:
        number: of the descriptor, 1 for stdout or 2 for stderr.
        file: open for writing.
    """
    stream = {1: sys.stdout, 2: sys.stderr}[number]
    try:
        stream.flush()
        real = os.dup(number)
    except (OSError, AttributeError):
        yield
        return
    os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        stream.flush()
        os.dup2(real, number)
        os.close(real)
