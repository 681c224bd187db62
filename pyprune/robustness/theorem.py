"""Theorem 1 of MoreauPruner, checked on a function whose Gaussian smoothing has a closed form.

The theorem: let g be beta-Lipschitz, g_s(w) = E g(w + u) with isotropic noise u ~ N(0, sigma^2 I), and
0 < rho < sigma/beta. Then the gradient of the Moreau envelope of g_s is Lipschitz with the constant

    printed:  sigma / min(sigma rho, sigma - rho beta)  =  max(1/rho, sigma / (sigma - rho beta))
    proved:                                                max(1/rho, beta  / (sigma - rho beta))

The two differ by a slip in the last line of the paper's proof (appendix A.1), whose left side, max{|sigma/(sigma -
rho beta) - 1|, 1}/rho, is the second form. Both hold where beta <= sigma. Where beta > sigma the printed constant can
be too small, and the check finds a function that breaks it; the proved one held everywhere.

Here g(w) = sum_k c_k |a_k . w - t_k| with orthonormal a_k and c of both signs: neither convex nor smooth, beta = |c|
exactly, and the gradient of g itself jumps, so that no such constant exists for it.

None of this covers the noise of the paper's experiments, N(0, (sigma |w|)^2) per weight, which vanishes where w does:
a kink at w = 0 stays one (E|w + sigma |w| z| is a multiple of |w|), and no bound of this form holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyprune.errors import ScoreError

TOLERANCE = 1e-13
MOST_STEPS = 10_000
CASES = ((1.0, 1.0, 0.5), (1.0, 1.0, 0.9), (0.2, 1.0, 4.0), (1.0, 0.05, 0.02), (10.0, 1.0, 0.08))
"""(beta, sigma, rho) of the default check; beta <= sigma in the first three."""

NOTE = (
    "Slopes |F(w1) - F(w2)| / |w1 - w2| of a function with kinks, isotropic noise N(0, sigma^2 I). As printed the "
    "bound is max(1/rho, sigma/(sigma - rho beta)); its proof gives beta instead of sigma above the line, which "
    "matters where beta > sigma. Noise relative to each weight, as the method uses it, is not covered by the theorem."
)


@dataclass(frozen=True)
class Kinks:
    """g(w) = sum_k c_k |a_k . w - t_k|.

    Attributes:
        directions: the a_k, orthonormal rows, float64 [K, d].
        weights: the c_k, float64 [K].
        offsets: the t_k, float64 [K].
    """

    directions: Tensor
    weights: Tensor
    offsets: Tensor

    @classmethod
    def random(cls, beta: float, *, dims: int = 6, seed: int = 0) -> Kinks:
        """Draw as many kinks as dimensions; the first is concave and holds nearly all of beta."""
        generator = torch.Generator().manual_seed(seed)
        normals = torch.randn(dims, dims, generator=generator, dtype=torch.float64)
        weights = 0.1 * torch.randn(dims, generator=generator, dtype=torch.float64)
        weights[0] = -1.0
        offsets = torch.randn(dims, generator=generator, dtype=torch.float64)
        return cls(torch.linalg.qr(normals).Q, beta * weights / weights.norm(), offsets)

    @property
    def beta(self) -> float:
        """The Lipschitz constant of g."""
        return float(self.weights.norm())

    def value(self, w: Tensor) -> Tensor:
        """g, float64 [...] for w [..., d]."""
        return (self.weights * (w @ self.directions.T - self.offsets).abs()).sum(-1)

    def gradient(self, w: Tensor) -> Tensor:
        """The gradient of g, float64 [..., d]."""
        return (self.weights * (w @ self.directions.T - self.offsets).sign()) @ self.directions

    def smoothed_gradient(self, w: Tensor, sigma: float) -> Tensor:
        """The gradient of E g(w + u), u ~ N(0, sigma^2 I), in closed form, float64 [..., d]."""
        at = (w @ self.directions.T - self.offsets) / (sigma * math.sqrt(2))
        return (self.weights * torch.erf(at)) @ self.directions


def moreau_gradient(gradient: Callable[[Tensor], Tensor], w: Tensor, rho: float) -> Tensor:
    """The gradient of the Moreau envelope, (w - v)/rho with v = argmin f(v) + |v - w|^2 / (2 rho) (equation 10).

    Iterates v <- w - rho grad f(v), which converges to the one minimiser where rho times the Lipschitz constant of
    grad f is below 1 (for f = g_s: rho < sigma/beta).

    Args:
        gradient: of f, [..., d] -> [..., d].
        w: float64 [..., d].
        rho: of the envelope.

    Raises:
        ScoreError: no convergence; rho is too large for f.
    """
    v = w
    for _ in range(MOST_STEPS):
        before, v = v, w - rho * gradient(v)
        if float((v - before).abs().max()) <= TOLERANCE * (1 + float(w.abs().max())):
            return (w - v) / rho
    raise ScoreError(f"The proximal point did not converge with rho {rho}; use a smaller rho (below sigma/beta).")


@dataclass(frozen=True)
class TheoremCheck:
    """The largest slope |F(w1) - F(w2)| / |w1 - w2| over many pairs, and the bounds.

    Attributes:
        beta, sigma, rho: the constants.
        moreau: F = gradient of the Moreau envelope of the smoothed function.
        plain: F = gradient of g itself.
        printed: the theorem's constant as the paper states it.
        proved: the constant that its proof gives.
    """

    beta: float
    sigma: float
    rho: float
    moreau: float
    plain: float
    printed: float
    proved: float


def check_theorem(beta: float, sigma: float, rho: float, *, pairs: int = 4000, seed: int = 0) -> TheoremCheck:
    """Measure both slopes on seeded pairs, 1e-4 to 10 sigma apart, half of them across the concave kink.

    Raises:
        ScoreError: rho is outside (0, sigma/beta), which the theorem excludes.
    """
    if not 0 < rho < sigma / beta:
        raise ScoreError(f"rho is {rho}; the theorem needs 0 < rho < sigma/beta = {sigma / beta:.4g}.")
    function = Kinks.random(beta, seed=seed)
    first, second = _pairs(function, sigma, pairs, seed)

    def envelope(w: Tensor) -> Tensor:
        return moreau_gradient(lambda v: function.smoothed_gradient(v, sigma), w, rho)

    return TheoremCheck(
        beta,
        sigma,
        rho,
        moreau=_slope(envelope, first, second),
        plain=_slope(function.gradient, first, second),
        printed=sigma / min(sigma * rho, sigma - rho * beta),
        proved=max(1 / rho, beta / (sigma - rho * beta)),
    )


def _pairs(function: Kinks, sigma: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    across = function.directions[0]
    middle = sigma * torch.randn(count, len(across), generator=generator, dtype=torch.float64)
    half = count // 2
    middle[:half] += (function.offsets[0] - middle[:half] @ across)[:, None] * across
    towards = torch.randn(count, len(across), generator=generator, dtype=torch.float64)
    towards[: half // 2] = across
    sizes = sigma * 10 ** (torch.rand(count, 1, generator=generator, dtype=torch.float64) * 5 - 4)
    step = towards / towards.norm(dim=1, keepdim=True) * sizes
    return middle - step / 2, middle + step / 2


def _slope(field: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> float:
    return float(((field(first) - field(second)).norm(dim=1) / (first - second).norm(dim=1)).max())
