"""Which implementation of an op runs, and why.

Every op passes :func:`choose` one check per backend. A check returns the obstacle to running this call, or
``None``. ``PYPRUNE_BACKEND=auto`` (the default) takes the first backend without one, in the order triton, cpp, python,
and logs the reason once; a backend that was chosen by name and cannot run raises.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any, Literal, cast

import torch

from pyprune.errors import PypruneError, did_you_mean

Backend = Literal["triton", "cpp", "python"]
Check = Callable[[], str | None]

ENVIRONMENT_VARIABLE = "PYPRUNE_BACKEND"
PREFERENCE: tuple[Backend, ...] = ("triton", "cpp", "python")
NOT_BUILT = "the extension pyprune._C is not built (reinstall with PYPRUNE_REQUIRE_EXT=1 to see why)"
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger("pyprune.ops")
_plain_torch: ContextVar[bool] = ContextVar("plain_torch", default=False)


class OpError(PypruneError, ValueError):
    """An argument that no backend accepts: a shape, dtype, index or scalar outside an op's definition."""


class BackendError(PypruneError, RuntimeError):
    """A backend was chosen by name and cannot run this call."""


def extension() -> ModuleType | None:
    """Return the compiled module ``pyprune._C``; None if it is not installed or cannot be loaded."""
    return load_extension()[0]


@cache
def load_extension() -> tuple[ModuleType | None, str]:
    """Return the compiled module, or None and the reason."""
    try:
        return importlib.import_module("pyprune._C"), ""
    except ModuleNotFoundError:
        return None, NOT_BUILT
    except ImportError as error:
        return None, f"the extension pyprune._C cannot be loaded: {error}"


def available_isas() -> list[str]:
    """Return the instruction sets that the C++ kernels can use here, lowest first; empty without kernels."""
    module = extension()
    return [] if module is None else list(module.available_isas())


def backend_report() -> dict[str, str]:
    """Report for ``pyprune env`` whether each backend can run here, or its obstacle; one line a backend."""
    module = extension()
    cpp = _extension_obstacle() if module is None else f"available, {module.active_isa()}"
    if module is not None and not module.openmp:
        cpp += "; one thread, because it was built without OpenMP"
    triton = triton_obstacle() or ("available" if torch.cuda.is_available() else "available, but there is no GPU")
    return {"selected": requested_backend(), "triton": triton, "cpp": cpp, "python": "available"}


def requested_backend() -> str:
    """Return the value of PYPRUNE_BACKEND, checked.

    Raises:
        BackendError: the value is not auto, python, triton or cpp.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE, "auto").strip().lower() or "auto"
    allowed = ("auto", *PREFERENCE)
    if value not in allowed:
        raise BackendError(did_you_mean(value, allowed, f"backend in {ENVIRONMENT_VARIABLE}"))
    return value


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run every op of the block in plain torch, whatever PYPRUNE_BACKEND is: its tensors have shapes but no values."""
    token = _plain_torch.set(True)
    try:
        yield
    finally:
        _plain_torch.reset(token)


def choose(op: str, checks: Mapping[Backend, Check]) -> Backend:
    """Pick the backend for one call.

    Args:
        op: the op's name, for messages.
        checks: one check per backend that the op has; "python" may be left out, it always runs.

    Raises:
        BackendError: PYPRUNE_BACKEND names a backend that the op does not have or that cannot run this call.
    """
    requested = requested_backend()
    if _plain_torch.get():
        return "python"
    if requested != "auto":
        backend = cast(Backend, requested)
        reason = _refusal(checks, backend)
        if reason is not None:
            raise BackendError(
                f"{ENVIRONMENT_VARIABLE}={backend}, but {op} cannot run on it: {reason}. "
                f"Set {ENVIRONMENT_VARIABLE}=auto to let pyprune choose."
            )
        return backend
    refusals: list[str] = []
    for backend in PREFERENCE:
        reason = _refusal(checks, backend)
        if backend == "triton" and reason is None and uses_interpreter():
            reason = f"its interpreter is for tests and runs only with {ENVIRONMENT_VARIABLE}=triton"
        if reason is None:
            log_once(op, backend, "; ".join(refusals))
            return backend
        refusals.append(f"not {backend}: {reason}")
    raise AssertionError("the python backend always runs")


