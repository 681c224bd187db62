"""What bench/ops.py times: for every op its ceiling, the kernel, eager torch and torch.compile.

A ceiling is an in-place probe with the op's read and write streams over arrays of the same size. Probes go over the
bytes as 32-bit integers, because torch converts every 16-bit number on the way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from bench._timing import CEILING, Case, backend, on_backend
from pyprune.ops import (
    add_group_penalty_,
    available_isas,
    group_importance,
    group_penalty,
    group_prox,
    group_soft_threshold,
    layer_norm_virtual,
    moreau_step,
    perturb,
    residual_diff_norm,
    shrink,
    slice_gather,
)
from pyprune.ops.regularised_adamw import Hyper, Moments, Penalty, regularised_adamw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AXES = ("rows", "columns")
THRESHOLD = 1e-3
SIGMA = 0.1
# So small that hundreds of steps leave the weights where they are.
TINY = 1e-9
Kind = Literal["l1", "l2"]
Solver = Literal["subgradient", "prox"]


@dataclass(frozen=True)
class Setting:
    """Size, device and backend of a run.

    Attributes:
        rows: of every weight.
        cols: of every weight, a multiple of 8.
        device: CPU or CUDA.
        compiled: whether torch.compile is measured.
        selected: share of the rows or columns that the ops on an index set work on.
    """

    rows: int
    cols: int
    device: torch.device
    compiled: bool
    selected: float = 0.25

    @cached_property
    def kernel(self) -> str:
        """The fast backend of this device, or the reference if there is none."""
        if self.device.type == "cuda":
            return "triton"
        return "cpp" if available_isas() else "python"

    def array(self, dtype: str) -> Tensor:
        """Numbers from 1 to 2, where neither probes nor thresholds can drive values into subnormals."""
        generator = torch.Generator().manual_seed(0)
        return (1 + torch.rand(self.rows, self.cols, generator=generator)).to(self.device, DTYPES[dtype])

    def compile(self, function: Callable[..., object], *args: object) -> Callable[[], object]:
        """``function(*args)`` compiled for exactly these arguments."""
        return partial(torch.compile(function, dynamic=False), *args)

    def check(self, what: str, dtype: str, function: Callable[..., Tensor], count: int = 1, rtol: float = 0.0) -> None:
        """Refuse to time a kernel that disagrees with the reference in float64 on a small input.

        Args:
            what: for the message.
            dtype: of the input.
            function: the op, from ``count`` matrices to a result; it may change them.
            count: of its inputs.
            rtol: beyond the rounding of ``dtype``.
        """
        generator = torch.Generator().manual_seed(1)
        small = [
            (1 + torch.rand(67, 136, generator=generator)).to(self.device, DTYPES[dtype]) for _ in range(count)
        ]  # fmt: skip
        with backend("python"):
            exact = function(*(x.double() for x in small))
        with backend(self.kernel):
            result = function(*(x.clone() for x in small))
        limits = torch.finfo(result.dtype if result.dtype == torch.float32 else DTYPES[dtype])
        if not torch.allclose(result.double(), exact.double(), rtol=2 * limits.eps + rtol, atol=limits.smallest_normal):
            sys.exit(f"{what} of {self.kernel} disagrees with the reference on {dtype}: no speed is reported")


def words(x: Tensor) -> Tensor:
    """The bytes of ``x`` as 32-bit integers."""
    return x.view(torch.int32)


def touch(*arrays: Tensor) -> None:
    """Read and write every array once."""
    for x in arrays:
        words(x).add_(0)


def add(target: Tensor, *sources: Tensor) -> None:
    """Read every source, read and write the target."""
    for source in sources:
        words(target).add_(words(source))


def read(*arrays: Tensor) -> None:
    """Read every array once."""
    for x in arrays:
        # Pairs of 16-bit numbers between 1 and 2 are ordinary float32 numbers too.
        x.view(torch.float32).sum()


def last(x: Tensor, axis: int, share: float = 0.25) -> Tensor:
    """Positions of the last ``share`` along ``axis``."""
    size = x.shape[axis]
    return torch.arange(size - round(size * share), size, device=x.device)


def region(x: Tensor, axis: int, share: float) -> Tensor:
    """The last ``share`` along ``axis``, as a view."""
    count = round(x.shape[axis] * share)
    return x.narrow(axis, x.shape[axis] - count, count)


# --- ops 1 and 2 ------------------------------------------------------------------------------------------------------


def eager_threshold(x: Tensor, axis: int) -> Tensor:
    """The group soft-threshold as one writes it in torch, out of place."""
    norm = torch.linalg.vector_norm(x, dim=1 - axis, keepdim=True, dtype=torch.float32)
    return (x * torch.clamp(1 - THRESHOLD / norm, min=0)).to(x.dtype)


def eager_moreau(delta: Tensor, grad: Tensor, axis: int) -> Tensor:
    """The Moreau step as one writes it in torch, out of place."""
    return eager_threshold((1 - TINY) * delta - TINY * grad, axis)


def eager_moreau_(delta: Tensor, grad: Tensor, axis: int) -> Tensor:
    """The Moreau step without temporaries of its size."""
    delta.mul_(1 - TINY).add_(grad, alpha=-TINY)
    norm = torch.linalg.vector_norm(delta, dim=1 - axis, keepdim=True, dtype=torch.float32)
    return delta.mul_(torch.clamp(1 - THRESHOLD / norm, min=0).to(delta.dtype))


def into(function: Callable[..., Tensor], x: Tensor, *args: object) -> None:
    """Write ``function(x, ...)`` back to ``x``."""
    x.copy_(function(x, *args))


def threshold_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 1, in place."""
    op, x = "group_soft_threshold", s.array(dtype)
    traffic = 2 * x.nbytes
    ceiling = Case(op, dtype, "", CEILING, partial(touch, x.clone()), traffic)
    result = [ceiling]
    for axis, groups in enumerate(AXES):
        s.check(op, dtype, partial(group_soft_threshold, threshold=THRESHOLD, axis=axis))
        ours = on_backend(s.kernel, group_soft_threshold, x, THRESHOLD, axis, out=x)
        result.append(Case(op, dtype, groups, s.kernel, ours, traffic, ceiling))
        result.append(Case(op, dtype, groups, "eager", partial(into, eager_threshold, x, axis), traffic, ceiling))
        if s.compiled:
            call = s.compile(into, eager_threshold, x, axis)
            result.append(Case(op, dtype, groups, "compiled", call, traffic, ceiling))
    return result


