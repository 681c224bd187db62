"""Multiplicative shrink of selected slices: the annealed schedule of DReSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch

from pyprune.ops._dispatch import OpError, extension, rounded_scalar, tensor_view, threads
from pyprune.ops._index_set import as_rows, backend_for, select, written
from pyprune.ops.shrink.reference import shrink as reference

OP = "shrink"


@torch.no_grad()
def shrink(
    w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, factor: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Multiply the selected slices of ``w`` by ``factor``, in place and without gradient.

    Args:
        w: any shape, floating point; parameters are fine. Non-contiguous tensors are copied and written back where a
            kernel needs it.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along.
        factor: finite, >= 0; rounded to float32 unless ``w`` is float64. Exactly 0 writes +0 over everything selected,
            NaN and infinities included; any other factor lets them propagate. Exactly 1 changes nothing.
        offset: shrink ``w + offset`` instead of ``w`` (1 for norms that multiply by 1 + w): 0 then writes ``-offset``.

    Returns:
        ``w``.

    Raises:
        OpError: a bad dtype, axis, index, factor or offset, or a factor that is 0 in float32 without being 0.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    selection = select(OP, w, index, axis, offset)
    if not math.isfinite(factor) or factor < 0:
        raise OpError(f"factor is {factor}, must be finite and >= 0")
    rounded = rounded_scalar(factor, w.dtype, "factor")
    if (rounded == 0) != (factor == 0):
        raise OpError(f"factor is {factor}, which float32 cannot hold; use 0 or a factor of at least 1e-45")
    backend = backend_for(OP, selection.matrix, w)
    if rounded == 1 or not w.numel() or not selection.index.numel():
        return w
    if backend == "python" or selection.matrix is None:
        return reference(w, selection.index, selection.axis, rounded, selection.offset)
    rows = as_rows(w, selection.matrix)
    if backend == "triton":
        from pyprune.ops.shrink import triton as kernels

        kernels.shrink(rows, selection.index, selection.matrix[2], rounded, selection.offset)
    else:
        views = tensor_view(rows), tensor_view(selection.index)
        module = cast(ModuleType, extension())
        module.shrink(*views, selection.matrix[2], rounded, selection.offset, threads())
    written(w, rows)
    return w
