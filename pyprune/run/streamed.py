"""Runs that train nothing: a checkpoint on disk becomes another one, with one tensor or layer in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel
from typing_extensions import override

from pyprune.checkpoint.layers import ReadLayers, StoredLayers
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.places import Places
from pyprune.checkpoint.stored import StoredModel
from pyprune.config.run import PruneConfig
from pyprune.cut.compact import CompactReport
from pyprune.cut.compensate import CompensationReport, compensate_
from pyprune.cut.mask import Masking
from pyprune.data.sampling import TokenSamples
from pyprune.methods.base import PlanDecision
from pyprune.methods.registry import get_method
from pyprune.run.cut_on_disk import StreamedCut
from pyprune.run.result import PruneResult
from pyprune.run.resume import RunFolder
from pyprune.run.stages import Stages, planning_config
from pyprune.run.text import RunText, draw_samples
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.freed import freed_at_once

SOLVED = "solved"
"""Folder of a run for tensors that were changed before the cut (merged, rotated, solved) or added (biases)."""

NOTE = "Streamed from file to file: one tensor or layer of the model was in memory at a time."


def loading_reason(source: ModelSource, config: PruneConfig) -> str | None:
    """Return why a run loads the whole model.

    Args:
        source: of the dense model.
        config: every option, checked.

    Returns:
        A note for the report; empty for a run that nobody expects to be streamed, because it trains or cuts nothing;
        None where the weights can be streamed.
    """
    if config.stages.before or config.stages.after or not config.stages.prune:
        return ""
    reason = decision_obstacle(config) or source.streaming_obstacle()
    return f"The whole model was in memory, not streamed from file to file: {reason}." if reason else None


def decision_obstacle(config: PruneConfig) -> str | None:
    """Return why the method needs the whole model in memory to decide; None where it can read the files."""
    return None if config.plan is not None else get_method(config.method).streaming_obstacle(config)


class StreamedStages(Stages):
    """Stages whose weights are in files: each step of the cut reads them there."""

    streamed_cut: StreamedCut | None = None

    @property
    def files(self) -> StoredModel:
        """Return the files of the dense model."""
        return cast(StoredModel, self.stored)

    @override
    def _layers(self) -> StoredLayers:
        return StoredLayers(self.files)

    @override
    def _compensate(self) -> CompensationReport:
        layers, batch_size = self._layers(), self.config.cut.batch_size
        report = compensate_(layers, self.result.plan, self.text.cut_data.ids, batch_size=batch_size)
        if report.added_parameters:
            self.files.config.output_bias = layers.model.config.output_bias
        return report

    @override
    def _compact(self) -> CompactReport:
        dtype = self.config.export_dtype or ModelSource.of(self.files.folder).dtype or self.config.dtype
        self.streamed_cut = StreamedCut(self.files, self.result.plan, dtype=DTYPES[dtype])
        return self.streamed_cut.report

    @override
    @contextmanager
    def _masked(self) -> Iterator[PreTrainedModel]:
        masking = Masking(self.files.family, self.files.config, self.result.plan)
        with self.files.transform_reads(masking.apply_):
            whole = self._layers().whole()
            masking.apply_beside_parameters_(whole)
            yield whole

    @override
    def _cut_model(self) -> PreTrainedModel:
        return ReadLayers(cast(StreamedCut, self.streamed_cut)).whole()


class StreamedRun:
    """A run on a model whose weights stay on disk.

    Args:
        source: of a dense model; :func:`loading_reason` gives None for it.
        config: every option, checked.
        work: where an interrupted run is kept; None keeps nothing.
        only_planning: decide, but train and cut nothing: the text of other stages is drawn, and not used.

    Attributes:
        model: the dense model, its parameters without memory.
        samples: the text that was drawn, by its use.
        note: for the result.

    Raises:
        CheckpointError: files are damaged, or differ from the folder's record.
        PypruneError: as :class:`pyprune.run.stages.Stages`.
    """

    @freed_at_once()
    def __init__(
        self, source: ModelSource, config: PruneConfig, work: RunFolder | None = None, *, only_planning: bool = False
    ) -> None:
        source.inherited_facts(verify_files=True)
        scratch = None if work is None else work.path / SOLVED
        files = source.open_stored(dtype=config.dtype, device=resolve_device(config.device), scratch=scratch)
        tokenizer = source.tokenizer()
        self.note = NOTE
        self.model: PreTrainedModel = files.model()
        files.check(self.model)
        self.samples: dict[str, TokenSamples] = draw_samples(self.model, tokenizer, config)
        text, options = RunText.of(self.samples), planning_config(config) if only_planning else config
        self._stages = StreamedStages(self.model, text, options, work, stored=files)

    @property
    def places(self) -> Places:
        """Return where the tensors of the dense model are in its files."""
        return self._stages.files.places

    @freed_at_once()
    def decide(self) -> PlanDecision:
        """Decide what to remove; nothing is cut."""
        return self._stages.decide()

    @freed_at_once()
    def execute(self) -> PruneResult:
        """Decide, and plan the cut, which :meth:`write` makes."""
        return self._stages.run()

    @freed_at_once()
    def write(self, out: Path, provenance: Mapping[str, Any], *, overwrite: bool) -> Path:
        """Cut the weights from file to file; see :meth:`StreamedCut.write`. Call :meth:`execute` first."""
        if self._stages.streamed_cut is None:
            raise RuntimeError("There is no plan yet; call execute() first.")
        return self._stages.streamed_cut.write(out, provenance, overwrite=overwrite)
