"""The random bits of stochastic rounding: Philox4x32-10 (Salmon et al., 2011), in plain torch.

Element i of a flat tensor lies in block i // 128, at part (i % 128) // 16 and lane i % 16. Its 16 bits are half
``part // 4`` (0 = low) of word ``part % 4`` of the counter ``(16 * block + lane, purpose, step, stream)`` under the
64-bit key ``seed``. They depend on nothing else, so neither threads nor instruction sets change a rounding.
"""

from __future__ import annotations

import torch

BLOCK = 128
LANES = 16
PARTS = BLOCK // LANES
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, int, int, int], seed: int) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words for each counter, as int64.

    Args:
        counter: four 32-bit words; the first is an int64 tensor.
        seed: the 64-bit key.
    """
    c0 = counter[0]
    c1, c2, c3 = (torch.full_like(c0, word & _MASK) for word in counter[1:])
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a * b; int64 wraps, which leaves the low 32 bits right."""
    high = ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16
    return high, (a * b) & _MASK


def random16(count: int, seed: int, purpose: int, step: int, stream: int, device: torch.device) -> torch.Tensor:
    """16 random bits for each of ``count`` elements, int64 ``[count]``."""
    blocks = -(-count // BLOCK)
    lanes = torch.arange(blocks * LANES, dtype=torch.int64, device=device) & _MASK
    words = torch.stack(philox((lanes, purpose, step, stream), seed)).view(4, blocks, LANES)
    parts = torch.cat([words & 0xFFFF, words >> 16])  # [8 parts, blocks, lanes]
    return parts.transpose(0, 1).reshape(-1)[:count]
