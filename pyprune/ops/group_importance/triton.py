"""Triton kernel of the importance of rows and columns. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.triton_launch import launch, load_float32, load_weights, zero_sums
from pyprune.ops.triton_sums import add_products, folds, total

GROUPS = {True: 1, False: 64}
STEP = {True: 2048, False: 32}
STEPS = 8


@triton.jit
def _importance(score, w, partial, groups, length, group_stride, along_stride, offset, SIGNED: tl.constexpr,
                BY_ROW: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
                FOLDS: tl.constexpr):  # fmt: skip
    """Sums of a chunk of some groups, float64."""
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    first = tl.program_id(1).to(tl.int64) * (STEP * STEPS)
    high, low, rare = zero_sums(BY_ROW, GROUPS, STEP, FOLDS)
    for step in range(STEPS):
        along = first + step * STEP + tl.arange(0, STEP).to(tl.int64)
        if BY_ROW:
            at = group[:, None] * group_stride + along[None, :] * along_stride
            inside = (group < groups)[:, None] & (along < length)[None, :]
        else:
            at = group[None, :] * group_stride + along[:, None] * along_stride
            inside = (group < groups)[None, :] & (along < length)[:, None]
        factor, value = load_float32(score + at, inside), load_weights(w, at, inside, offset)
        if not SIGNED:
            factor, value = tl.abs(factor), tl.abs(value)
        high, low, rare = add_products(high, low, rare, factor, value, AXIS)
    sums = total(high, low, rare, AXIS, FOLDS)
    tl.store(partial + tl.program_id(1).to(tl.int64) * groups + group, sums, mask=group < groups)


def member_scores(score: torch.Tensor, w: torch.Tensor, axis: int, signed: bool, offset: float) -> torch.Tensor:
    """Scores of all rows (axis 0) or columns, float64.

    Args:
        score: like ``w``.
        w: ``[rows, cols]``, contiguous, float32, bfloat16 or float16, not empty.
        axis: 0 for rows, 1 for columns.
        signed: take the absolute value after summing.
        offset: added to the weights first.
    """
    by_row, (rows, cols) = axis == 0, w.shape
    groups, length = (rows, cols) if by_row else (cols, rows)
    strides = (cols, 1) if by_row else (1, cols)
    step = min(STEP[by_row], triton.next_power_of_2(length))
    steps = min(STEPS, triton.cdiv(length, step))
    chunks = triton.cdiv(length, step * steps)
    partial = torch.empty(chunks, groups, dtype=torch.float64, device=w.device)
    launch(
        _importance, (triton.cdiv(groups, GROUPS[by_row]), chunks),
        score, w, partial, groups, length, *strides, offset, SIGNED=signed, BY_ROW=by_row, GROUPS=GROUPS[by_row],
        STEP=step, STEPS=steps, FOLDS=folds(step, 1 - axis, w.device),
    )  # fmt: skip
    return partial.sum(dim=0).abs()
