"""Group penalty over a selected index set: what DReSS adds to the loss, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from pyprune.ops.dispatch import (
    Backend,
    OpError,
    axis_obstacle,
    backend_for,
    check_alike,
    check_kind,
    check_threshold,
    disjoint,
    round_scalar,
    run_cpp,
)
from pyprune.ops.group_penalty import reference as plain
from pyprune.ops.group_penalty.reference import group_penalty as reference
from pyprune.ops.index_set import Selection, as_rows, select, write_back

OP = "group_penalty"


def group_penalty(
    w: torch.Tensor, index: torch.Tensor | Sequence[int], axis: int, kind: str, *, offset: float = 0.0
) -> torch.Tensor:
    """Sum over the selected slices of ``w`` of their norm: one tensor's share of the DReSS regulariser.

    ``sum_{j in index} ||w along axis = j||``, DReSS, equations 2 to 4. The l2 norm is not squared. Nothing but ``w``
    and the index is kept for the gradient, which one pass over the selected slices makes.

    To add the gradient to one that exists, without a tensor in between, use :func:`add_group_penalty_`.

    Args:
        w: any shape, floating point. Non-contiguous tensors are copied where a kernel needs it.
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along. For ``w[out, in]``, 1 selects input columns.
        kind: "l2" (norm of each slice) or "l1" (sum of absolute values).
        offset: penalise ``w + offset`` (1 for norms that multiply by 1 + w).

    Returns:
        A scalar in float32 (float64 for float64), summed in float64, differentiable once in ``w``. The gradient at an
        all-zero slice is exactly 0, and it is exactly 0 outside ``index``. NaN and infinities reach the value. In the
        gradient, l1 gives NaN the sign 0, as torch does; l2 gives a slice with NaN NaN throughout, and a slice with an
        infinity NaN there and 0 elsewhere. A slice with a norm below 3e-39 has a shorter gradient than 1, since
        1 / norm is limited to the largest float32.

    Raises:
        OpError: a bad dtype, axis, kind, index or offset.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    selection = select(OP, w, index, axis, offset)
    kind = _norm_of(kind, selection)
    if torch.compiler.is_compiling():
        return reference(w, selection.index, selection.axis, kind, selection.offset)
    backend = backend_for(OP, w, obstacle=axis_obstacle(selection.matrix, w))
    result: torch.Tensor = _GroupPenalty.apply(w, selection.index, selection, kind, backend)
    return result


@torch.no_grad()
def add_group_penalty_(
    grad: torch.Tensor,
    w: torch.Tensor,
    index: torch.Tensor | Sequence[int],
    axis: int,
    kind: str,
    penalty_weight: float,
    *,
    offset: float = 0.0,
) -> torch.Tensor:
    """Add ``penalty_weight`` times the gradient of the group penalty to ``grad``, in place, in one pass.

    Args:
        grad: an existing gradient of ``w``, of its shape, dtype and device; shares no memory with it.
        w: as in :func:`group_penalty`.
        index: as in :func:`group_penalty`.
        axis: as in :func:`group_penalty`.
        kind: as in :func:`group_penalty`.
        penalty_weight: lambda, finite, >= 0.
        offset: as in :func:`group_penalty`.

    Returns:
        The penalty, not weighted, a scalar in float32 (float64 for float64). The gradient, NaN and infinities
        included, is that of :func:`group_penalty`; it is added in float32 and rounded once.

    Raises:
        OpError: a bad argument, or ``grad`` that does not fit ``w`` or shares its memory.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    selection = select(OP, w, index, axis, offset)
    kind = _norm_of(kind, selection)
    penalty_weight = round_scalar(check_threshold(penalty_weight, "penalty_weight"), w.dtype, "penalty_weight")
    check_alike("grad", grad, "w", w, "dtype")
    if not disjoint(grad, w):
        raise OpError("grad and w share memory: pass separate tensors")
    backend = backend_for(OP, w, obstacle=axis_obstacle(selection.matrix, w))
    return _add_gradient(grad, w, selection, kind, penalty_weight, backend)


def _norm_of(kind: str, selection: Selection) -> str:
    """The norm to take: of slices of one element both are the same, and l1 is exact."""
    check_kind(kind)
    return "l1" if selection.single else kind


class _GroupPenalty(torch.autograd.Function):
    """Keeps the weight itself, which the model keeps anyway, and the index."""

    @staticmethod
    def forward(
        ctx: Any, w: torch.Tensor, index: torch.Tensor, selection: Selection, kind: str, backend: Backend
    ) -> torch.Tensor:
        ctx.save_for_backward(w, index)
        ctx.selection, ctx.kind, ctx.backend = selection, kind, backend
        return _value(w, selection, kind, backend)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w, _ = ctx.saved_tensors
        grad = torch.zeros_like(w, memory_format=torch.contiguous_format)
        _add_gradient(grad, w, ctx.selection, ctx.kind, upstream, ctx.backend)
        return grad, None, None, None, None


def _value(w: torch.Tensor, selection: Selection, kind: str, backend: Backend) -> torch.Tensor:
    if backend == "python" or selection.matrix is None or not _elements(w, selection):
        return reference(w, selection.index, selection.axis, kind, selection.offset)
    return _run(None, as_rows(w, selection.matrix), selection, kind, 0.0, backend)


def _add_gradient(
    grad: torch.Tensor,
    w: torch.Tensor,
    selection: Selection,
    kind: str,
    penalty_weight: float | torch.Tensor,
    backend: Backend,
) -> torch.Tensor:
    if backend == "python" or selection.matrix is None or not _elements(w, selection):
        return plain.add_gradient(grad, w, selection.index, selection.axis, kind, penalty_weight, selection.offset)
    target = as_rows(grad, selection.matrix)
    value = _run(target, as_rows(w, selection.matrix), selection, kind, penalty_weight, backend)
    write_back(grad, target)
    return value


def _elements(w: torch.Tensor, selection: Selection) -> bool:
    return w.numel() > 0 and selection.index.numel() > 0


def _run(
    grad: torch.Tensor | None,
    w: torch.Tensor,
    selection: Selection,
    kind: str,
    penalty_weight: float | torch.Tensor,
    backend: Backend,
) -> torch.Tensor:
    axis = cast(tuple[int, int, int], selection.matrix)[2]
    if backend == "triton":
        from pyprune.ops.group_penalty import triton as kernels

        return kernels.group_penalty(grad, w, selection.index, axis, kind, penalty_weight, selection.offset)
    value = run_cpp(
        "group_penalty", w, selection.index, axis, kind == "l1", grad, float(penalty_weight), selection.offset
    )
    return torch.tensor(value, dtype=torch.float32)
