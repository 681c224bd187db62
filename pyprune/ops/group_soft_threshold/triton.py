"""Triton kernels of the group soft-threshold. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.group_penalty.triton import group_sums
from pyprune.ops.triton_launch import (
    broadcast_groups,
    group_sizes,
    group_tile,
    launch,
    load_weights,
    shrink_scale,
    shrink_scales,
    to_storage,
    zero_sums,
)
from pyprune.ops.triton_sums import add_squares, folds, total


@triton.jit
def _rows(w, index, cols, threshold, offset, STEP: tl.constexpr, FOLDS: tl.constexpr):
    """One program a row: once over it for the norm, once for the product."""
    high, low, rare = zero_sums(True, 1, STEP, FOLDS)
    for begin in range(0, cols, STEP):
        at, inside = group_tile(index, tl.num_programs(0), begin, cols, cols, True, 1, STEP)
        high, low, rare = add_squares(high, low, rare, load_weights(w, at, inside, offset), 1)
    scale = shrink_scale(total(high, low, rare, 1, FOLDS), threshold).to(tl.float32)[:, None]
    for begin in range(0, cols, STEP):
        at, inside = group_tile(index, tl.num_programs(0), begin, cols, cols, True, 1, STEP)
        product = tl.where(scale == 0.0, 0.0, load_weights(w, at, inside, offset) * scale) - offset
        tl.store(w + at, to_storage(product, w.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(w, index, scales, groups, length, cols, offset, BY_ROW: tl.constexpr, GROUPS: tl.constexpr,
              STEP: tl.constexpr):  # fmt: skip
    """One tile: ``(w + offset) * scale - offset``, with one scale a group."""
    begin = tl.program_id(1).to(tl.int64) * STEP
    at, inside = group_tile(index, groups, begin, length, cols, BY_ROW, GROUPS, STEP)
    position = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    scale = broadcast_groups(tl.load(scales + position, mask=position < groups, other=0.0), BY_ROW)
    value = load_weights(w, at, inside, offset)
    # Chosen, not multiplied: 0 * inf would be NaN, and -0 is not the zero that a cut leaves behind.
    product = tl.where(scale == 0.0, 0.0, value * scale) - offset
    tl.store(w + at, to_storage(product, w.dtype.element_ty), mask=inside)


def group_soft_threshold(w: torch.Tensor, index: torch.Tensor, axis: int, threshold: float, offset: float) -> None:
    """Shrink the selected rows or columns in place.

    Args:
        w: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        index: int64, not empty.
        axis: 0 for rows, 1 for columns.
        threshold: finite, > 0.
        offset: added first and taken off again.
    """
    sizes = group_sizes(axis == 0, w.shape[1])
    if axis == 0:
        constants = {"STEP": sizes["STEP"], "FOLDS": folds(sizes["STEP"], 1, w.device)}
        launch(_rows, (len(index),), w, index, w.shape[1], threshold, offset, **constants)
        return
    scales = shrink_scales(group_sums(w, index, axis, "l2", offset), threshold)
    grid = (triton.cdiv(len(index), sizes["GROUPS"]), triton.cdiv(w.shape[0], sizes["STEP"]))
    launch(_multiply, grid, w, index, scales, len(index), w.shape[0], w.shape[1], offset, **sizes)
