"""How much a layer changes its input: what ELDeR and TRSP add to the loss for each layer that will be removed."""

from __future__ import annotations

from typing import Any

import torch

from pyprune.ops.dispatch import Backend, OpError, backend_for, check_dtype, check_kind, run_cpp
from pyprune.ops.residual_diff_norm import reference as plain
from pyprune.ops.residual_diff_norm.reference import residual_diff_norm as reference

OP = "residual_diff_norm"


def residual_diff_norm(x_in: torch.Tensor, x_out: torch.Tensor, kind: str) -> torch.Tensor:
    """Mean over tokens of the norm of ``x_out - x_in``, ELDeR and TRSP stage 2.

    The papers write ``||X_out - X_in||`` for the whole batch; the mean over tokens makes the penalty
    independent of batch and length. Neither direction stores the difference: forward keeps one norm a token in
    addition to the inputs, backward takes the difference again and writes both gradients in one pass.

    Args:
        x_in: ``[..., H]``, usually ``[B, T, H]``: the layer's input, floating point.
        x_out: like ``x_in``: the layer's output.
        kind: "l2" (Euclidean norm of each token's difference, not squared) or "l1" (sum of absolute values).

    Returns:
        A scalar in float32 (float64 for float64), differentiable once in both. A token whose difference is zero
        has gradient exactly 0. NaN and infinities reach the result; in the gradient, l2 gives a token with NaN NaN
        throughout and a token with an infinity NaN there and 0 elsewhere, l1 gives NaN the sign 0 (as torch does).
        An l2 norm below 3e-39 has a shorter gradient, which stays finite. The reference squares in float32, so that
        it takes a difference below 2e-23 for 0; the kernels do not.

    Raises:
        OpError: the shapes, dtypes or devices differ, there is no token, or ``kind`` is unknown.
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    _check_tensors(x_in, x_out)
    check_kind(kind)
    if torch.compiler.is_compiling():
        return reference(x_in, x_out, kind)
    backend = backend_for(OP, x_in, x_out)
    result: torch.Tensor = _ResidualDiffNorm.apply(x_in, x_out, kind, backend)
    return result


def _check_tensors(x_in: torch.Tensor, x_out: torch.Tensor) -> None:
    if x_in.shape != x_out.shape:
        raise OpError(f"x_in has shape {tuple(x_in.shape)}, x_out has {tuple(x_out.shape)}; they must be equal")
    if x_in.dim() == 0 or x_in.numel() == 0:
        raise OpError(f"x_in has shape {tuple(x_in.shape)}: there is no token to average over")
    for name in ("dtype", "device"):
        if getattr(x_in, name) != getattr(x_out, name):
            raise OpError(f"x_in has {name} {getattr(x_in, name)}, x_out has {getattr(x_out, name)}")
    check_dtype(OP, x_in)


class _ResidualDiffNorm(torch.autograd.Function):
    """Keeps its inputs, which the layers around it keep anyway, and the norms."""

    @staticmethod
    def forward(ctx: Any, x_in: torch.Tensor, x_out: torch.Tensor, kind: str, backend: Backend) -> torch.Tensor:
        value, norms = _forward(*_rows(x_in, x_out), kind, backend)
        ctx.save_for_backward(x_in, x_out, norms)
        ctx.kind, ctx.backend = kind, backend
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x_in, x_out, norms = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:2])
        grads = _backward(*_rows(x_in, x_out), norms, ctx.kind, upstream, wanted, ctx.backend)
        grad_in, grad_out = (g if g is None else g.view(x_in.shape) for g in grads)
        return grad_in, grad_out, None, None


def _rows(x_in: torch.Tensor, x_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = x_in.shape[-1]
    return x_in.detach().reshape(-1, size).contiguous(), x_out.detach().reshape(-1, size).contiguous()


def _forward(x_in: torch.Tensor, x_out: torch.Tensor, kind: str, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "python":
        return plain.forward(x_in, x_out, kind)
    if backend == "triton":
        from pyprune.ops.residual_diff_norm import triton as kernels

        return kernels.forward(x_in, x_out, kind)
    norms = torch.empty(len(x_in), dtype=torch.float32)
    value = run_cpp("residual_diff_norm", x_in, x_out, norms, kind)
    return torch.tensor(value, dtype=torch.float32), norms


def _backward(
    x_in: torch.Tensor,
    x_out: torch.Tensor,
    norms: torch.Tensor,
    kind: str,
    upstream: torch.Tensor,
    wanted: Any,
    backend: Backend,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if backend == "python":
        return plain.backward(x_in, x_out, norms, kind, upstream, wanted)
    if kind == "l2":
        norms = _raise_norms(upstream, norms)
    if backend == "triton":
        from pyprune.ops.residual_diff_norm import triton as kernels

        return kernels.backward(x_in, x_out, norms, kind, upstream, wanted)
    results = [torch.empty_like(x_in) if want else None for want in wanted]
    run_cpp("residual_diff_norm_gradient", x_in, x_out, norms, float(upstream) / len(x_in), kind, *results)
    return results[0], results[1]


def _raise_norms(upstream: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Raise norms where ``upstream / tokens / norm`` would be infinite and the gradient infinite or NaN.

    The reference has no such norms, since the square of so small a difference is 0 in float32.
    """
    scale = upstream.double() / len(norms)
    too_small = (scale / norms.double()).float().isinf() & (norms > 0) & scale.isfinite()
    return torch.where(too_small, (scale.abs() * 2.0**-127).float(), norms)
