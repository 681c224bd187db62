"""Products of half-precision matrices on a CPU that has no instructions for them: computed in float32.

Such a CPU takes 4 to 300 times as long for them as for a product in float32, most of all for the gradients of a
linear layer. Weights, activations and gradients keep their dtype; a block of each operand is converted for a product
and dropped after it. Sums are those of float32 and rounded once, so that results are at least as exact as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from pyprune.runtime.device import DTYPES, INSTRUCTIONS, has_products
from pyprune.runtime.progress import say

BLOCK = 1 << 22
"""Numbers of one operand that are converted at a time: 16 MiB in float32."""

_CPU = torch.device("cpu")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_active = False
"""True inside a block of :func:`products_in_float32` that converts."""
_as_asked = False
"""True inside a block of :func:`products_in` that keeps the dtype of operands."""
reported: set[torch.dtype] = set()


@contextmanager
def products_in_float32(model: nn.Module) -> Iterator[None]:
    """Compute products of a model's half-precision matrices in float32 in the block, forwards and backwards.

    Does nothing for a model without such weights, on a GPU, on a CPU that has the instructions, or in a block of
    :func:`products_in`. Reports once a process that it does so.

    Args:
        model: on any device; weights that are read later have their dtype already.
    """
    global _active
    slow = {p.dtype for p in model.parameters() if p.device.type != "cuda"} & INSTRUCTIONS.keys()
    slow = {dtype for dtype in slow if not has_products(dtype, _CPU)}
    if _active or _as_asked or not slow:
        yield
        return
    for dtype in slow - reported:
        name = _NAMES[dtype]
        say(f"This CPU has no {name} arithmetic: products of {name} weights are computed in float32.", "dim")
    reported.update(slow)
    _active = True
    try:
        with Float32Products(slow):
            yield
    finally:
        _active = False


@contextmanager
def products_in(dtype: str) -> Iterator[None]:
    """Compute products in the block in a dtype that was chosen by name, even if it is slow.

    Args:
        dtype: a key of :data:`pyprune.runtime.device.DTYPES`, or auto; float32 and auto change nothing.
    """
    global _as_asked
    before, _as_asked = _as_asked, _as_asked or dtype not in ("auto", "float32")
    try:
        yield
    finally:
        _as_asked = before


def are_in_float32() -> bool:
    """Check whether products of half-precision matrices are computed in float32 here."""
    return _active and not _as_asked


class Float32Products(TorchDispatchMode):
    """Replaces products of CPU tensors of these dtypes. It acts below autograd, whose graph holds no converted tensor.

    Args:
        dtypes: of the operands.
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # autograd, which is off, would decompose it
                return func.decompose(*args, **(kwargs or {}))
        product = _PRODUCTS.get(func)
        if product is None or _as_asked or args[1].dtype not in self.dtypes or args[1].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        return product(*args, **(kwargs or {}))


def _addmm(added: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta`` times ``added`` [broadcast to M, N] plus ``alpha`` times the product of a [M, K] and b [K, N].

    The longest of M, K and N is divided into blocks. The operand without it is the smallest, and is converted whole.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    added = None if added is None else added.expand(rows, columns)
    longest = max(rows, inner, columns)
    step = max(1, BLOCK * longest // max(1, rows * inner, inner * columns, rows * columns))
    if longest == inner:
        total = a.new_zeros(rows, columns, dtype=torch.float32)
        for block in _blocks(inner, step):
            total.addmm_(a[:, block].float(), b[block].float())
        return _sum(total, added, beta, alpha).to(a.dtype)
    result = a.new_empty(rows, columns)
    by_rows = longest == rows
    smaller = b.float() if by_rows else a.float()
    for block in _blocks(longest, step):
        at = (block, slice(None)) if by_rows else (slice(None), block)
        wide = a[block].float() @ smaller if by_rows else smaller @ b[at].float()
        result[at] = _sum(wide, None if added is None else added[at], beta, alpha)
    return result


def _baddbmm(added: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta`` times ``added`` [like the result] plus ``alpha`` times products of [B, M, K] and [B, K, N]."""
    result = a.new_empty(len(a), a.shape[1], b.shape[2])
    added = None if added is None else added.expand(result.shape)
    largest = max(1, a.shape[1] * a.shape[2], b.shape[1] * b.shape[2], result.shape[1] * result.shape[2])
    for block in _blocks(len(a), max(1, BLOCK // largest)):
        wide = a[block].float() @ b[block].float()
        result[block] = _sum(wide, None if added is None else added[block], beta, alpha)
    return result


def _sum(product: Tensor, added: Tensor | None, beta: float, alpha: float) -> Tensor:
    """Return ``alpha`` times a product plus ``beta`` times ``added``, in the product's memory."""
    product = product if alpha == 1 else product.mul_(alpha)
    return product if added is None or not beta else product.add_(added, alpha=beta)


def _blocks(length: int, step: int) -> Sequence[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the output of fused attention, in the dtype of the queries, and its sums, float32."""
    output, sums = _FUSED(*_widen((query, *args)), **_widen(kwargs))
    return output.to(query.dtype), sums


def _attention_backward(gradient: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, in the dtype of the output's gradient."""
    gradients = _FUSED_BACKWARD(*_widen((gradient, *args)), **_widen(kwargs))
    return tuple(tensor.to(gradient.dtype) for tensor in gradients)


def _widen(tree: Any) -> Any:
    """Convert half-precision tensors in arguments of an operation to float32."""
    return tree_map_only(Tensor, lambda t: t.float() if t.dtype in INSTRUCTIONS else t, tree)


_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.default: partial(_addmm, None),
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.bmm.default: partial(_baddbmm, None),
    torch.ops.aten.baddbmm.default: _baddbmm,
    _FUSED: _attention,
    _FUSED_BACKWARD: _attention_backward,
}
"""Every product that a forward or backward pass of a language model makes on a CPU."""
