"""What the Triton kernels have in common: their launch, and that they compile for a GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyprune.ops
from pyprune.ops.triton_launch import launch

FOLDER = Path(pyprune.ops.__file__).parent


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in a module of kernels, with the module's name."""
    for path in FOLDER.rglob("*triton.py"):
        module = ".".join(("pyprune.ops", *path.relative_to(FOLDER).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield module, node


def launched() -> set[str]:
    """The names of all kernels that are launched."""
    return {
        f"{module}.{call.args[0].id}"
        for module, call in calls()
        if isinstance(call.func, ast.Name) and call.func.id == "launch" and isinstance(call.args[0], ast.Name)
    }


class TestLaunch:
    @pytest.mark.parametrize("device", ["cuda:1", "cpu"])
    def test_is_on_the_device_of_the_tensors(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[Any] = []

        class Guard:
            def __init__(self, chosen: torch.device) -> None:
                events.append(chosen)

            def __enter__(self) -> None:
                events.append("entered")

            def __exit__(self, *_: object) -> None:
                events.append("left")

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *arguments, **constants: events.append((grid, arguments, constants))

        monkeypatch.setattr(torch.cuda, "device", Guard)
        tensor: Any = SimpleNamespace(is_cuda=device != "cpu", device=torch.device(device))
        launch(Kernel(), (2, 3), tensor, 7, BLOCK=8)
        run = ((2, 3), (tensor, 7), {"BLOCK": 8})
        assert events == ([run] if device == "cpu" else [torch.device(device), "entered", run, "left"])

    def test_is_the_only_way(self) -> None:
        assert len(launched()) > 15
        assert not [
            (module, call.lineno)
            for module, call in calls()
            if isinstance(call.func, ast.Subscript) and module != "pyprune.ops.triton_launch"
        ]


@pytest.mark.process
@pytest.mark.second
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    options = {"PYPRUNE_BACKEND": "triton", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_child"],
        env=os.environ | options,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    compiled = json.loads(result.stdout.splitlines()[-1])
    assert compiled.keys() == launched()
    # Backends that agree to 1e-6 leave no room for approximate roots.
    assert compiled["pyprune.ops.perturb.triton._perturb"] == []
    # docs/reference/kernels.md: nothing else flushes subnormal numbers to zero.
    flushing = {name: found for name, found in compiled.items() if any(".ftz" in one for one in found)}
    assert flushing == {"pyprune.ops.layer_norm_virtual.triton._forward": ["sqrt.approx.ftz.f32"]}
