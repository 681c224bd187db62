"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
"""Of a 32-bit word."""


def philox(counter: Sequence[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Random words of counters.

    Args:
        counter: four int64 tensors that hold 32-bit words.
        key: two 32-bit words.

    Returns:
        Four int64 tensors that hold 32-bit words.
    """
    x0, x1, x2, x3 = counter
    key0, key1 = key
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(x0, _MULTIPLIERS[0]), _product(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high2 ^ x1 ^ key0, low2, high0 ^ x3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & MASK, (key1 + _KEY_STEPS[1]) & MASK
    return [x0, x1, x2, x3]


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower word of a product of 32-bit words, in halves that int64 can hold."""
    lower = a * (b & 0xFFFF)
    upper = a * (b >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)
