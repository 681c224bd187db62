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
