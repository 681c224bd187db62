"""The releases of vLLM and Transformers that serving was tested with, and what older ones get wrong."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyprune.serving.vllm.launch import OFFICIAL, answer_for_variants

if TYPE_CHECKING:
    from pyprune.serving.widths import LayerSizes

TESTED = "vLLM 0.32.0 with transformers 5.19.0"
"""The releases that every serving test runs with; docs/serving.md has the others (`make matrix`)."""

HEADS_PER_LAYER = (0, 29)
"""The release of vLLM since which its attention backends plan with the query heads of their own layers: FlashInfer and
Triton did before 0.26, the CPU since 0.28, FlashAttention since 0.29."""

TRIED_ON_CPU = (0, 32)
"""The release of vLLM whose CPU build was seen to end at what :func:`is_tried_cpu_build` is asked for."""
CPU_SEQUENCES = 128
"""That a server of vLLM 0.29 to 0.32 answers at a time on a CPU, for each of its ranks, without --max-num-seqs."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that chooses vLLM's model runner; the second one makes the buffers of a pipeline in any case."""


def vllm_version() -> str:
    """The version of the installed vLLM, also where it is distributed under another name; "" if there is none."""
    answer_for_variants()
    try:
        return importlib.metadata.version(OFFICIAL)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_cpu_build(version: str) -> bool:
    """Whether a vLLM of this version runs models on the CPU; told as vLLM itself does."""
    return os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or "cpu" in version or sys.platform == "darwin"


def has_cpu_sequences(version: str) -> bool:
    """Whether a server of this version is known to answer :data:`CPU_SEQUENCES` at a time by itself."""
    release = _release(version)
    return is_cpu_build(version) and release is not None and HEADS_PER_LAYER <= release <= TRIED_ON_CPU


def is_tried_cpu_build(version: str) -> bool:
    """The same of the release that is known to fail at some things there."""
    return is_cpu_build(version) and _release(version) == TRIED_ON_CPU


def why_not_uncompiled_pipeline(ranks: int, version: str) -> str:
    """Why a vLLM cannot run an uncompiled model in a pipeline; empty where it can, or was not seen to fail.

    On a CPU its first model runner makes the buffers between ranks in the run that compiles the model, and only there:
    without them the first request ends the server in an AssertionError.

    Args:
        ranks: of pipeline parallelism.
        version: of vLLM, such as 0.32.0+cpu.
    """
    if ranks < 2 or not is_tried_cpu_build(version):
        return ""
    return (
        f"pipeline_parallel_size is {ranks} and the model is not compiled, which ends vLLM {version} on a CPU at the "
        "first request. Leave out what switches compilation off (--enforce-eager, -O0, --enable-lora, mode 0 of "
        "--compilation-config, the variable TORCH_COMPILE_DISABLE), or use "
        f"--tensor-parallel-size instead; where triton has a backend for CPUs, {RUNNER}=1 takes another runner."
    )


def why_not_draft_in_pipeline(ranks: int) -> str:
    """Why vLLM cannot run a draft model beside one that is divided among ranks; empty where it is not.

    vLLM 0.32 builds the draft on the last rank alone, whose place in the pipeline then decides which of the draft's
    layers are made: the server ends while it starts.

    Args:
        ranks: of pipeline parallelism.
    """
    if ranks < 2:
        return ""
    return (
        f"pipeline_parallel_size is {ranks}, and vLLM cannot build a draft model in a pipeline. Use "
        "--tensor-parallel-size instead, or leave the draft out."
    )


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None for a version that tells no release, such as that of sources without their tags."""
    number = re.match(r"(?!0\.1\.dev)(\d+)\.(\d+)", version)
    return None if number is None else (int(number[1]), int(number[2]))


def why_not_unequal_heads(widths: Sequence[LayerSizes], version: str) -> str:
    """Why a release of vLLM cannot serve these layers; empty where it can, or where its version tells no release.

    Before :data:`HEADS_PER_LAYER` some backends take the model's query heads for those of each layer: they read and
    write beyond their scratch memory, which ends in a crash, a standstill or wrong tokens.

    Args:
        widths: of every layer.
        version: of vLLM, such as 0.32.0+cpu.
    """
    number = _release(version)
    with_attention = {heads: index for index, (heads, _, _) in reversed(list(enumerate(widths))) if heads}
    if number is None or len(with_attention) < 2 or number >= HEADS_PER_LAYER:
        return ""
    (one, first), (other, second) = sorted(with_attention.items(), key=lambda found: found[1])[:2]
    needed = ".".join(map(str, HEADS_PER_LAYER))
    return (
        f"layer {first} has {one} query heads and layer {second} {other}, which vLLM {version} computes wrongly. "
        f"Install vLLM {needed} or later, or prune to the same number of query heads in every layer."
    )
