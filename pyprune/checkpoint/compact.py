"""Cutting a checkpoint on disk, one tensor in memory at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.checkpoint.shards import Entry, TensorFiles, check_finite, write_shards
from pyprune.cut.compact import Buffers, CompactReport, tensor_cut
from pyprune.cut.mask import gauged
from pyprune.cut.target import Target, choose_target, zero_biases
from pyprune.errors import CheckpointError
from pyprune.families import Family, check_plan, family_for, shapes_after
from pyprune.plan import PrunePlan


def compact_checkpoint(
    folder: str | Path,
    plan: PrunePlan,
    out: str | Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> CompactReport:
    """Cut a checkpoint on disk to the plan and write the result as another, one tensor in memory at a time.

    The written tensors equal bit for bit those of loading the checkpoint in its own dtype, :func:`compact_` and
    saving. A model far larger than memory needs room for some megabytes only (for its largest tensor in float32 where
    LayerNorm is cut through the gauge). The tokenizer's files are copied as they are.

    Args:
        folder: a dense checkpoint of a known family, safetensors in one file or in shards.
        plan: what stays.
        out: the folder to create; it appears complete or not at all, with ``pruning.json``.
        provenance: plain JSON data for the record.
        overwrite: replace an existing ``out``.
        max_shard_bytes: size at which the output is split into shards.

    Raises:
        CheckpointError: no safetensors, damaged files, weights that are not finite, or tensors missing from or foreign
            to the model.
        PlanError: the plan is inconsistent or was made for another model.
        UnsupportedModelError: unknown model type, variant or parameter.
        OutputError: ``out`` exists or cannot be written.
    """
    from pyprune.checkpoint.load import read_dense_config
    from pyprune.checkpoint.record import PruningRecord, inherited_facts, write_record
    from pyprune.checkpoint.tokenizer import copy_tokenizer
    from pyprune.runtime.files import atomic_folder, check_output

    check_output(out, overwrite=overwrite, reads=[folder])
    inherited = inherited_facts(folder, verify_files=True)
    source = TensorFiles(Path(folder))
    config, shapes = read_dense_config(folder)
    family = family_for(config)
    if config.tie_word_embeddings and _head_is_its_own(source, family):
        config.tie_word_embeddings = False
    check_plan(plan, family, config)
    target = choose_target(family, config, plan)
    names = _dense_names(source, family, config)
    _check_shapes(source, names, shapes)
    entries = _planned_entries(source, names, family, plan, target)
    model = _described_model(target, source, entries, folder)
    dense = sum(math.prod(source.shape(name)) for name in names)
    report = CompactReport(
        dense_parameters=dense,
        parameters=sum(math.prod(e.shape) for e in entries),
        architecture=type(model).__name__,
        stock=target.stock is not None,
        reasons=target.why_not_stock,
    )
    facts = {
        "source": str(folder),
        **inherited,
        **(provenance or {}),
        "dense_parameters": dense,
        "parameters": report.parameters,
        "architecture": report.architecture,
        "dtype": str(model.config.dtype).removeprefix("torch."),
    }
    tensors = _streamed_tensors(source, names, family, config, plan, target)
    with atomic_folder(out, overwrite=overwrite) as temporary:
        digests = write_shards(temporary, entries, tensors, max_shard_bytes)
        model.config.save_pretrained(temporary)
        if model.generation_config is not None:
            # As it is: save_pretrained refuses values that Transformers only reads (LLaMA 2: an idle temperature).
            model.generation_config.to_json_file(temporary / "generation_config.json")
        copy_tokenizer(Path(folder), temporary)
        write_record(temporary, PruningRecord(plan, facts), digests)
    return report


def _dense_names(source: TensorFiles, family: Family, config: PretrainedConfig) -> dict[str, str]:
    """Name in the checkpoint -> parameter name, without what Transformers does not load as a parameter."""
    names: dict[str, str] = {}
    for name in source.names():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        dense = _parameter_name(name, family)
        if family.match(dense)[0].role == "head" and config.tie_word_embeddings:
            continue
        names[name] = dense
    return names


def _check_shapes(source: TensorFiles, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the files with the dense model: of a larger tensor a part would be cut out as if it were the whole."""
    for name, dense in names.items():
        expected = shapes.get(dense, source.shape(name))  # a foreign tensor is refused where the output is planned
        if source.shape(name) != expected:
            raise CheckpointError(
                f"{name} of {source.folder} has the shape {source.shape(name)}, but by its config.json it is "
                f"{expected}. The checkpoint is damaged or its config.json was changed."
            )


