"""Start ``vllm serve`` on a checkpoint: what is refused before it starts, and the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pyprune.errors import CheckpointError, MissingDependencyError
from pyprune.families import find_family
from pyprune.runtime.progress import warn
from pyprune.serving.adapters import foreign_adapter
from pyprune.serving.checkpoints import Checkpoint, architecture_of, read_checkpoint, refuse_unread_sizes
from pyprune.serving.engines import PYTHON, engine_environment, vllm_installed
from pyprune.serving.vllm.cpu import cache_environment, cpu_warnings
from pyprune.serving.vllm.limits import (
    adapter_obstacle,
    architecture_obstacle,
    rounding_obstacle,
    serving_warnings,
    stock_obstacle,
)
from pyprune.serving.vllm.options import draft_config, given_options, hub_of
from pyprune.serving.vllm.plugin import loading_obstacle
from pyprune.serving.vllm.releases import (
    RUNNER,
    draft_pipeline_obstacle,
    is_cpu_build,
    is_faulty_cpu_build,
    uncompiled_pipeline_obstacle,
    vllm_version,
)
from pyprune.serving.widths import (
    PARTITION,
    LayerSizes,
    draft_obstacle,
    layer_widths,
    sharing_obstacle,
    stage_obstacle,
    stages_of,
)

DRAFT_MODEL, HEADS = "draft_model", ("eagle-", "eagle3", "dflash", "dspark")
"""vLLM's method for a draft that is a whole model, and the parts of names by which it recognises other drafts without a
method."""


def serve_command(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> list[str]:
    """Return the command line that starts ``vllm serve`` for a checkpoint through :mod:`pyprune.serving.vllm.launch`.

    Print warnings about what the server does not support.

    Args:
        folder: the checkpoint, or a hub id, which is served by that name.
        extra_args: handed on as they are, such as ``--port 9000``; see :func:`servable`.
        verify: compare a pyprune checkpoint with its pruning.json first; without it a warning is printed.
        server: name that tells the server's processes that the folder was verified
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
    config = checkpoint.config
    for warning in (*serving_warnings(config), *cpu_warnings(config, given, vllm_version())):
        warn(warning)
    words = [*PYTHON, "-m", "pyprune.serving.vllm.launch", "serve"]
    if os.path.isdir(folder):  # unchanged: vLLM names the model by these words, such as pruned/ or ./pruned
        return [*words, str(folder), *extra_args]
    name = ["--served-model-name", str(folder)] if given.served_model_name is None else []
    return [*words, str(checkpoint.folder), *extra_args, *name]