def _refusal(checks: Mapping[Backend, Check], backend: Backend) -> str | None:
    if backend in checks:
        return checks[backend]()
    return None if backend == "python" else "it has no such implementation yet"


def backend_for(op: str, *tensors: torch.Tensor, obstacle: str | None = None) -> Backend:
    """Choose the backend for a call on ``tensors``.

    Args:
        op: the op's name, for messages.
        tensors: a kernel must take the dtype and device of each.
        obstacle: a reason why no kernel takes this call; None if there is none.

    Raises:
        BackendError: PYPRUNE_BACKEND names a backend that cannot run this call.
    """
    return choose(
        op, {"triton": lambda: obstacle or triton_obstacle(*tensors), "cpp": lambda: obstacle or cpp_obstacle(*tensors)}
    )


@cache
def log_once(op: str, backend: Backend, refusals: str) -> None:
    """Log the backend of an op and why the others were refused, each combination once."""
    logger.info("%s runs on %s (%s)", op, backend, refusals or "first choice")


def _extension_obstacle() -> str:
    return load_extension()[1] or NOT_BUILT


def cpp_obstacle(*tensors: torch.Tensor) -> str | None:
    """Return the reason why the C++ kernels cannot take these tensors, or None."""
    if extension() is None:
        return _extension_obstacle()
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"a tensor is on {tensor.device}, the C++ kernels need cpu"
        if tensor.dtype not in KERNEL_DTYPES:
            return f"dtype is {tensor.dtype}, the C++ kernels take float32, bfloat16 and float16"
    return None


def uses_interpreter() -> bool:
    """Check whether Triton kernels run under its interpreter (TRITON_INTERPRET=1), which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_obstacle(*tensors: torch.Tensor) -> str | None:
    """Return the reason why the Triton kernels cannot take these tensors, or None."""
    if not _triton_installed():
        return "the package triton is not installed"
    for tensor in tensors:
        if tensor.device.type != "cuda" and not uses_interpreter():
            return f"a tensor is on {tensor.device}, Triton needs a GPU or TRITON_INTERPRET=1"
        if tensor.dtype not in KERNEL_DTYPES:
            return f"dtype is {tensor.dtype}, the Triton kernels take float32, bfloat16 and float16"
    return None


def tensor_view(tensor: torch.Tensor) -> object:
    """Describe a CPU tensor without torch, for the C++ bindings to check and read."""
    module = cast(ModuleType, extension())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return module.Tensor(tensor.data_ptr(), list(tensor.shape), list(tensor.stride()), dtype)


def disjoint(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Check that two tensors share no memory."""
    if not first.numel() or not second.numel() or first.device != second.device:
        return True
    # By the span from first to last element: views that interleave count as sharing, which is safe.
    begins, ends = zip(*(_span(tensor) for tensor in (first, second)), strict=True)
    return bool(max(begins) >= min(ends))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (int(reach) + 1) * tensor.element_size()


def run_cpp(kernel: str, *arguments: object) -> Any:
    """Call a C++ kernel with tensors as their views, and with torch's number of threads as the last argument."""
    views = (tensor_view(value) if isinstance(value, torch.Tensor) else value for value in arguments)
    return getattr(extension(), kernel)(*views, torch.get_num_threads())


