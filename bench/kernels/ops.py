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
appended to bench/results/ops.jsonl. The table shows medians with their median absolute deviation; shares and ratios are
medians over the rounds, and the targets come last. An op whose kernel disagrees with the reference, in any of the timed
modes, is not timed; the others are, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from bench._timing import (
    CEILING,
    Case,
    Target,
    conditions,
    find,
    interleave,
    keep,
    last_level_cache,
    print_targets,
    quotient,
    release,
    worst,
)
from bench.kernels.ops_cases import OPS, cases
from bench.kernels.ops_setting import AXES, DTYPES, ONE_THREAD, Setting
from pyprune.runtime.report import Table, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results" / "ops.jsonl"
SELECTED = ("group_penalty", "group_soft_threshold")
"""The ops that work on a selection of the groups."""
JUDGED = (("moreau_step",), SELECTED, ("regularised_adamw",))
"""The ops that have targets; those of one tuple share theirs."""
COLUMN_NOTES = {
    ("moreau_step",): "norms first: 5 array passes instead of 3 make 1.67 at equal bandwidth",
    SELECTED: "norms first: l2 reads the weights once more than rows, which find theirs in the core's cache: 3 array "
    "passes instead of 2 make 1.5 for the soft-threshold, 4 instead of 3 make 1.33 for the penalty",
}
"""Why columns of a matrix beyond the caches cannot be as fast as rows."""
CEILING_NOTES = {("moreau_step",): "two sums of squares in float64 beside the streams"}
"""Work of an op that its ceiling does not do."""
DTYPE_NOTES = {("regularised_adamw",): "22 bytes an element instead of 28 allow 1.27; 8-bit moments 10 instead of 16"}
"""Why bfloat16 cannot be 1.6 times as fast."""


def kernel_cases(all_cases: Iterable[Case], setting: Setting, ops: Sequence[str], dtype: str) -> list[Case]:
    """The kernel's cases of these ops on one dtype."""
    return [c for c in all_cases if c.op in ops and c.dtype == dtype and c.implementation == setting.kernel]


def judged_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Judge the ops with targets: share of the ceiling, bfloat16 over float32, and columns over rows (in float32)."""
    shares, rates, ratios = [], [], []
    rows, columns = AXES
    for ops in JUDGED:
        wide = {(c.op, c.variant): c for c in kernel_cases(all_cases, setting, ops, "float32")}
        narrow = {(c.op, c.variant): c for c in kernel_cases(all_cases, setting, ops, "bfloat16")}
        # Column groups have a target of their own.
        others = {key: case for key, case in wide.items() if "column" not in case.variant}
        share = {" ".join(key): case.share for key, case in others.items()}
        shares.append(_worst(ops, "float32, share of the ceiling", 0.9, share, CEILING_NOTES))
        rate = {" ".join(key): quotient(case, narrow.get(key)) for key, case in others.items()}
        rates.append(_worst(ops, "rate of bfloat16 over float32", 1.6, rate, DTYPE_NOTES))
        pairs = {
            f"{op} {variant}": (case, wide.get((op, variant.replace(columns, rows))))
            for (op, variant), case in wide.items()
            if variant.startswith(columns)
        }
        ratio = {name: quotient(*pair) for name, pair in pairs.items()}
        # Pieces of rows are slower to read than whole ones, for any kernel.
        ceilings = [(case.ceiling, over.ceiling) for case, over in pairs.values() if over is not None]
        probes = [quotient(*pair) or 0.0 for pair in ceilings if pair[0] is not pair[1]]
        note = f"; the ceilings themselves: {max(probes):.2f} at most" if any(probes) else ""
        ratios.append(_worst(ops, "columns over rows", 1.5, ratio, COLUMN_NOTES, note, at_least=False))
    return [*shares, *rates, *ratios]


def _worst(
    ops: Sequence[str],
    figure: str,
    limit: float,
    ratios: Mapping[str, float | None],
    notes: Mapping[tuple[str, ...], str],
    more: str = "",
    at_least: bool = True,
) -> Target:
    measured = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    note = notes.get(tuple(ops), "") + more
    return worst(f"{', '.join(ops)}, {figure}", limit, measured, at_least=at_least, note=note)


def thread_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Columns that lie together, on all threads and on one: the selection has to be shared, not the matrix."""
    chosen = [c for c in kernel_cases(all_cases, setting, SELECTED, "float32") if c.variant == "columns, l2"]
    alone = {c.op: quotient(find(all_cases, c.op, c.dtype, c.variant, ONE_THREAD), c) for c in chosen}
    ratios = {f"{c.op} {c.variant}": ratio for c in chosen if (ratio := alone[c.op]) is not None}
    share = f"last {setting.selected:.0%} of the columns"
    return [worst(f"{', '.join(SELECTED)}, float32, {share}, times faster than on one thread", 1.25, ratios)]