def moreau_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 2, with the group threshold; and the plain step."""
    op, x = "moreau_step", s.array(dtype)
    grad = torch.full_like(x, 1e-3)
    traffic = 3 * x.nbytes
    ceiling = Case(op, dtype, "", CEILING, partial(add, x.clone(), grad), traffic)
    step = {"gamma": TINY, "rho": 1.0}
    plain = on_backend(s.kernel, moreau_step, x, grad, **step, eta=0.0, axis=0)
    result = [ceiling, Case(op, dtype, "plain step", s.kernel, plain, traffic, ceiling)]
    for axis, groups in enumerate(AXES):
        s.check(op, dtype, partial(moreau_step, gamma=0.1, rho=1.0, eta=1.0, axis=axis), count=2)
        ours = on_backend(s.kernel, moreau_step, x, grad, **step, eta=1.0, axis=axis)
        result.append(Case(op, dtype, groups, s.kernel, ours, traffic, ceiling))
        result.append(Case(op, dtype, groups, "eager", partial(into, eager_moreau, x, grad, axis), traffic, ceiling))
        in_place = partial(eager_moreau_, x, grad, axis)
        result.append(Case(op, dtype, groups, "eager, in place", in_place, traffic, ceiling))
        if s.compiled:
            call = s.compile(into, eager_moreau, x, grad, axis)
            result.append(Case(op, dtype, groups, "compiled", call, traffic, ceiling))
    return result


# --- op 3 -------------------------------------------------------------------------------------------------------------


def perturb_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 3 into a buffer, beside a plain copy."""
    op, w0 = "perturb", s.array(dtype)
    delta, out = w0 * 1e-3, torch.empty_like(w0)
    traffic = 3 * w0.nbytes

    def eager() -> None:
        w = w0 + delta
        torch.addcmul(w, w.abs() * SIGMA, torch.randn_like(w), out=out)

    # The normals are equal to 1e-6.
    s.check(op, dtype, partial(perturb, sigma=SIGMA, seed=3), count=2, rtol=1e-5)
    copy = Case(op, dtype, "a plain copy", CEILING, partial(words(out).copy_, words(w0)), 2 * w0.nbytes)
    ours = on_backend(s.kernel, perturb, w0, delta, SIGMA, seed=3, out=out)
    return [
        copy,
        Case(op, dtype, "", s.kernel, ours, traffic, copy),
        Case(op, dtype, "", "eager", eager, traffic, copy),
    ]


