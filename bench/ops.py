"""Times the kernels beside eager torch and beside their memory ceiling.

    python bench/ops.py [--rows 4096] [--cols 11008] [--repeats 9]

The ceiling of an op is an in-place probe over arrays of the same size with the same read and write streams and
almost no arithmetic: ``y.mul_(1)`` for the group soft-threshold, ``y.add_(g)`` for the Moreau step, both and
``y.mul_(1)`` once more for AdamW (weight and gradient, then each moment), two copies for the residual-difference norm,
which reads both inputs twice and writes both gradients, and a copy of what is read for the gather and the LayerNorm.
Implementations are interleaved, every sample is appended to bench/results/ops.jsonl, and the table shows medians with
their median absolute deviation. A result that disagrees with the reference is not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch

from pyprune.ops import (
    available_isas,
    group_soft_threshold,
    layer_norm_virtual,
    moreau_step,
    residual_diff_norm,
    slice_gather,
)
from pyprune.ops.group_soft_threshold import reference
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "ops.jsonl"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
THRESHOLD = 1e-3
CEILING = "ceiling"


@dataclass
class Case:
    """One implementation of one op on one dtype, with its samples in milliseconds."""

    op: str
    dtype: str
    axis: int
    implementation: str
    call: Callable[[], object]
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return statistics.median(self.samples)

    @property
    def deviation(self) -> float:
        """Median absolute deviation in milliseconds."""
        return statistics.median(abs(sample - self.median) for sample in self.samples)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Select a backend of the ops for the duration of the block."""
    before = os.environ.get("PYPRUNE_BACKEND")
    os.environ["PYPRUNE_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYPRUNE_BACKEND"]
        else:
            os.environ["PYPRUNE_BACKEND"] = before


def on_backend(name: str, function: Callable[..., object], *args: object, **options: object) -> Callable[[], object]:
    """``function(*args, **options)`` as a call without arguments, on one backend."""

    def call() -> object:
        with backend(name):
            return function(*args, **options)

    return call


def check(x: torch.Tensor, axis: int, name: str) -> None:
    """Refuse to time a backend that disagrees with the reference on a corner of the input."""
    corner = x[:257, :513].clone()
    with backend(name):
        out = group_soft_threshold(corner, THRESHOLD, axis)
    exact = reference(corner.double(), THRESHOLD, axis)
    unit = torch.finfo(x.dtype).eps
    if not torch.allclose(out.double(), exact, rtol=unit, atol=torch.finfo(x.dtype).smallest_normal):
        sys.exit(f"{name} disagrees with the reference on {x.dtype}, axis {axis}: no speed is reported")


def cases(rows: int, cols: int, device: torch.device) -> list[Case]:
    """Every implementation that can run on this device, dtype by dtype, each op after its ceiling."""
    kernels = ["triton"] if device.type == "cuda" else (["cpp"] if available_isas() else [])
    generator = torch.Generator().manual_seed(0)
    result: list[Case] = []
    for name, dtype in DTYPES.items():
        # Around 1, where neither the probes nor the thresholds can drive values into subnormals.
        x = (1 + torch.rand(rows, cols, generator=generator)).to(device, dtype)
        gradient = torch.zeros_like(x)
        result.append(Case("group_soft_threshold", name, 0, CEILING, partial(x.clone().mul_, 1.0)))
        result.append(Case("moreau_step", name, 0, CEILING, partial(x.clone().add_, gradient)))
        for axis, implementation in product((0, 1), (*kernels, "python")):
            check(x, axis, implementation)
            call = on_backend(implementation, group_soft_threshold, x, THRESHOLD, axis, out=x)
            result.append(Case("group_soft_threshold", name, axis, implementation, call))
            # gamma tiny, so that hundreds of steps leave x where it is
            call = on_backend(implementation, moreau_step, x, gradient, 1e-9, 1.0, 1.0, axis)
            result.append(Case("moreau_step", name, axis, implementation, call))
        if dtype != torch.float16:  # AdamW keeps bfloat16 weights by stochastic rounding; float16 is not trained in
            result += adamw_cases(name, x, kernels)
        result += layer_cases(name, x, kernels)
    return sorted(result, key=lambda case: case.op)


