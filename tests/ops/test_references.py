"""The ops that exist as references only."""

from __future__ import annotations

import math

import pytest
import torch

from pyprune.ops import OpError, group_penalty, residual_diff_norm, shrink, soft_threshold

HALVES = [torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class TestGroupPenalty:
    def test_value_by_hand(self) -> None:
        w = torch.tensor([[3.0, 1.0, 0.0], [4.0, -1.0, 2.0]])
        assert group_penalty(w, [0, 2], 1, "l2").item() == pytest.approx(5 + 2)
        assert group_penalty(w, [0, 2], 1, "l1").item() == pytest.approx(7 + 2)
        assert group_penalty(w, [1], 0, "l2").item() == pytest.approx(math.sqrt(21))
        assert group_penalty(w[0], [0, 1], 0, "l2").item() == pytest.approx(4)

    @pytest.mark.parametrize("kind", ["l1", "l2"])
    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_gradient(self, kind: str, axis: int) -> None:
        w = randn(4, 5, 6).requires_grad_()
        assert torch.autograd.gradcheck(lambda t: group_penalty(t, [0, 3], axis, kind), (w,))

    @pytest.mark.parametrize("kind", ["l1", "l2"])
    def test_gradient_is_exactly_zero_at_zero_groups_and_outside(self, kind: str) -> None:
        w = randn(6, 5, dtype=torch.float32)
        w[:, 1] = 0
        w.requires_grad_()
        group_penalty(w, [1, 3], 1, kind).backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        assert torch.isfinite(w.grad).all()
        assert (w.grad[:, [0, 1, 2, 4]] == 0).all()
        assert (w.grad[:, 3] != 0).all()

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_half_precision_sums_in_float32(self, dtype: torch.dtype) -> None:
        w = randn(300, 40, dtype=dtype)
        value = group_penalty(w, list(range(40)), 1, "l2")
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(w.double().norm(dim=0).sum().item(), rel=1e-5)

    def test_empty_index(self) -> None:
        w = randn(3, 4).requires_grad_()
        value = group_penalty(w, [], 1, "l2")
        value.backward()  # type: ignore[no-untyped-call]
        assert value.item() == 0
        assert w.grad is not None
        assert (w.grad == 0).all()

    def test_bad_arguments(self) -> None:
        w = randn(3, 4)
        with pytest.raises(OpError, match="more than once"):
            group_penalty(w, [1, 1], 1, "l2")
        with pytest.raises(OpError, match="0 to 3"):
            group_penalty(w, [4], 1, "l2")
        with pytest.raises(OpError, match="-1 to"):
            group_penalty(w, [-1], 1, "l2")
        with pytest.raises(OpError, match="integers"):
            group_penalty(w, torch.tensor([True, False, True, False]), 1, "l2")
        with pytest.raises(OpError, match="Did you mean"):
            group_penalty(w, [1], 1, "l22")


class TestResidualDiffNorm:
    def test_value_by_hand(self) -> None:
        x_in = torch.zeros(1, 2, 2)
        x_out = torch.tensor([[[3.0, -4.0], [0.0, 1.0]]])
        assert residual_diff_norm(x_in, x_out, "l2").item() == pytest.approx(3.0)
        assert residual_diff_norm(x_in, x_out, "l1").item() == pytest.approx(4.0)

    @pytest.mark.parametrize("kind", ["l1", "l2"])
    def test_gradient(self, kind: str) -> None:
        x_in, x_out = randn(2, 3, 5).requires_grad_(), randn(2, 3, 5, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: residual_diff_norm(a, b, kind), (x_in, x_out))

    @pytest.mark.parametrize("kind", ["l1", "l2"])
    def test_gradient_is_zero_where_nothing_changed(self, kind: str) -> None:
        x_in = randn(2, 3, 5, dtype=torch.float32)
        x_out = x_in.clone()
        x_out[0, 0] += 1
        x_out.requires_grad_()
        residual_diff_norm(x_in, x_out, kind).backward()  # type: ignore[no-untyped-call]
        assert x_out.grad is not None
        assert (x_out.grad[0, 0] != 0).all()
        assert (x_out.grad.flatten(0, 1)[1:] == 0).all()

    def test_does_not_depend_on_batch_or_length(self) -> None:
        x_in, x_out = randn(2, 3, 5), randn(2, 3, 5, seed=1)
        once = residual_diff_norm(x_in, x_out, "l2")
        twice = residual_diff_norm(x_in.repeat(2, 4, 1), x_out.repeat(2, 4, 1), "l2")
        assert torch.allclose(once, twice)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_half_precision_differences_are_taken_in_float32(self, dtype: torch.dtype) -> None:
        x_in, x_out = randn(2, 8, 64, dtype=dtype), randn(2, 8, 64, dtype=dtype, seed=1)
        exact = residual_diff_norm(x_in.double(), x_out.double(), "l2")
        value = residual_diff_norm(x_in, x_out, "l2")
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(exact.item(), rel=1e-5)

    def test_bad_arguments(self) -> None:
        with pytest.raises(OpError, match="must be equal"):
            residual_diff_norm(randn(2, 3), randn(2, 4), "l2")
        with pytest.raises(OpError, match="no token"):
            residual_diff_norm(randn(0, 3), randn(0, 3), "l2")


class TestShrink:
    def test_selected_slices_only_and_in_place(self) -> None:
        w = randn(4, 5, dtype=torch.float32)
        before = w.clone()
        assert shrink(w, [1, 4], 1, 0.5) is w
        assert torch.equal(w[:, [1, 4]], before[:, [1, 4]] * 0.5)
        assert torch.equal(w[:, [0, 2, 3]], before[:, [0, 2, 3]])

    def test_factor_zero_is_positive_zero_whatever_was_there(self) -> None:
        w = torch.tensor([[-1.0, math.nan], [-math.inf, -2.0]])
        shrink(w, [0, 1], 0, 0.0)
        assert torch.equal(w, torch.zeros(2, 2))
        assert not torch.signbit(w).any()

    def test_parameters_need_no_context(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, 3))
        shrink(parameter, [0], 0, 0.25)
        assert parameter[0].tolist() == [0.25] * 3
        assert parameter.is_leaf

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_half_precision_rounds_once(self, dtype: torch.dtype) -> None:
        w = randn(8, 8, dtype=dtype)
        expected = (w.float() * 0.3).to(dtype)
        assert torch.equal(shrink(w.clone(), range(8), 0, 0.3), expected)

    def test_empty_index_changes_nothing(self) -> None:
        w = randn(3, 3)
        assert torch.equal(shrink(w.clone(), [], 0, 0.0), w)

    @pytest.mark.parametrize("factor", [-0.1, math.nan, math.inf])
    def test_bad_factor(self, factor: float) -> None:
        with pytest.raises(OpError, match="factor"):
            shrink(randn(3, 3), [0], 0, factor)


class TestSoftThreshold:
    @pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
    def test_values(self, dtype: torch.dtype) -> None:
        x = torch.tensor([-3.0, -0.5, 0.0, 1.0, 2.5], dtype=dtype)
        assert soft_threshold(x, 1.0).tolist() == [-2.0, 0.0, 0.0, 0.0, 1.5]

    def test_nan_and_infinity(self) -> None:
        x = torch.tensor([math.nan, math.inf, -math.inf])
        assert soft_threshold(x, 1.0).nan_to_num(7).tolist() == x.nan_to_num(7).tolist()

    def test_is_the_proximal_operator(self) -> None:
        x = randn(50)
        grid = torch.linspace(-4, 4, 8001, dtype=torch.float64)
        cost = 0.5 * (grid - x[:, None]) ** 2 + 0.7 * grid.abs()
        best = grid[cost.argmin(dim=1)]
        assert torch.allclose(soft_threshold(x, 0.7), best, atol=1e-3)