# --- op 4 -------------------------------------------------------------------------------------------------------------


def penalty_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 4: the penalty's value and gradient, added to a gradient; some of the rows or columns."""
    op, w = "group_penalty", s.array(dtype)
    grad, probe = torch.full_like(w, 1e-3), torch.zeros_like(w)
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        traffic = 3 * part.nbytes
        ceiling = Case(op, dtype, groups, CEILING, partial(add, region(probe, axis, s.selected), part), traffic)
        reading = Case(op, dtype, f"{groups}, value only", CEILING, partial(read, part), part.nbytes)
        result += [ceiling, reading]
        for kind in ("l2", "l1"):
            s.check(op, dtype, partial(_penalty_gradient, axis=axis, kind=kind), count=2)
            name = f"{groups}, {kind}"
            ours = on_backend(s.kernel, add_group_penalty_, grad, w, index, axis, kind, TINY)
            result.append(Case(op, dtype, name, s.kernel, ours, traffic, ceiling))
            eager = partial(eager_penalty, w, grad, index, axis, kind)
            result.append(Case(op, dtype, name, "eager", eager, traffic, ceiling))
        value = on_backend(s.kernel, group_penalty, w, index, axis, "l2")
        result.append(Case(op, dtype, f"{groups}, value only", s.kernel, value, part.nbytes, reading))
    # Every fourth column: whole cache lines come anyway.
    spread = torch.arange(0, s.cols, 4, device=w.device)
    whole = Case(op, dtype, "every 4th column", CEILING, partial(add, probe, w), 3 * w.nbytes)
    ours = on_backend(s.kernel, add_group_penalty_, grad, w, spread, 1, "l2", TINY)
    return [*result, whole, Case(op, dtype, "every 4th column, l2", s.kernel, ours, 3 * w.nbytes, whole)]


def _penalty_gradient(grad: Tensor, w: Tensor, axis: int, kind: str) -> Tensor:
    add_group_penalty_(grad, w, last(w, axis), axis, kind, 0.5)
    return grad


def eager_penalty(w: Tensor, grad: Tensor, index: Tensor, axis: int, kind: str) -> None:
    """The penalty by autograd, accumulated into a gradient."""
    leaf = w.detach().requires_grad_()
    leaf.grad = grad
    part = leaf.index_select(axis, index)
    order = 2 if kind == "l2" else 1
    (TINY * torch.linalg.vector_norm(part, order, dim=1 - axis, dtype=torch.float32).sum()).backward()


