"""Triton kernels of the proximal map of the group penalty. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops._triton import (
    group_sizes,
    group_tile,
    launch,
    load_weights,
    multiply_groups,
    shrink_scale,
    shrink_scales,
    to_storage,
    zero_sums,
)
from pyprune.ops._triton_sums import add_squares, folds, total
from pyprune.ops.group_penalty.triton import group_sums


@triton.jit
def _soft_threshold(w, out, index, groups, length, cols, threshold, offset, BY_ROW: tl.constexpr, GROUPS: tl.constexpr,
                    STEP: tl.constexpr):  # fmt: skip
    begin = tl.program_id(1).to(tl.int64) * STEP
    at, inside = group_tile(index, groups, begin, length, cols, BY_ROW, GROUPS, STEP)
    value = load_weights(w, at, inside, offset)
    # The comparison is false for NaN, which stays.
    shorter = tl.where(tl.abs(value) <= threshold, 0.0, value - tl.where(value < 0, -1.0, 1.0) * threshold)
    tl.store(out + at, to_storage(shorter - offset, out.dtype.element_ty), mask=inside)


@triton.jit
def _rows(w, out, index, cols, threshold, offset, STEP: tl.constexpr, FOLDS: tl.constexpr):
    """One program a row: once over it for the norm, once for the product."""
    high, low, rare = zero_sums(True, 1, STEP, FOLDS)
    for begin in range(0, cols, STEP):
        at, inside = group_tile(index, tl.num_programs(0), begin, cols, cols, True, 1, STEP)
        high, low, rare = add_squares(high, low, rare, load_weights(w, at, inside, offset), 1)
    scale = shrink_scale(total(high, low, rare, 1, FOLDS), threshold).to(tl.float32)[:, None]
    for begin in range(0, cols, STEP):
        at, inside = group_tile(index, tl.num_programs(0), begin, cols, cols, True, 1, STEP)
        product = tl.where(scale == 0.0, 0.0, load_weights(w, at, inside, offset) * scale) - offset
        tl.store(out + at, to_storage(product, out.dtype.element_ty), mask=inside)


def group_prox(
    w: torch.Tensor, out: torch.Tensor, index: torch.Tensor, axis: int, kind: str, threshold: float, offset: float
) -> None:
    """The proximal map of the selected rows or columns of ``w``, into those of ``out``.

    Args:
        w: ``[rows, cols]``, contiguous, float32, bfloat16 or float16.
        out: like ``w``; may be ``w``.
        index: int64, not empty.
        axis: 0 for rows, 1 for columns.
        kind: "l1" or "l2".
        threshold: finite, >= 0.
        offset: added first and taken off again.
    """
    sizes = group_sizes(axis == 0, w.shape[1])
    if kind == "l1":
        length = w.shape[1 - axis]
        grid = (triton.cdiv(len(index), sizes["GROUPS"]), triton.cdiv(length, sizes["STEP"]))
        launch(_soft_threshold, grid, w, out, index, len(index), length, w.shape[1], threshold, offset, **sizes)
    elif axis == 0:
        constants = {"STEP": sizes["STEP"], "FOLDS": folds(sizes["STEP"], 1, w.device)}
        launch(_rows, (len(index),), w, out, index, w.shape[1], threshold, offset, **constants)
    else:
        scales = shrink_scales(group_sums(w, index, axis, kind, offset), threshold)
        multiply_groups(w, out, index, scales, axis, offset)
