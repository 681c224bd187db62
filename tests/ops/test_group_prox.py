from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import (
    BackendError,
    OpError,
    _dispatch,
    available_isas,
    group_penalty,
    group_prox,
    group_soft_threshold,
)
from pyprune.ops.group_prox import reference
from tests.ops.properties import examples
from tests.ops.rule import assert_equal_for_every_isa_and_thread_count, assert_within_rule
from tests.ops.test_group_penalty import DTYPES, KINDS, SHAPES, selections, some_of, weights

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN = math.nan
THRESHOLD = 0.5


def plain(w: torch.Tensor, index: torch.Tensor, axis: int, kind: str) -> torch.Tensor:
    """The formula as one would write it, every step in the tensor's own dtype."""
    part = w.index_select(axis, index)
    if kind == "l1" or w.shape[1 - axis] == 1:
        part = part.sign() * (part.abs() - THRESHOLD).clamp_min(0)
    else:
        norms = part.norm(dim=1 - axis, keepdim=True)
        part = torch.where(norms <= THRESHOLD, 0, part * (1 - THRESHOLD / norms))
    return w.clone().index_copy_(axis, index, part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int, kind: str) -> None:
    w, _ = weights(*shape, dtype=dtype)
    index = some_of(shape[axis])
    exact = reference(w.double(), index, axis, "l1" if w.shape[1 - axis] == 1 else kind, THRESHOLD)
    result = w.clone()
    version = result._version
    assert group_prox(result, index, axis, kind, THRESHOLD) is result
    assert result._version > version, "autograd must learn that the tensor changed"
    assert_within_rule(result, exact, plain(w, index, axis, kind))
    assert torch.equal(result == 0, exact.to(dtype) == 0), "what is removed differs"
    others = torch.ones(shape[axis], dtype=torch.bool)
    others[index] = False
    assert torch.equal(result.movedim(axis, 0)[others], w.movedim(axis, 0)[others]), "outside the index"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_is_the_proximal_map_of_the_penalty(axis: int, kind: str) -> None:
    w = torch.randn(7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = group_prox(w.clone(), [0, 2, 3], axis, kind, 0.7)

    def cost(x: torch.Tensor) -> float:
        return float(0.5 * (x - w).square().sum() + 0.7 * group_penalty(x, [0, 2, 3], axis, kind))

    for seed in range(50):
        step = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        for size in (1.0, 1e-2, 1e-4):
            assert cost(best + size * step) > cost(best)


@pytest.mark.parametrize("axis", [0, 1])
def test_on_every_group_it_is_the_group_soft_threshold(backend: str, axis: int) -> None:
    w, _ = weights(33, 65)
    expected = group_soft_threshold(w, 3.0, axis)
    assert torch.allclose(group_prox(w, range(w.shape[axis]), axis, "l2", 3.0), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_hand_and_what_is_removed_is_positive_zero(backend: str, dtype: torch.dtype) -> None:
    w = torch.tensor([[-3.0, -0.5, -0.0, 1.0, 2.5], [-0.5, 0.25, 0.0, 0.0, 0.0]], dtype=dtype)
    flat = group_prox(w.clone(), [0, 1], 0, "l1", 1.0)
    assert flat.tolist() == [[-2.0, 0.0, 0.0, 0.0, 1.5], [0.0] * 5]
    group = group_prox(w.clone(), [1], 0, "l2", 1.0)
    assert torch.equal(group, torch.stack([w[0], torch.zeros(5, dtype=dtype)]))
    for result in (flat[0, 1:4], flat[1], group[1]):
        assert not torch.signbit(result).any()
    vector = torch.tensor([-3.0, 0.5, 2.0], dtype=dtype)
    for kind in KINDS:
        assert group_prox(vector.clone(), [0, 1], 0, kind, 1.0).tolist() == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_offset_maps_one_plus_w(backend: str, dtype: torch.dtype, kind: str) -> None:
    for shape, axis in (((33,), 0), ((6, 70), 0), ((6, 70), 1)):
        w = (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(3)) - 0.5).to(dtype)
        index = some_of(shape[axis])
        exact = reference(w.double(), index, axis, "l1" if len(shape) == 1 else kind, THRESHOLD, 1.0)
        group_prox(w, index, axis, kind, THRESHOLD, offset=1.0)
        unit = torch.finfo(dtype).eps
        assert ((w.double() - exact).abs() <= unit * exact.abs() + 3e-7).all()
        assert torch.equal(w == -1, exact.to(dtype) == -1)
    assert (w == -1).any() == (kind == "l1")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(backend: str, dtype: torch.dtype, axis: int) -> None:
    groups = torch.full((4, 40), 3.0, dtype=dtype)
    groups[0, 3], groups[1, 2], groups[3, 0] = NAN, -math.inf, NAN
    w = groups if axis == 0 else groups.t().contiguous()
    result = group_prox(w.clone(), [0, 1, 2], axis, "l2", 1.0).movedim(axis, 0)
    assert torch.isnan(result[0]).all()
    assert torch.equal(result[1], groups[1])
    assert ((result[2] < 3) & (result[2] > 2)).all()
    assert torch.equal(result[3].nan_to_num(7), groups[3].nan_to_num(7))
    result = group_prox(w.clone(), [0, 1, 2], axis, "l1", 1.0).movedim(axis, 0)
    assert torch.isnan(result).nonzero().tolist() == [[0, 3], [3, 0]]
    assert result[1, 2] == -math.inf
    assert (result[:3].nan_to_num(2.0, neginf=2.0) == 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_squares_beyond_float32_are_handled(backend: str, axis: int, dtype: torch.dtype) -> None:
    w = torch.full((2, 200), 2.0**100, dtype=dtype)
    w[1] = 2.0**-100
    w = w if axis == 0 else w.t().contiguous()
    result = group_prox(w.clone(), [0, 1], axis, "l2", 2.0**-100).movedim(axis, 0).float()
    assert (result[0] == 2.0**100).all()
    assert torch.allclose(result[1] * 2.0**100, torch.tensor(1 - 200**-0.5), rtol=1e-2)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, axis: int, kind: str, use_backend: Callable[[str], None]
) -> None:
    w, _ = weights(131, 517, dtype=dtype)
    assert_equal_for_every_isa_and_thread_count(
        use_backend, lambda: [group_prox(w.clone(), index, axis, kind, 2.0) for index in selections(w.shape[axis])]
    )


@examples(30)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 200),
    axis=st.integers(0, 1),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    threshold=st.floats(2**-10, 20, width=32),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_index(
    backend: str,
    rows: int,
    cols: int,
    axis: int,
    kind: str,
    dtype: torch.dtype,
    threshold: float,
    share: float,
    seed: int,
) -> None:
    w, _ = weights(rows, cols, dtype=dtype, seed=seed)
    index = (torch.rand(w.shape[axis], generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()
    exact = reference(w.double(), index, axis, "l1" if w.shape[1 - axis] == 1 else kind, threshold)
    result = group_prox(w.clone(), index, axis, kind, threshold)
    # The storage's rounding, whose spacing is constant below the smallest normal number, and float32's of the
    # difference of a weight and the threshold.
    storage = torch.finfo(dtype)
    rounding = storage.eps * exact.abs().clamp(min=storage.smallest_normal)
    assert ((result.double() - exact).abs() <= rounding + 3e-7 * w.double().abs()).all()
    assert (result.double().abs() <= w.double().abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(backend: str, kind: str) -> None:
    w, _ = weights(3, 4)
    before = w.clone()
    assert torch.equal(group_prox(w, [], 1, kind, 1.0), before)
    assert torch.equal(group_prox(w, [0, 1], 1, kind, 0.0, offset=1.0), before)
    assert group_prox(torch.zeros(0, 5), [1, 2], 1, kind, 1.0).shape == (0, 5)


@pytest.mark.parametrize("axis", [0, 1])
def test_non_contiguous_tensors_and_parameters(backend: str, axis: int) -> None:
    w, _ = weights(65, 66)
    view = w.t()[::2, 3:]
    before, expected = w.clone(), group_prox(view.contiguous(), [1, 5, 6], axis, "l2", 1.0)
    assert group_prox(view, [1, 5, 6], axis, "l2", 1.0) is view
    assert torch.equal(view, expected)
    assert torch.equal(w.t()[1::2], before.t()[1::2])
    parameter = torch.nn.Parameter(before.clone())
    group_prox(parameter, [1], 0, "l1", 100.0)
    assert (parameter[1] == 0).all()
    assert parameter.is_leaf


def test_a_middle_axis(use_backend: Callable[[str], None]) -> None:
    cube = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    use_backend("auto")
    expected = group_soft_threshold(cube, 2.0, 1)
    assert torch.allclose(group_prox(cube.clone(), range(5), 1, "l2", 2.0), expected)
    use_backend("triton")
    with pytest.raises(BackendError, match="middle"):
        group_prox(cube, [0], 1, "l2", 2.0)


def test_bad_arguments() -> None:
    w = torch.ones(3, 4)
    for threshold in (-1.0, math.inf, NAN):
        with pytest.raises(OpError, match="threshold is"):
            group_prox(w, [0], 0, "l2", threshold)
    with pytest.raises(OpError, match="Unknown kind"):
        group_prox(w, [0], 0, "l3", 1.0)
    with pytest.raises(OpError, match="0 to 2"):
        group_prox(w, [3], 0, "l2", 1.0)
    with pytest.raises(OpError, match="offset"):
        group_prox(w, [0], 0, "l2", 1.0, offset=NAN)
    assert torch.equal(w, torch.ones(3, 4))


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module, view = _dispatch.extension(), _dispatch.tensor_view
    assert module is not None
    w, memory, tall, apart = torch.ones(4, 6), torch.ones(40), torch.ones(6, 4), torch.ones(4, 6)
    wide, one, outside, every = w.double(), torch.tensor([1]), torch.tensor([-1]), torch.arange(4)
    good = {"w": w, "out": w, "index": one, "axis": 0, "l1": False, "threshold": 1.0, "offset": 0.0, "threads": 1}
    for words, changed in {
        "threshold": {"threshold": -1.0},
        "out of range": {"index": outside},
        "contiguous": {"w": w.t(), "out": w.t()},
        "2 dimensions": {"w": w[0], "out": w[0]},
        "shape": {"out": tall},
        "float64": {"w": wide, "out": wide},
        "axis": {"axis": 2},
        "threads": {"threads": 0},
        "overlap": {"w": memory[:24].view(4, 6), "out": memory[4:28].view(4, 6), "index": every},
        "every group": {"out": apart},
    }.items():
        arguments: dict[str, Any] = {**good, **changed}
        views = {name: view(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        with pytest.raises(ValueError, match=words):
            module.group_prox(**views)
    assert all(torch.equal(x, torch.ones_like(x)) for x in (w, memory, apart))
