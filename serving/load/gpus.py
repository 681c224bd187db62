"""Read energy and memory of NVIDIA GPUs from NVML, without a CUDA context."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        nvml: NVIDIA's library.
        handle: of the GPU, in that library.
        name: such as "GPU 0", counted as NVML does.
    """

    nvml: Any
    handle: Any
    name: str

    def joules(self) -> float:
        """Return its energy since its driver was loaded.

        Raises:
            OSError: the GPU reports none: it is older than Volta.
        """
        return float(self._query("nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def memory(self) -> int:
        """Return the bytes of its memory that all processes use.

        Raises:
            OSError: the GPU reports none.
        """
        return int(self._query("nvmlDeviceGetMemoryInfo").used)

    def _query(self, function: str) -> Any:
        try:
            return getattr(self.nvml, function)(self.handle)
        except self.nvml.NVMLError as error:
            raise OSError(str(error)) from error


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible.

    [] without NVIDIA's driver or the package that reads it. Also [] where the variable has indices of different GPUs
    and CUDA_DEVICE_ORDER is not PCI_BUS_ID: then only CUDA knows which ones are visible.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = _handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [Gpu(pynvml, handle, f"GPU {pynvml.nvmlDeviceGetIndex(handle)}") for handle in handles]
    except (pynvml.NVMLError, OSError):
        return []


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


def memory_in_use(gpus: Sequence[Gpu]) -> int | None:
    """Return the bytes in use on all of them; None without a GPU, or where one reports none."""
    try:
        return sum(gpu.memory() for gpu in gpus) if gpus else None
    except OSError:
        return None
