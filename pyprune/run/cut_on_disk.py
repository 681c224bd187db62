"""Cut a checkpoint on disk, one tensor in memory at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.checkpoint.configuration import read_generation_config
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.manifest import PruningRecord
from pyprune.checkpoint.notation import write_older_notation
from pyprune.checkpoint.record import write_record
from pyprune.checkpoint.save import convert_weight
from pyprune.checkpoint.shards import Entry, check_finite, largest_shard, write_shards
from pyprune.checkpoint.stored import StoredModel, build_without_parameters
from pyprune.checkpoint.tokenizer import copy_tokenizer
from pyprune.cut.compact import Buffers, CompactReport, TensorCut, compact_, cut_buffer, tensor_cut
from pyprune.cut.mask import gauge_weight
from pyprune.cut.proof import assert_proven
from pyprune.cut.shorter import kept_names
from pyprune.cut.target import choose_target, zero_biases
from pyprune.errors import CheckpointError
from pyprune.families import check_plan, shapes_after
from pyprune.plan import PrunePlan
from pyprune.runtime.files import atomic_folder, check_output


def compact_checkpoint(
    folder: str | Path,
    plan: PrunePlan,
    out: str | Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
) -> CompactReport:
    """Cut a checkpoint on disk to the plan and write the result as another, one tensor in memory at a time.

    The written tensors equal bit for bit those of loading the checkpoint in its own dtype, :func:`compact_` and
    saving. A model far larger than memory needs room for some megabytes only (for its largest tensor in float32 where
    LayerNorm is cut through the gauge). The tokenizer's files are copied as they are.

    Args:
        folder: a dense checkpoint of a known family, safetensors in one file or in shards.
        plan: which parts are kept.
        out: the folder to create; it appears complete or not at all, with ``pruning.json``.
        provenance: plain JSON data for the record.
        overwrite: replace an existing ``out``.
        max_shard_bytes: size at which the output is split into shards; None = the size of the source's largest
            shard, or 5 GB for a single file.

    Raises:
        CheckpointError: no safetensors, damaged files, weights that are not finite, or tensors missing from or foreign
            to the model.
        PlanError: the plan is inconsistent or was made for another model.
        UnsupportedModelError: unknown model type, variant or parameter.
        OutputError: ``out`` exists or cannot be written.
    """
    check_output(out, overwrite=overwrite, reads=[folder])
    inherited = ModelSource.of(folder).inherited_facts(verify_files=True)
    cut = StreamedCut(StoredModel(folder), plan)
    facts = {"source": str(folder), **inherited, **(provenance or {}), "dense_parameters": cut.report.dense_parameters}
    cut.write(out, facts, overwrite=overwrite, max_shard_bytes=max_shard_bytes)
    return cut.report


class StreamedCut:
    """A planned cut of a checkpoint on disk, which :meth:`write` makes.

    Before that, its tensors can be read one at a time (:class:`pyprune.checkpoint.layers.Tensors`).

    Args:
        source: the dense checkpoint; its dtype is the one that weights are cut in (None = each tensor's own).
        plan: which parts are kept.
        dtype: of the written weights; None = each tensor's own.

    Attributes:
        report: sizes before and after, and the architecture.
        device: where tensors are put that are read.
        family: of the dense model.

    Raises:
        CheckpointError: tensors are missing from or foreign to the model.
        PlanError: the plan is inconsistent or was made for another model.
    """

    def __init__(self, source: StoredModel, plan: PrunePlan, *, dtype: torch.dtype | None = None) -> None:
        check_plan(plan, source.family, source.config)
        self.source = source
        self.plan = plan
        self.dtype = dtype
        self.device, self.family = source.device, source.family
        assert_proven(source.family, compact_)
        self._target = choose_target(source.family, source.config, plan)
        self._tied = bool(source.config.tie_word_embeddings)
        self._through_gauge = bool(plan.removed_hidden) and source.family.gauges(source.config)
        source.refuse_foreign()
        self._places = source.places.kept(source.family.layers_path, plan.kept_layers)
        self._dense_names: dict[str, str] = {}  # by the names in the cut model
        self._entries = self._planned_entries()
        self._model = self._described_model()
        self.report = CompactReport(
            dense_parameters=sum(math.prod(source.entry(name).shape) for name in source.names),
            parameters=sum(math.prod(e.shape) for e in self._entries),
            architecture=type(self._model).__name__,
            stock=self._target.stock is not None,
            reasons=self._target.reasons,
        )

    def write(
        self,
        out: str | Path,
        provenance: Mapping[str, Any],
        *,
        overwrite: bool = False,
        max_shard_bytes: int | None = None,
    ) -> Path:
        """Write the checkpoint, tensor by tensor, the tokenizer's files copied.

        Args:
            out: the folder to create; it appears complete or not at all.
            provenance: plain JSON data for the record.
            overwrite: replace an existing ``out``.
            max_shard_bytes: see :func:`compact_checkpoint`.

        Raises:
            CheckpointError: weights that are not finite.
            OutputError: ``out`` exists or cannot be written, or weights are beyond the range of the written dtype.
        """
        model, limit = self._model, max_shard_bytes or largest_shard(self.source.folder)
        facts = {
            **provenance,
            "parameters": self.report.parameters,
            "architecture": self.report.architecture,
            "dtype": str(model.config.dtype).removeprefix("torch."),
        }
        with atomic_folder(out, overwrite=overwrite) as temporary:
            buffers = [Entry(new, values.dtype, tuple(values.shape)) for new, values in self._kept_buffers()]
            entries = [stored for entry in (*self._entries, *buffers) for stored in self._stored_entries(entry)]
            digests = write_shards(temporary, entries, self._tensors(), limit)
            model.config.save_pretrained(temporary)
            write_older_notation(temporary)
            if model.generation_config is not None:
                # As it is: save_pretrained refuses values that Transformers only reads (LLaMA 2: an idle temperature).
                model.generation_config.to_json_file(temporary / "generation_config.json")
            copy_tokenizer(self.source.folder, temporary)
            write_record(temporary, PruningRecord(self.plan, facts), digests)
        return Path(out)

    def model(self) -> PreTrainedModel:
        """The cut model in eval mode, its parameters without memory (on the meta device), its buffers computed."""
        config = copy.deepcopy(self._target.config)
        config.dtype = self.source.dtype or config.dtype
        model = build_without_parameters(config)
        for name, values in self._kept_buffers():
            model.get_buffer(name).copy_(values)
        return model

    def read(self, name: str) -> Tensor:
        """A tensor of the cut model by its name there, as it is before it is converted to the written dtype."""
        source = self.source
        if name not in self._dense_names:
            biases = zero_biases(self._target, self.plan, dtype=source.dtype or torch.float32, device=self.device)
            return next(zeros for bias, zeros in biases if bias == name)
        dense = self._dense_names[name]
        cut = cast(TensorCut, tensor_cut(dense, self.family, self.plan, tied=self._tied))  # it stays
        return cut.of(self._to_gauge(dense, source.read(dense)))

    def _stored_entries(self, entry: Entry) -> Iterator[Entry]:
        """The tensors in files, as those of the source are, that hold a tensor of the cut model."""
        for name, part in self._places.of(entry.name).split(torch.empty(entry.shape, device="meta")):
            yield replace(entry, name=name, shape=tuple(part.shape))

    def _to_gauge(self, name: str, tensor: Tensor) -> Tensor:
        """A dense tensor as it is cut: where the family needs that, in the gauge of the channels that stay."""
        return (
            gauge_weight(tensor, self.source.family.match(name)[0], self.plan.hidden) if self._through_gauge else tensor
        )

    def _planned_entries(self) -> list[Entry]:
        """Every tensor of the output, in the order in which they are made."""
        family, stored = self.source.family, {name: self.source.entry(name) for name in self.source.names}
        shapes = shapes_after(family, {name: entry.shape for name, entry in stored.items()}, self.plan)
        position = {layer.index: str(i) for i, layer in enumerate(self.plan.layers)}
        entries = []
        for name, entry in stored.items():
            if name in shapes:
                row, index = family.match(name, self.plan.dense.layers)
                new = name if index is None else row.pattern.replace("{i}", position[index])
                entries.append(Entry(new, self.dtype or entry.dtype, shapes[name]))
                self._dense_names[new] = name
        zeros = zero_biases(self._target, self.plan, dtype=entries[0].dtype) if entries else ()
        entries += [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in zeros]
        return entries

    def _kept_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that the files hold and the cut model has, by their names there."""
        held = self._model.state_dict().keys()
        for name, new in kept_names(self.source.buffers, self.family.layers_path, self.plan.kept_layers):
            if new in held:
                yield new, cut_buffer(name, self.source.map_tensor(name), self.family, self.plan)

    def _described_model(self) -> PreTrainedModel:
        """The compacted model without memory behind it, checked against what will be written."""
        config = copy.deepcopy(self._target.config)
        config.dtype = next((e.dtype for e in self._entries), torch.float32)
        with no_init_weights(), torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
        model.tie_weights()
        model.config.architectures = [type(model).__name__]
        generation = read_generation_config(self.source.folder)
        if generation is not None:
            model.generation_config = generation
        wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
        found = {e.name: e.shape for e in self._entries}
        wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        if wrong:
            raise CheckpointError(
                f"The tensors of {self.source.folder} do not fit its config.json; missing, unknown or of another "
                f"shape: {', '.join(wrong[:3])}. The checkpoint is incomplete or its config.json was changed."
            )
        return model

    def _tensors(self) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """Every tensor of the files that are written, in the order of the entries."""
        source, plan = self.source, self.plan
        buffers = Buffers()
        for name in source.names:
            cut = tensor_cut(name, source.family, plan, tied=self._tied)
            if cut is not None:
                yield from self._pieces(name, cut, buffers)
        for name, zeros in zero_biases(self._target, plan, dtype=self._entries[0].dtype):
            yield name, iter((zeros,))
        for name, values in self._kept_buffers():
            yield from ((stored, iter((part,))) for stored, part in self._places.of(name).split(values))

    def _pieces(self, name: str, cut: TensorCut, buffers: Buffers) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """The tensors of files that hold one of the cut model: of experts, one after another is read."""
        place = self._places.of(cut.name)
        if place.converter is None:
            tensor = self._to_gauge(name, self._to_cut(name, self.source.map_tensor(name)))
            yield next(place.split(tensor))[0], self._written(cut.name, cut.pieces(tensor, buffers))
            return
        experts: Sequence[int] = (0,)
        if place.is_merged:
            cut, experts = replace(cut, experts=None), cut.kept_experts(place.parts)
        for new, old in enumerate(experts):
            tensor = cut.of(self._to_gauge(name, self._to_cut(name, self.source.map_part(name, old))))
            for stored, values in place.files_of(new, tensor):
                yield stored, self._written(cut.name, iter((values.contiguous(),)))

    def _to_cut(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the dtype that it is cut in.

        A product of half precision is made in float32 and rounded once, so that a tensor that is read and written in
        the same dtype needs no copy in float32; the gauge would round it once more.
        """
        work = self.source.dtype or tensor.dtype
        once = work == torch.float32 and tensor.dtype == self.dtype and not self._through_gauge
        if once or tensor.dtype == work:
            return tensor
        tensor = tensor.to(work)
        check_finite(name, tensor, self.source.folder)  # beyond the range of float16
        return tensor

    def _written(self, name: str, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        return pieces if self.dtype is None else (convert_weight(name, piece, self.dtype) for piece in pieces)
