from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import OpError, available_isas, group_soft_threshold, moreau_step
from pyprune.ops.moreau_step import reference
from tests.ops.properties import examples
from tests.ops.rule import assert_equal_for_every_isa_and_thread_count, assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 1), (3, 5), (33, 65), (5, 2049), (130, 129), (601, 70)]
GAMMA, RHO, ETA = 0.1, 0.4, 8.0


def tensors(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Displacement and gradient; row 1 and column 1 are zero, row 2 and column 2 small enough to be removed."""
    generator = torch.Generator().manual_seed(seed)
    pair = []
    for _ in range(2):
        x = torch.randn(rows, cols, generator=generator)
        for view in (x, x.t()):
            if len(view) > 2:
                view[1] = 0
                view[2] *= 1e-3
        pair.append(x.to(dtype))
    return pair[0], pair[1]


def exact_step(delta: torch.Tensor, grad: torch.Tensor, eta: float, axis: int) -> torch.Tensor:
    """The reference in float64, on the scalars that every backend rounds to float32."""
    scalars = torch.tensor([1 - GAMMA / RHO, GAMMA, GAMMA * eta]).tolist()
    wide = delta.double()
    reference(wide, grad.double(), *scalars, axis)
    return wide


def stepped(delta: torch.Tensor, grad: torch.Tensor, eta: float, axis: int) -> torch.Tensor:
    """The op on a copy of the displacement."""
    result = delta.clone()
    moreau_step(result, grad, GAMMA, RHO, eta, axis)
    return result


def sums_of(before: torch.Tensor, after: torch.Tensor) -> list[float]:
    """What a step has to return: of what is stored, differences in float32, squares and sums in float64."""
    wide = torch.float64 if before.dtype == torch.float64 else torch.float32
    change = after.to(wide) - before.to(wide)
    return [change.double().square().sum().item(), after.double().square().sum().item()]


def plain_step(delta: torch.Tensor, grad: torch.Tensor, eta: float, axis: int) -> torch.Tensor:
    """The formula as one would write it, every step in the tensors' own dtype."""
    x = delta * (1 - GAMMA / RHO) - grad * GAMMA
    if eta == 0:
        return x
    norm = x.norm(dim=1 - axis, keepdim=True)
    return torch.where(norm <= GAMMA * eta, torch.zeros_like(x), x * (1 - GAMMA * eta / norm))


@pytest.mark.parametrize("eta", [0.0, ETA])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int, eta: float) -> None:
    delta, grad = tensors(*shape, dtype)
    exact, plain = exact_step(delta, grad, eta, axis), plain_step(delta, grad, eta, axis)
    before, grad_before, version = delta.clone(), grad.clone(), delta._version
    sums = moreau_step(delta, grad, GAMMA, RHO, eta, axis)
    assert delta._version > version, "autograd must learn that the tensor changed"
    assert_within_rule(delta, exact, plain)
    assert [x.dtype for x in sums] == [torch.float64] * 2
    assert [float(x) for x in sums] == pytest.approx(sums_of(before, delta), rel=1e-12)
    assert torch.equal(delta == 0, exact.to(dtype) == 0), "the removed groups differ"
    assert torch.equal(grad, grad_before)


def test_equals_the_papers_update_of_the_weight(backend: str) -> None:
    """Algorithm 1 on the weight, in float64, against the displacement form, over ten steps."""
    generator = torch.Generator().manual_seed(0)
    w0 = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    w, delta = w0.clone(), torch.zeros(6, 40)
    for _ in range(10):
        grad = torch.randn(6, 40, generator=generator, dtype=torch.float64)
        w = (1 - GAMMA / RHO) * w - GAMMA * (grad - w0 / RHO)
        w = group_soft_threshold_float64(w - w0, GAMMA * 0.5) + w0
        moreau_step(delta, grad.float(), GAMMA, RHO, 0.5, 0)
    assert torch.allclose(delta.double(), w - w0, atol=1e-6)


def group_soft_threshold_float64(x: torch.Tensor, threshold: float) -> torch.Tensor:
    norm = x.norm(dim=1, keepdim=True)
    return x * (1 - threshold / norm).clamp(min=0)


def test_is_step_then_threshold(backend: str) -> None:
    delta, grad = tensors(33, 65, torch.float32)
    expected = group_soft_threshold(stepped(delta, grad, 0.0, 1), range(delta.shape[1]), 1, GAMMA * ETA)
    assert torch.allclose(stepped(delta, grad, ETA, 1), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("eta", [0.0, ETA])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    axis: int, dtype: torch.dtype, eta: float, use_backend: Callable[[str], None]
) -> None:
    # As a vector the elements are groups of one; without a threshold they are summed in runs of 4096.
    pairs = [tensors(131, 517, dtype), tuple(x.view(-1) for x in tensors(131, 517, dtype))]

    def run() -> list[torch.Tensor]:
        results = []
        for delta, grad in pairs:
            own = delta.clone()
            results += [*moreau_step(own, grad, GAMMA, RHO, eta, axis % own.dim()), own]
        return results

    assert_equal_for_every_isa_and_thread_count(use_backend, run)


