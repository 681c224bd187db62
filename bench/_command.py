"""Command lines of benches: options and names, runs that can be continued, and their exit status."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pyprune.errors import PypruneError, did_you_mean
from pyprune.runtime.interrupts import interruptible
from pyprune.runtime.records import Json, RecordFile


def exit_status(
    run: Callable[[], None], interrupted: str = "Finished rows are recorded; the same command continues."
) -> int:
    """Run a bench: 0, 2 after a wrong option or input, 130 after an interruption.

    Args:
        run: the bench.
        interrupted: sentence to print after an interruption.
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


def record_parser(description: str | None, records: Path) -> argparse.ArgumentParser:
    """Make the parser of a bench for :func:`run_recorded`.

    Args:
        description: the module's docstring.
        records: the file to append to by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-table", action="store_true", help="print the table of the records and run nothing")
    parser.add_argument("--jsonl", type=Path, default=records, metavar="FILE", help="file to append to")
    return parser


def run_recorded(
    options: argparse.Namespace, measure: Callable[[RecordFile, Path], None], show: Callable[[RecordFile], str]
) -> int:
    """Measure what has no record unless --only-table is given, and print the table; return the exit status.

    Args:
        options: of :func:`record_parser`.
        measure: gets the records and a folder for temporary files.
        show: makes the table.
    """

    def run() -> None:
        records = RecordFile(options.jsonl)
        if not options.only_table:
            with tempfile.TemporaryDirectory(prefix="pyprune-bench-") as work:
                measure(records, Path(work))
        print(show(records))

    return exit_status(run)


def read_names(text: str, names: Sequence[str], what: str) -> list[str]:
    """Read "a,b" as names of a list; a name may contain commas itself.

    Args:
        text: from the command line.
        names: all allowed names.
        what: noun for a name, for the message.

    Raises:
        ArgumentTypeError: a name that is not allowed; the message has the nearest one.
    """
    chosen: list[str] = []
    parts = [part.strip() for part in text.split(",")]
    while parts:
        begins = [", ".join(parts[:length]) for length in range(len(parts), 0, -1)]
        name = next((begin for begin in begins if begin in names), None)
        if name is None:
            raise argparse.ArgumentTypeError(did_you_mean(parts[0], names, what))
        chosen.append(name)
        parts = parts[len(name.split(",")) :]
    return chosen


def last_line(text: str) -> str:
    """Return the last error line, else the last line, of a program's output, cut to fit into a table."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it ended without a message"])[-1][:300].replace("|", "/")


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ArgumentTypeError: something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1.")
    return int(text)


def counts(text: str) -> list[int]:
    """Read "1,4" as different whole numbers of at least 1."""
    return list(dict.fromkeys(count(part.strip()) for part in text.split(",")))


def seeds(text: str) -> list[int]:
    """Read "0,1" as seeds."""
    return [int(part) for part in text.split(",")]


def run_command(words: Sequence[str]) -> Json:
    """Run a command; return its wall and CPU seconds and its peak memory.

    Raises:
        PypruneError: it failed; the message is the end of what it printed.
    """
    started = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise PypruneError(f"{shlex.join(words)} ended with {process.returncode}: {printed[-500:]}")
    return {
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "peak_bytes": usage.ru_maxrss * 1024,
    }