def servable(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> Checkpoint:
    """Read a checkpoint, and refuse one that ``vllm serve`` would not serve with these options.

    Args:
        folder: the checkpoint, or a hub id.
        extra_args: of ``vllm serve``, the file of ``--config`` among them. ``--revision``, ``--download-dir`` and
            ``--hf-token`` decide what is downloaded of a hub id, ``--tensor-parallel-size`` how layers are divided.
        verify: compare a pyprune checkpoint with its pruning.json first.
        server: see :func:`serve_command`.

    Raises:
        MissingDependencyError: vLLM is not installed.
        CheckpointError: the folder is no checkpoint, was changed after it was written, or has sizes per layer that
            pyprune does not read. VLLM_PLUGINS keeps the plugin away. The ranks of tensor parallelism cannot share the
            layers (or inputs stored together). vLLM cannot run the draft, or an adapter is of another model. vLLM on a
            CPU would end: at a pipeline without compilation, w8a16, int8 in layers of Transformers or under adapters.
    """
    if not vllm_installed():
        raise MissingDependencyError("vllm", "vllm", "Serving")
    checkpoint = read_checkpoint(folder, verify=verify, server=server, hub=hub_of(extra_args))
    if reason := architecture_obstacle(checkpoint.architecture):
        raise CheckpointError(f"{folder} cannot be served: {reason}")
    refuse_unread_sizes(checkpoint, folder)
    if checkpoint.architecture.startswith("Pruned") and (reason := loading_obstacle()):
        raise CheckpointError(f"{folder} is a {checkpoint.architecture}, which pyprune's plugin serves. {reason}")
    if reason := _start_obstacle(checkpoint, given_options(extra_args), vllm_version()):
        raise CheckpointError(f"{folder} cannot be served: {reason}")
    return checkpoint


def _start_obstacle(checkpoint: Checkpoint, given: argparse.Namespace, version: str) -> str | None:
    """Return a known reason why vLLM would crash at its start or at the first request; None without one."""
    # Stock architectures are checked here alone: vLLM itself would end in an assertion of a rank.
    ranks = (given.tensor_parallel_size, given.expert_ranks)
    reason = sharing_obstacle(checkpoint.config, *ranks, balanced=given.enable_eplb)
    reason = reason or stock_obstacle(checkpoint.config)
    reason = reason or _stage_obstacle(layer_widths(checkpoint.config), given.pipeline_parallel_size)
    draft = draft_config(given)
    if _drafts_with_a_model(given, draft):
        reason = reason or draft_pipeline_obstacle(given.pipeline_parallel_size)
        reason = reason or _draft_obstacle(given, draft, version)
    if given.uncompiled and os.environ.get(RUNNER) != "1":
        reason = reason or uncompiled_pipeline_obstacle(given.pipeline_parallel_size, version)
    if is_faulty_cpu_build(version):
        reason = reason or rounding_obstacle(checkpoint.config, checkpoint.architecture)
        if given.enable_lora:
            reason = reason or adapter_obstacle(checkpoint.config, given.tensor_parallel_size)
    return reason or foreign_adapter(checkpoint.folder, given.lora_modules)


def _stage_obstacle(widths: Sequence[LayerSizes], ranks: int) -> str | None:
    """See :func:`pyprune.serving.widths.stage_obstacle`; None for a partition that vLLM itself refuses."""
    partition = os.environ.get(PARTITION, "")
    stages = stages_of(len(widths), ranks, partition)
    counts = [part.strip() for part in partition.split(",")]
    if not widths or (partition and counts != [str(end - start) for start, end in stages]):
        return None
    return stage_obstacle(widths, stages)


def _drafts_with_a_model(given: argparse.Namespace, config: Mapping[str, Any]) -> bool:
    """Check whether the draft is a whole model of a known family.

    Heads such as EAGLE's may have the config.json of one. They are recognised by the method or, as in vLLM, by name.
    """
    is_head = any(name in given.draft.lower() for name in HEADS)
    if given.draft_method != DRAFT_MODEL and (given.draft_method or is_head):
        return False
    family = find_family(config.get("model_type"))
    if family is None:
        return False
    return architecture_of(config) in (family.classes.model.rpartition(":")[2], family.pruned_model)


def _draft_obstacle(given: argparse.Namespace, config: Mapping[str, Any], version: str) -> str | None:
    """Explain why vLLM would end at the draft: its layers, or a plugin that is not loaded; None where it would not.

    The draft has the ranks of its target, or one. The CPU's first model runner prepares attention once for all layers.
    """
    architecture = architecture_of(config)
    if architecture.startswith("Pruned") and (reason := loading_obstacle()):
        return f"its draft {given.draft} is a {architecture}, which pyprune's plugin serves. {reason}"
    reason = sharing_obstacle(config, given.tensor_parallel_size if given.draft_ranks != 1 else 1)
    if is_faulty_cpu_build(version):
        reason = reason or rounding_obstacle(config, architecture)
    if is_cpu_build(version) and os.environ.get(RUNNER) != "1":
        kinds = config.get("layer_types") or ()
        hybrid = not given.disable_hybrid_kv_cache_manager
        reason = reason or draft_obstacle(layer_widths(config), kinds, hybrid=hybrid)
    return f"of its draft {given.draft}: {reason}" if reason else None


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
    environment = {
        **engine_environment(),
        **cache_environment(checkpoint.config, given, vllm_version()),
        SERVER: server,
    }
    if not verify:
        environment[VERIFY] = "0"
    os.execve(command[0], command, environment)  # noqa: S606  (an argument list, no shell)
