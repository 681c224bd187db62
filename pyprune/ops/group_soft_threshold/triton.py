"""Triton kernels of the group soft-threshold. ``reference.py`` is the definition.

Norms are accumulated in float64, as in the definition: one multiply-add an element, far below what a device
can do while it waits for memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops._triton import launch, shrink_scale, to_storage

ROW_BLOCK = 2048
COLUMN_BLOCK = 64
COLUMN_STEP = 64


@triton.jit
def _rows(x, out, cols, threshold, BLOCK: tl.constexpr):
    """One program a row: once over it for the norm, once for the product."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = tl.load(x + start + begin + lanes, mask=inside, other=0.0).to(tl.float64)
        sums += value * value
    scale = shrink_scale(tl.sum(sums, axis=0), threshold).to(tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = tl.load(x + start + begin + lanes, mask=inside, other=0.0).to(tl.float32)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(out + start + begin + lanes, to_storage(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _columns(x, out, rows, cols, threshold, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of columns, walking down the rows STEP at a time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, STEP).to(tl.int64)
    in_columns = column < cols
    sums = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    for begin in range(0, rows, STEP):
        inside = (begin + row < rows)[:, None] & in_columns[None, :]
        offset = (begin + row)[:, None] * cols + column[None, :]
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float64)
        sums += value * value
    scale = shrink_scale(tl.sum(sums, axis=0), threshold).to(tl.float32)[None, :]
    for begin in range(0, rows, STEP):
        inside = (begin + row < rows)[:, None] & in_columns[None, :]
        offset = (begin + row)[:, None] * cols + column[None, :]
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(out + offset, to_storage(result, out.dtype.element_ty), mask=inside)


def group_soft_threshold(x: torch.Tensor, out: torch.Tensor, threshold: float, axis: int) -> None:
    """Write the group soft-threshold of ``x`` into ``out``.

    Args:
        x: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        out: like ``x``; may be ``x``.
        threshold: finite, >= 0.
        axis: 0 for rows as groups, 1 for columns.
    """
    rows, cols = x.shape
    if axis == 0:
        launch(_rows, (rows,), x, out, cols, threshold, BLOCK=min(ROW_BLOCK, triton.next_power_of_2(cols)))
    else:
        grid = (triton.cdiv(cols, COLUMN_BLOCK),)
        launch(_columns, grid, x, out, rows, cols, threshold, STEP=COLUMN_STEP, BLOCK=COLUMN_BLOCK)
