"""Products of matrices: a CPU without instructions for some, and the dtypes of those that are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from pyprune.runtime import products


def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this CPU has no products of half precision, and that nothing was reported about it yet."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(products, "reported", set())


@contextmanager
def products_seen() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of the matrices that are multiplied in the block, as kernels get them: enter it first."""
    seen: set[torch.dtype] = set()

    class Recorder(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if any(part in name for part in ("mm", "matmul", "linear", "dot_product")):
                seen.add(args[1].dtype)
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield seen
