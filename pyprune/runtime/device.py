"""Devices and dtypes of this machine, and the speed of their products."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, TypeVar

import torch

from pyprune.errors import ConfigError
from pyprune.runtime import processes
from pyprune.runtime.host import available_memory
from pyprune.runtime.progress import warn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Dtype -> instructions of x86 and Arm for its products, by the names of torch.cpu.get_capabilities."""
SLOWER = {"bfloat16": "6 to 14 times", "float16": "4 to 17 times"}
"""Measured of a linear layer and its weight's gradient (512 x 2,048 by 2,048 x 4,096, AVX2, one thread, torch 2.13).

The gradient of its input takes 300 times as long, 27 s.
"""
X86 = ("x86_64", "AMD64")
Dtype = TypeVar("Dtype", bound=str)

GPU_MARGIN = 0.03
"""Share of a GPU's free memory that is left to fragmentation, cuBLAS and kernels: an empty card of 80 GB has 76 GiB."""


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is CUDA if there is one.

    Raises:
        ConfigError: no such device name, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.cuda.device_count()
    if device.index is not None and processes.count() > 1:
        raise ConfigError(
            f"device is {name!r}, which all {processes.count()} processes would share; use cuda: each takes its own."
        )
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < count):
        return device
    raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:N. This machine has {count} CUDA devices.")


def device_memory(device: torch.device) -> int:
    """Return the bytes that a run may still take on a device: of a CPU :func:`pyprune.runtime.host.available_memory`.

    Of a GPU it is the free memory, without that of other processes and of this process's CUDA context, plus the unused
    reserve of this process's allocator, less :data:`GPU_MARGIN`.
    """
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + unused) * (1 - GPU_MARGIN))


def empty_cache() -> None:
    """Return the unused memory of this process's allocator to the GPUs."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def park(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Hold a model in the host's memory while other work needs its accelerator; does nothing on a CPU.

    Args:
        model: returned to ``device`` afterwards.
        device: of the model.
    """
    if device.type == "cpu":
        yield
        return
    model.to("cpu")
    empty_cache()
    try:
        yield
    finally:
        model.to(device)


def computes_bfloat16(device: torch.device) -> bool:
    """Check whether a device has bfloat16 arithmetic; see :func:`has_products`."""
    return has_products(torch.bfloat16, device)


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Check whether a device has instructions for products in a dtype; True if torch cannot tell (older releases).

    A CPU without them is :data:`SLOWER` times slower than in float32. One whose instructions are masked
    (``ONEDNN_MAX_CPU_ISA``) counts as one without.
    """
    read = getattr(torch.cpu, "get_capabilities", None)
    if dtype not in INSTRUCTIONS or device.type != "cpu" or read is None:
        return True
    available = read()
    return any(available.get(name) for name in INSTRUCTIONS[dtype]) and not is_masked(dtype)


def is_masked(dtype: torch.dtype) -> bool:
    """Check whether oneDNN, which computes these products, must not use instructions that an x86 CPU has."""
    if platform.machine() not in X86 or not torch.backends.mkldnn.is_available():
        return False
    ask = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return not getattr(torch.ops.mkldnn, ask)()


@cache
def int8_products_saturate() -> bool:
    """Check whether this CPU gets products of int8 matrices wrong, by one product with the largest sums.

    Without VNNI instructions (AVX2 alone, or masked), oneDNN adds pairs of products in 16 bits, which hold 32,767.
    """
    left, right = torch.full((32, 64), 127, dtype=torch.int8), torch.full((64, 32), 127, dtype=torch.int8)
    return not torch.equal(torch._int_mm(left, right), left.int() @ right.int())


def bfloat16_is_faster(device: torch.device) -> bool:
    """Check whether a device multiplies matrices faster in bfloat16 than in float32; the same in all processes.

    Having the instructions is not enough: an Intel Xeon with AVX512-BF16 whose AMX is hidden by its virtual machine
    takes 1.9 times as long in bfloat16 (torch 2.13, oneDNN). So a CPU that has them is timed, once, with two products.
    A resumed run (:func:`bfloat16_as`) keeps the result of its beginning.
    """
    if _kept is not None:
        return _kept
    if device.type != "cpu":
        return True
    return processes.from_first(_cpu_is_faster()) if agreed_on_bfloat16 is None else agreed_on_bfloat16


_kept: bool | None = None
"""The result of a resumed run; None = this machine is timed."""


@contextmanager
def bfloat16_as(faster: bool | None) -> Iterator[None]:
    """Continue a run in the arithmetic in which it began, even if the other is faster here.

    Args:
        faster: the result of :func:`bfloat16_is_faster` then; None = unknown.
    """
    global _kept
    before, _kept = _kept, faster
    try:
        yield
    finally:
        _kept = before


agreed_on_bfloat16: bool | None = None
"""The result that all processes of a run share; None = each call exchanges it among all."""


def agree_on_bfloat16() -> None:
    """Share the first process's result among all, so that single processes may call without the others."""
    global agreed_on_bfloat16
    agreed_on_bfloat16 = processes.from_first(_cpu_is_faster())


def _cpu_is_faster() -> bool:
    return computes_bfloat16(torch.device("cpu")) and cpu_is_faster_in_bfloat16()


@cache
def cpu_is_faster_in_bfloat16() -> bool:
    """Time a product of two matrices in both dtypes, once, and return whether bfloat16 took less time."""
    size, turns = 1024, 5
    inputs, weights = torch.ones(size, size), torch.ones(size, size)
    halves = inputs.bfloat16(), weights.bfloat16()

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        begin = time.perf_counter()
        product()
        return time.perf_counter() - begin

    # In turns, and the shortest of each, so that other work of the machine does not count. The first turn, in which
    # oneDNN makes its kernels, is never the shortest.
    pairs = [(seconds(lambda: inputs @ weights), seconds(lambda: halves[0] @ halves[1])) for _ in range(turns)]
    single, half = (min(times) for times in zip(*pairs, strict=True))
    return bool(half < single)


def working_dtype(dtype: Dtype, device: torch.device) -> Dtype | Literal["float32", "bfloat16"]:
    """Return the dtype to compute in: auto is bfloat16 if the device is faster in it, else float32; others are kept."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if bfloat16_is_faster(device) else "float32"


def slow_dtype_warning(dtype: str, device: torch.device) -> str | None:
    """Return a warning that a dtype is slow on this CPU, with the factor; None if it is not, or torch cannot tell.

    Args:
        dtype: a key of :data:`DTYPES`; no warning for others.
        device: of the computation.
    """
    if dtype not in DTYPES or has_products(DTYPES[dtype], device):
        return None
    return (
        f"this CPU has no {dtype} arithmetic: products take {SLOWER[dtype]} as long in {dtype} as in float32, "
        "gradients of activations 300 times; set dtype to float32 if time counts."
    )


def warn_of_slow_dtype(dtype: str, device: torch.device) -> None:
    """Print the warning of :func:`slow_dtype_warning`, for a dtype that was asked for by name."""
    if warning := slow_dtype_warning(dtype, device):
        warn(warning)
