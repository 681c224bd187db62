"""Prepare vLLM on a CPU: the size of its cache, and warnings about memory nodes, dtypes and int8 products."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyprune.runtime.progress import say
from pyprune.serving.checkpoints import rotary_scaling, scaled_positions
from pyprune.serving.engines import KV_CACHE_SPACE
from pyprune.serving.vllm.options import context_tokens, draft_config
from pyprune.serving.vllm.releases import is_cpu_build
from pyprune.serving.widths import (
    PARTITION,
    cache_bytes,
    head_channels,
    layer_widths,
    quantised_layout,
    stages_of,
    token_bytes_of,
)

SERVE_KV_CACHE_GIB = 2
"""Least key-value cache of ``pyprune serve`` on a CPU, unless VLLM_CPU_KVCACHE_SPACE is set. vLLM's default is nearly
all memory of the machine, which fails as soon as anything else runs."""

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
SIMULATED, VISIBLE = "VLLM_CPU_SIM_MULTI_NUMA", "CPU_VISIBLE_MEMORY_NODES"
"""Environment variables of vLLM that bind its ranks to CPUs and memory."""
MEMORY = Path("/proc/self/status")


def cpu_warnings(config: Mapping[str, Any], given: argparse.Namespace, version: str) -> list[str]:
    """Return a sentence for each thing that will go wrong, or slowly, on this CPU; [] where vLLM runs elsewhere.

    Args:
        config: config.json of the model.
        given: options of ``vllm serve``, as of :func:`~pyprune.serving.vllm.options.given_options`.
        version: of vLLM.
    """
    if not is_cpu_build(version):
        return []
    warnings = memory_nodes_warning(given), _slow_products_warning(config, given), _saturating_int8_warning(config)
    return list(filter(None, warnings))


def memory_nodes_warning(given: argparse.Namespace) -> str | None:
    """Warn that vLLM on a CPU would end while it binds each rank to a memory node, because there are fewer nodes."""
    ranks = max(1, given.tensor_parallel_size) * max(1, given.pipeline_parallel_size)
    binds = (os.environ.get(THREADS_BIND) or "auto") == "auto" and os.environ.get(SIMULATED, "0") == "0"
    # Not all ranks are on this machine, or vLLM's own processes are not what runs them.
    elsewhere = given.nnodes not in (None, "1") or given.distributed_executor_backend not in (None, "mp")
    if ranks == 1 or elsewhere or not binds:
        return None
    nodes = memory_nodes(MEMORY.read_text(encoding="ascii", errors="replace") if MEMORY.is_file() else "")
    if not 0 < nodes < ranks:
        return None
    return (
        f"vLLM on a CPU binds each of {ranks} ranks to a memory node, and this process may use {nodes}: it would end "
        f'with "Not enough allowed NUMA nodes". Set {THREADS_BIND}=nobind, or to CPUs for each rank.'
    )


def _slow_products_warning(config: Mapping[str, Any], given: argparse.Namespace) -> str | None:
    """Warn that this CPU has no arithmetic for the dtype in which vLLM will run a model."""
    from torch import device

    from pyprune.runtime.device import slow_dtype_warning

    # Without a name, vLLM runs every model in bfloat16 that is not stored in float16.
    default = "float16" if config.get("dtype", config.get("torch_dtype")) == "float16" else "bfloat16"
    asked = {None: default, "auto": default, "half": "float16", "float": "float32"}.get(given.dtype, given.dtype)
    warning = slow_dtype_warning(asked, device("cpu"))
    return None if warning is None else f"vLLM will run in {asked}, and {warning} (--dtype float32)"


def _saturating_int8_warning(config: Mapping[str, Any]) -> str | None:
    """Warn that this CPU computes the products of an int8 model wrongly, in vLLM and elsewhere."""
    from pyprune.runtime.device import int8_products_saturate

    if quantised_layout(config) != "int-quantized" or not int8_products_saturate():
        return None
    return (
        "this CPU has no VNNI instructions, without which sums of int8 products (w8a8-int8) saturate in oneDNN: "
        "answers are off. Serve the checkpoint that is not quantised, or export with --quantise w4a16."
    )


def memory_nodes(status: str) -> int:
    """Count the memory nodes that a process may use; 0 if unknown. As in vLLM, CPU_VISIBLE_MEMORY_NODES hides some.

    Args:
        status: the text of the process's status in /proc.
    """
    line = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status, re.MULTILINE)
    spans = [span.split("-") for span in line[1].split(",")] if line else []
    allowed = {str(node) for span in spans for node in range(int(span[0]), int(span[-1]) + 1)}
    visible = os.environ.get(VISIBLE)
    return len(allowed.intersection(visible.split(",")) if visible else allowed)


def cache_environment(config: Mapping[str, Any], given: argparse.Namespace, version: str) -> dict[str, str]:
    """Size the cache on a CPU where the user does not: at least one sequence of the longest context fits.

    The sequence is one of the model and of its draft; vLLM refuses to start with less. On a CPU the variable replaces
    both of vLLM's options. It is the cache of each rank.

    Args:
        config: config.json of the model.
        given: options of ``vllm serve``, as of :func:`~pyprune.serving.vllm.options.given_options`.
        version: of vLLM.

    Returns:
        The variables to set; none where the user sets the size.
    """
    sized = given.kv_cache_memory_bytes is not None or given.gpu_memory_utilization is not None
    if sized or os.environ.get(KV_CACHE_SPACE):  # vLLM ignores an empty one too
        return {}
    context = context_tokens(given.max_model_len, _usual_context(config))
    stages = stages_of(len(layer_widths(config)), given.pipeline_parallel_size, os.environ.get(PARTITION, ""))
    tokens = [_rank_token_bytes(config, given, stage) for stage in stages]
    tokens[-1] += _rank_token_bytes(draft_config(given), given)  # the last rank holds the whole draft
    needed = -(-cache_bytes(1, context, max(tokens)) // 2**30)
    if needed > SERVE_KV_CACHE_GIB and is_cpu_build(version):
        say(
            f"Key-value cache: {needed} GiB, for one sequence of {context:,} tokens. --max-model-len makes it smaller, "
            f"{KV_CACHE_SPACE} sets it (GiB)."
        )
    return {KV_CACHE_SPACE: str(max(SERVE_KV_CACHE_GIB, needed))}


def _rank_token_bytes(
    config: Mapping[str, Any], given: argparse.Namespace, stage: tuple[int, int] | None = None
) -> int:
    """Return the bytes of cache that one token takes on one tensor parallel rank, in all layers or those of a stage.

    0 where only vLLM knows the size: windows, latents, other dtypes.
    """
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    is_windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    if kinds or is_windowed or config.get("kv_lora_rank") or given.kv_cache_dtype not in (None, "auto"):
        return 0
    dtype = "float32" if given.dtype in ("float32", "float") else "bfloat16"
    shared = max(1, given.tensor_parallel_size)  # ranks have KV heads of their own, or the same ones
    widths = layer_widths(config)[slice(*stage) if stage else slice(None)]
    layers = [(heads, -(-kv_heads // shared), ffn) for heads, kv_heads, ffn in widths]
    return token_bytes_of(layers, head_channels(config), dtype)


def _usual_context(config: Mapping[str, Any]) -> int:
    """Return vLLM's default for the longest sequence in tokens; 0 where config.json names none.

    With longrope the default is the length before the scaling, though more may be asked for.
    """
    kind, _ = rotary_scaling(config)
    if kind in ("longrope", "su"):
        return int(config.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    return scaled_positions(config)
