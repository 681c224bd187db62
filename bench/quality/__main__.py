"""Measure what ways of pruning cost in perplexity: one grid of cases for each question.

    python -m bench.quality compare --case layers-7 --seeds 0
    python -m bench.quality compare --table        # the tables of the records; nothing runs

A recorded case is skipped, so the same command continues a stopped run. Rows are appended to --jsonl. The table goes
to stdout, progress to stderr. Exit codes: 0 all cases are recorded, 1 a case failed, 2 a wrong option or input, 130
stopped with Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench._command import exit_status
from bench.quality import axes, card, commands, compare, mixtures, reconstruction, rounding, scores

GRIDS = (
    card.GRID,
    compare.GRID,
    scores.GRID,
    axes.GRID,
    reconstruction.GRID,
    rounding.GRID,
    commands.GRID,
    mixtures.GRID,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a grid; return the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.quality", description=__doc__, formatter_class=form)
    added = parser.add_subparsers(dest="name", required=True, metavar="GRID")
    for grid in GRIDS:
        summary = grid.description.splitlines()[0]
        command = added.add_parser(grid.name, help=summary, description=grid.description, formatter_class=form)
        grid.add_arguments(command)
    options = parser.parse_args(arguments)
    grid = next(grid for grid in GRIDS if grid.name == options.name)
    failed: list[int] = []
    return exit_status(lambda: failed.append(grid.run(options))) or sum(failed)


if __name__ == "__main__":
    sys.exit(main())
