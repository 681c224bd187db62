"""Proximal map of the group penalty over a selected index set: the step of DReSS's ``prox`` solver."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch

from pyprune.ops._dispatch import checked_kind, checked_threshold, extension, rounded_scalar, tensor_view, threads
from pyprune.ops._index_set import as_rows, backend_for, select, written
from pyprune.ops.group_prox.reference import group_prox as reference

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
    ``threshold`` is lambda times the step size. The whole tensor at once, out of place: ``group_soft_threshold``.

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
    if backend == "triton":
        from pyprune.ops.group_prox import triton as kernels

        kernels.group_prox(rows, selection.index, selection.matrix[2], kind, threshold, selection.offset)
    else:
        views = tensor_view(rows), tensor_view(selection.index)
        module = cast(ModuleType, extension())
        module.group_prox(*views, selection.matrix[2], kind == "l1", threshold, selection.offset, threads())
    written(w, rows)
    return w
