from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import OpError, available_isas, dispatch, residual_diff_norm
from pyprune.ops.residual_diff_norm.reference import residual_diff_norm as by_autograd
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (7, 1), (3, 5), (2, 3, 33), (5, 2049), (130, 129)]
KINDS = ["l1", "l2"]


def pair(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a layer; the output's first token equals the input's."""
    generator = torch.Generator().manual_seed(seed)
    x_in = torch.randn(shape, generator=generator).to(dtype)
    x_out = (x_in.float() + 0.3 * torch.randn(shape, generator=generator)).to(dtype)
    if x_in.numel() > shape[-1]:
        x_out.view(-1, shape[-1])[0] = x_in.view(-1, shape[-1])[0]
    return x_in.requires_grad_(), x_out.requires_grad_()


def gradients(function: Callable[..., torch.Tensor], x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> Any:
    value = function(x_in, x_out, kind)
    return value.detach(), *torch.autograd.grad(value, (x_in, x_out), torch.full_like(value, 1.5))


def plain(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> torch.Tensor:
    """The formula as one would write it, every step in the tensors' own dtype."""
    return (x_out - x_in).norm(p=int(kind[1]), dim=-1).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    x_in, x_out = pair(shape, dtype)
    value, *grads = gradients(residual_diff_norm, x_in, x_out, kind)
    wide = [x.detach().double().requires_grad_() for x in (x_in, x_out)]
    exact, *exact_grads = gradients(by_autograd, *wide, kind)
    simple, *simple_grads = gradients(plain, x_in, x_out, kind)
    assert value.dtype == torch.float32
    # Of one number the plain formula may be right by luck: one unit of float32 is always allowed.
    error = abs(value.double() - exact)
    assert error <= max(2 * abs(simple.double() - exact), 2.0**-23 * abs(exact))
    for own, right, other in zip(grads, exact_grads, simple_grads, strict=True):
        assert own.shape == x_in.shape
        if dtype == torch.float32:
            assert (own - right).abs().max() <= 3e-7 * right.abs().max()
        else:
            assert_within_rule(own, right, other)
    if x_in.numel() > shape[-1]:
        assert all((g.view(-1, shape[-1])[0] == 0).all() for g in grads), "no difference, no gradient"


def test_by_hand(backend: str) -> None:
    x_in, x_out = torch.zeros(1, 2, 2), torch.tensor([[[3.0, -4.0], [0.0, 1.0]]])
    assert residual_diff_norm(x_in, x_out, "l2") == 3
    assert residual_diff_norm(x_in, x_out, "l1") == 4


def test_does_not_depend_on_batch_or_length(backend: str) -> None:
    x_in, x_out = pair((2, 3, 5), torch.float32)
    once = residual_diff_norm(x_in, x_out, "l2")
    assert torch.allclose(once, residual_diff_norm(x_in.repeat(2, 4, 1), x_out.repeat(2, 4, 1), "l2"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_formula(kind: str) -> None:
    x_in, x_out = (x.detach().double().requires_grad_() for x in pair((2, 3, 5), torch.float32, 1))
    x_out = (x_out.detach() + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: residual_diff_norm(a, b, kind), (x_in, x_out))


def test_no_difference_is_stored(backend: str) -> None:
    x_in, x_out = pair((4, 8, 32), torch.float32)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        residual_diff_norm(x_in, x_out, "l2")
    own = [t for t in saved if t.data_ptr() not in (x_in.data_ptr(), x_out.data_ptr())]
    assert [t.shape for t in own] == [(32,)], "in addition to the inputs only one norm a token"


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_that_nobody_wants_is_not_made(backend: str, which: int) -> None:
    pairs = list(pair((3, 7), torch.float32))
    both = torch.autograd.grad(residual_diff_norm(*pairs, "l2"), pairs)  # type: ignore[call-arg]
    pairs[1 - which] = pairs[1 - which].detach()
    (one,) = torch.autograd.grad(residual_diff_norm(*pairs, "l2"), [pairs[which]])  # type: ignore[call-arg]
    assert torch.equal(one, both[which])


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, kind: str, use_backend: Callable[[str], None]
) -> None:
    x_in, x_out = pair((131, 517), dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for isa in available_isas():
            use_backend(f"cpp-{isa}")
            for count in (1, 2, 8):
                torch.set_num_threads(count)
                results.append(gradients(residual_diff_norm, x_in, x_out, kind))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@examples(25)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend: str, rows: int, cols: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    x_in, x_out = pair((rows, cols), dtype, seed)
    value, *grads = gradients(residual_diff_norm, x_in, x_out, kind)
    exact, *right = gradients(by_autograd, *(x.detach().double().requires_grad_() for x in (x_in, x_out)), kind)
    assert abs(value.double() - exact) <= 3e-7 * abs(exact)
    # The storage's rounding, and the four of float32 before it: difference, norm, factor, product.
    unit = 0.5 * torch.finfo(dtype).eps + 4 * 2.0**-24
    for own, other in zip(grads, right, strict=True):
        assert ((own.double() - other).abs() <= unit * other.abs() + torch.finfo(dtype).smallest_normal).all()


def test_nan_and_infinity(backend: str) -> None:
    x_in = torch.zeros(4, 6, requires_grad=True)
    x_out = torch.ones(4, 6)
    x_out[0, 3], x_out[1, 2] = math.nan, math.inf
    x_out.requires_grad_()
    value, _, grad = gradients(residual_diff_norm, x_in, x_out, "l2")
    assert torch.isnan(value)
    assert torch.isnan(grad[0]).all()
    assert torch.isnan(grad[1]).nonzero().flatten().tolist() == [2]
    assert grad[1].nansum() == 0
    assert torch.isfinite(grad[2:]).all()
    value, _, grad = gradients(residual_diff_norm, x_in, x_out, "l1")
    assert torch.isnan(value)
    assert grad[0].tolist() == [0.375] * 3 + [0.0] + [0.375] * 2
    assert (grad[1:] == 0.375).all()
    value = residual_diff_norm(x_in[1:], x_out[1:], "l2")
    assert value == math.inf


def test_squares_beyond_float32_are_handled(use_backend: Callable[[str], None]) -> None:
    for name in ("triton", *(["cpp"] if available_isas() else [])):
        use_backend(name)
        value = residual_diff_norm(torch.zeros(2, 40), torch.full((2, 40), 1e30), "l2")
        assert value.item() == pytest.approx(40**0.5 * 1e30, rel=1e-5)


def test_non_contiguous_inputs(backend: str) -> None:
    x_in, x_out = pair((9, 14), torch.float32)
    expected = gradients(residual_diff_norm, x_in[:, ::2].detach().clone().requires_grad_(),
                         x_out[:, ::2].detach().clone().requires_grad_(), "l2")  # fmt: skip
    views = [x.detach()[:, ::2].requires_grad_() for x in (x_in, x_out)]
    for own, other in zip(gradients(residual_diff_norm, *views, "l2"), expected, strict=True):
        assert torch.equal(own, other)


def test_bad_arguments() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(OpError, match="dtype"):
        residual_diff_norm(x, x.half(), "l2")
    with pytest.raises(OpError, match="int64"):
        residual_diff_norm(x.long(), x.long(), "l2")
    with pytest.raises(OpError, match="Unknown kind"):
        residual_diff_norm(x, x, "l3")
    with pytest.raises(OpError, match="must be equal"):
        residual_diff_norm(x, torch.ones(2, 4), "l2")
    with pytest.raises(OpError, match="no token"):
        residual_diff_norm(x[:0], x[:0], "l2")


def test_a_second_derivative_is_refused() -> None:
    x_in, x_out = pair((2, 3), torch.float32)
    (grad,) = torch.autograd.grad(residual_diff_norm(x_in, x_out, "l2"), [x_out], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module = dispatch.extension()
    assert module is not None
    view = dispatch.tensor_view
    x, norms = view(torch.ones(4, 6)), view(torch.ones(4))
    with pytest.raises(ValueError, match="kind"):
        module.residual_diff_norm(x, x, norms, "l3", 1)
    with pytest.raises(ValueError, match="4 elements"):
        module.residual_diff_norm(x, x, view(torch.ones(3)), "l2", 1)
    with pytest.raises(ValueError, match="shape"):
        module.residual_diff_norm_gradient(x, x, norms, 1.0, "l2", view(torch.ones(4, 5)), None, 1)
    with pytest.raises(ValueError, match="threads"):
        module.residual_diff_norm(x, x, norms, "l2", 0)