def check_axis(axis: int, dimensions: int) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        OpError: there is no such dimension.
    """
    if not -dimensions <= axis < dimensions:
        raise OpError(f"axis is {axis}, but the tensor has {dimensions} dimension(s)")
    return axis % dimensions


def check_index(
    index: torch.Tensor | Sequence[int], size: int, like: torch.Tensor, name: str = "index", *, repeats: bool = False
) -> torch.Tensor:
    """Return ``index`` as a LongTensor on ``like``'s device.

    An index tensor on an accelerator is not checked: that would wait for the device at every step.

    Raises:
        OpError: not integers, out of range, negative, or repeated unless ``repeats`` (a group would be counted twice).
    """
    tensor = index if isinstance(index, torch.Tensor) else torch.as_tensor(list(index))
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.long, device=like.device)
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
        raise OpError(f"{name} must be one-dimensional integers, not {tensor.dtype} of shape {tuple(tensor.shape)}")
    if tensor.device.type == "cpu":
        low, high, repeated = _index_facts(tensor, size)
        if low < 0 or high >= size:
            raise OpError(f"{name} runs from {low} to {high}, allowed are 0 to {size - 1}")
        if repeated and not repeats:
            raise OpError("index names a group more than once")
    return tensor.to(device=like.device, dtype=torch.long)


def _index_facts(index: torch.Tensor, size: int) -> tuple[int, int, bool]:
    """Return the least and the greatest of positions on the CPU, and whether one occurs twice.

    With torch alone this takes longer than a proximal step of a small weight.
    """
    module = extension()
    if module is None:
        return int(index.min()), int(index.max()), index.unique().numel() != index.numel()
    positions = index.to(torch.long).contiguous()
    low, high, repeated = module.index_facts(tensor_view(positions), size)
    return low, high, repeated


def check_threshold(threshold: float, name: str = "threshold") -> float:
    """Return a threshold as a float.

    Raises:
        OpError: it is negative, infinite or NaN.
    """
    value = float(threshold)
    if not 0 <= value < float("inf"):
        raise OpError(f"{name} is {value}, must be finite and >= 0")
    return value


def check_kind(kind: str) -> str:
    """Return ``kind`` if it is "l1" or "l2".

    Raises:
        OpError: it is neither.
    """
    if kind not in ("l1", "l2"):
        raise OpError(did_you_mean(kind, ("l1", "l2"), "kind"))
    return kind


def round_scalar(value: float, dtype: torch.dtype, name: str = "threshold") -> float:
    """Round a scalar as every backend does: to float32, unless the tensors are float64.

    Raises:
        OpError: it is then NaN or infinite.
    """
    # Triton passes scalars as float32. Rounding for every backend keeps the set of removed groups the same on
    # all.
    rounded = value if dtype == torch.float64 else ctypes.c_float(value).value
    if not math.isfinite(rounded):
        limit = "" if dtype == torch.float64 else ", and at most 3.4e38 in size unless the tensors are float64"
        raise OpError(f"{name} is {value}, must be finite{limit}")
    return rounded


def check_dtype(op: str, tensor: torch.Tensor) -> None:
    """Raise :class:`OpError` if no backend of an op takes the tensor's dtype."""
    if tensor.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise OpError(f"{op} takes float32, bfloat16, float16 or float64, not {tensor.dtype}")


def check_alike(name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor, *extra: str) -> None:
    """Raise :class:`OpError` if two tensors differ in shape, device or one of the ``extra`` attributes."""
    for attribute in ("shape", *extra, "device"):
        if getattr(tensor, attribute) != getattr(like, attribute):
            pair = getattr(tensor, attribute), getattr(like, attribute)
            raise OpError(f"{name} has {attribute} {pair[0]}, but {like_name} has {pair[1]}")


def as_matrix(shape: tuple[int, ...], axis: int) -> tuple[int, int, int] | None:
    """Return (rows, cols, axis) of a contiguous tensor as a matrix for this axis; None for a middle axis."""
    count = shape[axis]
    other = math.prod(shape) // count if count else 0
    if axis == 0:
        return count, other, 0
    if axis == len(shape) - 1:
        return other, count, 1
    return None


def axis_obstacle(matrix: tuple[int, int, int] | None, tensor: torch.Tensor) -> str | None:
    """Return why a kernel on matrices cannot take a tensor that is ``matrix`` for its axis: None for a middle one."""
    if matrix is not None:
        return None
    return f"the kernels take the first or the last axis, not one in the middle of {tuple(tensor.shape)}"
