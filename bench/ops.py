"""Times the kernels beside eager torch, torch.compile and their memory ceiling.

    python bench/ops.py [--rows 4096] [--cols 11008] [--repeats 9] [--ops OP ...] [--dtypes DTYPE ...]
                        [--selected 0.25] [--no-compile]

The ceiling of an op is an in-place probe over arrays of the same size with the same read and write streams and almost
no arithmetic, in the same run: for each op bench/_ops_cases.py says which. Two kinds are stricter or looser than that
in words: ``perturb`` is compared with a plain copy, ``slice_gather`` with a copy of the rows that it reads; and where
an op returns new tensors (the gradients of ``residual_diff_norm``, the LayerNorm's output) its ceiling allocates them
too. The ops on an index set (op 4) work on the last quarter of the groups; of 4096 x 11008 that is 45 MB, which large
last-level caches hold in part, so on a CPU other data fills the caches before each of their cases, untimed, and all of
them come from memory; on a GPU --selected 1 does that. ``group_prox`` and ``shrink`` have one ceiling. All
implementations of an op, in all dtypes, are interleaved; arrays are freed after each op. Every sample is appended to
bench/results/ops.jsonl, the table shows medians with their median absolute deviation, shares and ratios are medians
over the rounds, and what was asked for comes last. A kernel that disagrees with the reference is not timed, in none of
the modes that are timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, Python sees this folder only

from bench._ops_cases import AXES, DTYPES, OPS, Setting, cases  # noqa: E402
from bench._timing import (  # noqa: E402
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
)

RESULTS = ROOT / "bench" / "results" / "ops.jsonl"
NUMBERED = {
    "op 1": ("group_soft_threshold",),
    "op 2": ("moreau_step",),
    "op 4": ("group_penalty", "group_prox", "shrink"),
    "op 5": ("regularised_adamw",),
}
"""What the figures are asked of, by the numbers of the design."""
COLUMN_NOTES = {
    "op 1": "norms first: 3 array passes instead of 2 make 1.5 at equal bandwidth",
    "op 2": "norms first: 5 array passes instead of 3 make 1.67 at equal bandwidth",
    "op 4": "norms first: l2 reads the weights once more than rows, which find theirs in the core's cache: 3 array "
    "passes instead of 2 make 1.5 for the proximal map, 4 instead of 3 make 1.33 for the penalty",
}
"""Why columns of a matrix beyond the caches cannot be as fast as rows."""


def kernel_cases(all_cases: Iterable[Case], setting: Setting, ops: Sequence[str], dtype: str) -> list[Case]:
    """The kernel's cases of these ops on one dtype."""
    return [c for c in all_cases if c.op in ops and c.dtype == dtype and c.implementation == setting.kernel]


def worst(what: str, wanted: float, ratios: dict[str, float], *, at_least: bool = True, note: str = "") -> Target:
    """A target that has to hold for every case, judged by the worst one, which is named."""
    if not ratios:
        return Target(what, wanted, None, at_least, note)
    name = (min if at_least else max)(ratios, key=lambda key: ratios[key])
    return Target(what, wanted, ratios[name], at_least, "; ".join(filter(None, (f"worst: {name}", note))))


def ceiling_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Shares of the ceiling, without the column groups, which have a target of their own."""
    result = []
    for number, ops in NUMBERED.items():
        chosen = [c for c in kernel_cases(all_cases, setting, ops, "float32") if "column" not in c.variant]
        shares = {f"{c.op} {c.variant}": c.share for c in chosen if c.share is not None}
        result.append(worst(f"{number}, float32, share of the ceiling", 0.9, shares))
    return result


def dtype_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """bfloat16 against float32, elements a second, rows."""
    result = []
    for number, ops in NUMBERED.items():
        wide = kernel_cases(all_cases, setting, ops, "float32")
        narrow = {(c.op, c.variant): c for c in kernel_cases(all_cases, setting, ops, "bfloat16")}
        rates = {
            f"{c.op} {c.variant}": ratio
            for c in wide
            if (ratio := quotient(c, narrow.get((c.op, c.variant)))) is not None and "column" not in c.variant
        }
        note = (
            "22 bytes an element instead of 28 allow 1.27; 8-bit moments 10 instead of 16" if number == "op 5" else ""
        )
        result.append(worst(f"{number}, rate of bfloat16 over float32", 1.6, rates, note=note))
    return result


def axis_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Time of column groups over row groups, float32."""
    result = []
    for number, ops in NUMBERED.items():
        chosen = {(c.op, c.variant): c for c in kernel_cases(all_cases, setting, ops, "float32")}
        rows, columns = AXES
        pairs = {
            f"{op} {variant}": (case, over)
            for (op, variant), case in chosen.items()
            if variant.startswith(columns) and (over := chosen.get((op, variant.replace(columns, rows)))) is not None
        }
        ratios = {name: ratio for name, pair in pairs.items() if (ratio := quotient(*pair)) is not None}
        note = COLUMN_NOTES.get(number, "")
        # Pieces of rows are slower to read than whole ones, for any kernel.
        apart = [(case.ceiling, over.ceiling) for case, over in pairs.values() if case.ceiling is not over.ceiling]
        probes = [quotient(*pair) for pair in apart]
        if found := [ratio for ratio in probes if ratio is not None]:
            note += f"; the ceilings themselves: {max(found):.2f} at most"
        result.append(worst(f"{number}, columns over rows", 1.5, ratios, at_least=False, note=note))
    return result


