from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyprune.ops import BackendError, OpError, available_isas, dispatch, group_importance
from tests.ops.properties import examples
from tests.ops.rule import assert_equal_for_every_isa_and_thread_count

# Triton's interpreter computes in numpy, which warns of NaN and infinity.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (16, 64), (33, 65), (5, 2049), (130, 129)]
AGGREGATIONS: list[Any] = ["sum", "mean", "max", "prod"]


def pair(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    score, w = torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)
    w.view(-1)[::11] = 0
    return (1e-3 * score).to(dtype), w.to(dtype)


def members(score: torch.Tensor, w: torch.Tensor, axis: int, signed: bool = False) -> torch.Tensor:
    product = (score.double() * w.double()).movedim(axis, 0).flatten(1)
    return product.sum(dim=1).abs() if signed else product.abs().sum(dim=1)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_exact_to_float64(
    backend: str, shape: tuple[int, int], dtype: torch.dtype, axis: int, signed: bool
) -> None:
    score, w = pair(*shape, dtype=dtype)
    result = group_importance(score, w, axis, signed=signed)
    assert result.dtype == torch.float64
    # Cancellation leaves an error of the terms' size, not of their sum's.
    allowed = 1e-13 * members(score, w, axis)
    assert ((result - members(score, w, axis, signed)).abs() <= allowed).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_by_hand(backend: str, axis: int) -> None:
    w = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.0, 1.0], [-1.0, -1.0]])
    score = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [5.0, 0.5], [2.0, -2.0]])
    if axis == 1:
        w, score = w.t(), score.t()
    assert group_importance(score, w, axis).tolist() == [3, 7, 0.5, 4]
    assert group_importance(score, w, axis, signed=True).tolist() == [1, 1, 0.5, 0]
    assert group_importance(score, w, axis, 2).tolist() == [10, 4.5]
    assert group_importance(score, w, axis, 2, "mean").tolist() == [5, 2.25]
    assert group_importance(score, w, axis, 2, "max").tolist() == [7, 4]
    assert group_importance(score, w, axis, 2, "prod").tolist() == pytest.approx([21**0.5, 2**0.5])
    assert group_importance(score, w, axis, 4, "prod", signed=True).tolist() == [0.0]
    assert group_importance(score, w, axis, offset=1.0).tolist() == [2 + 1, 4 + 5, 5 + 1, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_heads_are_consecutive_rows_or_columns(backend: str, aggregation: Any) -> None:
    """The right heads: those that were made important."""
    head_dim, heads = 7, 6
    score, w = pair(head_dim * heads, 40)
    for head in (1, 4):
        score[head * head_dim : (head + 1) * head_dim] *= 10
    order = group_importance(score, w, 0, head_dim, aggregation).argsort(descending=True)
    assert set(order[:2].tolist()) == {1, 4}
    columns = group_importance(score.t(), w.t(), 1, head_dim, aggregation)
    assert torch.equal(columns.argsort(descending=True), order)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 12, 60])
def test_aggregations(backend: str, group_size: int) -> None:
    score, w = pair(60, 33)
    groups = members(score, w, 0).view(-1, group_size)
    for aggregation, expected in {
        "sum": groups.sum(dim=1),
        "mean": groups.mean(dim=1),
        "max": groups.amax(dim=1),
        "prod": groups.log().mean(dim=1).exp(),
    }.items():
        result = group_importance(score, w, 0, group_size, aggregation)  # type: ignore[arg-type]
        assert torch.allclose(result, expected, rtol=1e-12, atol=0)


def test_the_product_of_many_small_members_is_not_lost(backend: str) -> None:
    score, w = torch.full((128, 4), 1e-9), torch.full((128, 4), 1e-3)
    score[:64] *= 2
    result = group_importance(score, w, 0, 64, "prod")
    assert result.tolist() == pytest.approx([8e-12, 4e-12])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_score_is_lost_to_underflow_or_overflow(backend: str, dtype: torch.dtype, axis: int) -> None:
    score, w = torch.full((3, 50), 2.0**-100, dtype=dtype), torch.full((3, 50), 2.0**-90, dtype=dtype)
    score[1], w[1] = 2.0**100, 2.0**90
    score, w = (t if axis == 0 else t.t() for t in (score, w))
    assert group_importance(score, w, axis).tolist() == [50 * 2.0**-190, 50 * 2.0**190, 50 * 2.0**-190]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(backend: str, dtype: torch.dtype, axis: int) -> None:
    score, w = torch.ones(4, 40, dtype=dtype), torch.ones(4, 40, dtype=dtype)
    w[0, 3], score[1, 2], w[2, 0], score[2, 0] = math.nan, -math.inf, math.inf, 0.0
    score, w = (t if axis == 0 else t.t() for t in (score, w))
    for signed in (False, True):
        result = group_importance(score, w, axis, signed=signed)
        assert result.nan_to_num(-1, posinf=7).tolist() == [-1, 7, -1, 40]
        blocks = group_importance(score, w, axis, 2, signed=signed)
        assert torch.isnan(blocks).all()


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_is_bit_equal_for_every_isa_and_thread_count(
    dtype: torch.dtype, axis: int, use_backend: Callable[[str], None]
) -> None:
    score, w = pair(132, 516, dtype=dtype)

    def run() -> list[torch.Tensor]:
        return [
            group_importance(score, w, axis, 4, aggregation, signed=signed)
            for aggregation in AGGREGATIONS
            for signed in (False, True)
        ]

    assert_equal_for_every_isa_and_thread_count(use_backend, run)