@pytest.mark.second
@examples(25)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    axis=st.integers(0, 1),
    eta=st.one_of(st.just(0.0), st.floats(0, 50)),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend: str, rows: int, cols: int, axis: int, eta: float, seed: int) -> None:
    delta, grad = tensors(rows, cols, torch.float32, seed)
    exact, before = exact_step(delta, grad, eta, axis), delta.clone()
    scale = delta.abs().max() + grad.abs().max()
    sums = moreau_step(delta, grad, GAMMA, RHO, eta, axis)
    assert (delta.double() - exact).abs().max() <= 4e-7 * scale
    assert [float(x) for x in sums] == pytest.approx(sums_of(before, delta), rel=1e-12)


def test_nan_and_infinity(backend: str) -> None:
    delta, grad = torch.ones(4, 6), torch.ones(4, 6)
    grad[0, 3] = math.nan
    delta[1, 2] = math.inf
    plain = stepped(delta, grad, 0.0, 0)
    assert torch.isnan(plain).sum() == 1
    assert plain[1, 2] == math.inf
    grouped = stepped(delta, grad, ETA, 0)
    assert torch.isnan(grouped[0]).all()
    assert torch.equal(grouped[1], plain[1])
    assert torch.isfinite(grouped[2:]).all()
    for eta in (0.0, ETA):
        rows = [tuple(x[k : k + 1].clone() for x in (delta, grad)) for k in range(3)]
        sums = torch.stack([torch.stack(moreau_step(*pair, GAMMA, RHO, eta, 0)) for pair in rows])
        assert torch.isnan(sums[0]).all()
        assert torch.isnan(sums[1, 0])
        assert sums[1, 1] == math.inf
        assert torch.isfinite(sums[2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eta", [0.0, 2.0**-10])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_squares_beyond_float32(backend: str, axis: int, eta: float, dtype: torch.dtype) -> None:
    """Displacements of early steps are so small that their squares vanish in float32."""
    for size in (2.0**-90, 2.0**90):
        delta, grad = torch.full((6, 70), size, dtype=dtype), torch.zeros(6, 70, dtype=dtype)
        before = delta.clone()
        moved, after = moreau_step(delta, grad, 0.25, 1.0, eta * size, axis)
        assert [float(moved), float(after)] == pytest.approx(sums_of(before, delta), rel=1e-12)
        assert float(moved) == pytest.approx(420 * (0.25 * size) ** 2, rel=1e-2)


def test_vectors_empty_and_non_contiguous_gradients(backend: str) -> None:
    vector = torch.tensor([1.0, -2.0])
    moreau_step(vector, torch.zeros(2), 0.1, 0.2, 1.0, 0)
    assert torch.allclose(vector, torch.tensor([0.4, -0.9]))
    nothing = torch.zeros(0, 3)
    assert [float(x) for x in moreau_step(nothing, torch.zeros(0, 3), 0.1, 0.2, 1.0, 0)] == [0.0, 0.0]
    delta, grad = tensors(9, 7, torch.float32)
    assert torch.equal(stepped(delta, grad.t().contiguous().t(), ETA, 0), stepped(delta, grad, ETA, 0))


def test_bad_arguments() -> None:
    delta, grad = torch.ones(3, 4), torch.ones(3, 4)
    with pytest.raises(OpError, match="rho is 0"):
        moreau_step(delta, grad, 0.1, 0.0, 0.0, 0)
    with pytest.raises(OpError, match="gamma is -1"):
        moreau_step(delta, grad, -1.0, 1.0, 0.0, 0)
    with pytest.raises(OpError, match="eta is nan"):
        moreau_step(delta, grad, 0.1, 1.0, math.nan, 0)
    with pytest.raises(OpError, match="shape"):
        moreau_step(delta, grad[:2], 0.1, 1.0, 0.0, 0)
    with pytest.raises(OpError, match="dtype"):
        moreau_step(delta, grad.half(), 0.1, 1.0, 0.0, 0)
    with pytest.raises(OpError, match="contiguous"):
        moreau_step(delta.t(), grad.t(), 0.1, 1.0, 0.0, 0)
    assert torch.equal(delta, torch.ones(3, 4))