def other_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Against eager and compiled torch; perturb against a copy; the gather against a copy."""
    ours = find(all_cases, "moreau_step", "float32", "rows", setting.kernel)
    others = {
        name: quotient(find(all_cases, "moreau_step", "float32", "rows", name), ours)
        for name in ("eager", "eager, in place", "compiled")
    }
    compiled = find(all_cases, "moreau_step", "float32", "rows", "compiled")
    share = compiled.share if compiled else None
    result = [
        Target("op 2, float32 rows, times faster than eager", 10, others["eager"]),
        Target(
            "op 2, the same, eager without temporaries", 10, others["eager, in place"],
            note="8 array passes instead of 3 allow 2.7 at equal bandwidth",
        ),
        Target(
            "op 2, float32 rows, times faster than torch.compile", 3, others["compiled"],
            note=f"torch.compile reaches {share:.0%} of the ceiling" if share else "",
        ),
    ]  # fmt: skip
    for dtype in DTYPES:
        copy = find(all_cases, "perturb", dtype, "a plain copy", CEILING)
        ratio = quotient(find(all_cases, "perturb", dtype, "", setting.kernel), copy)
        result.append(Target(f"op 3, {dtype}, time over that of a copy", 3, ratio, at_least=False))
    for dtype in DTYPES:
        gathers = kernel_cases(all_cases, setting, ("slice_gather",), dtype)
        shares = {c.variant: c.share for c in gathers if c.share is not None}
        result.append(worst(f"op 8, {dtype}, share of a copy of what it reads", 0.7, shares))
    return result


def gpu_targets(all_cases: list[Case], setting: Setting) -> list[Target]:
    """Share of the device's copy bandwidth."""
    copy = find(all_cases, "perturb", "float32", "a plain copy", CEILING)
    if setting.device.type != "cuda" or copy is None:
        return []
    ops = {**NUMBERED, "op 6": ("residual_diff_norm",)}
    return [
        worst(
            f"{number}, {dtype}, share of the copy bandwidth", 0.85,
            {f"{c.op} {c.variant}": c.speed / copy.speed for c in kernel_cases(all_cases, setting, names, dtype)},
        )
        for number, names in ops.items()
        for dtype in ("float32", "bfloat16")
    ]  # fmt: skip


def print_table(all_cases: list[Case]) -> None:
    """One line a case."""
    print("| op | dtype | groups | implementation | ms | MAD | GB/s | share of ceiling |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for c in all_cases:
        share = "" if c.share is None else f"{c.share:.0%}"
        print(f"| {c.op} | {c.dtype} | {c.variant} | {c.implementation} ", end="")
        print(f"| {c.median:.2f} | {c.deviation:.2f} | {c.speed:.1f} | {share} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options, measure op by op, report."""
    parser = argparse.ArgumentParser(description="Time pyprune's kernels against their memory ceiling.")
    parser.add_argument("--rows", type=int, default=4096, help="a multiple of 4")
    parser.add_argument("--cols", type=int, default=11008, help="a multiple of 8")
    parser.add_argument("--repeats", type=int, default=9, help="samples per implementation")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="only these")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="only these")
    parser.add_argument("--selected", type=float, default=0.25, help="share of the groups for op 4, even of columns")
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
    for op in options.ops:
        own = cases(setting, op, options.dtypes)
        if own:
            interleave(own, options.repeats, device)
        keep(options.jsonl, own, about)
        release(own)
        measured += own
        torch.compiler.reset()
        gc.collect()
    print(f"{options.rows} x {options.cols}, {about['threads']} threads, {about['device']}\n")
    print_table(measured)
    groups = (ceiling_targets, other_targets, dtype_targets, axis_targets, gpu_targets)
    print_targets([target for make in groups for target in make(measured, setting)])


if __name__ == "__main__":
    main()
