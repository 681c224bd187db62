"""What bench/ops.py times: for every op its ceiling, the kernel, eager torch and torch.compile.

A ceiling is an in-place probe with the op's read and write streams over arrays of the same size. Probes go over the
bytes as 32-bit integers, because torch converts every 16-bit number on the way.

What only reads is compared with :func:`read`, a reduction. Its GB/s are about half of an in-place probe's, which count
every byte twice: on the CPUs measured a pass that reads takes as long as one that also writes back, to within a tenth,
whether torch reduces (sum, amax, norm, dot) or an AVX-512 loop with prefetches does. So it is a ceiling.

Op 4 works on a part of a matrix that large last-level caches hold in part, and what a case finds there would depend on
the case before it. On a CPU each of its cases therefore starts after an untimed pass that fills the caches with other
data (:attr:`Setting.cold`): the figures are those of arrays that come from memory. On a GPU a case runs several times a
sample, each time after itself and over as many bytes as its ceiling, so that both find the same in the L2 cache.
Evicting it would leave one call a sample, which is too short to time; --selected 1 is larger than the cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Literal, NoReturn

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
        cache: bytes of the last-level cache that cases of op 4 on a CPU must not find their arrays in; 0 = let them.
    """

    rows: int
    cols: int
    device: torch.device
    compiled: bool
    selected: float = 0.25
    cache: int = 0

    @cached_property
    def kernel(self) -> str:
        """The fast backend of this device, or the reference if there is none."""
        if self.device.type == "cuda":
            return "triton"
        return "cpp" if available_isas() else "python"

    @cached_property
    def cold(self) -> Callable[[], object] | None:
        """Fills the caches of a CPU with other data; None on a GPU.

        It reads, because cached lines that it had written would be written back in the time of what comes next; and
        twice the cache's size, because no cache drops exactly what was used longest ago.
        """
        if self.device.type == "cuda" or not self.cache:
            return None
        # Ones and no zeros: those would all be the one page that the system gives out before the first write.
        return partial(read, torch.ones(2 * self.cache // 4))

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
        small = self._small(dtype, count)
        with backend("python"):
            exact = function(*(x.double() for x in small))
        with backend(self.kernel):
            result = function(*(x.clone() for x in small))
        limits = torch.finfo(result.dtype if result.dtype == torch.float32 else DTYPES[dtype])
        if not torch.allclose(result.double(), exact.double(), rtol=2 * limits.eps + rtol, atol=limits.smallest_normal):
            self._refuse(what, dtype)

    def check_random(self, what: str, dtype: str, function: Callable[..., Sequence[Tensor]], count: int = 1) -> None:
        """Refuse to time a kernel that rounds at random in another way than the reference with the same seed.

        Equal seeds give equal bits; but where float32 sums round differently, a value may cross a rounding boundary
        now and then, so one in a hundred may differ.

        Args:
            what: for the message.
            dtype: of the input.
            function: the op, from ``count`` matrices to its results; it may change them.
            count: of its inputs.
        """
        small, results = self._small(dtype, count), []
        for name in ("python", self.kernel):
            with backend(name):
                results.append([x.double() for x in function(*(x.clone() for x in small))])
        for expected, found in zip(*results, strict=True):
            if float((~torch.isclose(found, expected, rtol=1e-6, atol=0)).double().mean()) > 0.01:
                self._refuse(what, dtype)

    def _small(self, dtype: str, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [(1 + torch.rand(67, 136, generator=generator)).to(self.device, DTYPES[dtype]) for _ in range(count)]

    def _refuse(self, what: str, dtype: str) -> NoReturn:
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
    """Read every array once, as fast as memory gives it (see the module's docstring)."""
    for x in arrays:
        words(x).amax()


def selected_count(x: Tensor, axis: int, share: float) -> int:
    """How many groups make up ``share``, at least one; of columns an even number, which :func:`words` can view."""
    step = 1 if axis == 0 else 2
    return max(step, step * round(x.shape[axis] * share / step))


def last(x: Tensor, axis: int, share: float = 0.25) -> Tensor:
    """Positions of the last ``share`` along ``axis``."""
    size = x.shape[axis]
    return torch.arange(size - selected_count(x, axis, share), size, device=x.device)


def region(x: Tensor, axis: int, share: float) -> Tensor:
    """The last ``share`` along ``axis``, as a view."""
    count = selected_count(x, axis, share)
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
    s.check(op, dtype, partial(moreau_step, gamma=0.1, rho=1.0, eta=0.0, axis=0), count=2)
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
    case = partial(Case, op, dtype, prepare=s.cold)
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        traffic = 3 * part.nbytes
        ceiling = case(groups, CEILING, partial(add, region(probe, axis, s.selected), part), traffic)
        result.append(ceiling)
        for kind in ("l2", "l1"):
            s.check(op, dtype, partial(_penalty_gradient, axis=axis, kind=kind), count=2)
            name = f"{groups}, {kind}"
            ours = on_backend(s.kernel, add_group_penalty_, grad, w, index, axis, kind, TINY)
            eager = partial(eager_penalty, w, grad, index, axis, kind)
            result += [case(name, s.kernel, ours, traffic, ceiling), case(name, "eager", eager, traffic, ceiling)]
        s.check(op, dtype, partial(_penalty_value, axis=axis), rtol=1e-5)
        name = f"{groups}, value only"
        reading = case(name, CEILING, partial(read, part), part.nbytes)
        value = on_backend(s.kernel, group_penalty, w, index, axis, "l2")
        result += [reading, case(name, s.kernel, value, part.nbytes, reading)]
    # Every fourth column: whole cache lines come anyway.
    s.check(op, dtype, partial(_penalty_gradient, axis=1, kind="l2", every=4), count=2)
    spread = torch.arange(0, s.cols, 4, device=w.device)
    whole = case("every 4th column", CEILING, partial(add, probe, w), 3 * w.nbytes)
    ours = on_backend(s.kernel, add_group_penalty_, grad, w, spread, 1, "l2", TINY)
    return [*result, whole, case("every 4th column, l2", s.kernel, ours, 3 * w.nbytes, whole)]


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


def prox_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 4: the proximal maps and the multiplicative shrink of some rows or columns, in place, with one ceiling."""
    w = s.array(dtype)
    probe = w.clone()
    result = []
    for axis, groups in enumerate(AXES):
        index, part = last(w, axis, s.selected), region(w, axis, s.selected)
        traffic = 2 * part.nbytes
        case = partial(Case, dtype=dtype, traffic=traffic, prepare=s.cold)
        call: Callable[[], object] = partial(touch, region(probe, axis, s.selected))
        ceiling = case("group_prox", variant=groups, implementation=CEILING, call=call)
        result.append(ceiling)
        for kind in ("l2", "l1"):
            s.check("group_prox", dtype, partial(_proximal, axis=axis, kind=kind))
            for name, call in (
                (s.kernel, on_backend(s.kernel, group_prox, w, index, axis, kind, TINY)),
                ("eager", partial(eager_prox, w, index, axis, kind)),
            ):
                variant = f"{groups}, {kind}"
                result.append(case("group_prox", variant=variant, implementation=name, call=call, ceiling=ceiling))
        s.check("shrink", dtype, partial(_shrunk, axis=axis))
        for name, call in (
            # Up and down in turn would be two calls; a factor of nearly 1 leaves the numbers where they are.
            (s.kernel, on_backend(s.kernel, shrink, w, index, axis, 1 - 1e-7)),
            ("eager", partial(eager_shrink, w, index, axis)),
        ):
            result.append(case("shrink", variant=groups, implementation=name, call=call, ceiling=ceiling))
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
        s.check(op, dtype, partial(_adamw_step, options), count=2)
        s.check_random(op, dtype, partial(_adamw_random_steps, options, quantised=False), count=2)
        penalty = None if options is None else _adamw_penalty(weight, *options)
        call = partial(_adamw, s.kernel, weight, gradient, moments, penalty)
        result.append(Case(op, dtype, name, s.kernel, call, traffic, ceiling))
    return result + _coded_cases(s, dtype, weight, gradient) + _torch_adamw_cases(s, weight, gradient, moments, ceiling)


def _adamw(kernel: str, weight: Tensor, gradient: Tensor, moments: Moments, penalty: Penalty | None) -> None:
    with backend(kernel):
        regularised_adamw(
            [weight], [gradient], [moments], Hyper(lr=TINY), steps=100, penalties=[penalty], stochastic=True
        )


def _adamw_penalty(weight: Tensor, axis: int, kind: Kind, solver: Solver, penalty_weight: float = 1e-3) -> Penalty:
    return Penalty(last(weight, axis), axis, kind, penalty_weight, solver)


def _adamw_step(options: tuple[int, Kind, Solver] | None, weight: Tensor, gradient: Tensor) -> Tensor:
    penalty = None if options is None else _adamw_penalty(weight, *options, penalty_weight=0.5)
    regularised_adamw([weight], [gradient], [Moments.zeros(weight)], Hyper(lr=0.1), steps=1, penalties=[penalty])
    return weight


def _adamw_random_steps(
    options: tuple[int, Kind, Solver] | None, weight: Tensor, gradient: Tensor, quantised: bool
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
    s.check(op, dtype, _difference_gradients, count=2, rtol=1e-5)
    ceiling = Case(op, dtype, "", CEILING, probe, traffic)
    return [
        ceiling,
        Case(op, dtype, "", s.kernel, on_backend(s.kernel, ours), traffic, ceiling),
        Case(op, dtype, "", "eager", eager, traffic, ceiling),
    ]


def _difference_gradients(x_in: Tensor, x_out: Tensor) -> Tensor:
    pair = [x_in.requires_grad_(), x_out.requires_grad_()]
    return torch.stack(torch.autograd.grad(residual_diff_norm(x_in, x_out, "l2"), pair))


def importance_cases(s: Setting, dtype: str) -> list[Case]:
    """Op 7: two arrays are read, next to nothing is written."""
    op, w = "group_importance", s.array(dtype)
    score = torch.full_like(w, 1.5)
    traffic = 2 * w.nbytes
    ceiling = Case(op, dtype, "", CEILING, partial(read, w, score), traffic)
    result = [ceiling]
    heads = math.gcd(s.rows, 64)
    for groups, axis, size in (("rows", 0, 1), ("columns", 1, 1), (f"heads of {heads} rows", 0, heads)):
        s.check(op, dtype, partial(_importance, axis=axis, size=size), count=2, rtol=1e-5)
        ours = on_backend(s.kernel, group_importance, score, w, axis, size)
        result.append(Case(op, dtype, groups, s.kernel, ours, traffic, ceiling))
        eager = partial(eager_importance, score, w, axis, size)
        result.append(Case(op, dtype, groups, "eager", eager, traffic, ceiling))
    return result


def _importance(score: Tensor, w: Tensor, axis: int, size: int) -> Tensor:
    whole = score.shape[axis] // size * size
    return group_importance(score.narrow(axis, 0, whole), w.narrow(axis, 0, whole), axis, size)


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
    result = []
    for name, (own_rows, own_columns, scale) in variants.items():
        few_rows = None if own_rows is None else range(5, 40)
        few_columns = None if own_columns is None else range(3, 100, 2)
        s.check(op, dtype, partial(slice_gather, rows=few_rows, columns=few_columns, scale=0.7 if scale != 1 else 1.0))
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
