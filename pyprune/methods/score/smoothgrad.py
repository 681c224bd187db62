"""SmoothGrad: the Taylor score with the gradient averaged over noisy weights (Wang et al., section 5.1)."""

from __future__ import annotations

from pyprune.methods.score._descent import score_by_smooth_gradient
from pyprune.methods.score.base import score_method

METHOD = score_method(
    "smoothgrad", "SmoothGrad: first-order scores from gradients averaged over noisy weights.", score_by_smooth_gradient
)
