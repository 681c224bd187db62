"""The sliced layer: rows and columns of a weight gathered in one pass, with the compaction's scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyprune.ops.dispatch import KERNEL_DTYPES, OpError, backend_for, check_index, round_scalar, run_cpp
from pyprune.ops.slice_gather.reference import slice_gather as reference

OP = "slice_gather"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Positions = torch.Tensor | Sequence[int] | None


@torch.no_grad()
def slice_gather(
    w: torch.Tensor,
    rows: Positions,
    columns: Positions = None,
    scale: float = 1.0,
    *,
    offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(w[rows][:, columns] + offset) * scale - offset`` in one pass, as a contiguous tensor without gradient.

    Args:
        w: a matrix, or a vector (then ``columns`` must be None). Any dtype without a scale: the bits are copied, NaN
            payloads included. With a scale, float32, bfloat16, float16 or float64, computed in float32 (float64
            for float64) and rounded once; NaN and infinities propagate.
        rows: positions along the first dimension, in the order wanted; repeats are allowed; None = all of them.
        columns: positions along the second.
        scale: a finite factor. Exactly 1 copies, whatever ``offset`` is.
        offset: scale ``w + offset`` instead of ``w`` (1 for norms that multiply by 1 + w).
        out: where to write, contiguous, of the result's shape and ``w``'s dtype and device, sharing no memory with
            ``w``; None makes a new tensor.

    Raises:
        OpError: another number of dimensions, a bad position, a scale that is not finite or does not fit the dtype, or
            an ``out`` that does not fit.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    if w.dim() not in (1, 2) or (w.dim() == 1 and columns is not None):
        raise OpError(f"w has shape {tuple(w.shape)}; {OP} takes a matrix, or a vector without columns")
    scale, offset = round_scalar(scale, w.dtype, "scale"), round_scalar(offset, w.dtype, "offset")
    scaled = scale != 1.0
    if scaled and w.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise OpError(f"a scale of {scale} needs float32, bfloat16, float16 or float64, not {w.dtype}")
    own_rows = _check_positions(rows, w.shape[0], w, "rows")
    own_columns = _check_positions(columns, w.shape[-1], w, "columns")
    values = w.detach()
    counts = [n if s is None else s.numel() for n, s in zip(w.shape, (own_rows, own_columns), strict=False)]
    _check_out(w, out, counts)
    size = w.element_size()
    obstacle = None if size in _BITS else f"elements of {size} bytes are not handled"
    # A scale counts the dtype; without one only the device does.
    backend = backend_for(
        OP, values if scaled else torch.empty(0, dtype=torch.float32, device=w.device), obstacle=obstacle
    )
    if backend == "python":
        result = reference(values, own_rows, own_columns, scale, offset)
        return result if out is None else out.copy_(result)
    result = torch.empty(counts, dtype=w.dtype, device=w.device) if out is None else out
    vector = w.dim() == 1
    # A vector is one row; what selects its elements selects columns.
    matrix = values.unsqueeze(0) if vector else values
    selected = (None, own_rows) if vector else (own_rows, own_columns)
    matrix = matrix if matrix.stride(-1) == 1 and matrix.stride(0) >= 0 else matrix.contiguous()
    if result.numel():
        filled = result.detach().unsqueeze(0) if vector else result.detach()
        source, target = (matrix, filled) if scaled else (_bits(matrix), _bits(filled))
        _run(backend, source, target, selected, scale if scaled else None, offset)
    return result


def _check_out(w: torch.Tensor, out: torch.Tensor | None, counts: list[int]) -> None:
    if out is None:
        return
    if list(out.shape) != counts or out.dtype != w.dtype or out.device != w.device or not out.is_contiguous():
        raise OpError(
            f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}; it must be contiguous {w.dtype} of shape "
            f"{tuple(counts)} on {w.device}"
        )
    if out.numel() and out.untyped_storage().data_ptr() == w.untyped_storage().data_ptr():
        raise OpError("out shares memory with w: pass a separate tensor")


def _check_positions(positions: Positions, size: int, like: torch.Tensor, name: str) -> torch.Tensor | None:
    return None if positions is None else check_index(positions, size, like, name, repeats=True).contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def _run(
    backend: str,
    w: torch.Tensor,
    out: torch.Tensor,
    selected: tuple[torch.Tensor | None, torch.Tensor | None],
    scale: float | None,
    offset: float,
) -> None:
    if backend == "triton":
        from pyprune.ops.slice_gather import triton as kernels

        kernels.slice_gather(w, out, *selected, scale, offset)
        return
    run_cpp("slice_gather", w, out, *selected, scale, offset)
