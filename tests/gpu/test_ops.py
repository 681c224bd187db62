"""The Triton kernels compiled for a real GPU.

PYPRUNE_GPU_TESTS=interpreter runs them on the CPU, which shows that the tests themselves are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pyprune.ops import (
    add_group_penalty_,
    group_importance,
    group_penalty,
    group_soft_threshold,
    layer_norm_virtual,
    moreau_step,
    perturb,
    regularised_adamw,
    residual_diff_norm,
    slice_gather,
)
from pyprune.ops.moreau_step import reference as step_reference
from pyprune.ops.regularised_adamw import Moments, Penalty
from pyprune.ops.regularised_adamw.reference import Randomness, read_moments, write_moments
from tests.ops.test_regularised_adamw import HYPER, PENALTIES, STEP, exact_step, penalty_for, tensors

INTERPRETED = os.environ.get("PYPRUNE_GPU_TESTS") == "interpreter"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu


@pytest.mark.parametrize("eta", [0.0, 8.0])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_moreau_step(dtype: torch.dtype, axis: int, eta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
    generator = torch.Generator().manual_seed(0)
    delta, grad = (torch.randn(257, 4099, generator=generator).to(DEVICE, dtype) for _ in range(2))
    scalars = torch.tensor([0.75, 0.1, 0.1 * eta]).tolist()
    exact, before = delta.double(), delta.float().clone()
    step_reference(exact, grad.double(), *scalars, axis)
    sums = moreau_step(delta, grad, 0.1, 0.4, eta, axis)
    unit = torch.finfo(dtype).eps
    # The sum of two terms of about 1 carries their rounding in float32, whatever its own size.
    assert ((delta.double() - exact).abs() <= unit * exact.abs() + 1e-6).all()
    after = delta.float()
    expected = [x.double().square().sum().item() for x in (after - before, after)]
    assert [float(x) for x in sums] == pytest.approx(expected, rel=1e-11)


SHAPE = (257, 1031)
INDEX = torch.tensor([256, 3, 128, 64, 65])
DTYPES = [torch.float32, torch.bfloat16]


def on_gpu(
    call: Callable[..., Sequence[torch.Tensor]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    shapes: Sequence[tuple[int, ...]] = (SHAPE, SHAPE),
    slack: float = 1e-6,
) -> None:
    """Check an op on the GPU against its definition in float64: to the rounding of the result, and of float32."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    monkeypatch.setenv("PYPRUNE_BACKEND", "python")
    exact = call(*(t.double() for t in inputs))
    monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
    for out, wanted in zip(call(*(t.to(DEVICE) for t in inputs)), exact, strict=True):
        assert out.device.type == DEVICE
        error = (out.cpu().double() - wanted).abs()
        assert (error <= torch.finfo(out.dtype).eps * wanted.abs() + slack * wanted.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestAgainstFloat64:
    def test_perturb(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        on_gpu(lambda w, delta: [perturb(w, delta, 0.125, 2**63 + 7, offset=5)], dtype, monkeypatch)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("kind", ["l1", "l2"])
    def test_group_penalty(self, kind: str, axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(w: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
            value = add_group_penalty_(grad, w, INDEX, axis, kind, 0.5, offset=1.0)
            leaf = w.clone().requires_grad_()
            (slope,) = torch.autograd.grad(group_penalty(leaf, INDEX, axis, kind), leaf)
            return [value, grad, slope]

        on_gpu(call, dtype, monkeypatch)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("threshold", [16.0, 64.0])
    def test_group_soft_threshold(
        self, threshold: float, axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_gpu(lambda w: [group_soft_threshold(w, INDEX, axis, threshold)], dtype, monkeypatch, [SHAPE])

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("signed", [True, False])
    def test_group_importance(
        self, signed: bool, axis: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_gpu(lambda s, w: [group_importance(s, w, axis, signed=signed, offset=1.0)], dtype, monkeypatch)

    @pytest.mark.parametrize("kind", ["l1", "l2"])
    def test_residual_diff_norm(self, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(*pair: torch.Tensor) -> list[torch.Tensor]:
            leaves = [t.requires_grad_() for t in pair]
            value = residual_diff_norm(leaves[0], leaves[1], kind)
            return [value.detach(), *torch.autograd.grad(value, leaves)]

        on_gpu(call, dtype, monkeypatch)

    @pytest.mark.parametrize("scale", [1.0, 0.375])
    def test_slice_gather(self, scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(w: torch.Tensor) -> list[torch.Tensor]:
            choices = [(INDEX, INDEX), (None, INDEX), (INDEX, None)]
            return [slice_gather(w, rows, columns, scale, offset=1.0) for rows, columns in choices]

        on_gpu(call, dtype, monkeypatch, [SHAPE])

    @pytest.mark.parametrize("bias", [True, False])
    def test_layer_norm_virtual(self, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, upstream: torch.Tensor) -> Any:
            leaves = [t.requires_grad_() for t in ((x, weight, shift) if bias else (x, weight))]
            out = layer_norm_virtual(x, weight, shift if bias else None, 1100, 2.0**-17)
            return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

        # The sums over rows are in float32.
        on_gpu(call, dtype, monkeypatch, [SHAPE, SHAPE[1:], SHAPE[1:], SHAPE], slack=1e-5)


class TestRegularisedAdamW:
    @staticmethod
    def step(weight: torch.Tensor, gradient: torch.Tensor, moments: Moments, penalty: Penalty | None) -> None:
        """One step on the GPU, copied back."""
        own = [weight, *(t for t in vars(moments).values() if t is not None)]
        there = [t.to(DEVICE) for t in own]
        penalties = [penalty]
        regularised_adamw(
            [there[0]], [gradient.to(DEVICE)], [Moments(*there[1:])], HYPER, steps=STEP, penalties=penalties,
            stochastic=True, seed=2**63 + 9,
        )  # fmt: skip
        for here, result in zip(own, there, strict=True):
            here.copy_(result)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("case", PENALTIES, ids=str)
    def test_float32(self, case: Any, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
        weight, gradient, moments = tensors(SHAPE, torch.float32)
        penalty = penalty_for(case, SHAPE[axis], axis)
        exact, exact_moments = exact_step(weight, gradient, moments, penalty)
        self.step(weight, gradient, moments, penalty)
        for out, wanted in (
            (weight, exact), (moments.first, exact_moments.first), (moments.second, exact_moments.second)
        ):  # fmt: skip
            assert (out.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max().clamp(min=1)

    @pytest.mark.parametrize("case", [None, "l2"], ids=str)
    @pytest.mark.parametrize("quantised", [True, False])
    def test_random_bits_are_those_of_the_definition(
        self, quantised: bool, case: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stochastically rounded bfloat16 weights, and 8-bit moments.

        A value that a fused multiply-add moves across the random limit goes to the other neighbour; with other bits
        half of all would.
        """
        states = []
        for backend in ("python", "triton"):
            monkeypatch.setenv("PYPRUNE_BACKEND", backend)
            weight, gradient, moments = tensors(SHAPE, torch.bfloat16)
            penalty = penalty_for(case, SHAPE[1], 1)
            if quantised:
                first, second = moments.first, moments.second
                moments = Moments.zeros(weight, quantised=True)
                write_moments(moments, first, second, Randomness(3, 4, 0))
            if backend == "python":
                regularised_adamw(
                    [weight], [gradient], [moments], HYPER, steps=STEP, penalties=[penalty], stochastic=True,
                    seed=2**63 + 9,
                )  # fmt: skip
            else:
                self.step(weight, gradient, moments, penalty)
            states.append((weight.float(), *read_moments(moments)))
        for wanted, out in zip(*states, strict=True):
            unequal = (out - wanted).abs() > 1e-5 * wanted.abs() + 1e-9
            assert unequal.float().mean() < 1e-3
            # One step of the code, of which an 8-bit second moment has 16 in a power of two, squared.
            assert (out - wanted).abs().max() <= 0.15 * wanted.abs().max()

    @pytest.mark.parametrize("quantised", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_many_weights_in_one_launch(
        self, dtype: torch.dtype, quantised: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYPRUNE_BACKEND", "triton")
        results = []
        for together in (True, False):
            made = [tensors(shape, dtype, seed) for seed, shape in enumerate([SHAPE, (3,), (4096,), (64, 1000)])]
            weights, gradients = ([m[i].to(DEVICE) for m in made] for i in (0, 1))  # type: ignore[union-attr]
            moments = [Moments.zeros(w, quantised=quantised) for w in weights]
            for step in (1, 2, 3):
                for chosen in [range(4)] if together else [range(i, i + 1) for i in range(4)]:
                    regularised_adamw(
                        [weights[i] for i in chosen], [gradients[i] for i in chosen], [moments[i] for i in chosen],
                        HYPER, steps=step, stochastic=True, seed=9, streams=list(chosen),
                    )  # fmt: skip
            results.append([*weights, *(t for m in moments for t in vars(m).values() if t is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
