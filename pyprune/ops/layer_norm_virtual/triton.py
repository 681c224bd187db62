"""Triton kernels of the LayerNorm with a virtual size. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.triton_launch import launch, load_float32, to_storage

BLOCK = 2048
COLUMNS = 64
ROWS = 32
MOST_GROUPS = 64


@triton.jit
def _forward(x, weight, bias, out, means, rstds, cols, d, eps, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        sums += load_float32(x + start + begin + lanes, inside)
    size = (d + tl.zeros((), tl.int32)).to(tl.float32)
    mean = tl.sum(sums, axis=0) / size
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        centred = load_float32(x + start + begin + lanes, inside) - mean
        squares += tl.where(inside, centred * centred, 0.0)
    variance = (tl.sum(squares, axis=0) + (d - cols + tl.zeros((), tl.int32)).to(tl.float32) * mean * mean) / size
    rstd = 1.0 / tl.sqrt(variance + eps)
    tl.store(means + row, mean)
    tl.store(rstds + row, rstd)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        value = load_float32(x + start + begin + lanes, inside)
        scale = load_float32(weight + begin + lanes, inside)
        result = (value - mean) * rstd * scale
        if HAS_BIAS:
            result += load_float32(bias + begin + lanes, inside)
        tl.store(out + start + begin + lanes, to_storage(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, weight, means, rstds, grad_x, cols, d, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    mean, rstd = tl.load(means + row), tl.load(rstds + row)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        slope = load_float32(grad + start + begin + lanes, inside)
        slope *= load_float32(weight + begin + lanes, inside)
        normal = (load_float32(x + start + begin + lanes, inside) - mean) * rstd
        sums += slope
        products += slope * normal
    size = (d + tl.zeros((), tl.int32)).to(tl.float32)
    shift, tilt = tl.sum(sums, axis=0) / size, tl.sum(products, axis=0) / size
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        slope = load_float32(grad + start + begin + lanes, inside)
        slope *= load_float32(weight + begin + lanes, inside)
        normal = (load_float32(x + start + begin + lanes, inside) - mean) * rstd
        result = rstd * (slope - shift - normal * tilt)
        tl.store(grad_x + start + begin + lanes, to_storage(result, grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _parameters(grad, x, means, rstds, weights, biases, rows, cols, group_rows, COLUMNS: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """One program a block of columns and a group of rows: its share of the gradients of weight and bias."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1).to(tl.int64) * group_rows
    end = tl.minimum(begin + group_rows, rows)
    lanes = tl.arange(0, ROWS)
    weight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, group_rows, ROWS):
        row = begin + first + lanes
        present = row < end
        inside = present[:, None] & (column < cols)[None, :]
        at = row[:, None] * cols + column[None, :]
        slope = load_float32(grad + at, inside)
        mean = tl.load(means + row, mask=present, other=0.0)[:, None]
        rstd = tl.load(rstds + row, mask=present, other=0.0)[:, None]
        value = load_float32(x + at, inside)
        weight += tl.where(inside, slope * ((value - mean) * rstd), 0.0)
        bias += slope
    at = tl.program_id(1).to(tl.int64) * cols + column
    tl.store(weights + at, tl.sum(weight, axis=0), mask=column < cols)
    tl.store(biases + at, tl.sum(bias, axis=0), mask=column < cols)


def _block(cols: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(cols)))


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and the mean and the reciprocal deviation of each row, float32.

    Args:
        x: ``[rows, d']``, contiguous, float32, bfloat16 or float16.
        weight: ``[d']``, contiguous, of the dtype of ``x``.
        bias: likewise, or None.
        d: the number of channels that is divided by.
        eps: added to the variance.
    """
    rows, cols = x.shape
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    shift = weight if bias is None else bias
    launch(
        _forward, (rows,),
        x, weight, shift, out, mean, rstd, cols, d, eps, HAS_BIAS=bias is not None, BLOCK=_block(cols)
    )  # fmt: skip
    return out, mean, rstd


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias; the shapes are those of :func:`forward`."""
    rows, cols = x.shape
    grad_x = torch.empty_like(x)
    launch(_backward, (rows,), grad, x, weight, mean, rstd, grad_x, cols, d, BLOCK=_block(cols))
    group_rows = max(ROWS, triton.cdiv(rows, MOST_GROUPS))
    groups = triton.cdiv(rows, group_rows)
    shares = torch.empty(2, groups, cols, dtype=torch.float32, device=x.device)
    launch(
        _parameters, (triton.cdiv(cols, COLUMNS), groups),
        grad, x, mean, rstd, shares[0], shares[1], rows, cols, group_rows, COLUMNS=COLUMNS, ROWS=ROWS,
    )  # fmt: skip
    weights, biases = shares.sum(1).to(weight.dtype)
    return grad_x, weights, biases
