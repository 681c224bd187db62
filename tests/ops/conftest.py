"""Backends and instruction sets that the op tests run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from pyprune.ops import available_isas, dispatch

BACKENDS = ["python", "triton", *(f"cpp-{isa}" for isa in available_isas())]


@pytest.fixture
def use_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that selects "python", "triton" or "cpp-<isa>" until the end of the test."""
    module = dispatch.extension()

    def select(name: str) -> None:
        backend, _, isa = name.partition("-")
        if backend == "triton" and "TRITON_INTERPRET" not in os.environ:
            pytest.skip("these tensors are on the CPU, and Triton has a GPU here: tests/gpu runs the kernels on it")
        monkeypatch.setenv("PYPRUNE_BACKEND", backend)
        if isa and module is not None:
            module.set_isa(isa)

    yield select
    if module is not None:
        module.set_isa("auto")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, use_backend: Callable[[str], None]) -> str:
    """Run the test once per backend and instruction set of this machine."""
    use_backend(request.param)
    return str(request.param)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that torch.empty makes with NaN (integers: the largest), for ops that make their result."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)
