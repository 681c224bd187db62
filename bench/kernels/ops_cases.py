"""Cases of ops.py: for every op its ceiling, the kernel, eager torch and torch.compile."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench._timing import CEILING, Case, beside, run_on_backend, run_on_one_thread
from bench.kernels.ops_adamw import adamw_cases
from bench.kernels.ops_setting import AXES, ONE_THREAD, TINY, Setting, add, last, read, region, touch, words
from pyprune.ops import (
    add_group_penalty_,
    group_importance,
    group_penalty,
    group_soft_threshold,
    layer_norm_virtual,
    moreau_step,
    perturb,
    residual_diff_norm,
    slice_gather,
)

THRESHOLD = 1e-3
SIGMA = 0.1


def eager_threshold(x: Tensor, axis: int) -> Tensor:
    """The group soft-threshold as one writes it in torch, out of place."""
    norm = torch.linalg.vector_norm(x, dim=1 - axis, keepdim=True, dtype=torch.float32)
    return (x * torch.clamp(1 - THRESHOLD / norm, min=0)).to(x.dtype)


def eager_moreau(delta: Tensor, grad: Tensor, axis: int) -> Tensor:
    """The Moreau step as one writes it in torch, out of place."""
    return eager_threshold((1 - TINY) * delta - TINY * grad, axis)


def into(function: Callable[..., Tensor], x: Tensor, *args: object) -> None:
    """Write ``function(x, ...)`` back to ``x``."""
    x.copy_(function(x, *args))


def step_result(delta: Tensor, grad: Tensor, gamma: float, rho: float, eta: float, axis: int) -> Tensor:
    """The displacement after ``moreau_step``, which changes it in place."""
    moreau_step(delta, grad, gamma, rho, eta, axis)
    return delta


def step_sums(delta: Tensor, grad: Tensor, gamma: float, rho: float, eta: float, axis: int) -> Tensor:
    """Compute the result of ``moreau_step``."""
    return torch.stack(moreau_step(delta, grad, gamma, rho, eta, axis))


def moreau_cases(s: Setting, dtype: str) -> list[Case]:
    """``moreau_step`` with the group threshold, and the plain step."""
    op, x = "moreau_step", s.array(dtype)
    grad = torch.full_like(x, 1e-3)
    ceiling = Case(op, dtype, "", CEILING, partial(add, x.clone(), grad), 3 * x.nbytes)
    step = {"gamma": TINY, "rho": 1.0}
    s.check(op, dtype, partial(step_result, gamma=0.1, rho=1.0, eta=0.0, axis=0), count=2)
    s.check(op, dtype, partial(step_sums, gamma=0.1, rho=1.0, eta=0.0, axis=0), count=2, rtol=1e-5)
    plain = run_on_backend(s.kernel, moreau_step, x, grad, **step, eta=0.0, axis=0)
    result = [ceiling, *beside(ceiling, "plain step", {s.kernel: plain})]
    for axis, groups in enumerate(AXES):
        s.check(op, dtype, partial(step_result, gamma=0.1, rho=1.0, eta=1.0, axis=axis), count=2)
        s.check(op, dtype, partial(step_sums, gamma=0.1, rho=1.0, eta=1.0, axis=axis), count=2, rtol=1e-5)
        ours = run_on_backend(s.kernel, moreau_step, x, grad, **step, eta=1.0, axis=axis)
        calls = {s.kernel: ours, "eager": partial(into, eager_moreau, x, grad, axis)}
        if s.compiled:
            calls["compiled"] = s.compile(into, eager_moreau, x, grad, axis)
        result += beside(ceiling, groups, calls)
    return result


def perturb_cases(s: Setting, dtype: str) -> list[Case]:
    """``perturb`` into a buffer, compared with a plain copy."""
    op, w0 = "perturb", s.array(dtype)
    delta, out = w0 * 1e-3, torch.empty_like(w0)

    def eager() -> None:
        w = w0 + delta
        torch.addcmul(w, w.abs() * SIGMA, torch.randn_like(w), out=out)

    # The normals are equal to 1e-6.
    s.check(op, dtype, partial(perturb, sigma=SIGMA, seed=3), count=2, rtol=1e-5)
    copy = Case(op, dtype, "a plain copy", CEILING, partial(words(out).copy_, words(w0)), 2 * w0.nbytes)
    ours = run_on_backend(s.kernel, perturb, w0, delta, SIGMA, seed=3, out=out)
    return [copy, *beside(copy, "", {s.kernel: ours, "eager": eager}, 3 * w0.nbytes)]


def penalty_cases(s: Setting, dtype: str) -> list[Case]:
    """The penalty's value and gradient, added to a gradient; some of the rows or columns."""
    op, w = "group_penalty", s.array(dtype)
    grad, probe = torch.full_like(w, 1e-3), torch.zeros_like(w)
    case = partial(Case, op, dtype, prepare=s.cold)
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        ceiling = case(groups, CEILING, partial(add, region(probe, axis, s.selected), part), 3 * part.nbytes)
        result.append(ceiling)
        for kind in ("l2", "l1"):
            s.check(op, dtype, partial(_penalty_gradient, axis=axis, kind=kind), count=2)
            ours = run_on_backend(s.kernel, add_group_penalty_, grad, w, index, axis, kind, TINY)
            calls = {s.kernel: ours, "eager": partial(eager_penalty, w, grad, index, axis, kind)}
            if s.shared and groups == "columns" and kind == "l2":
                calls[ONE_THREAD] = run_on_one_thread(ours)
            result += beside(ceiling, f"{groups}, {kind}", calls)
        s.check(op, dtype, partial(_penalty_value, axis=axis), rtol=1e-5)
        name = f"{groups}, value only"
        reading = case(name, CEILING, partial(read, part), part.nbytes)
        value = run_on_backend(s.kernel, group_penalty, w, index, axis, "l2")
        result += [reading, *beside(reading, name, {s.kernel: value})]
    # Every fourth column: whole cache lines come anyway.
    s.check(op, dtype, partial(_penalty_gradient, axis=1, kind="l2", every=4), count=2)
    spread = torch.arange(0, s.cols, 4, device=w.device)
    whole = case("every 4th column", CEILING, partial(add, probe, w), 3 * w.nbytes)
    ours = run_on_backend(s.kernel, add_group_penalty_, grad, w, spread, 1, "l2", TINY)
    return [*result, whole, *beside(whole, "every 4th column, l2", {s.kernel: ours})]


