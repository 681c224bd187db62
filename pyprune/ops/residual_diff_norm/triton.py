"""Triton kernels of the residual-difference norm. ``reference.py`` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pyprune.ops.triton_launch import launch, load_float32, to_storage, zero_sums
from pyprune.ops.triton_sums import add_magnitudes, add_squares, folds, total

BLOCK = 2048


@triton.jit
def _norms(x_in, x_out, norms, cols, L1: tl.constexpr, BLOCK: tl.constexpr, FOLDS: tl.constexpr):
    """One program a token."""
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)[None, :]
    high, low, rare = zero_sums(True, 1, BLOCK, FOLDS)
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        before = load_float32(x_in + start + begin + lanes, inside)
        after = load_float32(x_out + start + begin + lanes, inside)
        if L1:
            high, low, rare = add_magnitudes(high, low, rare, after - before, 1)
        else:
            high, low, rare = add_squares(high, low, rare, after - before, 1)
    result = total(high, low, rare, 1, FOLDS)
    token = tl.program_id(0) + tl.arange(0, 1)
    tl.store(norms + token, (result if L1 else tl.sqrt(result)).to(tl.float32))


@triton.jit
def _gradient(x_in, x_out, norms, scale, grad_in, grad_out, cols, L1: tl.constexpr, IN: tl.constexpr,
              OUT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * cols
    lanes = tl.arange(0, BLOCK)
    factor = tl.load(scale)
    if not L1:
        norm = tl.load(norms + tl.program_id(0))
        factor = tl.where(norm == 0.0, 0.0, factor / tl.where(norm == 0.0, 1.0, norm))
    for begin in range(0, cols, BLOCK):
        inside = begin + lanes < cols
        before = load_float32(x_in + start + begin + lanes, inside)
        after = load_float32(x_out + start + begin + lanes, inside)
        value = after - before
        if L1:
            value = tl.where(value > 0, factor, tl.where(value < 0, -factor, 0.0))
        else:
            value = value * factor
        if OUT:
            tl.store(grad_out + start + begin + lanes, to_storage(value, grad_out.dtype.element_ty), mask=inside)
        if IN:
            tl.store(grad_in + start + begin + lanes, to_storage(-value, grad_in.dtype.element_ty), mask=inside)


def forward(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the norms, and the norms, float32 ``[tokens]``.

    Args:
        x_in: ``[tokens, H]``, contiguous, float32, bfloat16 or float16.
        x_out: like ``x_in``.
        kind: "l1" or "l2".
    """
    rows, cols = x_in.shape
    norms = torch.empty(rows, dtype=torch.float32, device=x_in.device)
    block = min(BLOCK, triton.next_power_of_2(cols))
    launch(_norms, (rows,), x_in, x_out, norms, cols, L1=kind == "l1", BLOCK=block, FOLDS=folds(block, 1, x_in.device))
    return norms.double().mean().float(), norms


def backward(
    x_in: torch.Tensor,
    x_out: torch.Tensor,
    norms: torch.Tensor,
    kind: str,
    upstream: torch.Tensor,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x_in`` and ``x_out``, those that are wanted; the shapes are those of :func:`forward`."""
    rows, cols = x_in.shape
    results = [torch.empty_like(x_in) if want else None for want in wanted]
    # A tensor, so that nothing waits for the device.
    scale = (upstream.double() / rows).float().reshape(1)
    targets = [x_in if result is None else result for result in results]
    launch(
        _gradient, (rows,),
        x_in, x_out, norms, scale, *targets, cols, L1=kind == "l1", IN=wanted[0], OUT=wanted[1],
        BLOCK=min(BLOCK, triton.next_power_of_2(cols)),
    )  # fmt: skip
    return results[0], results[1]
