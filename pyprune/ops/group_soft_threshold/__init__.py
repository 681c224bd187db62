"""Group soft-threshold of selected slices: DReSS's proximal step, and the map in that of MoreauPruner-GS."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyprune.ops.dispatch import axis_obstacle, backend_for, check_threshold, round_scalar, run_cpp
from pyprune.ops.group_soft_threshold.reference import group_soft_threshold as reference
from pyprune.ops.index_set import as_rows, select, write_back

OP = "group_soft_threshold"


@torch.no_grad()
def group_soft_threshold(
    w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, threshold: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Shrink the selected slices of ``w`` by ``threshold`` in l2 norm, in place and without gradient.

    ``g <- g * max(0, 1 - threshold / ||g||_2)`` (MoreauPruner-GS, Algorithm 1) is the proximal map of the l2 group
    penalty, ``argmin_x 1/2 ||x - w||^2 + threshold * group_penalty(x, index, axis, "l2")``. In DReSS's proximal step
    ``threshold`` is lambda times the step size.

    Args:
        w: any shape, floating point; parameters are fine. Non-contiguous tensors are copied and written back where a
            kernel needs it.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along. For ``w[out, in]``, 1 selects input columns. The slices of a
            vector are its elements.
        threshold: finite, >= 0, in the unit of ``w``; rounded to float32 unless ``w`` is float64. 0 changes nothing.
        offset: map ``w + offset`` instead of ``w`` and take the offset off again (1 for norms that multiply by 1 + w).

    Returns:
        ``w``. Slices not longer than the threshold become exactly +0 (with an offset, exactly its negative). A NaN
        reaches its whole slice; a slice with an infinity stays as it is (threshold / inf = 0).

    Raises:
        OpError: a bad dtype, axis, index, threshold or offset.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    selection = select(OP, w, index, axis, offset)
    threshold = round_scalar(check_threshold(threshold), w.dtype)
    backend = backend_for(OP, w, obstacle=axis_obstacle(selection.matrix, w))
    if threshold == 0 or not w.numel() or not selection.index.numel():
        return w
    if backend == "python" or selection.matrix is None:
        return reference(w, selection.index, selection.axis, threshold, selection.offset)
    rows, matrix_axis = as_rows(w, selection.matrix), selection.matrix[2]
    if backend == "triton":
        from pyprune.ops.group_soft_threshold import triton as kernels

        kernels.group_soft_threshold(rows, selection.index, matrix_axis, threshold, selection.offset)
    else:
        run_cpp("group_soft_threshold", rows, selection.index, matrix_axis, threshold, selection.offset)
    write_back(w, rows)
    return w
