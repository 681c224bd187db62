"""Second moments of activations: sums of x x^T over tokens."""

from __future__ import annotations

from torch import Tensor

_PANELS = 8
_NARROWEST = 128
"""Panels of fewer columns than this cost more in calls than they save in products."""


def add_moments_(total: Tensor, x: Tensor) -> Tensor:
    """Add x^T x to ``total`` in place; return it.

    A matrix product would compute every pair of columns twice. Here each panel of columns is multiplied with itself and
    the panels after it, and the part below the diagonal is copied: 9/16 of the products with eight panels.

    Args:
        total: [n, n]; symmetric except for rounding, before and after.
        x: [tokens, n], of the same dtype and device.
    """
    size = x.shape[1]
    width = max(_NARROWEST, -(-size // _PANELS))
    for start in range(0, size, width):
        end = min(start + width, size)
        products = x[:, start:end].T @ x[:, start:]
        total[start:end, start:] += products
        total[end:, start:end] += products[:, end - start :].T
    return total