@pytest.mark.second
@examples(30)
@given(
    groups=st.integers(1, 20),
    group_size=st.integers(1, 9),
    other=st.integers(1, 150),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
    signed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    backend: str, groups: int, group_size: int, other: int, axis: int, dtype: torch.dtype, signed: bool, seed: int
) -> None:
    score, w = pair(groups * group_size, other, dtype=dtype, seed=seed)
    if axis == 1:
        score, w = score.t().contiguous(), w.t().contiguous()
    result = group_importance(score, w, axis, group_size, signed=signed)
    expected = members(score, w, axis, signed).view(groups, group_size).sum(dim=1)
    allowed = 1e-13 * members(score, w, axis).view(groups, group_size).sum(dim=1)
    assert ((result - expected).abs() <= allowed).all()


def test_a_displacement_of_another_dtype(backend: str) -> None:
    score, w = pair(9, 33)
    half = w.bfloat16()
    assert torch.equal(group_importance(score, half, 0), group_importance(score, half.float(), 0))


def test_non_contiguous_higher_rank_and_empty(backend: str, use_backend: Callable[[str], None]) -> None:
    score, w = pair(20, 34)
    view = score[::2, 3:].t(), w[::2, 3:].t()
    assert torch.allclose(group_importance(*view, 1), members(*view, 1), rtol=1e-13)
    score, w = pair(4, 5, 6)
    for axis in (0, 2):
        assert torch.allclose(group_importance(score, w, axis), members(score, w, axis), rtol=1e-13)
    assert group_importance(torch.zeros(3, 0), torch.zeros(3, 0), 0).tolist() == [0, 0, 0]
    assert group_importance(torch.zeros(0, 3), torch.zeros(0, 3), 0).tolist() == []
    vector = torch.tensor([1.0, -2.0, 3.0])
    assert group_importance(vector, vector, 0).tolist() == [1, 4, 9]
    if backend != "python":
        with pytest.raises(BackendError, match="middle"):
            group_importance(score, w, 1)
    use_backend("auto")
    assert torch.allclose(group_importance(score, w, 1), members(score, w, 1), rtol=1e-13)


def test_parameters_leave_no_graph(backend: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    assert not group_importance(torch.ones(4, 4), weight, 0).requires_grad


def test_bad_arguments() -> None:
    w = torch.ones(6, 4)
    for match, options in {
        "divide the 6 members": {"group_size": 4},
        "group_size is 0": {"group_size": 0},
        "Did you mean 'max'": {"aggregation": "maxx"},
        "offset is": {"offset": math.nan},
        "axis is 2": {"axis": 2},
    }.items():
        with pytest.raises(OpError, match=match):
            group_importance(w, w, **({"axis": 0} | options))  # type: ignore[arg-type]
    with pytest.raises(OpError, match="score has shape"):
        group_importance(w[:3], w, 0)
    with pytest.raises(OpError, match=r"score is torch\.int64"):
        group_importance(w.long(), w, 0)


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
def test_the_bindings_check_what_they_are_given() -> None:
    module, view = dispatch.extension(), dispatch.tensor_view
    assert module is not None
    w, other, half = torch.ones(4, 6), torch.ones(6, 4), torch.ones(4, 6).bfloat16()
    out, single = torch.zeros(4, dtype=torch.float64), torch.zeros(4)
    with pytest.raises(ValueError, match="shape"):
        module.group_importance(view(other), view(w), 0, False, 0.0, view(out), 1)
    with pytest.raises(ValueError, match="bfloat16"):
        module.group_importance(view(half), view(w), 0, False, 0.0, view(out), 1)
    with pytest.raises(ValueError, match="6 elements"):
        module.group_importance(view(w), view(w), 1, False, 0.0, view(out), 1)
    with pytest.raises(ValueError, match="float64"):
        module.group_importance(view(w), view(w), 0, False, 0.0, view(single), 1)
