from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, available_isas, dispatch, group_penalty, group_soft_threshold
from pyprune.ops.group_soft_threshold import reference
from tests.ops.properties import examples
from tests.ops.rule import assert_equal_for_every_isa_and_thread_count, assert_within_rule
from tests.ops.test_group_penalty import DTYPES, SHAPES, selections, some_of, weights

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = math.nan
THRESHOLD = 0.5


def plain(w: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
    """The formula as one would write it, every step in the tensor's own dtype."""
    part = w.index_select(axis, index)
    norms = part.norm(dim=1 - axis, keepdim=True)
    part = torch.where(norms <= THRESHOLD, 0, part * (1 - THRESHOLD / norms))
    return w.clone().index_copy_(axis, index, part)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int) -> None:
    w, _ = weights(*shape, dtype=dtype)
    index = some_of(shape[axis])
    exact = reference(w.double(), index, axis % 2, THRESHOLD)
    result = w.clone()
    version = result._version
    assert group_soft_threshold(result, index, axis, THRESHOLD) is result
    assert result._version > version, "autograd must learn that the tensor changed"
    assert_within_rule(result, exact, plain(w, index, axis % 2))
    assert torch.equal(result == 0, exact.to(dtype) == 0), "the removed groups differ"
    others = torch.ones(shape[axis], dtype=torch.bool)
    others[index] = False
    assert torch.equal(result.movedim(axis, 0)[others], w.movedim(axis, 0)[others]), "outside the index"


