"""MoreauPruner's Theorem 1 with the isotropic noise it assumes, on a function with a closed form."""

from __future__ import annotations

import math

import pytest
import torch

from pyprune.errors import ScoreError
from pyprune.robustness.theorem import CASES, Kinks, check_theorem, moreau_gradient


def test_the_closed_forms_are_those_of_the_function() -> None:
    function = Kinks.random(2.0, dims=3)
    sigma = 0.7
    w = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    noise = sigma * torch.randn(400_000, 3, generator=generator, dtype=torch.float64)
    sampled = function.gradient(w + noise)
    error = sampled.std(0) / math.sqrt(len(noise))
    difference = (sampled.mean(0) - function.smoothed_gradient(w, sigma)).abs()
    assert (difference < 5 * error).all()
    # The theorem's noise has one sigma for all weights: another sigma gives another gradient.
    assert ((sampled.mean(0) - function.smoothed_gradient(w, 2 * sigma)).abs() > 20 * error).any()
    v = w.clone().requires_grad_()
    function.value(v).backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, function.gradient(w))


def test_beta_is_the_lipschitz_constant_and_is_reached() -> None:
    function = Kinks.random(3.0)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2000, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    slopes = (function.value(a) - function.value(b)).abs() / (a - b).norm(dim=1)
    assert slopes.max() <= 3.0 * (1 + 1e-12)
    assert function.gradient(a).norm(dim=1).max() == pytest.approx(3.0)
    middle, step = a / 2 + b / 2, 1e-3 * torch.randn(6, generator=generator, dtype=torch.float64)
    bends = function.value(middle - step) + function.value(middle + step) - 2 * function.value(middle)
    assert bends.min() < 0 < bends.max(), "neither convex nor concave"


def test_the_proximal_point_is_the_minimiser_of_the_envelope() -> None:
    function, sigma, rho = Kinks.random(1.0, dims=2), 1.0, 0.8
    w = torch.tensor([0.4, -0.3], dtype=torch.float64)
    found = w - rho * moreau_gradient(lambda v: function.smoothed_gradient(v, sigma), w, rho)

    def objective(v: torch.Tensor) -> torch.Tensor:
        m = v @ function.directions.T - function.offsets
        z = m / (sigma * math.sqrt(2))
        smooth = (function.weights * (sigma * math.sqrt(2 / math.pi) * torch.exp(-(z**2)) + m * torch.erf(z))).sum(-1)
        return smooth + (v - w).square().sum(-1) / (2 * rho)

    axis = torch.linspace(-3, 3, 601, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    best = grid[objective(grid).argmin()]
    assert (found - best).abs().max() <= 0.01
    assert objective(found) <= objective(best)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_proved_bound_holds_and_is_not_vacuous(case: tuple[float, float, float], seed: int) -> None:
    check = check_theorem(*case, seed=seed)
    assert check.moreau <= check.proved
    assert check.moreau > 0.2 * check.proved, "a bound far above everything that happens says nothing"
    assert check.plain > 100 * max(check.proved, check.printed), "the gradient itself has no such bound"


@pytest.mark.parametrize("case", [c for c in CASES if c[0] <= c[1]])
def test_the_printed_bound_holds_where_beta_is_at_most_sigma(case: tuple[float, float, float]) -> None:
    check = check_theorem(*case)
    assert check.moreau <= check.printed
    assert check.proved <= check.printed


def test_the_printed_bound_is_broken_where_beta_is_larger_than_sigma() -> None:
    check = check_theorem(10.0, 1.0, 0.08)
    assert check.printed == pytest.approx(12.5)
    assert check.printed < check.moreau <= check.proved
    # In one dimension by hand: E(-beta |w + u|) has the curvature -c at 0, and its envelope -c / (1 - rho c).
    curvature = 10 * math.sqrt(2 / math.pi)
    assert curvature / (1 - 0.08 * curvature) > check.printed


def test_noise_relative_to_the_weight_is_not_covered() -> None:
    """E|w + sigma |w| z| = k |w|: the kink at 0 stays, so that the envelope's gradient jumps there."""
    sigma, rho, beta = 0.5, 0.2, 1.0
    z = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = float((1 + sigma * z).abs().mean())

    def gradient(w: torch.Tensor) -> torch.Tensor:
        return -beta * k * w.sign()

    w = torch.tensor([-1e-6, 1e-6], dtype=torch.float64)
    below, above = moreau_gradient(gradient, w, rho).tolist()
    bound = max(1 / rho, beta / (sigma - rho * beta), sigma / (sigma - rho * beta))
    assert abs(above - below) / 2e-6 > 1e4 * bound
    # The same function, noise and pair with isotropic noise of that sigma:
    smooth = moreau_gradient(lambda v: -beta * torch.erf(v / (sigma * math.sqrt(2))), w, rho)
    assert float((smooth[1] - smooth[0]).abs()) / 2e-6 <= bound


@pytest.mark.parametrize("rho", [0.0, 1.0, 2.0])
def test_what_the_theorem_excludes_is_refused(rho: float) -> None:
    with pytest.raises(ScoreError, match="0 < rho < sigma/beta"):
        check_theorem(1.0, 1.0, rho)


def test_a_proximal_point_that_is_not_reached_is_an_error() -> None:
    with pytest.raises(ScoreError, match="did not converge"):
        moreau_gradient(lambda v: 3 * v, torch.ones(1, dtype=torch.float64), 1.0)
