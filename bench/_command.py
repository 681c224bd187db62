"""What the command lines of several benches share: lists of names and seeds, and how a run that can continue ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from pyprune.errors import PypruneError, did_you_mean
from pyprune.runtime.interrupts import interruptible


def exit_status(
    run: Callable[[], None], interrupted: str = "Finished rows are recorded; the same command continues."
) -> int:
    """Run a bench: 0, 2 after a wrong option or input, 130 after an interruption.

    Args:
        run: the bench.
        interrupted: what to say when it was stopped.
    """
    try:
        with interruptible():
            run()
    except PypruneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted. {interrupted}", file=sys.stderr)
        return 130
    return 0


def known(text: str, names: Sequence[str], what: str) -> list[str]:
    """Read "a,b" as names out of a list; a name may hold commas itself.

    Args:
        text: from the command line.
        names: what is allowed.
        what: what a name is of, for the message.

    Raises:
        ArgumentTypeError: a name that is not allowed; the message has the nearest one.
    """
    wanted: list[str] = []
    parts = [part.strip() for part in text.split(",")]
    while parts:
        begins = [", ".join(parts[:length]) for length in range(len(parts), 0, -1)]
        name = next((begin for begin in begins if begin in names), None)
        if name is None:
            raise argparse.ArgumentTypeError(did_you_mean(parts[0], names, what))
        wanted.append(name)
        parts = parts[len(name.split(",")) :]
    return wanted


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ArgumentTypeError: something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1.")
    return int(text)


def seeds(text: str) -> list[int]:
    """Read "0,1" as seeds."""
    return [int(part) for part in text.split(",")]
