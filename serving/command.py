"""Start ``vllm serve`` on a checkpoint: what is refused before it starts, the command line, and its cache on a CPU."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pyprune.errors import CheckpointError, MissingDependencyError
from pyprune.families import all_families
from pyprune.runtime.files import read_json
from pyprune.runtime.progress import say, warn
from pyprune.serving.checkpoints import (
    Checkpoint,
    architecture_of,
    read_checkpoint,
    refuse_unread_sizes,
    rotary_scaling,
    scaled_positions,
)
from pyprune.serving.engines import KV_CACHE_SPACE, PYTHON, engine_environment, vllm_installed
from pyprune.serving.limits import serving_warnings, why_not_rounded
from pyprune.serving.plugin import architectures, why_not_loaded
from pyprune.serving.releases import (
    RUNNER,
    is_cpu_build,
    is_tried_cpu_build,
    vllm_version,
    why_not_draft_in_pipeline,
    why_not_uncompiled_pipeline,
    why_not_unequal_heads,
)
from pyprune.serving.vllm_options import context_tokens, given_options, hub_of
from pyprune.serving.widths import (
    PARTITION,
    LayerSizes,
    cache_bytes,
    head_channels,
    layer_widths,
    scale_group,
    stages_of,
    token_bytes_of,
    why_not_drafting,
    why_not_grouped,
    why_not_split,
    why_not_staged,
)

SERVE_KV_CACHE_GIB = 2
"""Key-value cache of ``pyprune serve`` on a CPU, for contexts that need no more, unless VLLM_CPU_KVCACHE_SPACE is set;
vLLM's own default is nearly all memory of the machine, which fails as soon as anything else runs."""

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
SIMULATED, VISIBLE = "VLLM_CPU_SIM_MULTI_NUMA", "CPU_VISIBLE_MEMORY_NODES"
"""Environment variables of vLLM that say what its ranks are bound to."""
MEMORY = Path("/proc/self/status")

DRAFT_MODEL, HEADS = "draft_model", ("eagle-", "eagle3", "dflash", "dspark")
"""vLLM's method of a draft that is a model of its own, and what it goes by in the names of drafts that are not, where
no method is given."""


def serve_command(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> list[str]:
    """Return the command line that is ``vllm serve`` for a checkpoint (:mod:`pyprune.serving.launch` says why not it).

    What the server will not like is printed as warnings.

    Args:
        folder: the checkpoint, or a hub id, which is served by that name.
        extra_args: handed on as they are, such as ``--port 9000``; see :func:`servable`.
        verify: compare a pyprune checkpoint with its pruning.json first; without it a warning is printed.
        server: name by which the server's processes will know that this was done
            (:func:`pyprune.serving.checkpoints.verify_checkpoint`).

    Raises:
        MissingDependencyError, CheckpointError: see :func:`servable`.
    """
    return _command(servable(folder, extra_args, verify=verify, server=server), folder, extra_args, verify=verify)


def _command(checkpoint: Checkpoint, folder: str | Path, extra_args: Sequence[str], *, verify: bool) -> list[str]:
    """See :func:`serve_command`."""
    if not verify:
        warn(f"The files of {folder} were not verified.")
    given = given_options(extra_args)
    for warning in (*serving_warnings(checkpoint.config), *_memory_nodes_warning(given)):
        warn(warning)
    words = [*PYTHON, "-m", "pyprune.serving.launch", "serve"]
    if os.path.isdir(folder):  # as it was given: vLLM calls the model by these words, such as pruned/ or ./pruned
        return [*words, str(folder), *extra_args]
    unnamed = given.served_model_name is None
    return [*words, str(checkpoint.folder), *extra_args, *(["--served-model-name", str(folder)] if unnamed else [])]


def _memory_nodes_warning(given: argparse.Namespace) -> tuple[str, ...]:
    """What vLLM's binding of threads would end at on a CPU: it gives each rank a memory node of its own."""
    ranks = max(1, given.tensor_parallel_size) * max(1, given.pipeline_parallel_size)
    binds = (os.environ.get(THREADS_BIND) or "auto") == "auto" and os.environ.get(SIMULATED, "0") in ("", "0")
    elsewhere = given.nnodes is not None or given.distributed_executor_backend is not None  # not all ranks are here
    if ranks == 1 or elsewhere or not binds or not is_cpu_build(vllm_version()):
        return ()
    nodes = memory_nodes(MEMORY.read_text(encoding="ascii", errors="replace") if MEMORY.is_file() else "")
    if not 0 < nodes < ranks:
        return ()
    return (
        f"vLLM on a CPU binds each of {ranks} ranks to a memory node, and this process may use {nodes}: its ranks will "
        f'end with "Not enough allowed NUMA nodes". {THREADS_BIND}=nobind does without, or names CPUs for each rank.',
    )


def memory_nodes(status: str) -> int:
    """Memory nodes that a process may use; 0 where that is not said.

    Args:
        status: of the process, as /proc has it; CPU_VISIBLE_MEMORY_NODES leaves some of them out, as in vLLM.
    """
    line = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status, re.MULTILINE)
    spans = [span.split("-") for span in line[1].split(",")] if line else []
    allowed = {str(node) for span in spans for node in range(int(span[0]), int(span[-1]) + 1)}
    visible = os.environ.get(VISIBLE)
    return len(allowed.intersection(visible.split(",")) if visible else allowed)


