"""The memory of GPUs, read from an NVML of our own."""

from __future__ import annotations

import sys
import types

import pytest

from pyprune.serving.load.gpus import memory_in_use


class NVMLError(Exception):
    """As NVML's package calls it."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """NVIDIA's library with two GPUs."""
    found = types.ModuleType("pynvml")
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": ["GPU-a", "GPU-b"].index,
        "nvmlDeviceGetName": lambda handle: "one kind",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=10**9 * (handle + 1)),
    }
    for name, function in functions.items():
        setattr(found, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return found


def refuse(*_handle: int) -> None:
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(("visible", "memory"), [(None, 3 * 10**9), ("1", 2 * 10**9), ("GPU-b", 2 * 10**9), ("", None)])
def test_gpus_that_are_visible_are_counted(
    nvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch, visible: str | None, memory: int | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_in_use() == memory


def test_an_index_of_different_gpus_may_be_another_one_s(
    nvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda handle: f"kind {handle}")
    assert memory_in_use() == 3 * 10**9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert memory_in_use() is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert memory_in_use() == 2 * 10**9


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_a_gpu_that_does_not_tell_its_memory(
    nvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """No driver is loaded, or the GPU reports none."""
    monkeypatch.setattr(nvml, function, refuse)
    assert memory_in_use() is None
