"""AdamW whose pass over weight, gradient and moments also handles a group penalty."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch

from pyprune.ops.dispatch import (
    Backend,
    OpError,
    as_matrix,
    axis_obstacle,
    backend_for,
    check_axis,
    check_dtype,
    check_index,
    check_kind,
    check_threshold,
    extension,
    round_scalar,
    run_cpp,
    tensor_view,
)
from pyprune.ops.regularised_adamw.reference import (
    Hyper,
    Moments,
    Penalty,
    Randomness,
    Scalars,
    decode_moment,
    encode_moment,
)
from pyprune.ops.regularised_adamw.reference import regularised_adamw as reference

__all__ = ["Hyper", "Moments", "Penalty", "decode_moment", "encode_moment", "regularised_adamw"]

OP = "regularised_adamw"


@torch.no_grad()
def regularised_adamw(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    moments: Sequence[Moments],
    hyper: Hyper,
    *,
    steps: Sequence[int] | int,
    penalties: Sequence[Penalty | None] | None = None,
    gradient_scales: Sequence[float] | None = None,
    stochastic: bool = False,
    seed: int = 0,
    streams: Sequence[int] | None = None,
) -> None:
    """One step of decoupled AdamW (Loshchilov and Hutter, 2019) on many weights, in place.

    For each weight: lambda times the penalty's gradient joins the gradient, the moments move, and the weight decays and
    steps as ``torch.optim.AdamW`` does it. Weight, gradient and moments pass through memory once; the l2 penalties read
    the selected slices once more for their norms.

    Without a penalty, float32 weights agree with ``torch.optim.AdamW`` to 1e-6 of the largest weight over 20 steps.

    NaN and infinities: an element whose gradient is NaN or infinite becomes NaN itself; others do not, except in the
    same group of an l2 penalty (NaN only; a group with an infinity has no penalty; the gradient of a group with a
    norm below 3e-39 is shorter than the weight of the penalty, as in ``group_penalty``), and in the same 128 elements
    of 8-bit moments, which become NaN from the next step on.

    Args:
        weights: float32, bfloat16, float16 or float64, contiguous; all of one dtype and device.
        gradients: like ``weights``; not changed.
        moments: one for each weight, float32 or 8-bit (:meth:`Moments.zeros`); all of one kind.
        hyper: learning rate, betas, eps, weight decay.
        steps: number of this step for each weight, from 1 (bias correction; also selects the random bits).
        penalties: one or None for each weight.
        gradient_scales: a factor on each gradient (for clipping).
        stochastic: round bfloat16 weights up or down at random with the right mean instead of to nearest. 8-bit
            moments are always rounded so.
        seed: key of the random bits, 0 <= seed < 2**64. Equal seeds give equal bits on any backend, instruction set
            and number of threads.
        streams: tells weights apart in the random bits; by default their position.

    Raises:
        OpError: tensors that do not fit each other, or options outside their range.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    count = len(weights)
    numbers = [steps] * count if isinstance(steps, int) else list(steps)
    own_penalties = list(penalties) if penalties is not None else [None] * count
    scales = list(gradient_scales) if gradient_scales is not None else [1.0] * count
    own_streams = list(streams) if streams is not None else list(range(count))
    lengths = {len(x) for x in (weights, gradients, moments, numbers, own_penalties, scales, own_streams)}
    if len(lengths) != 1:
        raise OpError(f"there are {count} weights, but other lists have {sorted(lengths - {count})} entries")
    if not count:
        return
    _check_options(hyper, numbers, seed)
    for weight, gradient, own in zip(weights, gradients, moments, strict=True):
        _check_tensors(weights[0], weight, gradient, own)
    for step, scale in {*zip(numbers, scales, strict=True)}:
        Scalars.of(hyper, step, scale, weights[0].dtype)
    checked = [_check_penalty(p, w) for p, w in zip(own_penalties, weights, strict=True)]
    randoms = [Randomness(seed, step, stream) for step, stream in zip(numbers, own_streams, strict=True)]
    stochastic = stochastic and weights[0].dtype == torch.bfloat16
    pairs = ((w, as_matrix(tuple(w.shape), p.axis)) for w, p in zip(weights, checked, strict=True) if p is not None)
    obstacle = next((axis_obstacle(matrix, w) for w, matrix in pairs if matrix is None), None)
    backend = backend_for(OP, *weights, obstacle=obstacle)
    plain = [w.detach() for w in weights]
    slopes = [g.detach().contiguous() for g in gradients]
    if backend == "python":
        reference(plain, slopes, list(moments), hyper, numbers, checked, scales, randoms, stochastic=stochastic)
        return
    _run(backend, plain, slopes, moments, hyper, checked, scales, randoms, stochastic)
    for weight in weights:
        torch.autograd.graph.increment_version(weight)


