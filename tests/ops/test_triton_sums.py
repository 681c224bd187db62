"""The sums of the Triton kernels, pairs of float32 numbers or float64 as a GPU needs it, against sums in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyprune.ops import group_penalty, moreau_step, residual_diff_norm, triton_sums
from pyprune.ops.group_importance.reference import member_scores as exact_scores

# Triton's interpreter computes in numpy, which warns of products that float32 cannot hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# The sizes of a projection of a 7B model: so long are its rows and its columns.
ROW, COLUMN = 11008, 4096
DTYPES = [torch.float32, torch.bfloat16]
OFFSET = 1000.0
"""Much larger than the weights, so that a plain float32 sum loses what distinguishes them."""

ADDITIONS = 3 * 8 + 4
"""At most, to one lane: three for each product of its eight tiles, and four when lanes are folded."""
BOUND = ADDITIONS**2 * 2.0**-49
"""Relative to the sum of the terms' sizes, 1.4e-12. Each addition leaves at most 2**-24 of that in the lower number of
the pair and no addition to the lower one loses more than 2**-25 of what has gathered there, half a unit."""


@pytest.fixture(autouse=True, params=["consumer", "data centre"])
def _triton(
    use_backend: Callable[[str], None], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to sum; the interpreter takes the first by itself."""
    use_backend("triton")
    if request.param == "data centre":
        monkeypatch.setattr(triton_sums, "fast_in_float64", lambda device: True)


@pytest.mark.parametrize(("capability", "fast"), [((8, 0), True), ((8, 9), False), ((9, 0), True), ((12, 0), False)])
def test_a_gpu_is_known_by_its_capability(
    capability: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton_sums.fast_in_float64(torch.device("cuda")) is fast
    assert (triton_sums.folds(2048, 1, torch.device("cuda")) < 0) is fast
    assert triton_sums.folds(2048, 1, torch.device("cpu")) == 4


def matrix(axis: int, groups: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some whole rows, or columns, of a large projection."""
    shape = (groups, ROW) if axis == 0 else (COLUMN, groups)
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def within(result: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> None:
    error = (result - exact).abs()
    assert (error <= BOUND * sizes).all(), f"{(error / sizes).max():.1e} of the terms, allowed {BOUND:.1e}"


@pytest.mark.parametrize("offset", [0.0, OFFSET])
@pytest.mark.parametrize("kind", ["l1", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_group_sums(axis: int, dtype: torch.dtype, kind: str, offset: float) -> None:
    from pyprune.ops.group_penalty.triton import group_sums

    w = matrix(axis, 3, dtype=dtype)
    value = (w.float() + offset).double()
    exact = (value.abs() if kind == "l1" else value.square()).sum(1 - axis)
    index = torch.arange(3)
    within(group_sums(w, index, axis, kind, offset), exact, exact)
    # The result is that of the definition, rounded once.
    penalty = (exact if kind == "l1" else exact.sqrt()).sum()
    assert abs(group_penalty(w, index, axis, kind, offset=offset).double() - penalty) <= 2.0**-23 * penalty


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_importance(axis: int, dtype: torch.dtype, signed: bool) -> None:
    """Products of all signs, which nearly cancel: what is left is small against the terms."""
    from pyprune.ops.group_importance.triton import member_scores

    score, w = matrix(axis, 3, dtype=dtype), matrix(axis, 3, 1, dtype)
    exact, sizes = (exact_scores(score, w, axis, own, OFFSET) for own in (signed, False))
    within(member_scores(score, w, axis, signed, OFFSET), exact, sizes)


@pytest.mark.parametrize("eta", [0.0, 1e-3])
@pytest.mark.parametrize("axis", [0, 1])
def test_moreau_step(axis: int, eta: float) -> None:
    delta, grad = matrix(axis, 3) + 1, matrix(axis, 3, 1)
    before = delta.clone()
    sums = moreau_step(delta, grad, 0.1, 0.4, eta, axis)
    for own, value in zip(sums, (delta - before, delta), strict=True):
        exact = value.double().square().sum()
        within(own, exact, exact)


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_residual_diff_norm(kind: str) -> None:
    x_in, x_out = matrix(0, 2), matrix(0, 2, 1) + OFFSET
    norms = torch.linalg.vector_norm((x_out - x_in).double(), ord=int(kind[1]), dim=1)
    assert abs(residual_diff_norm(x_in, x_out, kind).double() - norms.mean()) <= 2.0**-23 * norms.mean()


EXPONENTS = {"small": (-140, -45), "large": (40, 63), "both": (-140, 63), "around the limits": (-55, -45)}


@pytest.mark.parametrize("exponents", EXPONENTS.values(), ids=EXPONENTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_terms_that_float32_cannot_hold(axis: int, exponents: tuple[int, int]) -> None:
    """Squares far below and above float32's numbers, some of them in every tile."""
    from pyprune.ops.group_penalty.triton import group_sums

    shape = (3, 500) if axis == 0 else (500, 3)
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(*exponents, shape, generator=generator).double()
    w = (torch.randn(shape, generator=generator).double() * 2.0**powers).float()
    exact = w.double().square().sum(1 - axis)
    within(group_sums(w, torch.arange(3), axis, "l2", 0.0), exact, exact)


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_infinity_and_zero(axis: int) -> None:
    from pyprune.ops.group_penalty.triton import group_sums

    w = torch.ones(4, 300)
    w[0, 7], w[1, 8], w[1, 200], w[2] = math.nan, math.inf, -math.inf, 0.0
    w = w if axis == 0 else w.t().contiguous()
    for kind in ("l1", "l2"):
        sums: list[Any] = group_sums(w, torch.arange(4), axis, kind, 0.0).tolist()
        assert math.isnan(sums[0])
        assert sums[1:] == [math.inf, 0.0, 300.0]