def adamw_cases(name: str, x: torch.Tensor, kernels: list[str]) -> list[Case]:
    """AdamW alone and with the l2 penalty of a quarter of the columns (fused, and beside torch's fused AdamW)."""
    op, hyper = "regularised_adamw", Hyper(lr=1e-9)
    gradient = torch.full_like(x, 1e-3)
    selected = torch.arange(x.shape[1] * 3 // 4, x.shape[1], device=x.device)
    probes = [x.clone(), *(torch.ones_like(x, dtype=torch.float32) for _ in range(2))]

    def ceiling() -> None:
        probes[0].add_(gradient)
        probes[1].mul_(1.0)
        probes[2].mul_(1.0)

    result = [Case(op, name, 0, CEILING, ceiling)]
    for kernel in kernels:
        for what, penalty, quantised in (
            ("", None, False),
            (" + l2 subgradient", Penalty(selected, 1, "l2", 1e-3), False),
            (" + l2 prox", Penalty(selected, 1, "l2", 1e-3, "prox"), False),
            (" + l1 prox", Penalty(selected, 1, "l1", 1e-3, "prox"), False),
            (", 8-bit moments", None, True),
        ):
            weight = x.clone()
            moments = Moments.zeros(weight, quantised=quantised)
            options = {"steps": 100, "penalties": [penalty], "stochastic": True}
            call = on_backend(kernel, regularised_adamw, [weight], [gradient], [moments], hyper, **options)
            result.append(Case(op, name, 1, kernel + what, call))
    parameter = torch.nn.Parameter(x.clone())
    parameter.grad = gradient
    theirs = torch.optim.AdamW([parameter], lr=1e-9, fused=True)
    plain = torch.optim.AdamW([parameter], lr=1e-9, foreach=False)

    def penalised(optimizer: torch.optim.Optimizer) -> None:
        parameter.grad = gradient.clone()
        norms = torch.linalg.vector_norm(parameter.index_select(1, selected), dim=0, dtype=torch.float32)
        (1e-3 * norms.sum()).backward()
        optimizer.step()

    result.append(Case(op, name, 1, "torch fused", theirs.step))
    result.append(Case(op, name, 1, "eager l2 + torch fused", partial(penalised, theirs)))
    result.append(Case(op, name, 1, "eager l2 + torch eager", partial(penalised, plain)))
    return result


def layer_cases(name: str, x: torch.Tensor, kernels: list[str]) -> list[Case]:
    """The ops on whole activations and weights: residual-difference norm, gather, LayerNorm."""
    rows, cols = x.shape
    other, target = x * 1.01, torch.empty_like(x)
    pair = [x.clone().requires_grad_(), other.clone().requires_grad_()]
    kept = torch.tensor([i for i in range(cols) if i % 4 != 1], device=x.device)
    kept_rows = torch.arange(rows * 3 // 4, device=x.device)
    weight, bias = torch.ones(cols, device=x.device, dtype=x.dtype), torch.zeros(cols, device=x.device, dtype=x.dtype)

    def difference() -> None:
        torch.autograd.grad(residual_diff_norm(pair[0], pair[1], "l2"), pair)

    def twice() -> None:
        target.copy_(x)
        target.copy_(other)

    result = [
        Case("residual_diff_norm", name, 0, CEILING, twice),
        Case("slice_gather", name, 0, CEILING, partial(target.copy_, x)),
        Case("layer_norm_virtual", name, 0, CEILING, partial(target.copy_, x)),
    ]
    for kernel in (*kernels, "python"):
        result += [
            Case("residual_diff_norm", name, 0, kernel, on_backend(kernel, difference)),
            Case("slice_gather", name, 1, f"{kernel}, scattered", on_backend(kernel, slice_gather, x, None, kept, 0.5)),
            Case("slice_gather", name, 0, f"{kernel}, first rows", on_backend(kernel, slice_gather, x, kept_rows)),
            Case(
                "layer_norm_virtual", name, 0, kernel,
                on_backend(kernel, layer_norm_virtual, x, weight, bias, cols + 64),
            ),
        ]  # fmt: skip
    return result


def measure(all_cases: list[Case], repeats: int, device: torch.device) -> None:
    """Warm every case once, then take one sample of each in turn until there are ``repeats``."""
    for number in range(repeats + 1):
        print(f"\rround {number}/{repeats}", end="", file=sys.stderr, flush=True)
        for case in all_cases:
            _synchronise(device)
            begin = time.perf_counter()
            case.call()
            _synchronise(device)
            if number:
                case.samples.append(1e3 * (time.perf_counter() - begin))
    print(file=sys.stderr)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def conditions(device: torch.device) -> dict[str, object]:
    """What a number needs beside it to mean something."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "isas": available_isas(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def report(all_cases: list[Case], about: dict[str, object], size: tuple[int, int]) -> None:
    """Append every sample to the results file and print the table."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        for case in all_cases:
            row = {"op": case.op, "dtype": case.dtype, "axis": case.axis, "implementation": case.implementation}
            file.write(json.dumps({**about, "size": size, **row, "samples_ms": case.samples}) + "\n")
    ceilings = {(case.op, case.dtype): case.median for case in all_cases if case.implementation == CEILING}
    print(f"{size[0]} x {size[1]}, {about['threads']} threads, {about['device']}\n")
    print("| op | dtype | groups | implementation | ms | MAD | share of ceiling |")
    print("|---|---|---|---|---:|---:|---:|")
    for case in all_cases:
        groups = "" if case.implementation == CEILING else ("rows", "columns")[case.axis]
        share = ceilings[case.op, case.dtype] / case.median
        row = f"| {case.op} | {case.dtype} | {groups} | {case.implementation} "
        print(f"{row}| {case.median:.2f} | {case.deviation:.2f} | {share:.0%} |")


def main() -> None:
    """Parse the options, measure, report."""
    parser = argparse.ArgumentParser(description="Time pyprune's kernels against their memory ceiling.")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=11008)
    parser.add_argument("--repeats", type=int, default=9, help="samples per implementation")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    all_cases = cases(options.rows, options.cols, device)
    measure(all_cases, options.repeats, device)
    report(all_cases, conditions(device), (options.rows, options.cols))


if __name__ == "__main__":
    main()
