"""Triton kernels of the Moreau step. ``reference.py`` is the definition.

The stepped value is computed twice, for the norm and for the product, because storing it in between would round it
and would cost another trip to memory.
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
def _stepped(delta, grad, offset, inside, decay, gamma):
    before = tl.load(delta + offset, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
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
def _columns(delta, grad, rows, cols, decay, gamma, threshold, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of columns, walking down the rows STEP at a time."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, STEP).to(tl.int64)
    in_columns = column < cols
    sums = tl.zeros((STEP, BLOCK), dtype=tl.float64)
    for begin in range(0, rows, STEP):
        inside = (begin + row < rows)[:, None] & in_columns[None, :]
        offset = (begin + row)[:, None] * cols + column[None, :]
        value = _stepped(delta, grad, offset, inside, decay, gamma).to(tl.float64)
        sums += value * value
    scale = shrink_scale(tl.sum(sums, axis=0), threshold).to(tl.float32)[None, :]
    for begin in range(0, rows, STEP):
        inside = (begin + row < rows)[:, None] & in_columns[None, :]
        offset = (begin + row)[:, None] * cols + column[None, :]
        value = _stepped(delta, grad, offset, inside, decay, gamma)
        result = tl.where(scale == 0.0, 0.0, value * scale)
        tl.store(delta + offset, to_storage(result, delta.dtype.element_ty), mask=inside)


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
        grid = (triton.cdiv(rows * cols, ROW_BLOCK),)
        launch(_plain, grid, delta, grad, rows * cols, decay, gamma, BLOCK=ROW_BLOCK)
    elif axis == 0:
        block = min(ROW_BLOCK, triton.next_power_of_2(cols))
        launch(_rows, (rows,), delta, grad, cols, decay, gamma, threshold, BLOCK=block)
    else:
        grid = (triton.cdiv(cols, COLUMN_BLOCK),)
        sizes = {"STEP": COLUMN_STEP, "BLOCK": COLUMN_BLOCK}
        launch(_columns, grid, delta, grad, rows, cols, decay, gamma, threshold, **sizes)
