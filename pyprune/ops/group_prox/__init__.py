"""Proximal map of the group penalty: the step of DReSS's ``prox`` solver, on a selected index set or every group."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch

from pyprune.ops._dispatch import (
    Backend,
    OpError,
    checked_kind,
    checked_threshold,
    disjoint,
    extension,
    rounded_scalar,
    tensor_view,
    threads,
)
from pyprune.ops._index_set import Selection, as_rows, backend_for, select, written
from pyprune.ops.group_prox.reference import group_prox as reference
from pyprune.ops.group_prox.reference import proximal_map

OP = "group_prox"


@torch.no_grad()
def group_prox(
    w: torch.Tensor,
    index: torch.Tensor | Sequence[int],
    axis: int,
    kind: str,
    threshold: float,
    *,
    offset: float = 0.0,
) -> torch.Tensor:
    """``argmin_x 1/2 ||x - w||^2 + threshold * group_penalty(x, index, axis, kind)``, in place and without gradient.

    For l1 the soft-threshold ``sign(v) max(0, |v| - threshold)`` of each selected element, for l2 the group
    soft-threshold ``v max(0, 1 - threshold / ||v||)`` of each selected slice: the proximal step of DReSS, where
    ``threshold`` is lambda times the step size. :func:`group_soft_threshold` is the l2 form for every slice, out of
    place as well.

    Args:
        w: any shape, floating point; parameters are fine. Non-contiguous tensors are copied and written back where a
            kernel needs it.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along. For ``w[out, in]``, 1 selects input columns.
        kind: "l1" or "l2".
        threshold: finite, >= 0, in the unit of ``w``; rounded to float32 unless ``w`` is float64. 0 changes nothing.
        offset: map ``w + offset`` instead of ``w`` and take the offset off again (1 for norms that multiply by 1 + w).

    Returns:
        ``w``. What is removed is exactly +0 (with an offset, exactly its negative). NaN stays NaN, and for l2 reaches
        its whole slice; an infinity stays, and for l2 leaves its slice as it is (threshold / inf = 0).

    Raises:
        OpError: a bad dtype, axis, kind, index, threshold or offset.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    selection = select(OP, w, index, axis, offset)
    checked_kind(kind)
    # Of slices of one element both norms are the same, and l1 is exact.
    kind = "l1" if selection.single else kind
    threshold = rounded_scalar(checked_threshold(threshold), w.dtype)
    backend = backend_for(OP, selection.matrix, w)
    if threshold == 0 or not w.numel() or not selection.index.numel():
        return w
    if backend == "python" or selection.matrix is None:
        return reference(w, selection.index, selection.axis, kind, threshold, selection.offset)
    rows = as_rows(w, selection.matrix)
    _run(backend, rows, rows, selection, kind, threshold)
    written(w, rows)
    return w


def group_soft_threshold(
    x: torch.Tensor, threshold: float, axis: int, out: torch.Tensor | None = None, *, offset: float = 0.0
) -> torch.Tensor:
    """Shrink every slice of ``x`` towards zero by ``threshold`` in l2 norm; slices not longer than that become 0.

    ``g <- g * max(0, 1 - threshold / ||g||_2)``, MoreauPruner-GS, Algorithm 1 (GroupSoftThreshold), and the proximal
    step of DReSS's l2 penalty on every channel: :func:`group_prox` with "l2" on all positions, by the same kernels.

    Not a differentiable op: call it under ``torch.no_grad()`` or on a detached tensor.

    Args:
        x: any shape, floating point. Non-contiguous tensors are copied where a kernel needs it.
        threshold: finite, >= 0, in the unit of ``x``; rounded to float32 unless ``x`` is float64. 0 returns ``x``,
            except that slices of zeros become +0, and that a slice with NaN becomes NaN.
        axis: the dimension that counts the slices. For a matrix, 0 makes every row a group, 1 every column. A vector's
            groups are its single elements.
        out: where to write, of the shape, dtype and device of ``x``; may be ``x`` itself.
        offset: map ``x + offset`` instead of ``x`` and take the offset off again (1 for norms that multiply by 1 + w).

    Returns:
        ``out``, or a new contiguous tensor. What is removed, NaN and infinities: as in :func:`group_prox`.

    Raises:
        OpError: a bad threshold, axis or offset, ``out`` that does not fit or overlaps ``x`` in part, or a tensor that
            requires grad outside ``no_grad``.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    op = "group_soft_threshold"
    selection = select(op, x, None, axis, offset)
    _check_out(op, x, out)
    kind = "l1" if selection.single else "l2"
    threshold = rounded_scalar(checked_threshold(threshold), x.dtype)
    backend = backend_for(op, selection.matrix, x)
    if backend == "python" or selection.matrix is None or not x.numel():
        result = proximal_map(x, selection.axis, kind, threshold, selection.offset)
        return result.contiguous() if out is None else out.copy_(result)
    source = as_rows(x, selection.matrix)
    if out is not None and out.is_contiguous():
        target = as_rows(out, selection.matrix)
    else:
        # A result that is not contiguous goes through a temporary: the kernels write whole matrices.
        target = torch.empty_like(source)
    _run(backend, source, target, selection, kind, threshold)
    if out is None:
        return target.view(x.shape)
    written(out, target)
    return out


def _run(
    backend: Backend, w: torch.Tensor, out: torch.Tensor, selection: Selection, kind: str, threshold: float
) -> None:
    """Write the map of the selected rows or columns of the matrix ``w`` into ``out``, which may be ``w``."""
    _, _, axis = cast(tuple[int, int, int], selection.matrix)
    if backend == "triton":
        from pyprune.ops.group_prox import triton as kernels

        kernels.group_prox(w, out, selection.index, axis, kind, threshold, selection.offset)
        return
    module = cast(ModuleType, extension())
    views = (tensor_view(tensor) for tensor in (w, out, selection.index))
    module.group_prox(*views, axis, kind == "l1", threshold, selection.offset, threads())


def _check_out(op: str, x: torch.Tensor, out: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad)):
        raise OpError(f"{op} has no gradient: call it under torch.no_grad() or on a detached tensor")
    if out is None or out is x:
        return
    for name in ("shape", "dtype", "device"):
        if getattr(out, name) != getattr(x, name):
            raise OpError(f"out has {name} {getattr(out, name)}, but x has {getattr(x, name)}")
    same = x.data_ptr() == out.data_ptr() and x.stride() == out.stride()
    if not (same or disjoint(x, out)):
        raise OpError("x and out overlap in part: pass the same tensor or a separate one")
