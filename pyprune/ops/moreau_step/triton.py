"""Triton kernels of the Moreau step. ``reference.py`` is the definition.

The stepped value is computed twice, for the norm and for the product, because storing it in between would round it
and would cost another trip to memory. Every program keeps its own share of the sums that the step returns.
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
    to_float32,
    to_storage,
)

ROW_BLOCK = 2048


@triton.jit
def _stepped(delta, grad, offset, inside, decay, gamma):
    before = load_float32(delta + offset, inside)
    slope = load_float32(grad + offset, inside)
    return before * decay - slope * gamma


@triton.jit
def _store(delta, offset, inside, value):
    """Store new values; the squares of their change and of themselves, as they are stored, float64."""
    before = load_float32(delta + offset, inside)
    stored = to_storage(value, delta.dtype.element_ty)
    tl.store(delta + offset, stored, mask=inside)
    after = tl.where(inside, to_float32(stored), 0.0)
    change, size = (after - before).to(tl.float64), after.to(tl.float64)
    return change * change, size * size


@triton.jit
def _keep(sums, program, programs, moved, size):
    """A program's share of the two sums, in its column of ``sums``, ``[2, programs]``."""
    tl.store(sums + program, moved)
    tl.store(sums + programs + program, size)


@triton.jit
def _plain(delta, grad, sums, count, decay, gamma, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    moved, size = _store(delta, offset, inside, _stepped(delta, grad, offset, inside, decay, gamma))
    _keep(sums, tl.program_id(0), tl.num_programs(0), tl.sum(moved, axis=0), tl.sum(size, axis=0))


@triton.jit
def _rows(delta, grad, sums, cols, decay, gamma, threshold, BLOCK: tl.constexpr):
    """One program a row."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _stepped(delta, grad, start + begin + lanes, inside, decay, gamma).to(tl.float64)
        squares += value * value
    scale = shrink_scale(tl.sum(squares, axis=0), threshold).to(tl.float32)
    moved = tl.zeros((BLOCK,), dtype=tl.float64)
    size = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _stepped(delta, grad, start + begin + lanes, inside, decay, gamma)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        own_moved, own_size = _store(delta, start + begin + lanes, inside, result)
        moved += own_moved
        size += own_size
    _keep(sums, tl.program_id(0), tl.num_programs(0), tl.sum(moved, axis=0), tl.sum(size, axis=0))


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
def _scale_columns(delta, grad, scales, sums, rows, cols, decay, gamma, CHUNK: tl.constexpr, STEP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    column = own_columns(BLOCK)
    scale = tl.load(scales + column, mask=column < cols, other=0.0)[None, :]
    moved = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    size = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        result = tl.where(scale == 0.0, 0.0, _stepped(delta, grad, at, inside, decay, gamma) * scale)
        own_moved, own_size = _store(delta, at, inside, result)
        moved += own_moved
        size += own_size
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total_moved, total_size = tl.sum(tl.sum(moved, axis=1), axis=0), tl.sum(tl.sum(size, axis=1), axis=0)
    _keep(sums, program, tl.num_programs(0) * tl.num_programs(1), total_moved, total_size)


def moreau_step(
    delta: torch.Tensor, grad: torch.Tensor, decay: float, gamma: float, threshold: float, axis: int
) -> torch.Tensor:
    """Step ``delta`` in place.

    Args:
        delta: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        grad: like ``delta``.
        decay: the factor on ``delta``, 1 - gamma/rho.
        gamma: the factor on ``grad``.
        threshold: of the group soft-threshold; 0 leaves it out.
        axis: 0 for rows as groups, 1 for columns.

    Returns:
        The sums of squares of the change of ``delta`` and of ``delta`` after it, float64 ``[2]``.
    """
    rows, cols = delta.shape
    if threshold == 0:
        sums = _empty_sums(delta, triton.cdiv(rows * cols, ROW_BLOCK))
        launch(_plain, (sums.shape[1],), delta, grad, sums, rows * cols, decay, gamma, BLOCK=ROW_BLOCK)
    elif axis == 0:
        sums = _empty_sums(delta, rows)
        block = min(ROW_BLOCK, triton.next_power_of_2(cols))
        launch(_rows, (rows,), delta, grad, sums, cols, decay, gamma, threshold, BLOCK=block)
    else:
        grid, sizes = column_grid(rows, cols)
        partial = torch.empty(grid[1], cols, dtype=torch.float64, device=delta.device)
        launch(_column_squares, grid, delta, grad, partial, rows, cols, decay, gamma, **sizes)
        scales = shrink_scales(partial.sum(dim=0), threshold)
        sums = _empty_sums(delta, grid[0] * grid[1])
        launch(_scale_columns, grid, delta, grad, scales, sums, rows, cols, decay, gamma, **sizes)
    return sums.sum(dim=1)


def _empty_sums(delta: torch.Tensor, programs: int) -> torch.Tensor:
    return torch.empty(2, programs, dtype=torch.float64, device=delta.device)
