"""One step of MoreauPruner: gradient step and decay of the displacement, then the group soft-threshold."""

from __future__ import annotations

import math

import torch

from pyprune.ops.dispatch import (
    OpError,
    as_matrix,
    axis_obstacle,
    backend_for,
    check_alike,
    check_axis,
    check_dtype,
    check_threshold,
    round_scalar,
    run_cpp,
)
from pyprune.ops.moreau_step.reference import StepSums
from pyprune.ops.moreau_step.reference import moreau_step as reference

__all__ = ["StepSums", "moreau_step"]

OP = "moreau_step"


@torch.no_grad()
def moreau_step(delta: torch.Tensor, grad: torch.Tensor, gamma: float, rho: float, eta: float, axis: int) -> StepSums:
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
        Two sums of squares from the same pass, float64 scalars on the device of ``delta``: of the change of ``delta``,
        and of ``delta`` after it. NaN and infinities follow ``group_soft_threshold``, in the plain step they stay where
        they are; they reach the sums.

    Raises:
        OpError: a scalar out of range, or tensors that do not fit each other.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    check_threshold(gamma, "gamma")
    check_threshold(eta, "eta")
    if not (math.isfinite(rho) and rho > 0):
        raise OpError(f"rho is {rho}, must be finite and > 0")
    axis = check_axis(axis, delta.dim())
    _check_tensors(delta, grad)
    # Rounded once for every backend, so that the set of removed groups is the same on all.
    scalars = {"1 - gamma / rho": 1 - gamma / rho, "gamma": gamma, "gamma * eta": gamma * eta}
    decay, step, threshold = (round_scalar(value, delta.dtype, name) for name, value in scalars.items())
    shape = as_matrix(tuple(delta.shape), axis)
    backend = backend_for(OP, delta, grad, obstacle=axis_obstacle(shape, delta))
    if backend == "python" or shape is None or delta.numel() == 0:
        return reference(delta, grad, decay, step, threshold, axis)
    rows, cols, matrix_axis = shape
    matrix, gradient = delta.detach().view(rows, cols), grad.detach().contiguous().view(rows, cols)
    if backend == "triton":
        from pyprune.ops.moreau_step import triton as kernels

        sums = kernels.moreau_step(matrix, gradient, decay, step, threshold, matrix_axis)
    else:
        pair = run_cpp("moreau_step", matrix, gradient, decay, step, threshold, matrix_axis)
        sums = torch.tensor(pair, dtype=torch.float64)
    torch.autograd.graph.increment_version(delta)
    return StepSums(*sums.unbind())


def _check_tensors(delta: torch.Tensor, grad: torch.Tensor) -> None:
    check_dtype(OP, delta)
    check_alike("grad", grad, "delta", delta, "dtype")
    if not delta.is_contiguous():
        raise OpError(f"delta must be contiguous, its strides are {delta.stride()}: pass delta.contiguous()")