def prox_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 4: the proximal maps and the multiplicative shrink of some rows or columns, in place."""
    w = s.array(dtype)
    probe = w.clone()
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        traffic = 2 * part.nbytes
        ceilings = {
            op: Case(op, dtype, groups, CEILING, partial(touch, region(probe, axis, s.selected)), traffic)
            for op in ("group_prox", "shrink")
        }
        result += ceilings.values()
        for kind in ("l2", "l1"):
            s.check("group_prox", dtype, partial(_proximal, axis=axis, kind=kind))
            name, ceiling = f"{groups}, {kind}", ceilings["group_prox"]
            ours = on_backend(s.kernel, group_prox, w, index, axis, kind, TINY)
            result.append(Case("group_prox", dtype, name, s.kernel, ours, traffic, ceiling))
            eager = partial(eager_prox, w, index, axis, kind)
            result.append(Case("group_prox", dtype, name, "eager", eager, traffic, ceiling))
        s.check("shrink", dtype, partial(_shrunk, axis=axis))
        # Up and down in turn would be two calls; a factor of nearly 1 leaves the numbers where they are.
        ours = on_backend(s.kernel, shrink, w, index, axis, 1 - 1e-7)
        result.append(Case("shrink", dtype, groups, s.kernel, ours, traffic, ceilings["shrink"]))
        eager = partial(eager_shrink, w, index, axis)
        result.append(Case("shrink", dtype, groups, "eager", eager, traffic, ceilings["shrink"]))
    return result


def _proximal(w: Tensor, axis: int, kind: str) -> Tensor:
    return group_prox(w, last(w, axis), axis, kind, 0.25)


def _shrunk(w: Tensor, axis: int) -> Tensor:
    return shrink(w, last(w, axis), axis, 0.75)


def eager_prox(w: Tensor, index: Tensor, axis: int, kind: str) -> None:
    """The proximal map of the selected slices with torch."""
    part = w.index_select(axis, index)
    if kind == "l1":
        part = torch.nn.functional.softshrink(part, TINY)
    else:
        norm = torch.linalg.vector_norm(part, dim=1 - axis, keepdim=True, dtype=torch.float32)
        part = (part * torch.clamp(1 - TINY / norm, min=0)).to(w.dtype)
    w.index_copy_(axis, index, part)


def eager_shrink(w: Tensor, index: Tensor, axis: int) -> None:
    """The shrink of the selected slices with torch."""
    w.index_copy_(axis, index, w.index_select(axis, index) * (1 - 1e-7))


# --- op 5 -------------------------------------------------------------------------------------------------------------

ADAMW_VARIANTS: dict[str, tuple[int, Kind, Solver] | None] = {
    "plain": None,
    "rows, l2 subgradient": (0, "l2", "subgradient"),
    "columns, l2 subgradient": (1, "l2", "subgradient"),
    "rows, l2 prox": (0, "l2", "prox"),
    "columns, l2 prox": (1, "l2", "prox"),
    "columns, l1 prox": (1, "l1", "prox"),
}


def adamw_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 5 with the penalty of a quarter of the rows or columns; bfloat16 weights are rounded stochastically."""
    if dtype == "float16":  # not trained in: it has no range for it, and no stochastic rounding
        return []
    op, weight = "regularised_adamw", s.array(dtype)
    gradient, moments = torch.full_like(weight, 1e-3), Moments.zeros(weight)
    traffic = 3 * weight.nbytes + 4 * moments.first.nbytes
    arrays = [weight.clone(), *(torch.ones_like(moments.first) for _ in range(2))]

    def probe() -> None:
        add(arrays[0], gradient)
        touch(*arrays[1:])

    ceiling = Case(op, dtype, "", CEILING, probe, traffic)
    result = [ceiling]
    for name, options in ADAMW_VARIANTS.items():
        if options is not None:
            s.check(op, dtype, partial(_adamw_step, *options), count=2)
        penalty = None if options is None else _adamw_penalty(weight, *options)
        call = partial(_adamw, s.kernel, weight, gradient, moments, penalty)
        result.append(Case(op, dtype, name, s.kernel, call, traffic, ceiling))
    return result + _coded_cases(s, dtype, weight, gradient) + _torch_adamw_cases(s, weight, gradient, moments, ceiling)


def _adamw(kernel: str, weight: Tensor, gradient: Tensor, moments: Moments, penalty: Penalty | None) -> None:
    with backend(kernel):
        regularised_adamw(
            [weight], [gradient], [moments], Hyper(lr=TINY), steps=100, penalties=[penalty], stochastic=True
        )


def _adamw_penalty(weight: Tensor, axis: int, kind: Kind, solver: Solver, strength: float = 1e-3) -> Penalty:
    return Penalty(last(weight, axis), axis, kind, strength, solver)


def _adamw_step(axis: int, kind: Kind, solver: Solver, weight: Tensor, gradient: Tensor) -> Tensor:
    penalty = _adamw_penalty(weight, axis, kind, solver, strength=0.5)
    regularised_adamw([weight], [gradient], [Moments.zeros(weight)], Hyper(lr=0.1), steps=1, penalties=[penalty])
    return weight