def _parameter_name(name: str, family: Family) -> str:
    """The model's name of a tensor: some checkpoints hold the decoder without the causal LM around it."""
    known = [n for n in (name, f"model.{name}") if any(row.regex.match(n) for row in family.rows)]
    return known[0] if known else name


def _head_is_its_own(source: TensorFiles, family: Family) -> bool:
    """Whether the files hold a head with other values than the embedding; Transformers then leaves them untied."""
    found: dict[str, Tensor] = {}
    vocabulary = [row for row in family.rows if row.axes == ("vocab", "hidden")]
    for name in source.names():
        for row in vocabulary:
            if row.regex.match(_parameter_name(name, family)):
                found[row.role] = source.read(name)
    return len(found) == 2 and not torch.equal(found["head"], found["embedding"].to(found["head"].dtype))


def _planned_entries(
    source: TensorFiles, names: Mapping[str, str], family: Family, plan: PrunePlan, target: Target
) -> list[Entry]:
    """Every tensor of the output, in the order in which they are made."""
    shapes = shapes_after(family, {dense: source.shape(name) for name, dense in names.items()}, plan)
    position = {layer.index: str(i) for i, layer in enumerate(plan.layers)}
    entries = []
    for name, dense in names.items():
        if dense in shapes:
            row, index = family.match(dense)
            new = dense if index is None else row.pattern.replace("{i}", position[index])
            entries.append(Entry(new, source.dtype(name), shapes[dense]))
    zeros = zero_biases(target, plan, dtype=entries[0].dtype) if entries else ()
    return entries + [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in zeros]


def _described_model(
    target: Target, source: TensorFiles, entries: Sequence[Entry], folder: str | Path
) -> PreTrainedModel:
    """The compacted model without memory behind it, checked against what will be written."""
    from pyprune.checkpoint.load import read_generation_config

    config = copy.deepcopy(target.config)
    config.dtype = next((e.dtype for e in entries), torch.float32)
    with no_init_weights(), torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    generation = read_generation_config(folder)
    if generation is not None:
        model.generation_config = generation
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {e.name: e.shape for e in entries}
    wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if wrong:
        raise CheckpointError(
            f"The tensors of {source.folder} do not fit its config.json; missing, foreign or of another shape: "
            f"{', '.join(wrong[:3])}. The checkpoint is incomplete or its config.json was changed."
        )
    return model


def _streamed_tensors(
    source: TensorFiles,
    names: Mapping[str, str],
    family: Family,
    config: PretrainedConfig,
    plan: PrunePlan,
    target: Target,
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    tied = bool(config.tie_word_embeddings)
    through_gauge = bool(plan.removed_hidden) and family.gauges(config)
    dtype = None
    buffers = Buffers()
    for name, dense in names.items():
        cut = tensor_cut(dense, family, plan, tied=tied)
        if cut is None:
            continue
        tensor = source.read(name)
        check_finite(name, tensor, source.folder)
        if through_gauge:
            tensor = gauged(tensor, family.match(dense)[0], plan.hidden)
        dtype = dtype or tensor.dtype
        yield cut.name, cut.pieces(tensor, buffers)
        del tensor
    for name, zeros in zero_biases(target, plan, dtype=dtype or torch.float32):
        yield name, iter((zeros,))
