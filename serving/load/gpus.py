"""Read the memory of NVIDIA GPUs from NVML, without a CUDA context."""

from __future__ import annotations

import os
from typing import Any

ORDER = "CUDA_DEVICE_ORDER"


def memory_in_use() -> int | None:
    """Return the bytes that all processes use on the GPUs that CUDA_VISIBLE_DEVICES leaves visible.

    None without NVIDIA's driver, the package that reads it, or a GPU that reports its memory. Also None where the
    variable has indices of different GPUs and CUDA_DEVICE_ORDER is not PCI_BUS_ID: then only CUDA knows which ones are
    visible.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = _handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles) if handles else None
    except (pynvml.NVMLError, OSError):
        return None


def _handles(nvml: Any, visible: str | None) -> list[Any]:
    """Return NVML's handles of the GPUs, which CUDA_VISIBLE_DEVICES names by index or UUID.

    CUDA may give an index to another GPU: it sorts the fastest one first, unless it uses the order of the bus as NVML.
    """
    if visible is None:
        return _every(nvml)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    by_index = any(name.isdigit() for name in names) and os.environ.get(ORDER) != "PCI_BUS_ID"
    if by_index and len({nvml.nvmlDeviceGetName(handle) for handle in _every(nvml)}) > 1:
        return []
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _every(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