def _penalty_gradient(grad: Tensor, w: Tensor, axis: int, kind: str, every: int | None = None) -> Tensor:
    index = last(w, axis) if every is None else torch.arange(0, w.shape[axis], every, device=w.device)
    add_group_penalty_(grad, w, index, axis, kind, 0.5)
    return grad


def _penalty_value(w: Tensor, axis: int) -> Tensor:
    return group_penalty(w, last(w, axis), axis, "l2")


def eager_penalty(w: Tensor, grad: Tensor, index: Tensor, axis: int, kind: str) -> None:
    """The penalty by autograd, accumulated into a gradient."""
    leaf = w.detach().requires_grad_()
    leaf.grad = grad
    part = leaf.index_select(axis, index)
    order = 2 if kind == "l2" else 1
    (TINY * torch.linalg.vector_norm(part, order, dim=1 - axis, dtype=torch.float32).sum()).backward()


def threshold_cases(s: Setting, dtype: str) -> list[Case]:
    """The group soft-threshold of some rows or columns, in place."""
    op, w = "group_soft_threshold", s.array(dtype)
    probe = w.clone()
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        probe_call = partial(touch, region(probe, axis, s.selected))
        ceiling = Case(op, dtype, groups, CEILING, probe_call, 2 * part.nbytes, prepare=s.cold)
        ours = run_on_backend(s.kernel, group_soft_threshold, w, index, axis, TINY)
        calls = {s.kernel: ours, "eager": partial(eager_threshold_, w, index, axis)}
        if s.shared and groups == "columns":
            calls[ONE_THREAD] = run_on_one_thread(ours)
        s.check(op, dtype, partial(_threshold, axis=axis))
        result += [ceiling, *beside(ceiling, f"{groups}, l2", calls)]
    return result


def _threshold(w: Tensor, axis: int) -> Tensor:
    return group_soft_threshold(w, last(w, axis), axis, 0.25)


def eager_threshold_(w: Tensor, index: Tensor, axis: int) -> None:
    """The group soft-threshold of the selected slices with torch."""
    part = w.index_select(axis, index)
    norm = torch.linalg.vector_norm(part, dim=1 - axis, keepdim=True, dtype=torch.float32)
    w.index_copy_(axis, index, (part * torch.clamp(1 - TINY / norm, min=0)).to(w.dtype))


def difference_cases(s: Setting, dtype: str) -> list[Case]:
    """Value and both gradients. The gradients are new tensors in every case, the ceiling included."""
    op, x = "residual_diff_norm", s.array(dtype)
    pair = [x.requires_grad_(), (x.detach() * 1.01).requires_grad_()]
    plain = [t.detach() for t in pair]

    def probe() -> None:
        read(*plain)
        _ = [words(t).clone() for t in plain]

    def ours() -> None:
        torch.autograd.grad(residual_diff_norm(pair[0], pair[1], "l2"), pair)

    def eager() -> None:
        norms = torch.linalg.vector_norm(pair[1] - pair[0], dim=-1, dtype=torch.float32)
        torch.autograd.grad(norms.mean(), pair)

    s.check(op, dtype, lambda a, b: residual_diff_norm(a, b, "l2"), count=2, rtol=1e-5)
    s.check(op, dtype, _difference_gradients, count=2, rtol=1e-5)
    ceiling = Case(op, dtype, "", CEILING, probe, 6 * x.nbytes)
    return [ceiling, *beside(ceiling, "", {s.kernel: run_on_backend(s.kernel, ours), "eager": eager})]


