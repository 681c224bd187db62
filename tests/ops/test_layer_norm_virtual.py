from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from pyprune.ops import BackendError, OpError, available_isas, dispatch, layer_norm_virtual
from pyprune.ops.layer_norm_virtual.reference import layer_norm_virtual as by_autograd
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(33, 65), (5, 2049), (130, 129), (2, 3, 48)]
EPS = 2.0**-17


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, *, bias: bool = True) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 0.5
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator)
    shift = torch.randn(shape[-1], generator=generator)
    return [t.to(dtype).requires_grad_() for t in (x, weight)] + [shift.to(dtype).requires_grad_() if bias else None]


def padded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float) -> torch.Tensor:
    """torch's LayerNorm over d channels, the missing ones zero: what the op stands for."""
    missing = d - x.shape[-1]
    wide = [functional.pad(t, (0, missing)) if t is not None else None for t in (x, weight, bias)]
    return functional.layer_norm(wide[0], (d,), wide[1], wide[2], eps)[..., : x.shape[-1]]  # type: ignore[arg-type]


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float) -> torch.Tensor:
    """The formulas as one would write them, every step in the tensors' own dtype."""
    mean = x.sum(-1, keepdim=True) / d
    centred = x - mean
    variance = (centred.square().sum(-1, keepdim=True) + (d - x.shape[-1]) * mean.square()) / d
    out = centred * torch.rsqrt(variance + eps) * weight
    return out if bias is None else out + bias


def results(function: Callable[..., torch.Tensor], tensors: list[Any], d: int, seed: int = 9) -> list[torch.Tensor]:
    """Output and gradients."""
    out = function(*tensors, d, EPS)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(tensors[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, [t for t in tensors if t is not None], upstream.to(out.dtype))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    tensors = inputs(shape, dtype, bias=bias)
    d = shape[-1] + 16
    own = results(layer_norm_virtual, tensors, d)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    exact = results(padded, wide, d)
    simple = results(plain, tensors, d)
    for out, right, other in zip(own, exact, simple, strict=True):
        assert_within_rule(out, right, other)


@pytest.mark.parametrize("d", [7, 12])
def test_the_gradient_formula(d: int) -> None:
    tensors = [t.detach().double().requires_grad_() for t in inputs((2, 3, 7), torch.float32)]
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm_virtual(x, w, b, d, EPS), tensors)
    assert torch.autograd.gradcheck(lambda x, w: layer_norm_virtual(x, w, None, d, EPS), tensors[:2])


def test_without_missing_channels_it_is_layer_norm(backend: str) -> None:
    x, weight, bias = inputs((9, 40), torch.float32)
    expected = functional.layer_norm(x, (40,), weight, bias, EPS)
    torch.testing.assert_close(layer_norm_virtual(x, weight, bias, 40, EPS), expected)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, use_backend: Callable[[str], None]
) -> None:
    tensors = inputs((331, 117), dtype)
    threads = torch.get_num_threads()
    found = []
    try:
        for isa in available_isas():
            use_backend(f"cpp-{isa}")
            for count in (1, 2, 8):
                torch.set_num_threads(count)
                found.append(results(layer_norm_virtual, tensors, 160))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in found for a, b in zip(result, found[0], strict=True))


@pytest.mark.second
@examples(15)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(8, 200),
    missing=st.integers(0, 100),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend: str, rows: int, cols: int, missing: int, bias: bool, seed: int) -> None:
    tensors = inputs((rows, cols), torch.float32, seed, bias=bias)
    own = results(layer_norm_virtual, tensors, cols + missing)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    for out, right in zip(own, results(padded, wide, cols + missing), strict=True):
        assert (out.double() - right).abs().max() <= 1e-5 * right.abs().max().clamp(min=1)


def test_nan_and_infinity_stay_in_their_rows(backend: str) -> None:
    x, weight, bias = (t.detach() for t in inputs((4, 6), torch.float32))
    x[0, 3], x[1, 2] = math.nan, math.inf
    out = layer_norm_virtual(x, weight, bias, 8)
    assert torch.isnan(out[:2]).all()
    assert torch.isfinite(out[2:]).all()


def test_large_means_and_constant_rows(backend: str) -> None:
    x = torch.full((2, 64), 1000.0)
    x[1] += torch.arange(64) / 64
    out = layer_norm_virtual(x, torch.ones(64), None, 64, 1e-5)
    expected = functional.layer_norm(x.double(), (64,), eps=1e-5)
    assert torch.equal(out[0], torch.zeros(64))
    assert (out[1] - expected[1]).abs().max() < 1e-3


def test_non_contiguous_and_empty(backend: str) -> None:
    x, weight, bias = inputs((10, 12), torch.float32)
    copies = [t.detach()[..., ::2].clone().requires_grad_() for t in (x, weight, bias)]
    expected = results(layer_norm_virtual, copies, 9)
    views = [x.detach()[:, ::2].requires_grad_(), *(t.detach()[::2].requires_grad_() for t in (weight, bias))]
    assert all(torch.equal(a, b) for a, b in zip(results(layer_norm_virtual, views, 9), expected, strict=True))
    assert layer_norm_virtual(torch.zeros(0, 12), weight, bias, 12).shape == (0, 12)


def test_only_the_gradients_that_are_wanted(backend: str) -> None:
    x, weight, bias = inputs((9, 12), torch.float32)
    everything = results(layer_norm_virtual, [x, weight, bias], 16)
    out = layer_norm_virtual(x.detach(), weight, bias.detach(), 16, EPS)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    assert torch.equal(torch.autograd.grad(out, weight, upstream)[0], everything[2])


def test_two_dtypes_run_on_the_reference(use_backend: Callable[[str], None]) -> None:
    x, weight, bias = inputs((3, 8), torch.float32)
    low = x.detach().bfloat16()
    use_backend("auto")
    out = layer_norm_virtual(low, weight, bias, 10)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, by_autograd(low, weight, bias, 10, 1e-5))
    use_backend("triton")
    with pytest.raises(BackendError, match="one dtype"):
        layer_norm_virtual(low, weight, bias, 10)


def test_bad_arguments() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(OpError, match="at least the 4"):
        layer_norm_virtual(x, torch.ones(4), None, 3)
    with pytest.raises(OpError, match="last size"):
        layer_norm_virtual(x, torch.ones(3), None, 4)
    with pytest.raises(OpError, match="last size"):
        layer_norm_virtual(x, torch.ones(4), torch.ones(1), 4)
    with pytest.raises(OpError, match="eps"):
        layer_norm_virtual(x, torch.ones(4), None, 4, -1.0)
    with pytest.raises(OpError, match="int64"):
        layer_norm_virtual(x.long(), torch.ones(4), None, 4)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module = dispatch.extension()
    assert module is not None
    view = dispatch.tensor_view
    x, out, weight, mean, rstd = (torch.ones(s) for s in ((4, 6), (4, 6), (6,), (4,), (4,)))

    def call(size: int = 8, scale: torch.Tensor = weight, target: torch.Tensor = out, threads: int = 1) -> None:
        module.layer_norm_virtual(
            view(x), view(scale), None, 1e-5, size, view(target), view(mean), view(rstd), threads
        )  # fmt: skip

    call()
    with pytest.raises(ValueError, match="norm_size is 5"):
        call(5)
    with pytest.raises(ValueError, match="6 elements"):
        call(scale=torch.ones(5))
    with pytest.raises(ValueError, match="shape"):
        call(target=torch.ones(4, 5))
    with pytest.raises(ValueError, match="threads"):
        call(threads=0)