def servable(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> Checkpoint:
    """Read a checkpoint, and refuse one that ``vllm serve`` would not serve with these options.

    Args:
        folder: the checkpoint, or a hub id.
        extra_args: of ``vllm serve``, the file of ``--config`` among them. ``--revision``, ``--download-dir`` and
            ``--hf-token`` say what is downloaded of a hub id, ``--tensor-parallel-size`` what divides the layers.
        verify: compare a pyprune checkpoint with its pruning.json first.
        server: see :func:`serve_command`.

    Raises:
        MissingDependencyError: vLLM is not installed.
        CheckpointError: the folder is no checkpoint, was changed after it was written, has sizes per layer that nothing
            here reads, needs a plugin that VLLM_PLUGINS keeps away, has layers (or, in w4a16, groups of scales) that
            the ranks of tensor parallelism cannot share, has a draft that vLLM cannot run, or is for a vLLM on a CPU
            what that ends at (a pipeline of ranks without compilation, int8 in layers of Transformers, w8a16).
    """
    if not vllm_installed():
        raise MissingDependencyError("vllm", "vllm", "Serving")
    checkpoint = read_checkpoint(folder, verify=verify, server=server, hub=hub_of(extra_args))
    if checkpoint.architecture.startswith("Pruned") and checkpoint.architecture not in architectures():
        raise CheckpointError(
            f"{folder} is a {checkpoint.architecture}, which the vLLM plugin does not serve "
            f"(it serves {', '.join(sorted(architectures()))}); load it with Transformers."
        )
    refuse_unread_sizes(checkpoint, folder)
    if checkpoint.architecture.startswith("Pruned") and (reason := why_not_loaded()):
        raise CheckpointError(f"{folder} is a {checkpoint.architecture}, which pyprune's plugin serves. {reason}")
    if reason := _why_not_run(checkpoint, given_options(extra_args), vllm_version()):
        raise CheckpointError(f"{folder} cannot be served: {reason}")
    return checkpoint


def _why_not_run(checkpoint: Checkpoint, given: argparse.Namespace, version: str) -> str:
    """What a rank of vLLM would die of, or the server at its first request; empty where that is nothing known."""
    widths, ranks = layer_widths(checkpoint.config), given.tensor_parallel_size
    # vLLM itself would end a stock architecture in an assertion of a rank.
    reason = why_not_unequal_heads(widths, version) or why_not_split(widths, ranks)
    reason = reason or _why_not_in_stages(widths, given.pipeline_parallel_size)
    draft = _draft_config(given)
    if _drafts_with_a_model(given, draft):
        reason = reason or why_not_draft_in_pipeline(given.pipeline_parallel_size)
        reason = reason or _why_not_draft(given, draft, version)
    if given.uncompiled and os.environ.get(RUNNER) != "1":
        reason = reason or why_not_uncompiled_pipeline(given.pipeline_parallel_size, version)
    if is_tried_cpu_build(version):
        reason = reason or why_not_rounded(checkpoint.config, checkpoint.architecture)
    group = scale_group(checkpoint.config)
    return reason or why_not_grouped(widths, head_channels(checkpoint.config), group, ranks)


def _why_not_in_stages(widths: Sequence[LayerSizes], ranks: int) -> str:
    """See :func:`pyprune.serving.widths.why_not_staged`; of a division that vLLM refuses, it says why itself."""
    partition = os.environ.get(PARTITION, "")
    stages = stages_of(len(widths), ranks, partition)
    asked = [part.strip() for part in partition.split(",")]
    if not widths or (partition and asked != [str(end - start) for start, end in stages]):
        return ""
    return why_not_staged(widths, stages)


def _drafts_with_a_model(given: argparse.Namespace, config: Mapping[str, Any]) -> bool:
    """Whether the draft is a model of its own, of a family here. Heads such as EAGLE's, whose config.json may say the
    same, are told by the method, or as vLLM does by their name.
    """
    is_head = any(name in given.draft.lower() for name in HEADS)
    if given.draft_method != DRAFT_MODEL and (given.draft_method or is_head):
        return False
    family = all_families().get(str(config.get("model_type")).removeprefix("pruned_"))
    own = () if family is None else (family.classes.model.rpartition(":")[2], family.pruned_model)
    return architecture_of(config) in own


def _why_not_draft(given: argparse.Namespace, config: Mapping[str, Any], version: str) -> str:
    """What vLLM would end at in the layers of the draft, or because nothing here reads it.

    Layers are looked at for the CPU's first model runner, which prepares attention once for all of them.
    """
    architecture = architecture_of(config)
    if architecture.startswith("Pruned") and (reason := why_not_loaded()):
        return f"its draft {given.draft} is a {architecture}, which pyprune's plugin serves. {reason}"
    if not is_cpu_build(version) or os.environ.get(RUNNER) == "1":
        return ""
    kinds = config.get("layer_types") or ()
    reason = why_not_drafting(layer_widths(config), kinds, hybrid=not given.disable_hybrid_kv_cache_manager)
    return reason and f"of its draft {given.draft}: {reason}"


def _draft_config(given: argparse.Namespace) -> Mapping[str, Any]:
    """config.json of the draft that vLLM's options name; empty without one in a local folder."""
    try:
        config = read_json(Path(given.draft) / "config.json") if given.draft else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def serve(folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True) -> NoReturn:
    """Replace this process by one that waits for ``vllm serve folder extra_args...``.

    Args:
        folder: the checkpoint.
        extra_args: handed on as they are.
        verify: whether this process and the server's compare a pyprune checkpoint with its pruning.json.

    Raises:
        MissingDependencyError: vLLM is not installed.
        CheckpointError: the folder cannot be served.
    """
    from pyprune.checkpoint.verify import SERVER, VERIFY, current_server, new_server

    server = current_server() or new_server()
    checkpoint = servable(folder, extra_args, verify=verify, server=server)
    command = _command(checkpoint, folder, extra_args, verify=verify)
    given = given_options(extra_args)
    environment = {**engine_environment(), **_cache_environment(checkpoint, given), SERVER: server}
    if not verify:
        environment[VERIFY] = "0"
    os.execve(command[0], command, environment)  # noqa: S606  (an argument list, no shell)


def _cache_environment(checkpoint: Checkpoint, given: argparse.Namespace) -> dict[str, str]:
    """What sizes the cache on a CPU where the user does not: room for one sequence of the longest context at least.

    That is in the model and in its draft; vLLM refuses to start with less. On a CPU the variable replaces both of its
    options; each rank has so much.
    """
    sized = given.kv_cache_memory_bytes is not None or given.gpu_memory_utilization is not None
    if sized or os.environ.get(KV_CACHE_SPACE):  # an empty one is none to vLLM either
        return {}
    config = checkpoint.config
    context = context_tokens(given.max_model_len, _usual_context(config))
    stages = stages_of(len(layer_widths(config)), given.pipeline_parallel_size, os.environ.get(PARTITION, ""))
    tokens = [_rank_token_bytes(config, given, stage) for stage in stages]
    tokens[-1] += _rank_token_bytes(_draft_config(given), given)  # all of it is on the last rank
    needed = -(-cache_bytes(1, context, max(tokens)) // 2**30)
    if needed > SERVE_KV_CACHE_GIB and is_cpu_build(vllm_version()):
        say(
            f"Key-value cache: {needed} GiB, for one sequence of {context:,} tokens. --max-model-len makes it smaller, "
            f"{KV_CACHE_SPACE} sets it (GiB)."
        )
    return {KV_CACHE_SPACE: str(max(SERVE_KV_CACHE_GIB, needed))}


def _rank_token_bytes(
    config: Mapping[str, Any], given: argparse.Namespace, stage: tuple[int, int] | None = None
) -> int:
    """Bytes of cache that one token takes in the KV heads of all layers that one tensor parallel rank has.

    Of the layers of a stage alone, where one is given. 0 where vLLM alone knows: windows, latents, other dtypes.
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
    """Tokens of the longest sequence that vLLM takes where no length is given; 0 where config.json names none.

    With longrope that is the length before the scaling, though more may be asked for.
    """
    kind, _ = rotary_scaling(config)
    if kind in ("longrope", "su"):
        return int(config.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
    return scaled_positions(config)
