"""Progress on everything that takes over two seconds; always on stderr, so that stdout stays data."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
_console: Console | None = None


def console() -> Console:
    """Return the shared stderr console (created on first use, to keep import time low)."""
    global _console
    if _console is None:
        from rich.console import Console

        _console = Console(stderr=True)
    return _console


def printable(text: str) -> str:
    """Return a text with control characters escaped, all but line ends and tabs.

    Text out of a checkpoint or a file must not move the cursor, set a title or colour what follows.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def say(text: str, style: str = "") -> None:
    """Print a line on stderr: in a style on a terminal, plain in a log, brackets left as they are."""
    console().print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def time_left(began: float, done: int, total: int) -> str:
    """What is left of equal parts, in words for the end of a line: ", about 12 min left"; nothing before the first.

    Args:
        began: :func:`time.perf_counter` at the start of the first part.
        done: parts that are finished.
        total: all parts.
    """
    if not done:
        return ""
    minutes = (time.perf_counter() - began) / done * (total - done) / 60
    return f", about {minutes:.0f} min left" if minutes >= 1 else ", under a minute left"


def warn(text: str) -> None:
    """Print a warning on stderr."""
    say(f"Warning: {text}", "yellow")


def end_bars() -> None:
    """End the bars of other libraries (tqdm) that are open, or what is said next would stand on their line."""
    tqdm = sys.modules.get("tqdm.std")
    for bar in list(getattr(getattr(tqdm, "tqdm", None), "_instances", ())):
        bar.close()


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Hold back a library's log lines below errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield ``items`` while showing a progress bar on a terminal, or nothing but the final count in a log.

    Args:
        items: what to iterate over.
        description: what is being done, in a few words.
        total: number of items, when ``items`` has no length.
    """
    out = console()
    if out.is_terminal:
        from rich.progress import track as rich_track

        yield from rich_track(items, description=description, total=total, console=out, transient=True)
        return
    count = 0
    for item in items:
        yield item
        count += 1
    out.print(f"{description}: {count} done", highlight=False)


@contextmanager
def printing_nothing() -> Iterator[None]:
    """In the block this process shows no progress, notes or results: another one of the same run does."""
    global _console
    from rich.console import Console

    before, _console = _console, Console(quiet=True, stderr=True)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        _console = before
