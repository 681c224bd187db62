"""Sums in Triton kernels as accurate as float64 ones, also where a GPU is slow in float64.

Data-centre GPUs add float64 numbers as fast as memory brings them, and there sums are float64. Consumer GPUs do 64
operations in float32 in the time of one in float64. There a sum is kept as two float32 numbers whose sum it is: what an
addition rounds away is known exactly (Knuth's two-sum) and joins the lower one. Products are taken in parts short
enough to be exact, so that a compiler which fuses multiplications with additions changes nothing. float64 remains where
it is cheap or rare: for the last few lanes of a program, one sum a program, and the terms whose parts float32 cannot
hold (next to its limits, NaN and infinities).

A tile is two-dimensional; ``AXIS`` is the dimension along which it is summed. Which of the two a sum is follows from
the dtype of its first part (:func:`pyprune.ops.triton_launch.zero_sums`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(2.0**90)
"""2**38 such terms stay below float32's largest."""
SMALLEST = tl.constexpr(2.0**-100)
"""Of products: what is lost of their lowest part, below 2**-149, is then 2**-49 of them."""
LANES = {0: 8, 1: 128}
FLOAT64 = -1
"""In place of a number of halvings: the sum is float64."""
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities that do one operation in float64 in the time of two in float32: P100, V100, A100, H100, B200."""


@triton.jit
def _add(high, low, term):
    total = high + term
    other = total - high
    return total, low + ((high - (total - other)) + (term - other))


@triton.jit
def _upper(value):
    """The first 12 of the 24 bits; what is left has 12, and the product of two such numbers is exact."""
    return (value.to(tl.uint32, bitcast=True) & 0xFFFFF000).to(tl.float32, bitcast=True)


@triton.jit
def _any(condition):
    return tl.max(tl.max(condition.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def add_products(high, low, rare, a, b, AXIS: tl.constexpr):
    """Add the products of two tiles, float32, to a sum; returns its three parts.

    Args:
        high: float32, like the tiles.
        low: likewise.
        rare: float64, one for each sum.
    """
    if high.dtype == tl.float64:
        return high + a.to(tl.float64) * b.to(tl.float64), low, rare
    size = tl.abs(a * b)
    # All comparisons are false for NaN. A product that is 0 though no factor is has lost all its bits.
    usual = ((size >= SMALLEST) & (size <= LARGEST)) | (a == 0.0) | (b == 0.0)
    if _any(usual == 0):
        rare += tl.sum(tl.where(usual, 0.0, a.to(tl.float64) * b.to(tl.float64)), axis=AXIS)
    a = tl.where(usual, a, 0.0)
    b = tl.where(usual, b, 0.0)
    a_upper = _upper(a)
    b_upper = _upper(b)
    a_lower = a - a_upper
    b_lower = b - b_upper
    high, low = _add(high, low, a_upper * b_upper)
    high, low = _add(high, low, a_upper * b_lower)
    high, low = _add(high, low, a_lower * b_upper)
    return high, low + a_lower * b_lower, rare


@triton.jit
def add_squares(high, low, rare, value, AXIS: tl.constexpr):
    """:func:`add_products` of a tile with itself, in fewer steps."""
    if high.dtype == tl.float64:
        wide = value.to(tl.float64)
        return high + wide * wide, low, rare
    size = value * value
    usual = ((size >= SMALLEST) & (size <= LARGEST)) | (value == 0.0)
    if _any(usual == 0):
        wide = value.to(tl.float64)
        rare += tl.sum(tl.where(usual, 0.0, wide * wide), axis=AXIS)
    value = tl.where(usual, value, 0.0)
    upper = _upper(value)
    lower = value - upper
    high, low = _add(high, low, upper * upper)
    high, low = _add(high, low, (upper + upper) * lower)
    return high, low + lower * lower, rare


@triton.jit
def add_magnitudes(high, low, rare, value, AXIS: tl.constexpr):
    """:func:`add_products` for the absolute values of one tile."""
    size = tl.abs(value)
    if high.dtype == tl.float64:
        return high + size.to(tl.float64), low, rare
    usual = size <= LARGEST
    if _any(usual == 0):
        rare += tl.sum(tl.where(usual, 0.0, size.to(tl.float64)), axis=AXIS)
    high, low = _add(high, low, tl.where(usual, size, 0.0))
    return high, low, rare


@triton.jit
def _halves(tile, AXIS: tl.constexpr):
    if AXIS == 0:
        pairs = tl.permute(tl.reshape(tile, (2, tile.shape[0] // 2, tile.shape[1])), (1, 2, 0))
    else:
        pairs = tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1))
    return tl.split(pairs)


@triton.jit
def total(high, low, rare, AXIS: tl.constexpr, FOLDS: tl.constexpr):
    """The sums, float64; :func:`folds` says how often the lanes are halved in float32 before."""
    if FOLDS < 0:
        return tl.sum(high, axis=AXIS)
    for _ in tl.static_range(FOLDS):
        high, other_high = _halves(high, AXIS)
        low, other_low = _halves(low, AXIS)
        high, low = _add(high, low + other_low, other_high)
    return tl.sum(high.to(tl.float64) + low.to(tl.float64), axis=AXIS) + rare


def folds(lanes: int, axis: int, device: torch.device) -> int:
    """Halvings after which the lanes of a tile along ``axis`` are few, about one value a thread; or :data:`FLOAT64`."""
    return FLOAT64 if fast_in_float64(device) else max(0, (lanes // LANES[axis]).bit_length() - 1)


def fast_in_float64(device: torch.device) -> bool:
    """Check whether sums in float64 are hidden by the reading; Triton's interpreter acts as a consumer GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in FAST_FLOAT64
