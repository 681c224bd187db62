"""Device functions shared by the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_storage(value, dtype: tl.constexpr):
    """Round float32 to ``dtype``, to nearest with ties to even.

    For bfloat16 the rounding is done on the bits, because Triton's interpreter truncates; the conversion that follows
    is then exact everywhere.
    """
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(value == value, rounded, bits | 0x400000)
        return rounded.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return value.to(dtype)


@triton.jit
def shrink_scale(squared_norm, threshold):
    """Factor of a group in the group soft-threshold; 0 for a group that goes."""
    norm = tl.sqrt(squared_norm)
    # The comparison is false for NaN, so that a NaN reaches the whole group. A zero norm is replaced only to
    # keep the branch that is not taken from dividing by it.
    return tl.where(norm <= threshold, 0.0, 1.0 - threshold / tl.where(norm == 0.0, 1.0, norm))
