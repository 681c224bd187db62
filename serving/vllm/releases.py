"""The releases of vLLM and Transformers that serving was tested with, and the faults of vLLM's newest tested one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys

from pyprune.serving.vllm.launch import OFFICIAL, answer_for_variants

TESTED = "vLLM 0.32.0 with transformers 5.19.0"
"""The releases that every serving test runs with; docs/operations/releases.md has the others (`make matrix`)."""

OLDEST, NEWEST = (0, 29), (0, 32)
"""The oldest and newest release of vLLM that was tried. Faults of the CPU build were seen in the newest one."""
CPU_SEQUENCES = 128
"""Requests that one rank of a CPU server answers at a time without --max-num-seqs, from :data:`OLDEST` on."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that chooses vLLM's model runner; the second one always makes the buffers of a pipeline."""


def vllm_version() -> str:
    """Return the version of the installed vLLM, under either name of its distribution; "" if there is none."""
    answer_for_variants()
    try:
        return importlib.metadata.version(OFFICIAL)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_cpu_build(version: str) -> bool:
    """Check whether a vLLM of this version runs models on the CPU, by vLLM's own rule."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in version or sys.platform == "darwin"


def limits_cpu_sequences(version: str) -> bool:
    """Check whether a server of this version answers :data:`CPU_SEQUENCES` requests at a time by default."""
    release = _release(version)
    return is_cpu_build(version) and release is not None and OLDEST <= release <= NEWEST


def is_faulty_cpu_build(version: str) -> bool:
    """Check whether this is the CPU build that has the faults listed in :mod:`pyprune.serving.vllm.workarounds`."""
    return is_cpu_build(version) and _release(version) == NEWEST


def uncompiled_pipeline_obstacle(ranks: int, version: str) -> str | None:
    """Explain why vLLM cannot run an uncompiled model in a pipeline; None where no failure was seen.

    On a CPU, vLLM's first model runner makes the buffers between ranks only while it compiles the model. Without them
    the first request ends the server with an AssertionError.

    Args:
        ranks: of pipeline parallelism.
        version: of vLLM, such as 0.32.0+cpu.
    """
    if ranks < 2 or not is_faulty_cpu_build(version):
        return None
    return (
        f"pipeline_parallel_size is {ranks} and the model is not compiled, which ends vLLM {version} on a CPU. "
        "Leave out --enforce-eager, -O0, --enable-lora and TORCH_COMPILE_DISABLE, use --tensor-parallel-size, or "
        f"{RUNNER}=1."
    )


def draft_pipeline_obstacle(ranks: int) -> str | None:
    """Explain why vLLM cannot run a draft model in a pipeline; None without a pipeline.

    vLLM 0.32 builds the draft on the last rank alone. The place of that rank in the pipeline then decides which of the
    draft's layers are made: the server ends while it starts.

    Args:
        ranks: of pipeline parallelism.
    """
    if ranks < 2:
        return None
    return (
        f"pipeline_parallel_size is {ranks}, and vLLM cannot build a draft model in a pipeline. Use "
        "--tensor-parallel-size instead, or leave the draft out."
    )


def _release(version: str) -> tuple[int, int] | None:
    """Return major and minor number; None for versions without a release, such as sources without their tags."""
    number = re.match(r"(?!0\.1\.dev)(\d+)\.(\d+)", version)
    return None if number is None else (int(number[1]), int(number[2]))
