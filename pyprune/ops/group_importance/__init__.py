"""Importance of rows, columns and heads: element scores reduced to structures."""

from __future__ import annotations

from typing import Literal

import torch

from pyprune.errors import did_you_mean
from pyprune.ops.dispatch import (
    KERNEL_DTYPES,
    OpError,
    as_matrix,
    axis_obstacle,
    backend_for,
    check_alike,
    check_axis,
    round_scalar,
    run_cpp,
)
from pyprune.ops.group_importance.reference import aggregate, member_scores
from pyprune.ops.index_set import as_rows

OP = "group_importance"
Aggregation = Literal["sum", "mean", "max", "prod"]
AGGREGATIONS: tuple[Aggregation, ...] = ("sum", "mean", "max", "prod")


@torch.no_grad()
def group_importance(
    score: torch.Tensor,
    w: torch.Tensor,
    axis: int,
    group_size: int = 1,
    aggregation: Aggregation = "sum",
    *,
    signed: bool = False,
    offset: float = 0.0,
) -> torch.Tensor:
    """Reduce the element score ``score * w`` to structures in one pass, without gradient.

    A member is a slice along ``axis`` (for a matrix, 0: a row, 1: a column), and its score is the sum of
    ``|score * w|`` over its elements: MoreauPruner's ``|delta * w0|``, Taylor's ``|g * w|`` (param_first). With
    ``signed`` it is ``|sum of score * w|``, LLM-Pruner's "vectorize". A structure is ``group_size`` consecutive
    members: 1 for channels, head_dim for heads; ``aggregation`` combines their scores:

    * "sum", "mean", "max": of the members;
    * "prod": the ``group_size``-th root of their product (their geometric mean), which ranks like the product, but
      does not leave the range of float64 with 64 members.

    Args:
        score: of the shape and device of ``w``; a gradient, a displacement or any other factor.
        w: any shape, float32, bfloat16, float16 or float64. Non-contiguous tensors are copied where a kernel needs it.
        axis: the dimension that counts the members.
        group_size: members in a structure; divides their number.
        aggregation: see above.
        signed: take the absolute value after summing over a member instead of before.
        offset: score ``w + offset`` instead of ``w`` (1 for norms that multiply by 1 + w).

    Returns:
        float64 ``[members / group_size]``, on the device of ``w``. Products and sums are float64 in a fixed order:
        the C++ kernels give the same bits for any number of threads and any instruction set. NaN in a structure makes
        it NaN; an infinite product makes it infinite (NaN if it meets another of opposite sign or, with "prod", a
        zero). No element: 0.

    Raises:
        OpError: tensors that do not fit each other, or an option outside the above.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    axis = check_axis(axis, w.dim())
    _check_tensors(score, w)
    members = w.shape[axis]
    if group_size < 1 or members % group_size:
        raise OpError(f"group_size is {group_size}, must be at least 1 and divide the {members} members")
    if aggregation not in AGGREGATIONS:
        raise OpError(did_you_mean(aggregation, AGGREGATIONS, "aggregation"))
    offset = round_scalar(offset, w.dtype, "offset")
    return aggregate(_member_scores(score, w, axis, signed, offset), group_size, aggregation)


def _check_tensors(score: torch.Tensor, w: torch.Tensor) -> None:
    for name, tensor in (("score", score), ("w", w)):
        if tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
            raise OpError(f"{name} is {tensor.dtype}; {OP} takes float32, bfloat16, float16 and float64")
    check_alike("score", score, "w", w)


def _member_scores(score: torch.Tensor, w: torch.Tensor, axis: int, signed: bool, offset: float) -> torch.Tensor:
    if score.dtype != w.dtype:
        # Every value of the narrower dtype is one of the wider: nothing is rounded.
        wide = torch.promote_types(score.dtype, w.dtype)
        score, w = score.to(wide), w.to(wide)
    matrix = as_matrix(tuple(w.shape), axis)
    backend = backend_for(OP, score, w, obstacle=axis_obstacle(matrix, w))
    if backend == "python" or matrix is None or not w.numel():
        return member_scores(score.detach(), w.detach(), axis, signed, offset)
    pair = as_rows(score, matrix), as_rows(w, matrix)
    if backend == "triton":
        from pyprune.ops.group_importance import triton as kernels

        return kernels.member_scores(*pair, matrix[2], signed, offset)
    sums = torch.empty(w.shape[axis], dtype=torch.float64)
    run_cpp("group_importance", *pair, matrix[2], signed, offset, sums)
    return sums.abs()