def _coded_cases(s: Setting, dtype: str, weight: Tensor, gradient: Tensor) -> list[Case]:
    op, variant, moments = "regularised_adamw", "8-bit moments", Moments.zeros(weight, quantised=True)
    arrays = [weight.clone(), *(moments.first.clone() for _ in range(2))]
    traffic = 3 * weight.nbytes + 4 * moments.first.nbytes

    def probe() -> None:
        add(arrays[0], gradient)
        touch(*arrays[1:])

    ceiling = Case(op, dtype, variant, CEILING, probe, traffic)
    ours = partial(_adamw, s.kernel, weight, gradient, moments, None)
    return [ceiling, Case(op, dtype, variant, s.kernel, ours, traffic, ceiling)]


def _torch_adamw_cases(s: Setting, weight: Tensor, gradient: Tensor, moments: Moments, ceiling: Case) -> list[Case]:
    op, dtype, traffic = ceiling.op, ceiling.dtype, ceiling.traffic
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    fused = torch.optim.AdamW([parameter], lr=TINY, weight_decay=0.0, fused=True)
    plain = torch.optim.AdamW([parameter], lr=TINY, weight_decay=0.0, foreach=False, fused=False)
    index = last(parameter, 1)

    def penalised(optimizer: torch.optim.Optimizer) -> None:
        norms = torch.linalg.vector_norm(parameter.index_select(1, index), dim=0, dtype=torch.float32)
        (TINY * norms.sum()).backward()
        optimizer.step()

    l2 = "columns, l2 subgradient"
    result = [
        Case(op, dtype, "plain", "torch fused", fused.step, traffic, ceiling),
        Case(op, dtype, "plain", "torch eager", plain.step, traffic, ceiling),
        Case(op, dtype, l2, "eager + torch fused", partial(penalised, fused), traffic, ceiling),
        Case(op, dtype, l2, "eager + torch eager", partial(penalised, plain), traffic, ceiling),
    ]
    if s.compiled:
        mask = torch.zeros(s.cols, dtype=torch.bool, device=weight.device).index_fill_(0, index, True)
        arguments = (weight, gradient, moments.first, moments.second)
        for variant, selected in (("plain", None), (l2, mask)):
            call = s.compile(adamw_formula, *arguments, selected)
            result.append(Case(op, dtype, variant, "compiled", call, traffic, ceiling))
    return result


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


# --- ops 6 to 9 -------------------------------------------------------------------------------------------------------


def difference_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 6, value and both gradients. The gradients are new tensors for everybody, the ceiling included."""
    op, x = "residual_diff_norm", s.array(dtype)
    pair = [x.requires_grad_(), (x.detach() * 1.01).requires_grad_()]
    plain = [t.detach() for t in pair]
    traffic = 6 * x.nbytes

    def probe() -> None:
        read(*plain)
        _ = [words(t).clone() for t in plain]

    def ours() -> None:
        torch.autograd.grad(residual_diff_norm(pair[0], pair[1], "l2"), pair)

    def eager() -> None:
        norms = torch.linalg.vector_norm(pair[1] - pair[0], dim=-1, dtype=torch.float32)
        torch.autograd.grad(norms.mean(), pair)

    s.check(op, dtype, lambda a, b: residual_diff_norm(a, b, "l2"), count=2, rtol=1e-5)
    ceiling = Case(op, dtype, "", CEILING, probe, traffic)
    return [
        ceiling,
        Case(op, dtype, "", s.kernel, on_backend(s.kernel, ours), traffic, ceiling),
        Case(op, dtype, "", "eager", eager, traffic, ceiling),
    ]


def importance_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 7: two arrays are read, next to nothing is written."""
    op, w = "group_importance", s.array(dtype)
    score = torch.full_like(w, 1.5)
    traffic = 2 * w.nbytes
    ceiling = Case(op, dtype, "", CEILING, partial(read, w, score), traffic)
    result = [ceiling]
    heads = math.gcd(s.rows, 64)
    for groups, axis, size in (("rows", 0, 1), ("columns", 1, 1), (f"heads of {heads} rows", 0, heads)):
        if size == 1:
            s.check(op, dtype, partial(group_importance, axis=axis), count=2, rtol=1e-5)
        ours = on_backend(s.kernel, group_importance, score, w, axis, size)
        result.append(Case(op, dtype, groups, s.kernel, ours, traffic, ceiling))
        eager = partial(eager_importance, score, w, axis, size)
        result.append(Case(op, dtype, groups, "eager", eager, traffic, ceiling))
    return result


