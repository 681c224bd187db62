"""What docs/reference/kernels.md says about subnormal numbers, for every op, backend and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from pyprune import ops
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw
from tests.ops.test_group_penalty import DTYPES

Run = Callable[[torch.dtype, torch.dtype], list[torch.Tensor]]
"""An op on tiny numbers of the first dtype, held in the second: the results, the weight-like ones first."""

# Triton's interpreter computes in numpy, which warns of what is too small or divided by zero.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

ROWS, COLS = 37, 41
INDEX = torch.tensor([0, 3, 7, 20, 36])
SMALLEST_FLOAT32 = 2.0**-126


def spacing(dtype: torch.dtype) -> float:
    """The smallest subnormal number, which is the distance between two of them."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def tiny(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    """Numbers from the smallest subnormal one to four times the smallest normal one, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    share, sign, kept = torch.rand(3, *(shape or (ROWS, COLS)), generator=generator, dtype=torch.float64)
    size = spacing(dtype) * (4 / torch.finfo(dtype).eps) ** share
    return (size * torch.where(sign < 0.5, -1, 1) * (kept > 0.05)).to(dtype)


def subnormal(x: torch.Tensor) -> torch.Tensor:
    return (x != 0) & (x.double().abs() < torch.finfo(x.dtype).smallest_normal)


def threshold(dtype: torch.dtype, axis: int) -> float:
    """One that removes half of the groups of :func:`tiny`, as a float32."""
    return float(tiny(dtype, 0).double().norm(dim=1 - axis).median().float())


