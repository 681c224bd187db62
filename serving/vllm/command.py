"""Start ``vllm serve`` on a checkpoint: what is refused before it starts, and the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pyprune.errors import CheckpointError, MissingDependencyError
from pyprune.families import all_families
from pyprune.runtime.progress import warn
from pyprune.serving.adapters import why_not_of_this_model
from pyprune.serving.checkpoints import Checkpoint, architecture_of, read_checkpoint, refuse_unread_sizes
from pyprune.serving.engines import PYTHON, engine_environment, vllm_installed
from pyprune.serving.vllm.cpu import (
    cache_environment,
    memory_nodes_warning,
    saturating_int8_warning,
    slow_products_warning,
)
from pyprune.serving.vllm.limits import serving_warnings, why_not_adapted, why_not_rounded, why_not_stock
from pyprune.serving.vllm.options import draft_config, given_options, hub_of
from pyprune.serving.vllm.plugin import architectures, why_not_loaded
from pyprune.serving.vllm.releases import (
    RUNNER,
    is_cpu_build,
    is_tried_cpu_build,
    vllm_version,
    why_not_draft_in_pipeline,
    why_not_uncompiled_pipeline,
    why_not_unequal_heads,
)
from pyprune.serving.widths import (
    PARTITION,
    LayerSizes,
    layer_widths,
    stages_of,
    why_not_drafting,
    why_not_shared,
    why_not_staged,
)

DRAFT_MODEL, HEADS = "draft_model", ("eagle-", "eagle3", "dflash", "dspark")
"""vLLM's method of a draft that is a model of its own, and what it goes by in the names of drafts that are not, where
no method is given."""


def serve_command(
    folder: str | Path, extra_args: Sequence[str] = (), *, verify: bool = True, server: str = ""
) -> list[str]:
    """Return the command line that starts ``vllm serve`` for a checkpoint through :mod:`pyprune.serving.vllm.launch`.

    Print warnings about what the server does not support.

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
    version = vllm_version()
    on_cpu = (
        *memory_nodes_warning(given, version),
        *slow_products_warning(checkpoint.config, given, version),
        *saturating_int8_warning(checkpoint.config, version),
    )
    for warning in (*serving_warnings(checkpoint.config), *on_cpu):
        warn(warning)
    words = [*PYTHON, "-m", "pyprune.serving.vllm.launch", "serve"]
    if os.path.isdir(folder):  # as it was given: vLLM calls the model by these words, such as pruned/ or ./pruned
        return [*words, str(folder), *extra_args]
    unnamed = given.served_model_name is None
    return [*words, str(checkpoint.folder), *extra_args, *(["--served-model-name", str(folder)] if unnamed else [])]


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
            here reads, needs a plugin that VLLM_PLUGINS keeps away, has layers (or inputs stored together) that the
            ranks of tensor parallelism cannot share, has a draft that vLLM cannot run, is given an adapter of another
            model, or is for a vLLM on a CPU
            what that ends at (a pipeline of ranks without compilation, w8a16, int8 in layers of Transformers or under
            adapters).
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
    widths = layer_widths(checkpoint.config)
    # Of a stock architecture nobody else asks: vLLM itself would end in an assertion of a rank.
    reason = why_not_unequal_heads(widths, version) or why_not_shared(checkpoint.config, given.tensor_parallel_size)
    reason = reason or why_not_stock(checkpoint.config)
    reason = reason or _why_not_in_stages(widths, given.pipeline_parallel_size)
    draft = draft_config(given)
    if _drafts_with_a_model(given, draft):
        reason = reason or why_not_draft_in_pipeline(given.pipeline_parallel_size)
        reason = reason or _why_not_draft(given, draft, version)
    if given.uncompiled and os.environ.get(RUNNER) != "1":
        reason = reason or why_not_uncompiled_pipeline(given.pipeline_parallel_size, version)
    if is_tried_cpu_build(version):
        reason = reason or why_not_rounded(checkpoint.config, checkpoint.architecture)
        reason = reason or (given.enable_lora and why_not_adapted(checkpoint.config, given.tensor_parallel_size)) or ""
    return reason or why_not_of_this_model(checkpoint.folder, given.lora_modules)


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

    The draft has the ranks of its target, or one. The CPU's first model runner prepares attention once for all layers.
    """
    architecture = architecture_of(config)
    if architecture.startswith("Pruned") and (reason := why_not_loaded()):
        return f"its draft {given.draft} is a {architecture}, which pyprune's plugin serves. {reason}"
    reason = why_not_shared(config, given.tensor_parallel_size if given.draft_ranks != 1 else 1)
    if is_tried_cpu_build(version):
        reason = reason or why_not_rounded(config, architecture)
    if is_cpu_build(version) and os.environ.get(RUNNER) != "1":
        kinds = config.get("layer_types") or ()
        hybrid = not given.disable_hybrid_kv_cache_manager
        reason = reason or why_not_drafting(layer_widths(config), kinds, hybrid=hybrid)
    return reason and f"of its draft {given.draft}: {reason}"


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
