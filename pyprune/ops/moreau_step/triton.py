"""Triton kernels of the Moreau step. ``reference.py`` is the definition.

The stepped value is computed twice, for the norm and for the product, because storing it in between would round it
and would cost another trip to memory.
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
def _stepped(delta, grad, offset, inside, decay, gamma):
    before = load_float32(delta + offset, inside)
    slope = load_float32(grad + offset, inside)
    return before * decay - slope * gamma


@triton.jit
def _plain(delta, grad, count, decay, gamma, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    value = _stepped(delta, grad, offset, inside, decay, gamma)
    tl.store(delta + offset, to_storage(value, delta.dtype.element_ty), mask=inside)


@triton.jit
def _rows(delta, grad, cols, decay, gamma, threshold, BLOCK: tl.constexpr):
    """One program a row."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _stepped(delta, grad, start + begin + lanes, inside, decay, gamma).to(tl.float64)
        sums += value * value
    scale = shrink_scale(tl.sum(sums, axis=0), threshold).to(tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _stepped(delta, grad, start + begin + lanes, inside, decay, gamma)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(delta + start + begin + lanes, to_storage(result, delta.dtype.element_ty), mask=inside)


@triton.jit
def _column_squares(delta, grad, partial, rows, cols, decay, gamma, CHUNK: tl.constexpr, STEP: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    total = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        value = _stepped(delta, grad, at, inside, decay, gamma).to(tl.float64)
        total += value * value
    store_column_sums(partial, total, cols, BLOCK)


@triton.jit
def _scale_columns(delta, grad, scales, rows, cols, decay, gamma, CHUNK: tl.constexpr, STEP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    column = own_columns(BLOCK)
    scale = tl.load(scales + column, mask=column < cols, other=0.0)[None, :]
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        result = tl.where(scale == 0.0, 0.0, _stepped(delta, grad, at, inside, decay, gamma) * scale)
        tl.store(delta + at, to_storage(result, delta.dtype.element_ty), mask=inside)


def moreau_step(
    delta: torch.Tensor, grad: torch.Tensor, decay: float, gamma: float, threshold: float, axis: int
) -> None:
    """Step ``delta`` in place.

    Args:
        delta: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        grad: like ``delta``.
        decay: the factor on ``delta``, 1 - gamma/rho.
        gamma: the factor on ``grad``.
        threshold: of the group soft-threshold; 0 leaves it out.
        axis: 0 for rows as groups, 1 for columns.
    """
    rows, cols = delta.shape
    if threshold == 0:
        programs = triton.cdiv(rows * cols, ROW_BLOCK)
        launch(_plain, (programs,), delta, grad, rows * cols, decay, gamma, BLOCK=ROW_BLOCK)
    elif axis == 0:
        block = min(ROW_BLOCK, triton.next_power_of_2(cols))
        launch(_rows, (rows,), delta, grad, cols, decay, gamma, threshold, BLOCK=block)
    else:
        grid, sizes = column_grid(rows, cols)
        partial = torch.empty(grid[1], cols, dtype=torch.float64, device=delta.device)
        launch(_column_squares, grid, delta, grad, partial, rows, cols, decay, gamma, **sizes)
        scales = shrink_scales(partial.sum(dim=0), threshold)
        launch(_scale_columns, grid, delta, grad, scales, rows, cols, decay, gamma, **sizes)