def _check_options(hyper: Hyper, steps: Sequence[int], seed: int) -> None:
    for name in ("lr", "eps", "weight_decay"):
        check_threshold(getattr(hyper, name), name)
    for beta in hyper.betas:
        if not 0 <= beta < 1:
            raise OpError(f"betas are {hyper.betas}, each must be in [0, 1)")
    if min(steps) < 1:
        raise OpError(f"step is {min(steps)}, steps count from 1")
    if not 0 <= seed < 2**64:
        raise OpError(f"seed is {seed}, must be in 0 .. 2**64 - 1")


def _check_tensors(like: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, moments: Moments) -> None:
    check_dtype(OP, weight)
    if weight.dtype != like.dtype or weight.device != like.device:
        raise OpError(f"one weight is {weight.dtype} on {weight.device}, another {like.dtype} on {like.device}")
    for name in ("shape", "dtype", "device"):
        if getattr(gradient, name) != getattr(weight, name):
            raise OpError(f"a gradient has {name} {getattr(gradient, name)}, its weight {getattr(weight, name)}")
    if not weight.is_contiguous():
        raise OpError(f"weights must be contiguous, one has strides {weight.stride()}: pass w.contiguous()")
    expected = Moments.layout(weight, quantised=moments.quantised)
    for name in ("first", "second", "first_scale", "second_scale"):
        own, wanted = getattr(moments, name), expected.get(name)
        if wanted is None and own is None:
            continue
        if own is None or wanted is None or (tuple(own.shape), own.dtype) != wanted:
            raise OpError(f"moments.{name} does not fit its weight; make it with Moments.zeros(weight)")
        if not own.is_contiguous() or own.device != weight.device:
            raise OpError(f"moments.{name} must be contiguous and on {weight.device}")


def _check_penalty(penalty: Penalty | None, weight: torch.Tensor) -> Penalty | None:
    if penalty is None:
        return None
    check_kind(penalty.kind)
    check_threshold(penalty.penalty_weight, "penalty_weight")
    penalty_weight = round_scalar(penalty.penalty_weight, weight.dtype, "penalty_weight")
    offset = round_scalar(penalty.offset, weight.dtype, "offset")
    axis = check_axis(penalty.axis, weight.dim())
    # In order, neighbours are found by the kernels and read together.
    index = check_index(penalty.index, weight.shape[axis], weight).sort().values
    if not index.numel():
        return None
    # Both norms of a slice of one element are equal, and the gradient of l1 is exact.
    kind = "l1" if weight.numel() == weight.shape[axis] else penalty.kind
    return Penalty(index, axis, kind, penalty_weight, offset)


def _matrix_of(weight: torch.Tensor, penalty: Penalty | None) -> tuple[int, int, bool]:
    """(rows, cols, groups are rows)."""
    if penalty is not None:
        shape = as_matrix(tuple(weight.shape), penalty.axis)
        if shape is not None:
            return shape[0], shape[1], shape[2] == 0
    return 1, weight.numel(), True


def _run(
    backend: Backend,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    moments: Sequence[Moments],
    hyper: Hyper,
    penalties: Sequence[Penalty | None],
    scales: Sequence[float],
    randoms: Sequence[Randomness],
    stochastic: bool,
) -> None:
    parts = []
    for i, weight in enumerate(weights):
        rows, cols, by_row = _matrix_of(weight, penalties[i])
        scalars = Scalars.of(hyper, randoms[i].step, scales[i], weight.dtype)
        matrix, slope = weight.view(rows, cols), gradients[i].view(rows, cols)
        parts.append((matrix, slope, moments[i], scalars, penalties[i], by_row, randoms[i]))
    if backend == "triton":
        from pyprune.ops.regularised_adamw import triton as kernels

        kernels.step_tensors([kernels.Step(*part) for part in parts if part[0].numel()], stochastic=stochastic)
        return
    nothing = Penalty(torch.zeros(0, dtype=torch.int64), 0, penalty_weight=0.0)
    bound = []
    for matrix, slope, own, scalars, chosen, by_row, random in parts:
        penalty = chosen or nothing
        state = [tensor_view(t) for t in vars(own).values() if t is not None]
        bound.append(
            cast(ModuleType, extension()).AdamTensor(
                tensor_view(matrix), tensor_view(slope), state, [*vars(scalars).values()], random.step, random.stream,
                penalty.kind, tensor_view(penalty.index), by_row, penalty.penalty_weight, penalty.offset,
            )
        )  # fmt: skip
    run_cpp("regularised_adamw", bound, randoms[0].seed, stochastic)
