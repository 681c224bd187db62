"""Triton kernel of the sliced layer's gather. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.triton_launch import launch, to_float32, to_storage

ROWS = 16
COLUMNS = 256


@triton.jit
def _gather(w, out, rows, columns, row_count, col_count, row_stride, scale, offset, HAS_ROWS: tl.constexpr,
            HAS_COLUMNS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    source_row = tl.load(rows + i, mask=i < row_count, other=0) if HAS_ROWS else i
    source_column = tl.load(columns + j, mask=j < col_count, other=0) if HAS_COLUMNS else j
    inside = (i < row_count)[:, None] & (j < col_count)[None, :]
    value = tl.load(w + source_row[:, None] * row_stride + source_column[None, :], mask=inside, other=0)
    if SCALED:
        value = to_storage((to_float32(value) + offset) * scale - offset, out.dtype.element_ty)
    tl.store(out + i[:, None] * col_count + j[None, :], value, mask=inside)


def slice_gather(
    w: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
    scale: float | None,
    offset: float,
) -> None:
    """Write the gathered rows and columns of ``w`` into ``out``.

    Args:
        w: ``[R, C]`` with neighbouring columns; integers that carry the bits, or floats when there is a scale.
        out: ``[rows, columns]``, contiguous, of the dtype of ``w``.
        rows: int64 positions, or None for all.
        columns: likewise.
        scale: None copies bit for bit.
        offset: added before the scale and subtracted after it.
    """
    grid = (triton.cdiv(out.shape[0], ROWS), triton.cdiv(out.shape[1], COLUMNS))
    launch(
        _gather, grid,
        w, out, w if rows is None else rows, w if columns is None else columns, *out.shape, w.stride(0),
        1.0 if scale is None else scale, offset, HAS_ROWS=rows is not None, HAS_COLUMNS=columns is not None,
        SCALED=scale is not None, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
