"""Cases of ``regularised_adamw`` for ops.py: its ceiling, the kernel, torch's AdamW and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from bench._timing import CEILING, Case, backend, beside
from bench.kernels.ops_setting import TINY, Setting, add, last, touch
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw

Kind = Literal["l1", "l2"]

ADAMW_VARIANTS: dict[str, tuple[int, Kind] | None] = {
    "plain": None,
    "rows, l2 subgradient": (0, "l2"),
    "columns, l2 subgradient": (1, "l2"),
    "columns, l1 subgradient": (1, "l1"),
}


def adamw_cases(s: Setting, dtype: str) -> list[Case]:
    """With the penalty of a quarter of the rows or columns; bfloat16 weights are rounded stochastically."""
    if dtype == "float16":  # not trained in: it has no range for it, and no stochastic rounding
        return []
    op, weight = "regularised_adamw", s.array(dtype)
    gradient, moments = torch.full_like(weight, 1e-3), Moments.zeros(weight)
    ceiling = _ceiling("", dtype, weight, gradient, moments)
    result = [ceiling]
    for name, options in ADAMW_VARIANTS.items():
        s.check(op, dtype, partial(_adamw_step, options), count=2)
        s.check_random(op, dtype, partial(_adamw_random_steps, options, quantised=False), count=2)
        penalty = None if options is None else _adamw_penalty(weight, *options)
        result += beside(ceiling, name, {s.kernel: partial(_adamw, s.kernel, weight, gradient, moments, penalty)})
    return result + _coded_cases(s, dtype, weight, gradient) + _torch_adamw_cases(s, weight, gradient, moments, ceiling)


def _ceiling(variant: str, dtype: str, weight: Tensor, gradient: Tensor, moments: Moments) -> Case:
    arrays = [weight.clone(), *(torch.ones_like(moments.first) for _ in range(2))]

    def probe() -> None:
        add(arrays[0], gradient)
        touch(*arrays[1:])

    return Case("regularised_adamw", dtype, variant, CEILING, probe, 3 * weight.nbytes + 4 * moments.first.nbytes)


def _adamw(kernel: str, weight: Tensor, gradient: Tensor, moments: Moments, penalty: Penalty | None) -> None:
    with backend(kernel):
        regularised_adamw(
            [weight], [gradient], [moments], Hyper(lr=TINY), steps=100, penalties=[penalty], stochastic=True
        )


def _adamw_penalty(weight: Tensor, axis: int, kind: Kind, penalty_weight: float = 1e-3) -> Penalty:
    return Penalty(last(weight, axis), axis, kind, penalty_weight)


def _adamw_step(options: tuple[int, Kind] | None, weight: Tensor, gradient: Tensor) -> Tensor:
    penalty = None if options is None else _adamw_penalty(weight, *options, penalty_weight=0.5)
    regularised_adamw([weight], [gradient], [Moments.zeros(weight)], Hyper(lr=0.1), steps=1, penalties=[penalty])
    return weight


def _adamw_random_steps(
    options: tuple[int, Kind] | None, weight: Tensor, gradient: Tensor, quantised: bool
) -> tuple[Tensor, ...]:
    """Weight and moments after steps as they are timed: the second one reads what the first one rounded."""
    penalty = None if options is None else _adamw_penalty(weight, *options, penalty_weight=0.5)
    moments = Moments.zeros(weight, quantised=quantised)
    for step in (1, 2):
        regularised_adamw(
            [weight], [gradient], [moments], Hyper(lr=0.1), steps=step, penalties=[penalty], stochastic=True
        )
    return weight, moments.first, moments.second


def _coded_cases(s: Setting, dtype: str, weight: Tensor, gradient: Tensor) -> list[Case]:
    op, variant, moments = "regularised_adamw", "8-bit moments", Moments.zeros(weight, quantised=True)
    s.check_random(f"{op}, {variant},", dtype, partial(_adamw_random_steps, None, quantised=True), count=2)
    ceiling = _ceiling(variant, dtype, weight, gradient, moments)
    ours = partial(_adamw, s.kernel, weight, gradient, moments, None)
    return [ceiling, *beside(ceiling, variant, {s.kernel: ours})]


def _torch_adamw_cases(s: Setting, weight: Tensor, gradient: Tensor, moments: Moments, ceiling: Case) -> list[Case]:
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    fused = torch.optim.AdamW([parameter], lr=TINY, weight_decay=0.0, fused=True)
    index = last(parameter, 1)

    def step_with_penalty() -> None:
        norms = torch.linalg.vector_norm(parameter.index_select(1, index), dim=0, dtype=torch.float32)
        (TINY * norms.sum()).backward()
        fused.step()

    calls: dict[str, dict[str, Callable[[], object]]] = {
        "plain": {"torch fused": fused.step},
        "columns, l2 subgradient": {"eager + torch fused": step_with_penalty},
    }
    if s.compiled:
        mask = torch.zeros(s.cols, dtype=torch.bool, device=weight.device).index_fill_(0, index, True)
        arguments = (weight, gradient, moments.first, moments.second)
        for own, selected in zip(calls.values(), (None, mask), strict=True):
            own["compiled"] = s.compile(adamw_formula, *arguments, selected)
    return [case for variant, own in calls.items() for case in beside(ceiling, variant, own)]


def adamw_formula(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, selected: Tensor | None) -> None:
    """AdamW in place, as one writes it for torch.compile; ``selected`` columns get the l2 subgradient."""
    w, g = weight.float(), gradient.float()
    if selected is not None:
        norm = w.square().sum(0).sqrt()
        g = g + w * torch.where(selected & (norm > 0), 1e-3 / norm, 0.0)
    m, v = first.lerp(g, 0.1), second * 0.999 + g * g * 0.001
    first.copy_(m)
    second.copy_(v)
    scale = (v / (1 - 0.999**100)).sqrt() + 1e-8
    weight.copy_(w - TINY / (1 - 0.9**100) * m / scale)
