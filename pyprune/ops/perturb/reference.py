"""Definition of the noisy weight and of its random numbers."""

from __future__ import annotations

import math

import torch

from pyprune.ops.philox import MASK, philox

CHUNK = 64
"""Normals are numbered in chunks of 16 Philox counters with 4 words each."""


def perturb(w0: torch.Tensor, delta: torch.Tensor, sigma: float, seed: int, offset: int) -> torch.Tensor:
    """``w + sigma |w| z`` with ``w = w0 + delta``, in float32 (float64 for float64), rounded once."""
    wide = w0.dtype if w0.dtype == torch.float64 else torch.float32
    w = w0.to(wide) + delta.to(wide)
    z = normals(w.numel(), seed, offset).to(device=w.device, dtype=wide).view(w.shape)
    return (w + w.abs() * sigma * z).to(w0.dtype)


def normals(count: int, seed: int, offset: int) -> torch.Tensor:
    """Standard normals number ``offset`` to ``offset + count - 1`` of a seed, float64 ``[count]``.

    Chunk c of 64 normals comes from the Philox counters 16 c to 16 c + 15. Word j of the k-th of them makes normal
    16 j + k. Words 0 and 1 are one Box-Muller pair, words 2 and 3 the other. The radius is
    ``sqrt(-2 ln((u + 1) / 2^24))`` with u the first word's upper 24 bits, the angle ``2 pi v / 2^32`` with v the second
    word. The first normal takes the cosine, the second the sine. No normal is beyond 5.77.
    """
    first, last = offset // CHUNK, -(-(offset + count) // CHUNK)
    counter = torch.arange(16 * first, 16 * last, dtype=torch.int64)
    zero = torch.zeros_like(counter)
    words = philox((counter & MASK, counter >> 32, zero, zero), (seed & MASK, seed >> 32))
    pairs = [_box_muller(words[0], words[1]), _box_muller(words[2], words[3])]
    rows = [z.view(-1, 16) for pair in pairs for z in pair]
    begin = offset - first * CHUNK
    return torch.stack(rows, dim=1).flatten()[begin : begin + count]


def _box_muller(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    uniform = ((first >> 8) + 1).double() / 2**24
    radius = (-2 * uniform.log()).sqrt()
    angle = second.double() * (2 * math.pi / 2**32)
    return radius * angle.cos(), radius * angle.sin()
