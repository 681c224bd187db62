"""The random bits of stochastic rounding: Philox4x32-10 (Salmon et al., 2011), in plain torch.

Element i of a flat tensor lies in block i // 128, at part (i % 128) // 16 and lane i % 16. Its 16 bits are half
``part // 4`` (0 = low) of word ``part % 4`` of the counter ``(16 * block + lane, purpose, step, stream)`` under the
64-bit key ``seed``. They depend on nothing else, so neither threads nor instruction sets change a rounding.
"""

from __future__ import annotations

import torch

from pyprune.ops.philox import MASK, philox

BLOCK = 128
LANES = 16


def random16(count: int, seed: int, purpose: int, step: int, stream: int, device: torch.device) -> torch.Tensor:
    """16 random bits for each of ``count`` elements, int64 ``[count]``."""
    blocks = -(-count // BLOCK)
    lanes = torch.arange(blocks * LANES, dtype=torch.int64, device=device) & MASK
    others = (torch.full_like(lanes, word & MASK) for word in (purpose, step, stream))
    words = torch.stack(philox((lanes, *others), (seed & MASK, (seed >> 32) & MASK))).view(4, blocks, LANES)
    parts = torch.cat([words & 0xFFFF, words >> 16])  # [8 parts, blocks, lanes]
    return parts.transpose(0, 1).reshape(-1)[:count]
