"""Triton kernels of the Moreau step. ``reference.py`` is the definition.

The stepped value is computed twice, for the norm and for the product, because storing it in between would round it
and would cost another trip to memory. Every program keeps its own share of the sums that the step returns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.triton_launch import (
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
    zero_sums,
)
from pyprune.ops.triton_sums import add_squares, folds, total

ROW_BLOCK = 2048


@triton.jit
def _step_value(delta, grad, offset, inside, decay, gamma):
    before = load_float32(delta + offset, inside)
    slope = load_float32(grad + offset, inside)
    return before * decay - slope * gamma


@triton.jit
def _store(delta, offset, inside, value):
    """Store new values; their change and themselves, as they are stored."""
    before = load_float32(delta + offset, inside)
    stored = to_storage(value, delta.dtype.element_ty)
    tl.store(delta + offset, stored, mask=inside)
    after = tl.where(inside, to_float32(stored), 0.0)
    return after - before, after


@triton.jit
def _keep(sums, program, programs, moved, size):
    """A program's share of the two sums, ``[1]`` each, in its column of ``sums``, ``[2, programs]``."""
    program += tl.arange(0, 1)
    tl.store(sums + program, moved)
    tl.store(sums + programs + program, size)


@triton.jit
def _plain(delta, grad, sums, count, decay, gamma, BLOCK: tl.constexpr, FOLDS: tl.constexpr):
    offset = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = offset < count
    change, after = _store(delta, offset, inside, _step_value(delta, grad, offset, inside, decay, gamma))
    high, low, rare = zero_sums(True, 1, BLOCK, FOLDS)
    moved = total(*add_squares(high, low, rare, change, 1), 1, FOLDS)
    size = total(*add_squares(high, low, rare, after, 1), 1, FOLDS)
    _keep(sums, tl.program_id(0), tl.num_programs(0), moved, size)


@triton.jit
def _rows(delta, grad, sums, cols, decay, gamma, threshold, BLOCK: tl.constexpr, FOLDS: tl.constexpr):
    """One program a row."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)[None, :]
    high, low, rare = zero_sums(True, 1, BLOCK, FOLDS)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _step_value(delta, grad, start + begin + lanes, inside, decay, gamma)
        high, low, rare = add_squares(high, low, rare, value, 1)
    scale = shrink_scale(total(high, low, rare, 1, FOLDS), threshold).to(tl.float32)[:, None]
    moved, moved_low, moved_rare = zero_sums(True, 1, BLOCK, FOLDS)
    size, size_low, size_rare = zero_sums(True, 1, BLOCK, FOLDS)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = _step_value(delta, grad, start + begin + lanes, inside, decay, gamma)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        change, after = _store(delta, start + begin + lanes, inside, result)
        moved, moved_low, moved_rare = add_squares(moved, moved_low, moved_rare, change, 1)
        size, size_low, size_rare = add_squares(size, size_low, size_rare, after, 1)
    total_moved = total(moved, moved_low, moved_rare, 1, FOLDS)
    total_size = total(size, size_low, size_rare, 1, FOLDS)
    _keep(sums, tl.program_id(0), tl.num_programs(0), total_moved, total_size)


@triton.jit
def _column_squares(delta, grad, partial, rows, cols, decay, gamma, CHUNK: tl.constexpr, STEP: tl.constexpr,
                    BLOCK: tl.constexpr, FOLDS: tl.constexpr):  # fmt: skip
    high, low, rare = zero_sums(False, BLOCK, STEP, FOLDS)
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        value = _step_value(delta, grad, at, inside, decay, gamma)
        high, low, rare = add_squares(high, low, rare, value, 0)
    store_column_sums(partial, total(high, low, rare, 0, FOLDS), cols, BLOCK)


@triton.jit
def _scale_columns(delta, grad, scales, sums, rows, cols, decay, gamma, CHUNK: tl.constexpr, STEP: tl.constexpr,
                   BLOCK: tl.constexpr, FOLDS: tl.constexpr):  # fmt: skip
    column = own_columns(BLOCK)
    scale = tl.load(scales + column, mask=column < cols, other=0.0)[None, :]
    moved, moved_low, moved_rare = zero_sums(False, BLOCK, STEP, FOLDS)
    size, size_low, size_rare = zero_sums(False, BLOCK, STEP, FOLDS)
    for step in range(0, CHUNK, STEP):
        at, inside = column_tile(step, rows, cols, CHUNK, STEP, BLOCK)
        result = tl.where(scale == 0.0, 0.0, _step_value(delta, grad, at, inside, decay, gamma) * scale)
        change, after = _store(delta, at, inside, result)
        moved, moved_low, moved_rare = add_squares(moved, moved_low, moved_rare, change, 0)
        size, size_low, size_rare = add_squares(size, size_low, size_rare, after, 0)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    total_moved = tl.sum(total(moved, moved_low, moved_rare, 0, FOLDS), axis=0)
    total_size = tl.sum(total(size, size_low, size_rare, 0, FOLDS), axis=0)
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
        launch(
            _plain, (sums.shape[1],),
            delta, grad, sums, rows * cols, decay, gamma, BLOCK=ROW_BLOCK, FOLDS=folds(ROW_BLOCK, 1, delta.device),
        )  # fmt: skip
    elif axis == 0:
        sums = _empty_sums(delta, rows)
        block = min(ROW_BLOCK, triton.next_power_of_2(cols))
        own_folds = folds(block, 1, delta.device)
        launch(_rows, (rows,), delta, grad, sums, cols, decay, gamma, threshold, BLOCK=block, FOLDS=own_folds)
    else:
        grid, sizes = column_grid(rows, cols)
        sizes["FOLDS"] = folds(sizes["STEP"], 0, delta.device)
        partial = torch.empty(grid[1], cols, dtype=torch.float64, device=delta.device)
        launch(_column_squares, grid, delta, grad, partial, rows, cols, decay, gamma, **sizes)
        scales = shrink_scales(partial.sum(dim=0), threshold)
        sums = _empty_sums(delta, grid[0] * grid[1])
        launch(_scale_columns, grid, delta, grad, scales, sums, rows, cols, decay, gamma, **sizes)
    return sums.sum(dim=1)


def _empty_sums(delta: torch.Tensor, programs: int) -> torch.Tensor:
    return torch.empty(2, programs, dtype=torch.float64, device=delta.device)
