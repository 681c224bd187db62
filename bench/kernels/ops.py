"""Time the kernels against eager torch, torch.compile and their memory ceiling.

    python -m bench.kernels.ops [--rows 4096] [--cols 11008] [--ops OP ...] [--dtypes DTYPE ...]

The ceiling of an op is an in-place probe over arrays of the same size with the same read and write streams and almost
no arithmetic, in the same run: for each op ops_cases.py says which. There are two exceptions: ``perturb`` is compared
with a plain copy, ``slice_gather`` with a copy of the rows that it reads. Where an op returns new tensors (gradients of
``residual_diff_norm``, the LayerNorm's output), its ceiling allocates them too. ``group_penalty`` and
``group_soft_threshold`` work on the last quarter of the groups. Of 4096 x 11008 that is 45 MB, which large last-level
caches hold in part. On a CPU other data therefore fills the caches before each of their cases, untimed, so that all of
them come from memory; on a GPU --selected 1 does that.

All implementations of an op, in all dtypes, are interleaved; arrays are freed after each op. A summary of each case is
appended to bench/results/ops.jsonl. The table shows medians with their median absolute deviation; shares of a ceiling
are medians over the rounds. An op whose kernel disagrees with the reference, in any of the timed modes, is not timed;
the others are, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench._timing import CEILING, Case, conditions, find, interleave, keep, last_level_cache, release
from bench.kernels.ops_cases import OPS, cases
from bench.kernels.ops_setting import DTYPES, Setting
from pyprune.runtime.report import Table, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ops.jsonl"
SELECTED = ("group_penalty", "group_soft_threshold")
"""The ops that work on a selection of the groups."""


def print_table(all_cases: list[Case]) -> None:
    """One line a case, with its GB/s over those of a plain float32 copy if ``perturb`` was timed too."""
    columns = ("op", "dtype", "groups", "implementation", "ms", "MAD", "GB/s", "share of ceiling", "of a copy")
    copy = find(all_cases, "perturb", "float32", "a plain copy", CEILING)
    rows = tuple(
        (
            *(c.op, c.dtype, c.variant, c.implementation),
            *(f"{c.median:.2f}", f"{c.deviation:.2f}", f"{c.speed:.1f}"),
            None if c.share is None else f"{c.share:.0%}",
            None if copy is None else f"{c.speed / copy.speed:.0%}",
        )
        for c in all_cases
    )
    print(markdown_table(Table("Ops", columns, rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure op by op, report."""
    parser = argparse.ArgumentParser(description="Time pyprune's kernels against their memory ceiling.")
    parser.add_argument("--rows", type=int, default=4096, help="a multiple of 4")
    parser.add_argument("--cols", type=int, default=11008, help="a multiple of 8")
    parser.add_argument("--repeats", type=int, default=9, help="samples per implementation")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="only these")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="only these")
    parser.add_argument(
        "--selected",
        type=float,
        default=0.25,
        help=f"share of the groups for {', '.join(SELECTED)}; an even number of columns",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--jsonl", type=Path, default=RESULTS, help="file to append to")
    options = parser.parse_args(arguments)
    if options.rows < 4 or options.cols < 8 or options.rows % 4 or options.cols % 8 or options.repeats < 1:
        parser.error("--rows must be a multiple of 4, --cols of 8, and --repeats at least 1")
    if not 0 < options.selected <= 1:
        parser.error(f"--selected is {options.selected}, must be in (0, 1]")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache = 0 if device.type == "cuda" else last_level_cache()
    setting = Setting(options.rows, options.cols, device, not options.no_compile, options.selected, cache)
    about = {**conditions(device), "size": [options.rows, options.cols], "selected": options.selected, "evicted": cache}
    measured: list[Case] = []
    refused: list[str] = []
    for op in options.ops:
        try:
            own = cases(setting, op, options.dtypes)
        except SystemExit as refusal:
            refused.append(str(refusal))
            continue
        if own:
            interleave(own, options.repeats, device)
        keep(options.jsonl, own, about)
        release(own)
        measured += own
        torch.compiler.reset()
        gc.collect()
    print(f"{options.rows} x {options.cols}, {about['threads']} threads, {about['device']}\n")
    print_table(measured)
    if refused:
        sys.exit("\n".join(refused))


if __name__ == "__main__":
    main()
