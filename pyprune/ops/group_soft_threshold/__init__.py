"""Group soft-threshold: the l2 proximal step of MoreauPruner-GS and of DReSS's ``prox`` solver."""

from __future__ import annotations

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
    disjoint,
    extension,
    no_cpp,
    no_middle_axis,
    no_triton,
    rounded_scalar,
    tensor_view,
    threads,
)
from pyprune.ops.group_soft_threshold.reference import group_soft_threshold as reference

OP = "group_soft_threshold"


def group_soft_threshold(x: torch.Tensor, threshold: float, axis: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Shrink every group of ``x`` towards zero by ``threshold`` in l2 norm; groups not longer than that
    become 0.

    ``g <- g * max(0, 1 - threshold / ||g||_2)``, MoreauPruner-GS, Algorithm 1 (GroupSoftThreshold).

    Not a differentiable op: call it under ``torch.no_grad()`` for parameters.

    Args:
        x: any shape, floating point. Non-contiguous tensors are copied where a kernel needs it.
        threshold: finite, >= 0, in the unit of ``x``; rounded to float32 unless ``x`` is float64. 0 returns
            ``x``, except that a group with NaN becomes NaN.
        axis: the dimension that counts the groups. For a matrix, 0 makes every row a group, 1 every column. A
            vector's groups are its single elements.
        out: where to write, of the shape, dtype and device of ``x``; may be ``x`` itself.

    Returns:
        ``out``, or a new contiguous tensor. Removed groups are exactly +0. A group that holds NaN becomes NaN
        as a whole. A group that holds an infinity and no NaN is returned as it is (threshold / inf = 0).

    Raises:
        OpError: a bad threshold or axis, ``out`` that does not fit or overlaps ``x`` in part, or a tensor
            that requires grad outside ``no_grad``.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    threshold = rounded_scalar(checked_threshold(threshold), x.dtype)
    axis = checked_axis(axis, x.dim())
    _check_tensors(x, out)
    shape = as_matrix(tuple(x.shape), axis)
    checks: dict[Backend, Check] = {
        "triton": partial(no_middle_axis, no_triton, shape, x),
        "cpp": partial(no_middle_axis, no_cpp, shape, x),
    }
    backend = choose(OP, checks)
    if backend == "python" or shape is None:
        return reference(x, threshold, axis, out)
    source = x.contiguous()
    # A result that is not contiguous goes through a temporary: the kernels write whole matrices.
    target = out if out is not None and out.is_contiguous() else torch.empty_like(source)
    if x.numel():
        _run(backend, source, target, threshold, shape)
    if out is None:
        return target
    if target is not out:
        return out.copy_(target)
    torch.autograd.graph.increment_version(out)
    return out


def _run(backend: Backend, x: torch.Tensor, out: torch.Tensor, threshold: float, shape: tuple[int, int, int]) -> None:
    rows, cols, axis = shape
    source, target = x.detach().view(rows, cols), out.detach().view(rows, cols)
    if backend == "triton":
        from pyprune.ops.group_soft_threshold import triton as kernels

        kernels.group_soft_threshold(source, target, threshold, axis)
        return
    module = cast(ModuleType, extension())
    module.group_soft_threshold(tensor_view(source), tensor_view(target), threshold, axis, threads())


def _check_tensors(x: torch.Tensor, out: torch.Tensor | None) -> None:
    if x.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise OpError(f"{OP} takes float32, bfloat16, float16 or float64, not {x.dtype}")
    if torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad)):
        raise OpError(f"{OP} has no gradient: call it under torch.no_grad() or on a detached tensor")
    if out is None or out is x:
        return
    for name in ("shape", "dtype", "device"):
        if getattr(out, name) != getattr(x, name):
            raise OpError(f"out has {name} {getattr(out, name)}, but x has {getattr(x, name)}")
    same = x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
    if not (same or disjoint(x, out)):
        raise OpError("x and out overlap in part: pass the same tensor or a separate one")
