"""Runs on a model in memory, in each process or in the first one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.places import Places, places_of
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.stored import StoredModel
from pyprune.config.run import PruneConfig
from pyprune.cut.reconstruct import ReconstructionReport
from pyprune.data.sampling import TokenSamples
from pyprune.methods.base import Prepare
from pyprune.modeling.shapes import model_of_shapes
from pyprune.probe.streams import LayerRunner
from pyprune.run.memory import learns_from_files
from pyprune.run.result import PruneResult
from pyprune.run.resume import RunFolder
from pyprune.run.source import TEACHER_DTYPE, HostCopy, load_teacher, report_copies, teacher_dtype
from pyprune.run.stages import Stages
from pyprune.run.streamed import SOLVED, decision_obstacle
from pyprune.run.text import RunText, draw_samples
from pyprune.runtime import processes
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.freed import freed_at_once
from pyprune.runtime.processes import Division
from pyprune.runtime.progress import say


@dataclass
class HostStages(Stages):
    """Stages on a model on the host, whose cut is computed from its files, a layer at a time on the device."""

    files: StoredModel = field(kw_only=True)

    @override
    def _layers(self) -> LayerRunner:
        return StoredLayers(self.files)

    @override
    def _prepare_weights(self, prepare: Prepare, ids: Tensor) -> Sequence[str]:
        with freed_at_once():
            notes = super()._prepare_weights(prepare, ids)
        self._take_over()
        return notes

    @override
    def _solve(self) -> ReconstructionReport:
        with freed_at_once():
            report = super()._solve()
        self._take_over()
        return report

    def _take_over(self) -> None:
        """Put the tensors that were changed in the files into the model."""
        for name in self.files.replaced_names:
            self.model.get_parameter(name).data = self.files.map_tensor(name)


class LoadedRun:
    """A run on a model in memory.

    Args:
        source: of the dense model.
        config: every option, checked.
        division: how several processes divide the run.
        work: where an interrupted run is kept.
        note: for the result; why the model was loaded, or empty.

    Attributes:
        model: the model, changed in place.
        samples: the text that was drawn, by its use.
    """

    def __init__(
        self, source: ModelSource, config: PruneConfig, division: Division, work: RunFolder, note: str = ""
    ) -> None:
        self.note = note
        self._source, self._config = source, config
        dtype = teacher_dtype(config)  # decided by all processes together, while few of them may load the teacher
        if division.on_host:
            _report_place(source, config, dtype)
        self.model, self._tokenizer = load_divided(source, config, division)
        self.samples: dict[str, TokenSamples] = draw_samples(self.model, self._tokenizer, config)
        text, teacher = RunText.of(self.samples), None
        if config.recover.distill:
            place = "cpu" if division.on_host else config.device
            teacher = partial(load_teacher, source, config, device=place, dtype=dtype)
        files: StoredModel | None = None
        if division.on_host and source.streaming_obstacle() is None:
            device = resolve_device(config.device)
            files = source.open_stored(dtype=config.dtype, device=device, scratch=work.path / SOLVED)
        stored = None if decision_obstacle(config) else files
        parts = (self.model, text, config, work, teacher, division, stored)
        # A training before the cut changes the weights, which are then no longer those of the files.
        by_files = files is not None and not config.stages.before
        self._stages = HostStages(*parts, files=cast(StoredModel, files)) if by_files else Stages(*parts)

    @property
    def places(self) -> Places | None:
        """Return where the tensors of the model were in the files that it was loaded from, if that is known."""
        return places_of(self.model)

    def execute(self) -> PruneResult:
        """Run all stages."""
        return self._stages.run()

    def write(self, out: Path, provenance: Mapping[str, Any], *, overwrite: bool) -> Path:
        """Write the checkpoint; see :func:`pyprune.checkpoint.save.save_checkpoint`. Call :meth:`execute` first."""
        result = self._stages.result
        return save_checkpoint(
            self.model,
            self._tokenizer,
            out,
            plan=result.plan if result.compact else None,
            provenance=provenance,
            overwrite=overwrite,
            dtype=self._config.export_dtype or self._source.dtype,
            trained=bool(result.stages),
        )


def load_divided(source: ModelSource, config: PruneConfig, division: Division) -> tuple[PreTrainedModel, Any]:
    """Load the model and its tokenizer; where the first process alone has the model, the others get its shapes."""
    if not division.on_host:
        return source.load(dtype=config.dtype, device=config.device)
    loaded = source.load(dtype=config.dtype) if processes.first() else None
    shapes = processes.from_first(loaded[0].config if loaded else None)
    if loaded is not None:
        return loaded
    return model_of_shapes(cast(PretrainedConfig, shapes), DTYPES[config.dtype]), source.tokenizer()


def _report_place(source: ModelSource, config: PruneConfig, dtype: str) -> None:
    """Print that the model is on the host, and whether each process has a copy of the teacher there."""
    say(
        f"The first of {processes.count()} processes has the model on the host; what trains is divided among their "
        "devices, layer by layer."
    )
    if "recover" in config.stages.after and config.recover.distill is not None and not learns_from_files(config):
        report_copies([HostCopy(source, TEACHER_DTYPE, dtype)])