def eager_importance(score: Tensor, w: Tensor, axis: int, size: int) -> Tensor:
    """The importance with torch."""
    members: Tensor = (score * w).abs().sum(1 - axis, dtype=torch.float32)
    return members.view(-1, size).sum(1)


def gather_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 8 into a buffer, beside a copy of the bytes it reads; three quarters stay.

    It reads whole rows, since every cache line of them holds kept columns. A copy of what is kept stands beside it.
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
    s.check(op, dtype, lambda a: slice_gather(a, range(5, 40), range(3, 100, 2), 0.7))
    result = []
    for name, (own_rows, own_columns, scale) in variants.items():
        shape = (s.rows if own_rows is None else rows, s.cols if own_columns is None else cols)
        out, like = torch.empty(shape, dtype=x.dtype, device=x.device), x.view(-1)[: shape[0] * shape[1]]
        read = x[: shape[0]].reshape(-1)
        traffic = read.nbytes + out.nbytes
        probe = partial(words(torch.empty_like(read)).copy_, words(read))
        ceiling = Case(op, dtype, name, CEILING, probe, 2 * read.nbytes)
        keeping = partial(words(out.view(-1)).copy_, words(like))
        ours = on_backend(s.kernel, slice_gather, x, own_rows, own_columns, scale, out=out)
        result += [
            ceiling,
            Case(op, dtype, name, s.kernel, ours, traffic, ceiling),
            Case(op, dtype, name, "copy of what is kept", keeping, 2 * out.nbytes, ceiling),
        ]
    eager = partial(
        torch.index_select, x, 1, kept_columns, out=torch.empty(s.rows, cols, dtype=x.dtype, device=x.device)
    )
    return [*result, Case(op, dtype, "3 of 4 columns", "eager", eager, result[4].traffic, result[3])]


def layer_norm_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 9, forward. The output is a new tensor for everybody, the ceiling included."""
    op, x = "layer_norm_virtual", s.array(dtype)
    weight, bias = (torch.full((s.cols,), v, dtype=x.dtype, device=x.device) for v in (1.0, 0.0))
    s.check(op, dtype, lambda a: layer_norm_virtual(a, a[0], a[1], 200), rtol=1e-5)
    traffic = 2 * x.nbytes
    ceiling = Case(op, dtype, "", CEILING, words(x).clone, traffic)
    ours = on_backend(s.kernel, layer_norm_virtual, x, weight, bias, s.cols + 64)
    stock = partial(torch.nn.functional.layer_norm, x, (s.cols,), weight, bias)
    return [
        ceiling,
        Case(op, dtype, "", s.kernel, ours, traffic, ceiling),
        Case(op, dtype, "", "torch's LayerNorm", stock, traffic, ceiling),
    ]


OPS: dict[str, Callable[[Setting, str], list[Case]]] = {
    "group_soft_threshold": threshold_cases,
    "moreau_step": moreau_cases,
    "perturb": perturb_cases,
    "group_penalty": penalty_cases,
    "group_prox": prox_cases,
    "regularised_adamw": adamw_cases,
    "residual_diff_norm": difference_cases,
    "group_importance": importance_cases,
    "slice_gather": gather_cases,
    "layer_norm_virtual": layer_norm_cases,
}
"""Op -> its cases for one dtype; "group_prox" brings "shrink" along."""


def cases(s: Setting, op: str, dtypes: list[str]) -> list[Case]:
    """All cases of one op, every dtype, so that their ratio comes from the same minutes."""
    return [case for dtype, make in product(dtypes, [OPS[op]]) for case in make(s, dtype)]
