from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import OpError, available_isas, dispatch, perturb
from pyprune.ops.perturb import reference
from pyprune.ops.perturb.reference import normals
from pyprune.ops.philox import philox
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIGMA, SEED = 0.05, 20240607
NAN = math.nan


def tensors(count: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w0 = torch.randn(count, generator=generator)
    w0[::7] = 0
    return w0.to(dtype), (0.01 * torch.randn(count, generator=generator)).to(dtype)


def plain(w0: torch.Tensor, delta: torch.Tensor, offset: int) -> torch.Tensor:
    """The formula as one would write it, every step in the tensors' own dtype."""
    w = w0 + delta
    return w + SIGMA * w.abs() * normals(w.numel(), SEED, offset).to(w.dtype)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox([torch.tensor([word]) for word in counter], key)
    assert tuple(int(word) for word in words) == expected


def test_the_normals_are_standard_and_independent() -> None:
    z = normals(400_000, SEED, 0)
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs((z**3).mean()) < 0.03
    assert abs((z**4).mean() - 3) < 0.06
    assert z.abs().max() < 5.78
    for lag in (1, 16, 32, 64):
        assert abs((z[lag:] * z[:-lag]).mean()) < 0.01
    assert abs((z * normals(400_000, SEED + 1, 0)).mean()) < 0.01


@pytest.mark.parametrize("offset", [0, 1, 63, 64 * 2**28 - 100, 2**62 + 17])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_the_same_normals_everywhere(backend: str, seed: int, offset: int) -> None:
    one = torch.ones(300)
    out = perturb(one, torch.zeros(300), 1.0, seed, offset, out=torch.full((300,), NAN))
    assert ((out.double() - 1 - normals(300, seed, offset)).abs() <= 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (5, 62), (64, 0), (130, 64), (1000, 37), (4099, 1)])
def test_agrees_with_float64(backend: str, count: int, offset: int, dtype: torch.dtype) -> None:
    w0, delta = tensors(count, dtype)
    exact = reference(w0.double(), delta.double(), torch.tensor(SIGMA).item(), SEED, offset)
    out = torch.full_like(w0, NAN)
    assert perturb(w0, delta, SIGMA, SEED, offset, out=out) is out
    assert_within_rule(out, exact, plain(w0, delta, offset))
    assert (out[w0 + delta == 0] == 0).all()


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, use_backend: Callable[[str], None]
) -> None:
    w0, delta = tensors(5003, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for isa in available_isas():
            use_backend(f"cpp-{isa}")
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                results.append(perturb(w0, delta, SIGMA, SEED, 29, out=torch.full_like(w0, NAN)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@examples(25)
@given(
    count=st.integers(1, 700),
    split=st.floats(0, 1),
    offset=st.integers(0, 2**40),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_tensor_in_two_parts_gets_the_same_noise(
    backend: str, count: int, split: float, offset: int, seed: int
) -> None:
    w0, delta = tensors(count, torch.float32)
    whole = perturb(w0, delta, SIGMA, seed, offset)
    cut = int(split * count)
    first = perturb(w0[:cut], delta[:cut], SIGMA, seed, offset)
    second = perturb(w0[cut:], delta[cut:], SIGMA, seed, offset + cut)
    assert torch.equal(torch.cat([first, second]), whole)


def test_sigma_zero_is_the_sum(backend: str) -> None:
    w0, delta = tensors(200, torch.float32)
    assert torch.equal(perturb(w0, delta, 0.0, SEED), w0 + delta)


def test_in_place_on_either_input(backend: str) -> None:
    w0, delta = tensors(333, torch.float32)
    expected = perturb(w0, delta, SIGMA, SEED, 5)
    for number in (0, 1):
        pair = [w0.clone(), delta.clone()]
        version = pair[number]._version
        perturb(pair[0], pair[1], SIGMA, SEED, 5, out=pair[number])
        assert torch.equal(pair[number], expected)
        assert pair[number]._version > version


def test_non_contiguous_inputs_are_numbered_in_row_major_order(backend: str) -> None:
    w0, delta = (tensor.view(20, 30) for tensor in tensors(600, torch.float32))
    expected = perturb(w0, delta, SIGMA, SEED)
    out = perturb(w0.t().contiguous().t(), delta.t().contiguous().t(), SIGMA, SEED)
    assert out.is_contiguous()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_where_they_are(backend: str, dtype: torch.dtype) -> None:
    w0, delta = tensors(150, dtype)
    clean = perturb(w0, delta, SIGMA, SEED)
    w0[3], w0[70], delta[100] = NAN, math.inf, -math.inf
    out = perturb(w0, delta, SIGMA, SEED)
    assert torch.isnan(out[3])
    assert not torch.isfinite(out[[70, 100]]).any()
    others = torch.ones(150, dtype=torch.bool)
    others[[3, 70, 100]] = False
    assert torch.equal(out[others], clean[others])


def test_empty_and_parameters(backend: str) -> None:
    assert perturb(torch.zeros(0, 3), torch.zeros(0, 3), SIGMA, SEED).shape == (0, 3)
    weight = torch.nn.Parameter(torch.ones(4))
    assert not perturb(weight, torch.zeros(4), SIGMA, SEED).requires_grad


def test_bad_arguments() -> None:
    w0, delta = torch.ones(3, 4), torch.zeros(3, 4)
    for sigma in (-1.0, math.inf, NAN):
        with pytest.raises(OpError, match="sigma is"):
            perturb(w0, delta, sigma, SEED)
    for seed in (-1, 2**64):
        with pytest.raises(OpError, match="seed is"):
            perturb(w0, delta, SIGMA, seed)
    for offset in (-1, 2**63 - 2):
        with pytest.raises(OpError, match="offset is"):
            perturb(w0, delta, SIGMA, SEED, offset)
    with pytest.raises(OpError, match="delta has shape"):
        perturb(w0, delta[:2], SIGMA, SEED)
    with pytest.raises(OpError, match="out has dtype"):
        perturb(w0, delta, SIGMA, SEED, out=torch.ones(3, 4).half())
    with pytest.raises(OpError, match="int64"):
        perturb(w0.long(), delta.long(), SIGMA, SEED)
    with pytest.raises(OpError, match="contiguous"):
        perturb(w0, delta, SIGMA, SEED, out=torch.ones(4, 3).t())
    memory = torch.ones(20)
    with pytest.raises(OpError, match="delta and out overlap"):
        perturb(torch.ones(10), memory[:10], SIGMA, SEED, out=memory[5:15])


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module, view = dispatch.extension(), dispatch.tensor_view
    assert module is not None
    x, y = torch.ones(2, 6), torch.ones(2, 5)
    with pytest.raises(ValueError, match="delta has shape"):
        module.perturb(view(x), view(y), view(x), 0.1, 0, 0, 1)
    with pytest.raises(ValueError, match="threads"):
        module.perturb(view(x), view(x), view(x), 0.1, 0, 0, 0)
