from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, available_isas, group_prox, group_soft_threshold
from pyprune.ops.group_prox.reference import proximal_map
from tests.ops.properties import examples
from tests.ops.rule import assert_within_rule

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (16, 64), (33, 65), (5, 2049), (130, 129), (601, 70)]
NAN = math.nan


def matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values, with one group of each kind that is zero and one that is small enough to be removed."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    if rows > 2:
        x[1] = 0
        x[2] *= 1e-3
    if cols > 2:
        x[:, 1] = 0
        x[:, 2] *= 1e-3
    return x.to(dtype)


def reference(x: torch.Tensor, threshold: float, axis: int) -> torch.Tensor:
    """The definition. Of slices of one element both norms are the same, and l1 is exact."""
    return proximal_map(x, axis % x.dim(), "l1" if x.numel() == x.shape[axis] else "l2", threshold)


def plain(x: torch.Tensor, threshold: float, axis: int) -> torch.Tensor:
    """The formula as one would write it, every step in the tensor's own dtype."""
    norm = x.norm(dim=1 - axis, keepdim=True)
    return torch.where(norm <= threshold, torch.zeros_like(x), x * (1 - threshold / norm))


def poisoned_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, NAN)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int) -> None:
    x = matrix(*shape, dtype)
    out = poisoned_like(x)
    result = group_soft_threshold(x, 0.5, axis, out=out)
    assert result is out
    exact = reference(x.double(), 0.5, axis)
    assert_within_rule(out, exact, plain(x, 0.5, axis % 2))
    assert torch.equal(out == 0, exact.to(dtype) == 0), "the removed groups differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_removed_groups_are_positive_zero_and_others_shrink(backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.3, 0.4], [-3.0, 4.0], [0.0, -0.0]], dtype=dtype)
    out = group_soft_threshold(x, 1.0, 0)
    zero = torch.zeros(2, dtype=dtype)
    for row in (0, 2):
        assert torch.equal(out[row], zero)
        assert not torch.signbit(out[row]).any()
    assert torch.allclose(out[1].double(), torch.tensor([-2.4, 3.2]).double(), rtol=1e-2)


def test_in_place_equals_out_of_place(backend: str) -> None:
    x = matrix(33, 65, torch.float32)
    for axis in (0, 1):
        expected = group_soft_threshold(x, 0.7, axis)
        buffer = x.clone()
        version = buffer._version
        assert group_soft_threshold(buffer, 0.7, axis, out=buffer) is buffer
        assert torch.equal(buffer, expected)
        assert buffer._version > version, "autograd must learn that the tensor changed"


