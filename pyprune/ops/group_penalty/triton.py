"""Triton kernels of the group penalty. ``reference.py`` is the definition.

Sums are as accurate as the definition's in float64 (``triton_sums.py``). A row is one program's, which reads it again
for the gradient while it is in the cache; columns are summed by many programs a column, and the gradient is a second
kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.group_penalty.reference import slope_scales
from pyprune.ops.triton_launch import (
    broadcast_groups,
    group_sizes,
    group_tile,
    launch,
    load_float32,
    load_weights,
    to_storage,
    zero_sums,
)
from pyprune.ops.triton_sums import add_magnitudes, add_squares, folds, total

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
COLUMN_STEPS = 8


@triton.jit
def _add(grad, at, inside, slope):
    slope += load_float32(grad + at, inside)
    tl.store(grad + at, to_storage(slope, grad.dtype.element_ty), mask=inside)


@triton.jit
def _penalty(w, grad, index, penalty_weight, partial, groups, length, cols, offset, chunk, L1: tl.constexpr,
             GRADIENT: tl.constexpr, BY_ROW: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr,
             FOLDS: tl.constexpr):  # fmt: skip
    """Sums of a chunk of some groups; with l1 the gradient in the same pass, with l2 after them if the chunk is all."""
    first = tl.program_id(1).to(tl.int64) * chunk
    end = tl.minimum(first + chunk, length)
    factor = tl.load(penalty_weight)
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    high, low, rare = zero_sums(BY_ROW, GROUPS, STEP, FOLDS)
    for begin in range(first, end, STEP):
        at, inside = group_tile(index, groups, begin, end, cols, BY_ROW, GROUPS, STEP)
        value = load_weights(w, at, inside, offset)
        if L1:
            high, low, rare = add_magnitudes(high, low, rare, value, AXIS)
            if GRADIENT:
                _add(grad, at, inside, tl.where(value > 0, factor, tl.where(value < 0, -factor, 0.0)))
        else:
            high, low, rare = add_squares(high, low, rare, value, AXIS)
    sums = total(high, low, rare, AXIS, FOLDS)
    position = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    tl.store(partial + tl.program_id(1).to(tl.int64) * groups + position, sums, mask=position < groups)
    if GRADIENT and not L1:
        scale = factor.to(tl.float64) / tl.sqrt(tl.where(sums == 0.0, 1.0, sums))
        # Both comparisons are false for NaN; an infinite weight stays.
        limited = tl.where(tl.abs(scale) > LARGEST, tl.where(scale < 0, -LARGEST, LARGEST), scale)
        scale = tl.where(tl.abs(factor) <= LARGEST, limited, scale)
        scale = broadcast_groups(tl.where(sums == 0.0, 0.0, scale).to(tl.float32), BY_ROW)
        for begin in range(first, end, STEP):
            at, inside = group_tile(index, groups, begin, end, cols, BY_ROW, GROUPS, STEP)
            _add(grad, at, inside, load_weights(w, at, inside, offset) * scale)


@triton.jit
def _add_scaled(w, grad, index, scales, groups, length, cols, offset, BY_ROW: tl.constexpr, GROUPS: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    begin = tl.program_id(1).to(tl.int64) * STEP
    at, inside = group_tile(index, groups, begin, length, cols, BY_ROW, GROUPS, STEP)
    position = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    scale = broadcast_groups(tl.load(scales + position, mask=position < groups, other=0.0), BY_ROW)
    _add(grad, at, inside, load_weights(w, at, inside, offset) * scale)


def group_sums(
    w: torch.Tensor,
    index: torch.Tensor,
    axis: int,
    kind: str,
    offset: float,
    grad: torch.Tensor | None = None,
    penalty_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums of magnitudes (l1) or squares (l2) of the selected groups, float64, in the order of the index.

    With ``grad`` the gradient is added to it as well, except for the l2 norms of columns.
    """
    sizes = group_sizes(axis == 0, w.shape[1])
    length = w.shape[1 - axis]
    chunk = length if axis == 0 else sizes["STEP"] * COLUMN_STEPS
    chunks = triton.cdiv(length, chunk)
    partial = torch.empty(chunks, len(index), dtype=torch.float64, device=w.device)
    factor = torch.zeros(1, dtype=torch.float32, device=w.device) if penalty_weight is None else penalty_weight
    gradient = grad is not None and (kind == "l1" or axis == 0)
    launch(
        _penalty, (triton.cdiv(len(index), sizes["GROUPS"]), chunks),
        w, w if grad is None else grad, index, factor, partial, len(index), length, w.shape[1], offset, chunk,
        L1=kind == "l1", GRADIENT=gradient, FOLDS=folds(sizes["STEP"], 1 - axis, w.device), **sizes,
    )  # fmt: skip
    return partial.sum(dim=0)


def group_penalty(
    grad: torch.Tensor | None,
    w: torch.Tensor,
    index: torch.Tensor,
    axis: int,
    kind: str,
    penalty_weight: float | torch.Tensor,
    offset: float,
) -> torch.Tensor:
    """The penalty, float32; with ``grad``, ``penalty_weight`` times its gradient is added to that.

    Args:
        grad: like ``w``, or None.
        w: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        index: int64, not empty.
        axis: 0 for rows, 1 for columns.
        kind: "l1" or "l2".
        penalty_weight: a number, or a tensor on the device, which is not waited for.
        offset: added to the weights first.
    """
    factor = torch.as_tensor(penalty_weight, dtype=torch.float32, device=w.device).reshape(1)
    sums = group_sums(w, index, axis, kind, offset, grad, factor)
    if kind == "l1":
        return sums.sum().float()
    norms = sums.sqrt()
    if grad is not None and axis == 1:
        sizes = group_sizes(False, w.shape[1])
        grid = (triton.cdiv(len(index), sizes["GROUPS"]), triton.cdiv(w.shape[0], sizes["STEP"]))
        scales = slope_scales(norms, factor, torch.float32)
        launch(_add_scaled, grid, w, grad, index, scales, len(index), w.shape[0], w.shape[1], offset, **sizes)
    return norms.sum().float()
