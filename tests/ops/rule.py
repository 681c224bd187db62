"""The tolerance rule: an implementation may be at most twice as wrong as plain low-precision torch."""

from __future__ import annotations

import torch


def assert_within_rule(out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Check ``|out - exact| <= 2 |plain - exact|`` in the largest element.

    Args:
        out: what the implementation under test returned.
        exact: the float64 reference on the same (rounded) inputs.
        plain: the same formula in torch, every step in ``out``'s dtype.
    """
    assert out.dtype == plain.dtype
    assert out.shape == exact.shape
    error = (out.double() - exact).abs()
    assert not torch.isnan(error).any(), "an element was not written, or is NaN without reason"
    allowed = 2 * (plain.double() - exact).abs().max()
    assert error.max() <= allowed, f"error {error.max():.3e}, allowed {allowed:.3e}"
