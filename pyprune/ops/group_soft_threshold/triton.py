"""Triton kernels of the group soft-threshold. ``reference.py`` is the definition.

Norms are accumulated in float64, as in the definition: one multiply-add an element, far below what a device
can do while it waits for memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops._triton import (
    column_grid,
    column_tile,
    launch,
    load_float32,
    own_columns,
    shrink_scale,
    shrink_scales,
    store_column_sums,
    to_storage,
)

ROW_BLOCK = 2048


@triton.jit
def _rows(x, out, cols, threshold, BLOCK: tl.constexpr):
    """One program a row: once over it for the norm, once for the product."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = load_float32(x + start + begin + lanes, inside).to(tl.float64)
        sums += value * value
    scale = shrink_scale(tl.sum(sums, axis=0), threshold).to(tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = load_float32(x + start + begin + lanes, inside)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(out + start + begin + lanes, to_storage(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _column_squares(x, partial, rows, cols, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        value = load_float32(x + at, inside).to(tl.float64)
        total += value * value
    store_column_sums(partial, total, cols, BLOCK)


@triton.jit
def _scale_columns(x, out, scales, rows, cols, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    column = own_columns(BLOCK)
    scale = tl.load(scales + column, mask=column < cols, other=0.0)[None, :]
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        value = load_float32(x + at, inside)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(out + at, to_storage(result, out.dtype.element_ty), mask=inside)


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
        grid, sizes = column_grid(rows, cols)
        partial = torch.empty(grid[1], cols, dtype=torch.float64, device=x.device)
        launch(_column_squares, grid, x, partial, rows, cols, **sizes)
        launch(_scale_columns, grid, x, out, shrink_scales(partial.sum(dim=0), threshold), rows, cols, **sizes)