def test_threshold_zero_is_the_identity(backend: str) -> None:
    x = matrix(9, 17, torch.float32)
    assert torch.equal(group_soft_threshold(x, 0.0, 0), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(backend: str, dtype: torch.dtype) -> None:
    x = torch.ones(4, 6, dtype=dtype)
    x[0, 3] = NAN
    x[1, 2] = math.inf
    x[2, 5] = -math.inf
    out = group_soft_threshold(x, 1.0, 0)
    assert torch.isnan(out[0]).all()
    assert torch.equal(out[1:3], x[1:3])
    assert torch.isfinite(out[3]).all()
    assert torch.equal(group_soft_threshold(x.t(), 1.0, 1).t().nan_to_num(7), out.nan_to_num(7))


def test_squares_beyond_float32_are_handled(backend: str) -> None:
    x = torch.full((2, 40), 1e30)
    x[1] = 1e-30
    out = group_soft_threshold(x, 1e-31, 0)
    assert torch.allclose(out[0], x[0])
    assert torch.all((out[1] > 0) & (out[1] < x[1]))


@pytest.mark.parametrize("axis", [0, 1])
def test_non_contiguous_input_and_output(backend: str, axis: int) -> None:
    x = matrix(65, 66, torch.float32)
    view = x.t()[::2, 3:]
    expected = reference(view, 0.5, axis)
    assert torch.allclose(group_soft_threshold(view, 0.5, axis), expected)
    wide = torch.full((view.shape[0], 2 * view.shape[1]), NAN)
    out = wide[:, ::2]
    group_soft_threshold(view, 0.5, axis, out=out)
    assert torch.allclose(out, expected)
    assert torch.isnan(wide[:, 1::2]).all(), "wrote outside the view"


def test_vectors_and_higher_ranks(backend: str) -> None:
    vector = torch.tensor([-3.0, 0.5, 2.0])
    assert torch.equal(group_soft_threshold(vector, 1.0, 0), torch.tensor([-2.0, 0.0, 1.0]))
    cube = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    for axis in (0, 2):
        assert torch.allclose(group_soft_threshold(cube, 3.0, axis), reference(cube, 3.0, axis))


def test_middle_axis_is_refused_by_kernels_and_handled_by_auto(
    use_backend: Callable[[str], None],
) -> None:
    cube = torch.randn(4, 5, 6)
    use_backend("auto")
    assert torch.equal(group_soft_threshold(cube, 3.0, 1), reference(cube, 3.0, 1))
    use_backend("triton")
    with pytest.raises(BackendError, match="middle"):
        group_soft_threshold(cube, 3.0, 1)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_proximal_map_of_every_group_bit_for_bit(
    backend: str, dtype: torch.dtype, axis: int, offset: float
) -> None:
    """One implementation: in place by index, and out of place without one."""
    for shape in ((33, 65), (7, 1), (1, 130)):
        x = matrix(*shape, dtype)
        expected = group_prox(x.clone(), torch.randperm(shape[axis]), axis, "l2", 3.0, offset=offset)
        out = poisoned_like(x)
        assert torch.equal(group_soft_threshold(x, 3.0, axis, out=out, offset=offset), expected)
        assert torch.equal(group_soft_threshold(x, 3.0, axis, out=x, offset=offset), expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(backend: str, shape: tuple[int, int]) -> None:
    for axis in (0, 1):
        assert group_soft_threshold(torch.zeros(shape), 1.0, axis).shape == shape


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    axis: int, dtype: torch.dtype, use_backend: Callable[[str], None]
) -> None:
    x = matrix(131, 517, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for isa in available_isas():
            use_backend(f"cpp-{isa}")
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                results.append(group_soft_threshold(x, 2.0, axis, out=poisoned_like(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cpp_rounds_every_storage_value_as_torch_does(dtype: torch.dtype, use_backend: Callable[[str], None]) -> None:
    """All 65,536 bit patterns as groups of one element: threshold 0 must give each of them back."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    small = torch.tensor(2.0**-26).item()
    for isa in available_isas():
        use_backend(f"cpp-{isa}")
        same = group_soft_threshold(every, 0.0, 0)
        finite = ~torch.isnan(every)
        assert torch.equal(same[finite], every[finite])
        assert torch.isnan(same[~finite]).all()
        expected = reference(every, small, 0)
        assert torch.equal(group_soft_threshold(every, small, 0)[finite], expected[finite])


@pytest.mark.second
@examples(40)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
    threshold=st.floats(0, 20, width=32),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    backend: str, rows: int, cols: int, axis: int, dtype: torch.dtype, threshold: float, seed: int
) -> None:
    x = matrix(rows, cols, dtype, seed)
    out = group_soft_threshold(x, threshold, axis, out=poisoned_like(x))
    exact = reference(x.double(), threshold, axis)
    # Half a unit of the storage's rounding, and the float32 arithmetic before it.
    unit = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= unit * exact.abs() + torch.finfo(dtype).smallest_normal).all()
    assert (out.double().norm(dim=1 - axis) <= x.double().norm(dim=1 - axis) * (1 + unit)).all()


@pytest.mark.parametrize("threshold", [-1.0, math.inf, NAN])
def test_bad_threshold(threshold: float) -> None:
    with pytest.raises(OpError, match="finite and >= 0"):
        group_soft_threshold(torch.ones(2, 2), threshold, 0)


def test_bad_arguments() -> None:
    x = torch.ones(4, 4)
    with pytest.raises(OpError, match="axis is 2"):
        group_soft_threshold(x, 1.0, 2)
    with pytest.raises(OpError, match="axis is 0"):
        group_soft_threshold(torch.tensor(1.0), 1.0, 0)
    with pytest.raises(OpError, match="shape"):
        group_soft_threshold(x, 1.0, 0, out=torch.ones(4, 5))
    with pytest.raises(OpError, match="dtype"):
        group_soft_threshold(x, 1.0, 0, out=torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(OpError, match="int64"):
        group_soft_threshold(torch.ones(2, 2, dtype=torch.int64), 1.0, 0)
    with pytest.raises(OpError, match="no_grad"):
        group_soft_threshold(x.clone().requires_grad_(), 1.0, 0)


def test_partial_overlap_is_refused() -> None:
    memory = torch.ones(40)
    with pytest.raises(OpError, match="overlap"):
        group_soft_threshold(memory[:32].view(4, 8), 1.0, 0, out=memory[4:36].view(4, 8))
    group_soft_threshold(memory[:16].view(2, 8), 1.0, 0, out=memory[16:32].view(2, 8))


def test_parameters_in_place_without_grad(backend: str) -> None:
    weight = torch.nn.Parameter(matrix(8, 8, torch.float32))
    expected = reference(weight.detach().clone(), 0.5, 1)
    with torch.no_grad():
        group_soft_threshold(weight, 0.5, 1, out=weight)
    assert torch.allclose(weight.detach(), expected)


def test_float64_runs_on_the_reference(use_backend: Callable[[str], None]) -> None:
    x = torch.randn(5, 5, dtype=torch.float64)
    use_backend("auto")
    assert torch.equal(group_soft_threshold(x, 1.0, 0), reference(x, 1.0, 0))
    use_backend("cpp")
    with pytest.raises(BackendError, match=r"float64|not built"):
        group_soft_threshold(x, 1.0, 0)