def other_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Against eager and compiled torch; ``perturb`` and ``slice_gather`` against a copy."""
    ours = find(all_cases, "moreau_step", "float32", "rows", setting.kernel)
    others = {
        name: quotient(find(all_cases, "moreau_step", "float32", "rows", name), ours)
        for name in ("eager", "eager, in place", "compiled")
    }
    compiled = find(all_cases, "moreau_step", "float32", "rows", "compiled")
    share = compiled.share if compiled else None
    result = [
        Target("moreau_step, float32 rows, times faster than eager", 10, others["eager"]),
        Target(
            "moreau_step, the same, eager without temporaries", 10, others["eager, in place"],
            note="8 array passes instead of 3 allow 2.7 at equal bandwidth",
        ),
        Target(
            "moreau_step, float32 rows, times faster than torch.compile", 3, others["compiled"],
            note=f"torch.compile reaches {share:.0%} of the ceiling" if share else "",
        ),
    ]  # fmt: skip
    for variant in ("plain step", "rows"):
        apart = find(all_cases, "moreau_step", "float32", variant, "sums apart")
        ratio = quotient(apart, find(all_cases, "moreau_step", "float32", variant, setting.kernel))
        result.append(Target(f"moreau_step, float32 {variant}, times faster than with the sums apart", 3, ratio))
    for dtype in DTYPES:
        copy = find(all_cases, "perturb", dtype, "a plain copy", CEILING)
        ratio = quotient(find(all_cases, "perturb", dtype, "", setting.kernel), copy)
        result.append(Target(f"perturb, {dtype}, time over that of a copy", 3, ratio, at_least=False))
    for dtype in DTYPES:
        gathers = kernel_cases(all_cases, setting, ("slice_gather",), dtype)
        shares = {c.variant: c.share for c in gathers if c.share is not None}
        result.append(worst(f"slice_gather, {dtype}, share of a copy of what it reads", 0.7, shares))
    return result


def gpu_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Every Triton kernel's share of the device's copy bandwidth."""
    copy = find(all_cases, "perturb", "float32", "a plain copy", CEILING)
    if setting.kernel != "triton" or copy is None:
        return []
    measured = {c.op for c in all_cases}
    return [
        worst(
            f"{', '.join(ops)}, {dtype}, share of the copy bandwidth", 0.85,
            {f"{c.op} {c.variant}": c.speed / copy.speed for c in kernel_cases(all_cases, setting, ops, dtype)},
        )
        for ops in (*JUDGED, *((op,) for op in OPS if not any(op in judged for judged in JUDGED)))
        for dtype in ("float32", "bfloat16")
        if measured & set(ops)
    ]  # fmt: skip


def print_table(all_cases: list[Case]) -> None:
    """One line a case."""
    columns = ("op", "dtype", "groups", "implementation", "ms", "MAD", "GB/s", "share of ceiling")
    rows = tuple(
        (
            *(c.op, c.dtype, c.variant, c.implementation),
            *(f"{c.median:.2f}", f"{c.deviation:.2f}", f"{c.speed:.1f}"),
            None if c.share is None else f"{c.share:.0%}",
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
    groups = (judged_targets, thread_targets, other_targets, gpu_targets)
    print_targets([target for make in groups for target in make(measured, setting)])
    if refused:
        sys.exit("\n".join(refused))


if __name__ == "__main__":
    main()
