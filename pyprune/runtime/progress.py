"""Progress of all work that takes over two seconds; always on stderr, so that stdout stays data."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
_console: Console | None = None
_bar_is_shown = False

SILENT_S, GAP_S, LONGEST_GAP_S = 2.0, 10.0, 60.0
"""Of a step in a log: longest time without a line, and the shortest and longest time between two lines."""


def console() -> Console:
    """Return the shared stderr console (created on first use, to keep import time low)."""
    global _console
    if _console is None:
        from rich.console import Console

        _console = Console(stderr=True)
    return _console


def printable(text: str) -> str:
    """Return a text with control characters escaped, all but line ends and tabs.

    Text out of a checkpoint or a file must not move the cursor, set a title or colour later text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def say(text: str, style: str = "") -> None:
    """Print a line on stderr: in a style on a terminal, plain in a log, brackets left as they are."""
    console().print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def time_left(began: float, done: float, total: float) -> str:
    """Format the time left for equal parts, for the end of a line: ", about 12 min left"; empty before the first.

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
    """End open bars of other libraries (tqdm), or the next message would be printed on their line."""
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


class LogLines:
    """Prints the progress of a long step as lines of a log, at least ten seconds apart: every tenth and every minute.

    Args:
        what: the work, in a few words.
        total: number of its parts; None if unknown.
        name: of a part, for example step.
    """

    def __init__(self, what: str, total: float | None, name: str = "") -> None:
        self.what, self.total, self.name = what, total, f"{name} " if name else ""
        self.began = self.printed_at = time.perf_counter()
        self.printed = 0.0
        self.lines = 0

    def update(self, done: float, facts: str = "", shown: Callable[[float], str] = "{:,.0f}".format) -> None:
        """Print that this many parts are done, if a line is due.

        Args:
            done: parts that are finished.
            facts: more text about them.
            shown: formats a number of parts.
        """
        now = time.perf_counter()
        waited = now - self.printed_at
        tenth = self.total is None or done - self.printed >= self.total / 10
        if waited < GAP_S or not (tenth or waited >= LONGEST_GAP_S):
            return
        of = f" of {shown(self.total)}{time_left(self.began, done, self.total)}" if self.total else ""
        say(f"{self.what}: {self.name}{shown(done)}{of}{facts}", "dim")
        self.printed, self.printed_at = done, now
        self.lines += 1

    def end(self, done: float, facts: str = "") -> None:
        """Print the number of parts done, if the step took over two seconds."""
        if self.lines or time.perf_counter() - self.began > SILENT_S:
            say(f"{self.what}: {self.name}{done:,.0f} done{facts}", "dim")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Yield ``items`` while showing a progress bar on a terminal, or lines of a log (:class:`LogLines`).

    Inside of another one, which has a bar, it shows none.

    Args:
        items: what to iterate over.
        description: the work, in a few words.
        total: number of items, when ``items`` has no length.
    """
    global _bar_is_shown
    out = console()
    count = len(items) if total is None and isinstance(items, Sized) else total
    if not out.is_terminal:
        lines = LogLines(description, count)
        done = 0
        for done, item in enumerate(items, 1):
            yield item
            lines.update(done)
        lines.end(done)
    elif _bar_is_shown:
        yield from items
    else:
        from rich.progress import track as rich_track

        _bar_is_shown = True
        try:
            yield from rich_track(items, description=description, total=count, console=out, transient=True)
        finally:
            _bar_is_shown = False


def bars_as_lines() -> None:
    """Show the bars of other libraries (tqdm's: downloads, conversions) as lines of a log, if stderr is no terminal.

    A bar redraws itself by returning to the start of its line; in a log, all its frames would follow each other.
    """
    if console().is_terminal:
        return
    from tqdm.std import tqdm

    if hasattr(tqdm, "_pyprune_lines"):
        return
    real, nowhere = tqdm.__init__, open(os.devnull, "w")  # noqa: SIM115 - as long as the process

    def make(bar: Any, *args: Any, **options: Any) -> None:
        # "None" leaves a bar out if it would not be visible as one.
        unseen = "disable" in options and options["disable"] is None
        real(bar, *args, **options | {"file": nowhere} | ({"disable": False} if unseen else {}))
        bar._pyprune_lines = LogLines(
            str(getattr(bar, "desc", "") or "working").rstrip(": "), getattr(bar, "total", None)
        )

    def show(bar: Any, *_: Any, **__: Any) -> bool:
        lines = getattr(bar, "_pyprune_lines", None)
        if lines is not None:
            scaled = bool(getattr(bar, "unit_scale", False))
            lines.total = bar.total
            lines.update(bar.n, shown=(lambda n: f"{bar.format_sizeof(n)}{bar.unit}") if scaled else "{:,.0f}".format)
        return True

    tqdm.__init__, tqdm.display, tqdm._pyprune_lines = make, show, None


@contextmanager
def print_nothing() -> Iterator[None]:
    """Print no progress, notes or results of this process in the block: another one of the same run does."""
    global _console
    from rich.console import Console

    before, _console = _console, Console(quiet=True, stderr=True)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        _console = before
