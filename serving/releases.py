"""The releases of vLLM and Transformers that serving was tested with, and what older ones get wrong."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyprune.serving.launch import OFFICIAL, answer_for_variants

if TYPE_CHECKING:
    from pyprune.serving.widths import LayerSizes

TESTED = "vLLM 0.32.0 with transformers 5.19.0"
"""The releases that every serving test runs with; docs/serving.md has the others (`make matrix`)."""

HEADS_PER_LAYER = (0, 29)
"""The release of vLLM since which its attention backends plan with the query heads of their own layers: FlashInfer and
Triton did before 0.26, the CPU since 0.28, FlashAttention since 0.29."""


def vllm_version() -> str:
    """The version of the installed vLLM, also where it is distributed under another name; "" if there is none."""
    answer_for_variants()
    try:
        return importlib.metadata.version(OFFICIAL)
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_not_unequal_heads(widths: Sequence[LayerSizes], version: str) -> str:
    """Why a release of vLLM cannot serve these layers; empty where it can, or where its version tells no release.

    Before :data:`HEADS_PER_LAYER` some backends take the model's query heads for those of each layer: they read and
    write beyond their scratch memory, which ends in a crash, a standstill or wrong tokens.

    Args:
        widths: of every layer.
        version: of vLLM, such as 0.32.0+cpu.
    """
    number = re.match(r"(?!0\.1\.dev)(\d+)\.(\d+)", version)  # 0.1.dev: of sources without their tags
    with_attention = {heads: index for index, (heads, _, _) in reversed(list(enumerate(widths))) if heads}
    if number is None or len(with_attention) < 2 or tuple(map(int, number.groups())) >= HEADS_PER_LAYER:
        return ""
    (one, first), (other, second) = sorted(with_attention.items(), key=lambda found: found[1])[:2]
    needed = ".".join(map(str, HEADS_PER_LAYER))
    return (
        f"layer {first} has {one} query heads and layer {second} {other}, which vLLM {version} computes wrongly. "
        f"Install vLLM {needed} or later, or prune to the same number of query heads in every layer."
    )