@pytest.mark.parametrize("axis", [0, 1])
def test_is_the_proximal_map_of_the_penalty(axis: int) -> None:
    w = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = group_soft_threshold(w.clone(), [0, 2, 3], axis, 0.7)

    def cost(x: torch.Tensor) -> float:
        return float(0.5 * (x - w).square().sum() + 0.7 * group_penalty(x, [0, 2, 3], axis, "l2"))

    for seed in range(50):
        step = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        for size in (1.0, 1e-2, 1e-4):
            assert cost(best + size * step) > cost(best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_hand_and_what_is_removed_is_positive_zero(backend: str, dtype: torch.dtype) -> None:
    w = torch.tensor([[-0.3, 0.4], [-3.0, 4.0], [0.0, -0.0], [-0.5, 0.25]], dtype=dtype)
    result = group_soft_threshold(w.clone(), [0, 1, 2], 0, 1.0)
    for row in (0, 2):
        assert torch.equal(result[row], torch.zeros(2, dtype=dtype))
        assert not torch.signbit(result[row]).any()
    assert torch.allclose(result[1].double(), torch.tensor([-2.4, 3.2]).double(), rtol=1e-2)
    assert torch.equal(result[3], w[3])
    vector = torch.tensor([-4.0, 0.5, 2.0], dtype=dtype)
    assert group_soft_threshold(vector, [0, 1], 0, 1.0).tolist() == [-3.0, 0.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_maps_one_plus_w(backend: str, dtype: torch.dtype) -> None:
    for shape, axis in (((33,), 0), ((6, 70), 0), ((6, 70), 1)):
        w = (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(3)) - 0.5).to(dtype)
        index = some_of(shape[axis])
        exact = reference(w.double(), index, axis, THRESHOLD, 1.0)
        group_soft_threshold(w, index, axis, THRESHOLD, offset=1.0)
        unit = torch.finfo(dtype).eps
        assert ((w.double() - exact).abs() <= unit * exact.abs() + 3e-7).all()
        assert torch.equal(w == -1, exact.to(dtype) == -1)
        assert (w == -1).any() == (len(shape) == 1)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(backend: str, dtype: torch.dtype, axis: int) -> None:
    groups = torch.full((4, 40), 3.0, dtype=dtype)
    groups[0, 3], groups[1, 2], groups[3, 0] = NAN, -math.inf, NAN
    w = groups if axis == 0 else groups.t().contiguous()
    result = group_soft_threshold(w.clone(), [0, 1, 2], axis, 1.0).movedim(axis, 0)
    assert torch.isnan(result[0]).all()
    assert torch.equal(result[1], groups[1])
    assert ((result[2] < 3) & (result[2] > 2)).all()
    assert torch.equal(result[3].nan_to_num(7), groups[3].nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_squares_beyond_float32_are_handled(backend: str, axis: int, dtype: torch.dtype) -> None:
    w = torch.full((2, 200), 2.0**100, dtype=dtype)
    w[1] = 2.0**-100
    w = w if axis == 0 else w.t().contiguous()
    result = group_soft_threshold(w.clone(), [0, 1], axis, 2.0**-100).movedim(axis, 0).float()
    assert (result[0] == 2.0**100).all()
    assert torch.allclose(result[1] * 2.0**100, torch.tensor(1 - 200**-0.5), rtol=1e-2)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, axis: int, use_backend: Callable[[str], None]
) -> None:
    w, _ = weights(131, 517, dtype=dtype)
    assert_equal_for_every_isa_and_thread_count(
        use_backend, lambda: [group_soft_threshold(w.clone(), i, axis, 2.0) for i in selections(w.shape[axis])]
    )


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cpp_rounds_every_storage_value_as_torch_does(dtype: torch.dtype, use_backend: Callable[[str], None]) -> None:
    """All 65,536 bit patterns as groups of one element."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    index, small = torch.arange(len(every)), torch.tensor(2.0**-26).item()
    expected = reference(every.clone(), index, 0, small)
    for isa in available_isas():
        use_backend(f"cpp-{isa}")
        result = group_soft_threshold(every.clone(), index, 0, small)
        assert torch.equal(torch.isnan(result), torch.isnan(every))
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@examples(30)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
    threshold=st.floats(2**-10, 20, width=32),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_index(
    backend: str, rows: int, cols: int, axis: int, dtype: torch.dtype, threshold: float, share: float, seed: int
) -> None:
    w, _ = weights(rows, cols, dtype=dtype, seed=seed)
    index = (torch.rand(w.shape[axis], generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()
    exact = reference(w.double(), index, axis, threshold)
    result = group_soft_threshold(w.clone(), index, axis, threshold)
    # The storage's rounding, whose spacing is constant below the smallest normal number, and float32's.
    storage = torch.finfo(dtype)
    rounding = storage.eps * exact.abs().clamp(min=storage.smallest_normal)
    assert ((result.double() - exact).abs() <= rounding + 3e-7 * w.double().abs()).all()
    assert (result.double().abs() <= w.double().abs()).all()


def test_nothing_to_do(backend: str) -> None:
    w, _ = weights(3, 4)
    before = w.clone()
    assert torch.equal(group_soft_threshold(w, [], 1, 1.0), before)
    assert torch.equal(group_soft_threshold(w, [0, 1], 1, 0.0, offset=1.0), before)
    assert group_soft_threshold(torch.zeros(0, 5), [1, 2], 1, 1.0).shape == (0, 5)


@pytest.mark.parametrize("axis", [0, 1])
def test_non_contiguous_tensors_and_parameters(backend: str, axis: int) -> None:
    w, _ = weights(65, 66)
    view = w.t()[::2, 3:]
    before, expected = w.clone(), group_soft_threshold(view.contiguous(), [1, 5, 6], axis, 1.0)
    assert group_soft_threshold(view, [1, 5, 6], axis, 1.0) is view
    assert torch.equal(view, expected)
    assert torch.equal(w.t()[1::2], before.t()[1::2])
    parameter = torch.nn.Parameter(before.clone())
    group_soft_threshold(parameter, [1], 0, 100.0)
    assert (parameter[1] == 0).all()
    assert parameter.is_leaf


def test_higher_ranks_and_a_middle_axis(use_backend: Callable[[str], None]) -> None:
    cube, every = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)), [0, 1, 2, 3]
    use_backend("auto")
    for axis in (0, 1, 2):
        expected = reference(cube.clone(), torch.tensor(every), axis, 2.0)
        assert torch.allclose(group_soft_threshold(cube.clone(), every, axis, 2.0), expected)
    use_backend("triton")
    with pytest.raises(BackendError, match="middle"):
        group_soft_threshold(cube, [0], 1, 2.0)


def test_float64_runs_on_the_reference(use_backend: Callable[[str], None]) -> None:
    x, every = torch.randn(5, 5, dtype=torch.float64), torch.arange(5)
    use_backend("auto")
    assert torch.equal(group_soft_threshold(x.clone(), every, 0, 1.0), reference(x.clone(), every, 0, 1.0))
    use_backend("cpp")
    with pytest.raises(BackendError, match=r"float64|not built"):
        group_soft_threshold(x, every, 0, 1.0)


def test_bad_arguments() -> None:
    w = torch.ones(3, 4)
    for threshold in (-1.0, math.inf, NAN):
        with pytest.raises(OpError, match="threshold is"):
            group_soft_threshold(w, [0], 0, threshold)
    for match, arguments in {
        "0 to 2": (w, [3], 0, 1.0),
        "axis is 2": (w, [0], 2, 1.0),
        "axis is 0": (torch.tensor(1.0), [0], 0, 1.0),
        "int64": (w.long(), [0], 0, 1.0),
    }.items():
        with pytest.raises(OpError, match=match):
            group_soft_threshold(*arguments)  # type: ignore[arg-type]
    with pytest.raises(OpError, match="offset"):
        group_soft_threshold(w, [0], 0, 1.0, offset=NAN)
    assert torch.equal(w, torch.ones(3, 4))


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module, view = dispatch.extension(), dispatch.tensor_view
    assert module is not None
    w = torch.ones(4, 6)
    good = {"w": w, "index": torch.tensor([1]), "axis": 0, "threshold": 1.0, "offset": 0.0, "threads": 1}
    for words, changed in {
        "threshold": {"threshold": -1.0},
        "out of range": {"index": torch.tensor([-1])},
        "contiguous": {"w": w.t()},
        "2 dimensions": {"w": w[0]},
        "float64": {"w": w.double()},
        "axis": {"axis": 2},
        "threads": {"threads": 0},
    }.items():
        arguments: dict[str, Any] = {**good, **changed}
        views = {name: view(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        with pytest.raises(ValueError, match=words):
            module.group_soft_threshold(**views)
    assert torch.equal(w, torch.ones(4, 6))
