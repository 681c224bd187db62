"""LayerNorm over the stored channels of a sliced stream, dividing by the stream's original size."""

from __future__ import annotations

import math
from typing import Any

import torch

from pyprune.ops.dispatch import Backend, OpError, backend_for, check_dtype, run_cpp
from pyprune.ops.layer_norm_virtual import reference as plain
from pyprune.ops.layer_norm_virtual.reference import layer_norm_virtual as reference

OP = "layer_norm_virtual"


def layer_norm_virtual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float = 1e-5
) -> torch.Tensor:
    """Return the first d' channels of a LayerNorm over ``d`` channels whose other d - d' are zero.

    mean = sum(x) / d, variance = (sum((x - mean)^2) + (d - d') mean^2) / d: "LayerNorm, virtual size" in
    docs/reference/compaction.md.

    Args:
        x: ``[..., d']``, floating point.
        weight: ``[d']``.
        bias: ``[d']`` or None.
        d: the original number of channels, at least d'.
        eps: added to the variance, finite, >= 0.

    Returns:
        ``[..., d']`` in the dtype of ``x``, computed in float32 (float64 for float64); differentiable once in x,
        weight and bias. A row with NaN or an infinity becomes NaN as a whole, other rows are not touched.

    Raises:
        OpError: shapes that do not fit, ``d`` below d', or a bad ``eps``.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    _check(x, weight, bias, d, eps)
    if torch.compiler.is_compiling():
        return reference(x, weight, bias, d, eps)
    tensors = [t for t in (x, weight, bias) if t is not None]
    mixed = any(t.dtype != x.dtype for t in tensors)
    obstacle = f"x is {x.dtype} and weight {weight.dtype}, the kernels take one dtype" if mixed else None
    backend = backend_for(OP, *tensors, obstacle=obstacle)
    if x.numel() == 0 or (backend == "python" and x.dtype != weight.dtype):
        return reference(x, weight, bias, d, eps)
    result: torch.Tensor = _LayerNormVirtual.apply(x, weight, bias, d, eps, backend)
    return result


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:] or (bias is not None and bias.shape != x.shape[-1:]):
        shapes = [None if t is None else tuple(t.shape) for t in (x, weight, bias)]
        raise OpError(f"x, weight and bias have shapes {shapes}; weight and bias must have x's last size")
    check_dtype(OP, x)
    if d < max(1, x.shape[-1]):
        raise OpError(f"d is {d}, must be at least the {x.shape[-1]} stored channels")
    if not (math.isfinite(eps) and eps >= 0):
        raise OpError(f"eps is {eps}, must be finite and >= 0")


class _LayerNormVirtual(torch.autograd.Function):
    """Keeps x, weight, and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        d: int,
        eps: float,
        backend: Backend,
    ) -> torch.Tensor:
        out, mean, rstd = _forward(
            _rows(x),
            weight.detach().contiguous(),
            None if bias is None else bias.detach().contiguous(),
            d,
            eps,
            backend,
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.d, ctx.backend, ctx.has_bias = d, backend, bias is not None
        return out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        own = weight.detach().contiguous()
        grad_x, grad_weight, grad_bias = _backward(_rows(grad), _rows(x), own, mean, rstd, ctx.d, wanted, ctx.backend)
        return (
            grad_x.view(x.shape) if wanted[0] and grad_x is not None else None,
            grad_weight if wanted[1] else None,
            grad_bias if wanted[2] and ctx.has_bias else None,
            None, None, None,
        )  # fmt: skip


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, d: int, eps: float, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if backend == "python":
        return plain.forward(x, weight, bias, d, eps)
    if backend == "triton":
        from pyprune.ops.layer_norm_virtual import triton as kernels

        return kernels.forward(x, weight, bias, d, eps)
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(len(x), dtype=torch.float32) for _ in range(2))
    run_cpp("layer_norm_virtual", x, weight, bias, eps, d, out, mean, rstd)
    return out, mean, rstd


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    d: int,
    wanted: tuple[bool, ...],
    backend: Backend,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    if backend == "python":
        return plain.backward(grad, x, weight, mean, rstd, d)
    if backend == "triton":
        from pyprune.ops.layer_norm_virtual import triton as kernels

        return kernels.backward(grad, x, weight, mean, rstd, d)
    likes = (x, weight, weight)
    results = [torch.empty_like(like) if want else None for like, want in zip(likes, wanted, strict=True)]
    run_cpp("layer_norm_virtual_gradient", grad, x, weight, d, mean, rstd, *results)
    return results[0], results[1], results[2]
