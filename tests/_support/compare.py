"""Comparisons with one stated tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32_ROUNDING = 1e-5
"""Largest difference, relative to the largest logit, that float32 rounding of two equal networks explains."""


def assert_same_logits(actual: Tensor, expected: Tensor, tolerance: float = FLOAT32_ROUNDING) -> None:
    """Fail unless ``max |actual - expected| <= tolerance * max |expected|`` and everything is finite."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert torch.isfinite(actual).all()
    assert torch.isfinite(expected).all()
    scale = expected.abs().max().item()
    difference = (actual - expected).abs().max().item()
    assert difference <= tolerance * scale, f"differs by {difference:.3g} at a scale of {scale:.3g}"
