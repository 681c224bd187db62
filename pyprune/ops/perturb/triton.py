"""Triton kernel of the noisy weight. ``reference.py`` is the definition, with the numbering of the normals.

The polynomials are those of the C++ kernel: Cephes' logf, sinf and cosf after a reduction in integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.perturb.reference import CHUNK
from pyprune.ops.triton_launch import launch, load_float32, to_storage

COUNTERS = 256


@triton.jit
def _minus_log(k):
    """-ln((k + 1) / 2^24)"""
    bits = (k + 1).to(tl.float32).to(tl.int32, bitcast=True)
    shift = (bits - 0x3F3504F3) >> 23
    x = (bits - (shift << 23)).to(tl.float32, bitcast=True) - 1.0
    exponent = (shift - 24).to(tl.float32)
    y = x * 7.0376836292e-2 - 1.1514610310e-1
    y = y * x + 1.1676998740e-1
    y = y * x - 1.2420140846e-1
    y = y * x + 1.4249322787e-1
    y = y * x - 1.6668057665e-1
    y = y * x + 2.0000714765e-1
    y = y * x - 2.4999993993e-1
    y = y * x + 3.3333331174e-1
    square = x * x
    y = y * x * square - exponent * 2.12194440e-4 - square * 0.5
    # Without tl.maximum a fused multiply-add could leave a negative zero's neighbour under the root.
    return tl.maximum(-(exponent * 0.693359375 + (x + y)), 0.0)


@triton.jit
def _turn(word):
    """Cosine and sine of 2 pi word / 2^32"""
    quarter = (word + 0x20000000) >> 30
    angle = (word - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-9
    z = angle * angle
    s = ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1) * z * angle + angle
    c = ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - z * 0.5 + 1.0
    odd = (quarter & 1) == 1
    cosine, sine = tl.where(odd, s, c), tl.where(odd, c, s)
    cosine = tl.where(((quarter + 1) & 2) == 2, -cosine, cosine)
    return cosine, tl.where((quarter & 2) == 2, -sine, sine)


@triton.jit
def _write(w0, delta, out, z, number, offset, count, sigma):
    element = number - offset
    inside = (element >= 0) & (element < count)
    w = load_float32(w0 + element, inside)
    w += load_float32(delta + element, inside)
    value = w + tl.abs(w) * sigma * z
    tl.store(out + element, to_storage(value, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "offset", "first", "count"])
def _perturb(w0, delta, out, count, sigma, seed, offset, first, COUNTERS: tl.constexpr):
    """One program a block of counters, four normals each."""
    counter = first.to(tl.int64) + tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    zero = tl.zeros((COUNTERS,), dtype=tl.uint32)
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    x0, x1, x2, x3 = tl.philox(seed, low, high, zero, zero)
    number = (counter >> 4) * 64 + (counter & 15)
    # Correctly rounded: a GPU's tl.sqrt is an approximation in float32.
    radius = tl.sqrt_rn(_minus_log((x0 >> 8).to(tl.int32)) * 2.0)
    cosine, sine = _turn(x1)
    _write(w0, delta, out, radius * cosine, number, offset, count, sigma)
    _write(w0, delta, out, radius * sine, number + 16, offset, count, sigma)
    radius = tl.sqrt_rn(_minus_log((x2 >> 8).to(tl.int32)) * 2.0)
    cosine, sine = _turn(x3)
    _write(w0, delta, out, radius * cosine, number + 32, offset, count, sigma)
    _write(w0, delta, out, radius * sine, number + 48, offset, count, sigma)


def perturb(w0: torch.Tensor, delta: torch.Tensor, out: torch.Tensor, sigma: float, seed: int, offset: int) -> None:
    """Write the noisy weight into ``out``.

    Args:
        w0: ``[count]``, contiguous, float32, bfloat16 or float16; count > 0.
        delta: like ``w0``.
        out: like ``w0``; may be ``w0`` or ``delta``.
        sigma: standard deviation of the noise relative to the weight.
        seed: 0 <= seed < 2^64.
        offset: number of the first element's normal.
    """
    first, last = offset // CHUNK, -(-(offset + w0.numel()) // CHUNK)
    grid = (triton.cdiv((last - first) * 16, COUNTERS),)
    # The same 64 bits as a signed number, which is what a scalar argument may hold.
    signed = seed - 2**64 if seed >= 2**63 else seed
    launch(_perturb, grid, w0, delta, out, w0.numel(), sigma, signed, offset, 16 * first, COUNTERS=COUNTERS)
