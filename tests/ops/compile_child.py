"""Compile every Triton kernel for a GPU that need not be there, and print which, with some of their instructions: those
that approximate, and those that flush subnormal numbers to zero (ftz).

A process of its own with TRITON_INTERPRET=0 (read when triton is imported) and PYPRUNE_BACKEND=triton.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pyprune import ops
from pyprune.ops import dispatch, triton_sums
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw

DTYPES = (torch.float32, torch.bfloat16)
INDEX = torch.tensor([1, 3, 5])


class Target:
    """What the compiler asks a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def matrices(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    return [torch.zeros(40, 136, dtype=dtype) for _ in range(count)]


def groups(dtype: torch.dtype, axis: int) -> None:
    """The ops on rows or columns."""
    w, other = matrices(dtype, 2)
    ops.group_soft_threshold(w, INDEX, axis, 0.5, offset=1.0)
    ops.moreau_step(w, other, 0.1, 0.4, 8.0, axis)
    ops.group_importance(other, w, axis, offset=1.0)
    for kind in ("l1", "l2"):
        ops.add_group_penalty_(other, w, INDEX, axis, kind, 0.5)


def whole(dtype: torch.dtype) -> None:
    """The ops on whole tensors."""
    w, other = matrices(dtype, 2)
    ops.moreau_step(w, other, 0.1, 0.4, 0.0, 0)
    ops.perturb(w, other, 0.1, seed=2**63 + 1)
    ops.slice_gather(w, INDEX, INDEX, 0.5)
    ops.slice_gather(w, INDEX, None)
    pair = [t.requires_grad_() for t in matrices(dtype, 2)]
    for kind in ("l1", "l2"):
        ops.residual_diff_norm(*pair, kind).backward()
    scale, shift = (torch.zeros(136, dtype=dtype, requires_grad=True) for _ in range(2))
    for bias in (None, shift):
        ops.layer_norm_virtual(pair[0], scale, bias, 200).sum().backward()


def adamw(dtype: torch.dtype, quantised: bool, penalty: Penalty | None, count: int = 1) -> None:
    weights, gradients = matrices(dtype, count), matrices(dtype, count)
    regularised_adamw(
        weights, gradients, [Moments.zeros(w, quantised=quantised) for w in weights], Hyper(), steps=5,
        penalties=[penalty] * count, stochastic=True, seed=2**63 + 1,
    )  # fmt: skip


def main() -> None:
    driver.set_active(Target())  # type: ignore[no-untyped-call]
    # Tensors without a GPU are taken, as they are for the interpreter.
    dispatch.uses_interpreter = lambda: True
    compiled: dict[str, set[str]] = defaultdict(set)
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **constants)
        inexact = re.findall(r"\b\w+(?:\.\w+)*\.(?:approx|ftz)\b(?:\.\w+)*", kernel.asm["ptx"])
        compiled[f"{self.fn.__module__}.{self.fn.__name__}"].update(inexact)

    JITFunction.run = compile_only
    for dtype, axis in product(DTYPES, (0, 1)):
        groups(dtype, axis)
    for dtype in DTYPES:
        whole(dtype)
    triton_sums.fast_in_float64 = lambda device: True  # as on a data centre's GPU
    groups(torch.bfloat16, 1)
    groups(torch.float32, 0)
    whole(torch.bfloat16)
    adamw(torch.float32, False, Penalty(INDEX, 0, "l2"))
    adamw(torch.bfloat16, True, Penalty(INDEX, 1, "l2"))
    adamw(torch.bfloat16, False, Penalty(INDEX, 0, "l1"))
    adamw(torch.float32, True, Penalty(INDEX, 1, "l1"))
    for dtype, quantised in product(DTYPES, (False, True)):
        adamw(dtype, quantised, None, 2)
    adamw(torch.bfloat16, True, Penalty(INDEX, 1, "l1"), 2)
    print(json.dumps({name: sorted(found) for name, found in compiled.items()}))


if __name__ == "__main__":
    main()
