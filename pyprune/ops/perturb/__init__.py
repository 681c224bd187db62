"""The noisy weight at which MoreauPruner and SmoothGrad take their gradients."""

from __future__ import annotations

import torch

from pyprune.ops.dispatch import (
    OpError,
    backend_for,
    check_alike,
    check_dtype,
    check_threshold,
    disjoint,
    round_scalar,
    run_cpp,
)
from pyprune.ops.perturb.reference import CHUNK
from pyprune.ops.perturb.reference import perturb as reference

OP = "perturb"


@torch.no_grad()
def perturb(
    w0: torch.Tensor,
    delta: torch.Tensor,
    sigma: float,
    seed: int,
    offset: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``w + sigma |w| z`` with ``w = w0 + delta`` and standard normal z that is made on the fly, never stored.

    MoreauPruner, Algorithm 1, where z has the standard deviation sigma |w| elementwise; SmoothGrad with delta 0.

    The noise depends on ``seed`` and on the number of the normal alone: element i in row-major order takes number
    ``offset + i``. So it is the same for any number of threads and any instruction set, bit for bit, and within 1e-6
    on the other backends. A tensor that starts where another ended takes ``offset`` plus that one's size, and no two
    of them share noise. ``reference.py`` has the numbering.

    Args:
        w0: any shape, floating point. Non-contiguous tensors are copied where a kernel needs it.
        delta: like ``w0``.
        sigma: finite, >= 0, relative to the weight.
        seed: 0 <= seed < 2^64.
        offset: >= 0; number of the first element's normal. ``offset`` plus the size stays below 2^63.
        out: where to write, of the shape, dtype and device of ``w0``; contiguous; may be ``w0`` or ``delta`` itself,
            otherwise it shares no memory with them.

    Returns:
        ``out``, or a new contiguous tensor. Where ``w0 + delta`` is NaN the result is NaN, and where it is
        infinite the result is infinite or NaN; other elements are not touched by either.

    Raises:
        OpError: a scalar out of range, or tensors that do not fit each other.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    sigma = round_scalar(check_threshold(sigma, "sigma"), w0.dtype, "sigma")
    _check_numbers(seed, offset, w0.numel())
    _check_tensors(w0, delta, out)
    backend = backend_for(OP, w0, delta)
    if w0.numel() == 0:
        return torch.empty_like(w0) if out is None else out
    if backend == "python":
        result = reference(w0, delta, sigma, seed, offset)
        return result.contiguous() if out is None else out.copy_(result)
    target = torch.empty_like(w0, memory_format=torch.contiguous_format) if out is None else out
    sources = w0.detach().contiguous().view(-1), delta.detach().contiguous().view(-1)
    if backend == "triton":
        from pyprune.ops.perturb import triton as kernels

        kernels.perturb(*sources, target.detach().view(-1), sigma, seed, offset)
    else:
        run_cpp("perturb", *(tensor.view(1, -1) for tensor in (*sources, target.detach())), sigma, seed, offset)
    if out is not None:
        torch.autograd.graph.increment_version(out)
    return target


def _check_numbers(seed: int, offset: int, count: int) -> None:
    if not 0 <= seed < 2**64:
        raise OpError(f"seed is {seed}, must be at least 0 and below 2^64")
    if offset < 0 or offset + count > 2**63 - CHUNK:
        raise OpError(f"offset is {offset}, must be >= 0 and, with {count} elements, stay below 2^63")


def _check_tensors(w0: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None) -> None:
    check_dtype(OP, w0)
    check_alike("delta", delta, "w0", w0, "dtype")
    if out is None:
        return
    check_alike("out", out, "w0", w0, "dtype")
    if not out.is_contiguous():
        raise OpError(f"out must be contiguous, its strides are {out.stride()}")
    for name, tensor in (("w0", w0), ("delta", delta)):
        same = tensor.data_ptr() == out.data_ptr() and tensor.is_contiguous()
        if not (same or disjoint(tensor, out)):
            raise OpError(f"{name} and out overlap in part: pass the same tensor or a separate one")
