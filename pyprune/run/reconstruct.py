"""Reconstruct an already pruned checkpoint in closed form; its plan does not change."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from pyprune.checkpoint.load import ModelSource
from pyprune.config.run import ReconstructCheckpointConfig
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_compacted_
from pyprune.errors import ConfigError
from pyprune.probe.streams import LayerRunner
from pyprune.run.rework import check_inputs, refuse_rotated, rework
from pyprune.run.source import HostCopy, report_copies
from pyprune.run.text import one_kind_warnings, say_warnings
from pyprune.runtime import processes
from pyprune.runtime.device import resolve_device
from pyprune.runtime.processes import Division
from pyprune.runtime.progress import say


def reconstruct_checkpoint(
    pruned: str | Path | ModelSource,
    config: ReconstructCheckpointConfig,
    *,
    dense: str | Path | ModelSource,
    out: str | Path,
    dense_gguf_file: str | None = None,
    dense_revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> ReconstructionReport:
    """Reconstruct a pruned checkpoint from its dense model, and write another one with the same plan.

    The record keeps everything it held; this run is added under "reconstructions". Warnings of the text are
    printed before the work begins.

    Args:
        pruned: checkpoint folder of the cut model, written by pyprune.
        config: every option.
        dense: folder or hub id of the model that it was cut from. Of safetensors one layer is in memory at a time; of
            other formats the whole model.
        out: the folder to create.
        dense_gguf_file: a GGUF file inside the dense model's folder or repository.
        dense_revision: hub revision of the dense model.
        trust_remote_code: run the repositories' own code.
        overwrite: replace an existing ``out``.

    Raises:
        ConfigError: invalid options, or a checkpoint without a plan or with channels that were rotated.
        PlanError: the dense model is not the one that the plan is of.
        PypruneError: the error that stopped it; nothing is left at ``out``.
    """
    config.validate()
    source = ModelSource.of(pruned, trust_remote_code=trust_remote_code)
    reference = ModelSource.of(
        dense, gguf_file=dense_gguf_file, revision=dense_revision, trust_remote_code=trust_remote_code
    )
    refuse_rotated(source, "A reconstruction", "Prune the dense model again, with cut.reconstruct=least_squares.")
    check_inputs(source, config, reference, out, overwrite=overwrite)
    report_copies([HostCopy(source, "dtype", config.dtype)])
    with rework(source, config, reference, out, "reconstructions", "cpu", overwrite=overwrite) as work:
        if work.plan is None:
            raise ConfigError(
                f"{pruned} holds no plan, which says what was removed; give a checkpoint that pyprune prune wrote."
            )
        say_warnings(work.warnings)
        for note in one_kind_warnings(work.samples, "data.source"):
            say(note)
        walked, device = _dense_layers(reference, config), resolve_device(config.device)
        with processes.divide_training(Division(device, "files")):
            report = reconstruct_compacted_(
                work.model,
                work.plan,
                walked,
                work.samples,
                options=config.least_squares,
                batch_size=config.batch_size,
                device=device,
            )
        work.report = report.to_dict()
    return report


def _dense_layers(dense: ModelSource, config: ReconstructCheckpointConfig) -> PreTrainedModel | LayerRunner:
    """Open the dense model for one pass through its layers: in safetensors, with one layer in memory at a time."""
    if dense.layers_obstacle() is not None:
        return dense.load(dtype=config.dtype, device=config.device)[0]
    return dense.open_layers(dtype=config.dtype, device=config.device)
