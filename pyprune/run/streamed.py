"""Runs that train nothing: a checkpoint on disk becomes another one, with one tensor or layer in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.layers import ReadLayers, StoredLayers
from pyprune.checkpoint.load import stored_dtype
from pyprune.checkpoint.record import inherited_facts
from pyprune.checkpoint.stored import StoredModel, folder_with_safetensors, why_not_stored
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.config.run import PruneConfig
from pyprune.cut.compact import CompactReport
from pyprune.cut.compensate import CompensationReport, compensate_
from pyprune.cut.mask import Masking
from pyprune.cut.reconstruct import ReconstructionReport, reconstruct_
from pyprune.data.sampling import TokenSamples
from pyprune.data.tokens import Batch
from pyprune.errors import CheckpointError
from pyprune.methods.base import PlanDecision, Prepare
from pyprune.methods.registry import get_method
from pyprune.plan import PrunePlan
from pyprune.run.cut_on_disk import StreamedCut
from pyprune.run.resume import RunFolder
from pyprune.run.stages import Cutting, PruneResult, StageRun, StageText, draw_samples, planning
from pyprune.runtime.device import DTYPES, resolve_device
from pyprune.runtime.freed import freed_at_once

SOLVED = "solved"
"""Folder of a run for tensors that were changed before the cut (merged, rotated, solved) or added (biases)."""

NOTE = "Streamed from file to file: one tensor or layer of the model was in memory at a time."


def why_loaded(
    model_id: str | Path,
    config: PruneConfig,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str | None:
    """Why a run takes the whole model into memory.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option, checked.
        gguf_file: a GGUF file inside it.
        revision: hub revision.
        trust_remote_code: whether the repository's own code may run.

    Returns:
        A note for the report; empty where nobody would expect anything else (a run that trains, or cuts nothing); None
        where the weights can be streamed.
    """
    if config.stages.before or config.stages.after or not config.stages.prune:
        return ""
    reason = _why_not_decided(config) or why_not_stored(
        model_id, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code
    )
    return f"The whole model was in memory, not streamed from file to file: {reason}." if reason else None


def decides_from_disk(model_id: str | Path, config: PruneConfig, **source: Any) -> bool:
    """Whether the plan of a run can be found without the whole model in memory.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option, checked.
        source: ``gguf_file``, ``revision`` and ``trust_remote_code`` as in :func:`why_loaded`.
    """
    return not (_why_not_decided(config) or why_not_stored(model_id, **source))


def _why_not_decided(config: PruneConfig) -> str:
    if config.plan is not None:
        return ""
    return get_method(config.method).streaming_obstacle(config) or ""


def beside_files(
    model_id: str | Path, config: PruneConfig, work: Path, **source: Any
) -> tuple[StoredModel | None, Cutting]:
    """What a run on a model that is on the host computes from its files, a layer at a time on the device.

    Args:
        model_id: folder or hub id of a dense model.
        config: every option, checked.
        work: folder of the run.
        source: ``gguf_file``, ``revision`` and ``trust_remote_code`` as in :func:`why_loaded`.

    Returns:
        (where the method reads weights from, None for one that reads the model; what makes the cut).
    """
    if why_not_stored(model_id, **source):
        return None, Cutting()
    folder, place = folder_with_safetensors(model_id, source["revision"]), resolve_device(config.device)
    stored = StoredModel(str(folder), dtype=DTYPES[config.dtype], device=place, scratch=work / SOLVED)

    def taken_over(model: PreTrainedModel) -> None:
        for name in stored.replaced:
            model.get_parameter(name).data = stored.mapped(name)

    def prepared(prepare: Prepare, model: PreTrainedModel, *decided: Any) -> Sequence[str]:
        with freed_at_once():
            notes = prepare(StoredLayers(stored), *decided)
        taken_over(model)
        return notes

    def solved(model: PreTrainedModel, plan: PrunePlan, samples: Batch, **options: Any) -> ReconstructionReport:
        with freed_at_once():
            report = reconstruct_(StoredLayers(stored), plan, samples, **options)
        taken_over(model)
        return report

    trained = bool(config.stages.before)  # the weights are not those of the files when they are cut
    cutting = Cutting() if trained else Cutting(prepare=prepared, reconstruct=solved)
    return None if _why_not_decided(config) else stored, cutting


class StoredRun:
    """A run on a model whose weights stay on disk.

    Args:
        model_id: folder or hub id of a dense model, of which :func:`why_loaded` says None.
        config: every option, checked.
        revision: hub revision.
        work: where an interrupted run is kept; None keeps nothing.
        only_planning: decide, but train and cut nothing: the text of other stages is drawn, and not used.

    Attributes:
        model: the dense model, its parameters without memory.
        data: the text that was drawn.

    Raises:
        CheckpointError: files are damaged, or differ from the folder's record.
        PypruneError: as :class:`pyprune.run.stages.StageRun`.
    """

    @freed_at_once()
    def __init__(
        self,
        model_id: str | Path,
        config: PruneConfig,
        *,
        revision: str | None = None,
        work: RunFolder | None = None,
        only_planning: bool = False,
    ) -> None:
        inherited_facts(model_id, revision=revision, verify_files=True)
        folder = folder_with_safetensors(model_id, revision)
        if folder is None:
            raise CheckpointError(f"{model_id} has no safetensors, from which weights could be streamed.")
        self._config = config
        scratch = None if work is None else work.path / SOLVED
        place = resolve_device(config.device)
        self._source = StoredModel(folder, dtype=DTYPES[config.dtype], device=place, scratch=scratch)
        self._cut: StreamedCut | None = None
        tokenizer = load_tokenizer(str(model_id), revision=revision)
        self.model: PreTrainedModel = self._source.model()
        self._source.check(self.model)
        self.data: dict[str, TokenSamples] = draw_samples(self.model, tokenizer, config)
        text = StageText.of(self.data)
        own = planning(config) if only_planning else config
        cutting = Cutting(self._prepared, self._planned, self._compensated, self._solved, self._masked, self._compacted)
        self._run = StageRun(self.model, text, own, work, stored=self._source, cutting=cutting)

    @freed_at_once()
    def decide(self) -> PlanDecision:
        """Choose what to remove; nothing is cut."""
        return self._run.decide()

    @freed_at_once()
    def result(self) -> PruneResult:
        """Decide, and plan the cut, which :meth:`write` makes."""
        self._run.decide()
        self._run.cut()
        result = self._run.finished()
        result.notes.append(NOTE)
        return result

    def _prepared(self, prepare: Prepare, model: PreTrainedModel, *decided: Any) -> Sequence[str]:
        return prepare(StoredLayers(self._source), *decided)

    def _planned(self, model: PreTrainedModel, plan: PrunePlan) -> CompactReport:
        written = self._config.export_dtype or stored_dtype(self._source.folder) or self._config.dtype
        self._cut = StreamedCut(self._source, plan, dtype=DTYPES[written])
        return self._cut.report

    def _compensated(
        self, model: PreTrainedModel, plan: PrunePlan, samples: Tensor, **options: Any
    ) -> CompensationReport:
        layers = StoredLayers(self._source)
        report = compensate_(layers, plan, samples, **options)
        if report.added_parameters:
            self._source.config.output_bias = layers.model.config.output_bias
        return report

    def _solved(self, model: PreTrainedModel, plan: PrunePlan, samples: Batch, **options: Any) -> ReconstructionReport:
        return reconstruct_(StoredLayers(self._source), plan, samples, **options)

    @contextmanager
    def _masked(self, model: PreTrainedModel, plan: PrunePlan) -> Iterator[PreTrainedModel]:
        with self._source.transformed(Masking(self._source.family, self._source.config, plan).apply_):
            yield StoredLayers(self._source).whole()

    def _compacted(self, model: PreTrainedModel) -> PreTrainedModel:
        return ReadLayers(cast(StreamedCut, self._cut)).whole()  # it is planned

    @freed_at_once()
    def write(self, out: Path, provenance: Mapping[str, Any], *, overwrite: bool) -> Path:
        """Cut the weights from file to file; see :meth:`StreamedCut.write`. Call :meth:`result` first."""
        if self._cut is None:
            raise RuntimeError("There is no plan yet; call result() first.")
        return self._cut.write(out, provenance, overwrite=overwrite)
