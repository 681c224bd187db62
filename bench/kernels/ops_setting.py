"""Size, device and backend of ops.py, and the probes that its ceilings are made of.

A ceiling is an in-place probe with the op's read and write streams over arrays of the same size. Probes read and write
the bytes as 32-bit integers, because torch converts every 16-bit number on the way.

What only reads is compared with :func:`read`, a reduction. Its GB/s are about half of an in-place probe's, which count
every byte twice. On the CPUs measured a pass that reads takes as long as one that also writes back, to within a tenth.
This holds for torch's reductions (sum, amax, norm, dot) and for an AVX-512 loop with prefetches, so it is a ceiling.

``group_penalty`` and ``group_soft_threshold`` work on a part of a matrix. Large last-level caches hold some of it, and
what a case finds there would depend on the case before it. On a CPU each of their cases starts after an untimed pass
that fills the caches with other data (:attr:`Setting.cold`): the figures are those of arrays that come from memory. On
a GPU a case runs several times a sample, each time after itself. It moves as many bytes as its ceiling, so that both
find the same in the L2 cache. Evicting it would leave one call a sample, which is too short to time; --selected 1 is
larger than the cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import Tensor

from bench._timing import backend
from pyprune.ops import available_isas

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AXES = ("rows", "columns")
ONE_THREAD = "cpp, one thread"
TINY = 1e-9
"""A step so small that hundreds of them leave the weights where they are."""


@dataclass(frozen=True)
class Setting:
    """Size, device and backend of a run.

    Attributes:
        rows: of every weight.
        cols: of every weight, a multiple of 8.
        device: CPU or CUDA.
        compiled: whether torch.compile is measured.
        selected: share of the rows or columns that the ops on an index set work on.
        cache: bytes of the last-level cache in which cases of ``group_penalty`` and ``group_soft_threshold`` must
            not find their arrays on a CPU; 0 = they may.
    """

    rows: int
    cols: int
    device: torch.device
    compiled: bool
    selected: float = 0.25
    cache: int = 0

    @cached_property
    def kernel(self) -> str:
        """The fast backend of this device, or the reference if there is none; Triton where it is chosen by name."""
        if self.device.type == "cuda" or os.environ.get("PYPRUNE_BACKEND") == "triton":
            return "triton"
        return "cpp" if available_isas() else "python"

    @property
    def shared(self) -> bool:
        """Check whether the fast backend shares the work between threads of a CPU."""
        return self.kernel == "cpp" and torch.get_num_threads() > 1

    @cached_property
    def cold(self) -> Callable[[], object] | None:
        """Fills the caches of a CPU with other data; None on a GPU.

        It reads, because cached lines that it had written would be written back in the time of what comes next; and
        twice the cache's size, because no cache drops exactly what was used longest ago.
        """
        if self.device.type == "cuda" or not self.cache:
            return None
        # Ones and no zeros: those would all be the one page that the system gives out before the first write.
        return partial(read, torch.ones(2 * self.cache // 4))

    def array(self, dtype: str) -> Tensor:
        """Numbers from 1 to 2, where neither probes nor thresholds can make subnormal numbers of them."""
        generator = torch.Generator().manual_seed(0)
        return (1 + torch.rand(self.rows, self.cols, generator=generator)).to(self.device, DTYPES[dtype])

    def compile(self, function: Callable[..., object], *args: object) -> Callable[[], object]:
        """``function(*args)`` compiled for exactly these arguments."""
        return partial(torch.compile(function, dynamic=False), *args)

    def check(self, what: str, dtype: str, function: Callable[..., Tensor], count: int = 1, rtol: float = 0.0) -> None:
        """Refuse to time a kernel that disagrees with the reference in float64 on a small input.

        Args:
            what: for the message.
            dtype: of the input.
            function: the op, from ``count`` matrices to a result; it may change them.
            count: of its inputs.
            rtol: beyond the rounding of ``dtype``.
        """
        small = self._small(dtype, count)
        with backend("python"):
            exact = function(*(x.double() for x in small))
        with backend(self.kernel):
            result = function(*(x.clone() for x in small))
        limits = torch.finfo(result.dtype if result.dtype == torch.float32 else DTYPES[dtype])
        if not torch.allclose(result.double(), exact.double(), rtol=2 * limits.eps + rtol, atol=limits.smallest_normal):
            self._refuse(what, dtype)

    def check_random(self, what: str, dtype: str, function: Callable[..., Sequence[Tensor]], count: int = 1) -> None:
        """Refuse to time a kernel that rounds at random in another way than the reference with the same seed.

        Equal seeds give equal bits; but where float32 sums round differently, a value may cross a rounding boundary
        now and then, so one in a hundred may differ.

        Args:
            what: for the message.
            dtype: of the input.
            function: the op, from ``count`` matrices to its results; it may change them.
            count: of its inputs.
        """
        small, results = self._small(dtype, count), []
        for name in ("python", self.kernel):
            with backend(name):
                results.append([x.double() for x in function(*(x.clone() for x in small))])
        for expected, found in zip(*results, strict=True):
            if float((~torch.isclose(found, expected, rtol=1e-6, atol=0)).double().mean()) > 0.01:
                self._refuse(what, dtype)

    def _small(self, dtype: str, count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [(1 + torch.rand(67, 136, generator=generator)).to(self.device, DTYPES[dtype]) for _ in range(count)]

    def _refuse(self, what: str, dtype: str) -> NoReturn:
        sys.exit(f"{what} of {self.kernel} disagrees with the reference on {dtype}: no speed is reported")


def words(x: Tensor) -> Tensor:
    """The bytes of ``x`` as 32-bit integers."""
    return x.view(torch.int32)


def touch(*arrays: Tensor) -> None:
    """Read and write every array once."""
    for x in arrays:
        words(x).add_(0)


def add(target: Tensor, *sources: Tensor) -> None:
    """Read every source, read and write the target."""
    for source in sources:
        words(target).add_(words(source))


def read(*arrays: Tensor) -> None:
    """Read every array once, as fast as memory gives it (see the module's docstring)."""
    for x in arrays:
        words(x).amax()


def selected_count(x: Tensor, axis: int, share: float) -> int:
    """How many groups make up ``share``, at least one; of columns an even number, which :func:`words` can view."""
    step = 1 if axis == 0 else 2
    return max(step, step * round(x.shape[axis] * share / step))


def last(x: Tensor, axis: int, share: float = 0.25) -> Tensor:
    """Positions of the last ``share`` along ``axis``."""
    size = x.shape[axis]
    return torch.arange(size - selected_count(x, axis, share), size, device=x.device)


def region(x: Tensor, axis: int, share: float) -> Tensor:
    """The last ``share`` along ``axis``, as a view."""
    count = selected_count(x, axis, share)
    return x.narrow(axis, x.shape[axis] - count, count)