def soft_threshold(axis: int, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    return [ops.group_soft_threshold(tiny(dtype, 0).to(held), INDEX, axis, threshold(dtype, axis))]


def penalty(axis: int, kind: str, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    w, grad = tiny(dtype, 0).to(held), tiny(dtype, 1).to(held)
    value = ops.add_group_penalty_(grad, w, INDEX, axis, kind, torch.finfo(dtype).smallest_normal)
    return [grad, value, ops.group_penalty(w, INDEX, axis, kind)]


def moreau(axis: int, eta: float, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    delta, grad = tiny(dtype, 0).to(held), tiny(dtype, 1).to(held)
    ops.moreau_step(delta, grad, 2.0, 4.0, eta * threshold(dtype, axis), axis)
    return [delta]


def importance(axis: int, signed: bool, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    return [ops.group_importance(tiny(dtype, 1).to(held), tiny(dtype, 0).to(held), axis, signed=signed)]


def gather(scale: float, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    return [ops.slice_gather(tiny(dtype, 0).to(held), INDEX, INDEX, scale)]


def residual_l1(dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    pair = [tiny(dtype, seed).to(held).requires_grad_() for seed in (0, 1)]
    value = ops.residual_diff_norm(pair[0], pair[1], "l1")
    value.backward(torch.tensor(torch.finfo(dtype).smallest_normal).to(value.dtype))
    return [*(x.grad for x in pair if x.grad is not None), value.detach()]


def adamw(kind: str, stochastic: bool, quantised: bool, dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    w, gradient = tiny(dtype, 0).to(held), tiny(dtype, 1).to(held)
    smallest = torch.finfo(dtype).smallest_normal
    penalties = {
        "none": None,
        "l1": Penalty(INDEX, 0, "l1", penalty_weight=smallest),
        "l2": Penalty(INDEX, 0, "l2", penalty_weight=smallest),
    }
    moments = Moments.zeros(w, quantised=quantised)
    regularised_adamw(
        [w], [gradient], [moments], Hyper(lr=smallest), steps=1, penalties=[penalties[kind]], stochastic=stochastic
    )  # fmt: skip
    scales = [s for s in (moments.first_scale, moments.second_scale) if s is not None]
    return [w, moments.first, moments.second, *scales]


EXACT: dict[str, Run] = {
    **{f"group_soft_threshold-{a}": partial(soft_threshold, a) for a in (0, 1)},
    **{f"group_penalty-{a}-{k}": partial(penalty, a, k) for a in (0, 1) for k in ("l1", "l2")},
    **{f"moreau_step-{a}-{e}": partial(moreau, a, e) for a in (0, 1) for e in (0.0, 0.5)},
    **{f"group_importance-{a}-{s}": partial(importance, a, s) for a in (0, 1) for s in (False, True)},
    **{f"slice_gather-{s}": partial(gather, s) for s in (1.0, torch.tensor(0.3).item(), 2.0**-127)},
    "residual_diff_norm-l1": residual_l1,
    **{
        f"regularised_adamw-{k}-{s}-{q}": partial(adamw, k, s, q)
        for k in ("none", "l1", "l2")
        for s in (False, True)
        for q in (False, True)
    },
}


@pytest.mark.second
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backends_give_the_same_bits(dtype: torch.dtype, backend: str, use_backend: Callable[[str], None]) -> None:
    results = {name: run(dtype, dtype) for name, run in EXACT.items()}
    use_backend("python")
    for name, run in EXACT.items():
        for out, expected in zip(results[name], run(dtype, dtype), strict=True):
            assert torch.equal(out, expected), f"{name}: {backend} and the reference differ"


# Rounding at random and 8-bit moments have no float64 to compare with.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [n for n in EXACT if "True" not in n or not n.startswith("regularised_adamw")])
def test_nothing_is_flushed(name: str, dtype: torch.dtype, use_backend: Callable[[str], None]) -> None:
    """The reference against itself in float64, where none of these numbers is subnormal."""
    use_backend("python")
    out, exact = EXACT[name](dtype, dtype)[0], EXACT[name](dtype, torch.float64)[0]
    allowed = torch.finfo(out.dtype).eps * exact.abs() + 1.5 * spacing(dtype)
    if out.dtype == dtype:
        assert subnormal(out).any() or name.endswith(f"{2.0**-127}"), "the case shows nothing"
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_on_subnormal_weights(dtype: torch.dtype, backend: str, use_backend: Callable[[str], None]) -> None:
    w0, delta = tiny(dtype, 0), tiny(dtype, 1)
    out = ops.perturb(w0, delta, 0.3, seed=5)
    use_backend("python")
    exact = ops.perturb(w0.double(), delta.double(), torch.tensor(0.3).item(), seed=5)
    assert subnormal(out).any()
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 3 * spacing(dtype)).all()


def layer_norm(dtype: torch.dtype, held: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of activations, weight and bias."""
    x, weight, bias = tiny(dtype, 0), torch.ones(COLS), tiny(dtype, 3, COLS)
    leaves = [t.to(held).requires_grad_() for t in (x, weight, bias)]
    out = ops.layer_norm_virtual(leaves[0], leaves[1], leaves[2], 50)
    out.backward(tiny(dtype, 4).to(held))
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_of_subnormal_activations(
    dtype: torch.dtype, backend: str, use_backend: Callable[[str], None]
) -> None:
    """The sums are float32: what their order leaves of the mean is magnified by 1 / sqrt(eps) = 316."""
    results = layer_norm(dtype, dtype)
    use_backend("python")
    assert subnormal(results[0]).any()
    for out, exact in zip(results, layer_norm(dtype, torch.float64), strict=True):
        allowed = torch.finfo(dtype).eps * exact.abs() + 1e-4 * SMALLEST_FLOAT32 + spacing(dtype)
        assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_l2_norm_of_subnormal_differences(dtype: torch.dtype, backend: str) -> None:
    """The kernels add squares in float64; the reference squares in float32, which leaves 0."""
    x_in, x_out = (tiny(dtype, seed).requires_grad_() for seed in (0, 1))
    value = ops.residual_diff_norm(x_in, x_out, "l2")
    value.backward()
    assert x_out.grad is not None
    assert x_in.grad is not None
    if backend == "python":
        assert value == 0
        assert not x_out.grad.any()
        assert not x_in.grad.any()
        return
    difference = (x_out.detach().float() - x_in.detach().float()).double()
    norms = difference.norm(dim=-1, keepdim=True)
    assert math.isclose(value.item(), norms.mean().item(), rel_tol=1e-6)
    slope = difference / norms / ROWS
    # Norm, quotient and product are each rounded to float32 before the result is rounded to the dtype.
    unit = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps
    assert ((x_out.grad.double() - slope).abs() <= unit * slope.abs()).all()
    assert torch.equal(x_in.grad, -x_out.grad)


@pytest.mark.parametrize("upstream", [1.0, -1.0, 65536.0, 1e-30])
@pytest.mark.parametrize("difference", [[1e-40, 0.0, 3e-40], [1.4e-45, 0.0, 0.0], [1e-36, 0.0, -1e-36]], ids=str)
def test_the_gradient_of_a_subnormal_norm_is_finite(backend: str, difference: list[float], upstream: float) -> None:
    """upstream / norm is beyond float32 there; infinity times a difference of 0 would be NaN."""
    x_in, x_out = torch.zeros(1, 3, requires_grad=True), torch.tensor([difference], requires_grad=True)
    ops.residual_diff_norm(x_in, x_out, "l2").backward(torch.tensor(upstream))
    assert x_out.grad is not None
    assert torch.isfinite(x_out.grad).all()
    assert (x_out.grad.norm() <= abs(upstream) * (1 + 1e-6)).all()
    assert not x_out.grad[0, 1]
    if backend != "python":
        assert torch.equal(x_out.grad.sign(), x_out.detach().sign() * math.copysign(1, upstream))


@pytest.mark.parametrize("limit", [2.0**-127, 3e-45])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_subnormal_scalar(backend: str, dtype: torch.dtype, limit: float) -> None:
    """Triton's interpreter takes such a number for a float64, which has no bfloat16 in its upper half."""
    values = torch.tensor([1.0, -1.0, 0.0, 2.0**-20])[:, None].to(dtype)
    assert torch.equal(ops.group_soft_threshold(values.clone(), [0, 1, 2, 3], 0, limit), values)
    assert torch.equal(ops.slice_gather(values, None, None, limit), (values.float() * limit).to(dtype))
