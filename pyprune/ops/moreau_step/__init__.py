"""One step of MoreauPruner: gradient step and decay of the displacement, then the group soft-threshold."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import cast

import torch

from pyprune.ops._dispatch import (
    KERNEL_DTYPES,
    Backend,
    Check,
    OpError,
    as_matrix,
    checked_axis,
    checked_threshold,
    choose,
    extension,
    no_cpp,
    no_middle_axis,
    no_triton,
    rounded_scalar,
    tensor_view,
    threads,
)
from pyprune.ops.moreau_step.reference import moreau_step as reference

OP = "moreau_step"


@torch.no_grad()
def moreau_step(
    delta: torch.Tensor, grad: torch.Tensor, gamma: float, rho: float, eta: float, axis: int
) -> torch.Tensor:
    """Advance the displacement ``delta = w - w0`` by one step, in place.

    ``delta <- (1 - gamma/rho) delta - gamma * grad``, then the group soft-threshold with ``gamma * eta``:
    MoreauPruner, Algorithm 1 and appendix B.2, written for the displacement. The weight itself must not be carried:
    rounded to bfloat16 or float16, ``w0 + delta`` loses nearly all of ``delta``.

    Args:
        delta: any shape, floating point, contiguous; changed in place.
        grad: like ``delta``.
        gamma: step size, finite, >= 0.
        rho: weight of the proximal term, finite, > 0.
        eta: weight of the group norm (MoreauPruner-GS), finite, >= 0. 0 is MoreauPruner's plain step.
        axis: the dimension that counts the groups, as in ``group_soft_threshold``.

    Returns:
        ``delta``. NaN and infinities follow ``group_soft_threshold``; in the plain step they stay where they are.

    Raises:
        OpError: a scalar out of range, or tensors that do not fit each other.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    checked_threshold(gamma, "gamma")
    checked_threshold(eta, "eta")
    if not (math.isfinite(rho) and rho > 0):
        raise OpError(f"rho is {rho}, must be finite and > 0")
    axis = checked_axis(axis, delta.dim())
    _check_tensors(delta, grad)
    # Rounded once for every backend, so that the set of removed groups is the same on all.
    scalars = {"1 - gamma / rho": 1 - gamma / rho, "gamma": gamma, "gamma * eta": gamma * eta}
    decay, step, threshold = (rounded_scalar(value, delta.dtype, name) for name, value in scalars.items())
    shape = as_matrix(tuple(delta.shape), axis)
    checks: dict[Backend, Check] = {
        "triton": partial(no_middle_axis, no_triton, shape, delta, grad),
        "cpp": partial(no_middle_axis, no_cpp, shape, delta, grad),
    }
    backend = choose(OP, checks)
    if backend == "python" or shape is None or delta.numel() == 0:
        return reference(delta, grad, decay, step, threshold, axis)
    rows, cols, matrix_axis = shape
    matrix, gradient = delta.detach().view(rows, cols), grad.detach().contiguous().view(rows, cols)
    if backend == "triton":
        from pyprune.ops.moreau_step import triton as kernels

        kernels.moreau_step(matrix, gradient, decay, step, threshold, matrix_axis)
    else:
        module = cast(ModuleType, extension())
        views = tensor_view(matrix), tensor_view(gradient)
        module.moreau_step(*views, decay, step, threshold, matrix_axis, threads())
    torch.autograd.graph.increment_version(delta)
    return delta


def _check_tensors(delta: torch.Tensor, grad: torch.Tensor) -> None:
    if delta.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise OpError(f"{OP} takes float32, bfloat16, float16 or float64, not {delta.dtype}")
    for name in ("shape", "dtype", "device"):
        if getattr(grad, name) != getattr(delta, name):
            raise OpError(f"grad has {name} {getattr(grad, name)}, but delta has {getattr(delta, name)}")
    if not delta.is_contiguous():
        raise OpError(f"delta must be contiguous, its strides are {delta.stride()}: pass delta.contiguous()")