def _difference_gradients(x_in: Tensor, x_out: Tensor) -> Tensor:
    pair = [x_in.requires_grad_(), x_out.requires_grad_()]
    return torch.stack(torch.autograd.grad(residual_diff_norm(x_in, x_out, "l2"), pair))


def importance_cases(s: Setting, dtype: str) -> list[Case]:
    """Two arrays are read, next to nothing is written."""
    op, w = "group_importance", s.array(dtype)
    score = torch.full_like(w, 1.5)
    ceiling = Case(op, dtype, "", CEILING, partial(read, w, score), 2 * w.nbytes)
    result = [ceiling]
    heads = math.gcd(s.rows, 64)
    for groups, axis, size in (("rows", 0, 1), ("columns", 1, 1), (f"heads of {heads} rows", 0, heads)):
        s.check(op, dtype, partial(_importance, axis=axis, size=size), count=2, rtol=1e-5)
        ours = run_on_backend(s.kernel, group_importance, score, w, axis, size)
        result += beside(ceiling, groups, {s.kernel: ours, "eager": partial(eager_importance, score, w, axis, size)})
    return result


def _importance(score: Tensor, w: Tensor, axis: int, size: int) -> Tensor:
    whole = score.shape[axis] // size * size
    return group_importance(score.narrow(axis, 0, whole), w.narrow(axis, 0, whole), axis, size)


def eager_importance(score: Tensor, w: Tensor, axis: int, size: int) -> Tensor:
    """The importance with torch."""
    members: Tensor = (score * w).abs().sum(1 - axis, dtype=torch.float32)
    return members.view(-1, size).sum(1)


def gather_cases(s: Setting, dtype: str) -> list[Case]:
    """``slice_gather`` into a buffer, compared with a copy of the bytes it reads; three quarters are kept.

    It reads whole rows, since every cache line of them holds kept columns.
    """
    op, x = "slice_gather", s.array(dtype)
    rows, cols = s.rows * 3 // 4, s.cols * 3 // 4
    kept_rows = torch.arange(rows, device=x.device)
    kept_columns = torch.tensor([i for i in range(s.cols) if i % 4 != 1], device=x.device)
    variants = {
        "first rows": (kept_rows, None, 1.0),
        "3 of 4 columns": (None, kept_columns, 1.0),
        "3 of 4 columns, scaled": (None, kept_columns, 0.5),
        "rows and columns, scaled": (kept_rows, kept_columns, 0.5),
    }
    result = []
    for name, (own_rows, own_columns, scale) in variants.items():
        few_rows = None if own_rows is None else range(5, 40)
        few_columns = None if own_columns is None else range(3, 100, 2)
        s.check(op, dtype, partial(slice_gather, rows=few_rows, columns=few_columns, scale=0.7 if scale != 1 else 1.0))
        shape = (s.rows if own_rows is None else rows, s.cols if own_columns is None else cols)
        out, read = torch.empty(shape, dtype=x.dtype, device=x.device), x[: shape[0]].reshape(-1)
        probe = partial(words(torch.empty_like(read)).copy_, words(read))
        ceiling = Case(op, dtype, name, CEILING, probe, 2 * read.nbytes)
        calls = {s.kernel: run_on_backend(s.kernel, slice_gather, x, own_rows, own_columns, scale, out=out)}
        if name == "3 of 4 columns":
            calls["eager"] = partial(torch.index_select, x, 1, kept_columns, out=out)
        result += [ceiling, *beside(ceiling, name, calls, read.nbytes + out.nbytes)]
    return result


def layer_norm_cases(s: Setting, dtype: str) -> list[Case]:
    """Forward. The output is a new tensor in every case, the ceiling included."""
    op, x = "layer_norm_virtual", s.array(dtype)
    weight, bias = (torch.full((s.cols,), v, dtype=x.dtype, device=x.device) for v in (1.0, 0.0))
    s.check(op, dtype, lambda a: layer_norm_virtual(a, a[0], a[1], 200), rtol=1e-5)
    ceiling = Case(op, dtype, "", CEILING, words(x).clone, 2 * x.nbytes)
    ours = run_on_backend(s.kernel, layer_norm_virtual, x, weight, bias, s.cols + 64)
    stock = partial(torch.nn.functional.layer_norm, x, (s.cols,), weight, bias)
    return [ceiling, *beside(ceiling, "", {s.kernel: ours, "torch's LayerNorm": stock})]


OPS: dict[str, Callable[[Setting, str], list[Case]]] = {
    "group_soft_threshold": threshold_cases,
    "moreau_step": moreau_cases,
    "perturb": perturb_cases,
    "group_penalty": penalty_cases,
    "regularised_adamw": adamw_cases,
    "residual_diff_norm": difference_cases,
    "group_importance": importance_cases,
    "slice_gather": gather_cases,
    "layer_norm_virtual": layer_norm_cases,
}
"""Op -> its cases for one dtype."""


def cases(s: Setting, op: str, dtypes: list[str]) -> list[Case]:
    """All cases of one op, every dtype, so that their ratio comes from the same minutes."""
    return [case for dtype, make in product(dtypes, [OPS[op]]) for case in make(s, dtype)]
