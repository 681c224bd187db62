"""Device functions shared by the Triton kernels, and their launch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

COLUMN_BLOCK = 64
COLUMN_STEP = 32
COLUMN_STEPS = 8


def launch(kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *others: Any, **constants: Any) -> None:
    """Run a kernel on the device of its tensors; every launch uses this function.

    Triton launches on torch's current GPU, whatever GPU the tensors are on.

    Args:
        kernel: a ``triton.jit`` function.
        grid: the number of programs along each axis.
        first: the kernel's first argument, a tensor on the device of all others.
        others: the other arguments.
        constants: the compile-time arguments.
    """
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[grid](first, *others, **constants)


@triton.jit
def to_float32(value):
    """Convert storage to float32, exactly.

    bfloat16 is the upper half of float32, and is widened on the bits: Triton's interpreter converts subnormals wrongly,
    in either direction. A GPU's own conversions are exact.
    """
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def load_float32(pointer, inside):
    """Load elements of a tensor in float32, 0 outside."""
    return to_float32(tl.load(pointer, mask=inside, other=0.0))


@triton.jit
def upper_half(bits):
    """Return the bfloat16 values in the upper halves of float32's bits, uint32."""
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_storage(value, dtype: tl.constexpr):
    """Round float32 to ``dtype``, to nearest with ties to even.

    For bfloat16 the rounding is done on the bits: Triton's interpreter truncates, and gets subnormals wrong.
    """
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return upper_half(tl.where(value == value, rounded, bits | 0x400000))
    else:
        return value.to(dtype)


@triton.jit
def shrink_scale(squared_norm, threshold):
    """Return the factor of a group in the group soft-threshold; 0 for a removed group."""
    norm = tl.sqrt(squared_norm)
    # The comparison is false for NaN, so that a NaN reaches the whole group. A zero norm is replaced only to
    # keep the branch that is not taken from dividing by it.
    return tl.where(norm <= threshold, 0.0, 1.0 - threshold / tl.where(norm == 0.0, 1.0, norm))


def shrink_scales(sums: torch.Tensor, threshold: float) -> torch.Tensor:
    """:func:`shrink_scale` of many groups whose squares were summed in pieces.

    Args:
        sums: squared norms, float64 ``[groups]``.
        threshold: >= 0.

    Returns:
        float32 ``[groups]``.
    """
    norms = sums.sqrt()
    # The comparison is false for NaN, so that a NaN reaches the whole group.
    return torch.where(norms <= threshold, 0.0, 1 - threshold / norms).float()


def column_grid(rows: int, cols: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the programs for whole columns, and the compile-time arguments of :func:`column_tile`.

    A column is shared between programs: blocks of columns alone are too few to fill a GPU.
    """
    chunk = COLUMN_STEP * COLUMN_STEPS
    grid = (triton.cdiv(cols, COLUMN_BLOCK), triton.cdiv(rows, chunk))
    return grid, {"CHUNK": chunk, "STEP": COLUMN_STEP, "BLOCK": COLUMN_BLOCK}


@triton.jit
def own_columns(BLOCK: tl.constexpr):
    """Return the columns of a program of :func:`column_grid`."""
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def column_tile(step, rows, cols, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Locate the elements of one step of a program of :func:`column_grid`.

    Returns the elements' offsets and which of them exist, both ``[STEP, BLOCK]``.
    """
    row = tl.program_id(1).to(tl.int64) * CHUNK + step + tl.arange(0, STEP)
    column = own_columns(BLOCK)
    return row[:, None] * cols + column[None, :], (row < rows)[:, None] & (column < cols)[None, :]


@triton.jit
def store_column_sums(partial, sums, cols, BLOCK: tl.constexpr):
    """Store a program's ``[BLOCK]`` sums in its row of ``partial``, ``[programs of a column, cols]``."""
    column = own_columns(BLOCK)
    tl.store(partial + tl.program_id(1).to(tl.int64) * cols + column, sums, mask=column < cols)


@triton.jit
def group_tile(index, groups, begin, length, cols, BY_ROW: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """Locate a tile of the selected rows or columns: GROUPS groups, and STEP elements along each from ``begin``.

    Returns the elements' offsets and which of them exist; ``[GROUPS, STEP]`` for rows and ``[STEP, GROUPS]`` for
    columns, so that the last dimension runs along memory.
    """
    position = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    present = position < groups
    group = tl.load(index + position, mask=present, other=0)
    along = begin + tl.arange(0, STEP).to(tl.int64)
    if BY_ROW:
        at = group[:, None] * cols + along[None, :]
        inside = present[:, None] & (along < length)[None, :]
    else:
        at = along[:, None] * cols + group[None, :]
        inside = present[None, :] & (along < length)[:, None]
    return at, inside


@triton.jit
def broadcast_groups(values, BY_ROW: tl.constexpr):
    """Broadcast one value a group along a tile of :func:`group_tile`."""
    if BY_ROW:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def zero_sums(BY_ROW: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, FOLDS: tl.constexpr):
    """Return three zero parts of sums over the tiles of :func:`group_tile`, for ``triton_sums.py``."""
    DTYPE: tl.constexpr = tl.float64 if FOLDS < 0 else tl.float32  # as triton_sums.FLOAT64 asks
    if BY_ROW:
        zeros = tl.zeros((GROUPS, STEP), dtype=DTYPE)
    else:
        zeros = tl.zeros((STEP, GROUPS), dtype=DTYPE)
    return zeros, zeros, tl.zeros((GROUPS,), dtype=tl.float64)


@triton.jit
def load_weights(w, at, inside, offset):
    """Load ``w + offset`` in float32, 0 outside."""
    value = load_float32(w + at, inside) + offset
    return tl.where(inside, value, 0.0)


def group_sizes(by_row: bool, cols: int) -> dict[str, int]:
    """Return the shape of a tile: a stretch of one row, or a block of columns."""
    if by_row:
        return {"BY_ROW": True, "GROUPS": 1, "STEP": min(2048, triton.next_power_of_2(cols))}
    return {"BY_ROW": False, "GROUPS": 64, "STEP": 32}
