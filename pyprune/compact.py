"""The only code that cuts: a dense model and a plan become a physically smaller model.

``tensor_cut`` says what one tensor becomes; ``compact_`` applies it to a model in memory, and
``compact_checkpoint`` to a checkpoint on disk, one tensor at a time. The hidden axis is exact because the
residual stream is rescaled by s = sqrt(d'/d) instead of touching any epsilon: writers and the embedding times
s, norms of the stream times 1/s, the final norm once more times 1/s when the head is tied to the scaled
embedding. RMSNorm of s*x over d' channels is then s times RMSNorm of x over d channels whose removed ones are
zero.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from pyprune.errors import CheckpointError
from pyprune.families import Family, Row, StockTarget, check_plan, count_parameters, family_for, shapes_after
from pyprune.families.base import Axis, block_is_skipped, kept_indices
from pyprune.mask import gauge_, gauged
from pyprune.ops import slice_gather
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.tensor_files import Entry, TensorFiles, check_finite, write_shards

PER_LAYER_LISTS = ("layer_types",)
"""Config fields with one entry a layer; they are sliced together with the layers."""


@dataclass(frozen=True)
class Target:
    """What a plan turns a dense configuration into.

    Attributes:
        config: configuration of the compacted model.
        stock: the stock rule that fits, or None for the pruned architecture.
        reasons: why each stock rule that was tried does not fit.
        zero_biases: (pattern, axis) of biases that the stock target has and the source lacks.
    """

    config: PretrainedConfig
    stock: StockTarget | None
    reasons: tuple[str, ...]
    zero_biases: tuple[tuple[str, Axis], ...] = ()

    @property
    def why_not_stock(self) -> tuple[str, ...]:
        """Why no stock architecture fits; nothing when one does."""
        return () if self.stock else self.reasons


@dataclass(frozen=True)
class CompactReport:
    """What compaction did.

    Attributes:
        dense_parameters: parameters before.
        parameters: parameters after.
        architecture: class name of the compacted model.
        stock: True when plain Transformers and vLLM load it without pyprune.
        reasons: why a stock architecture does not fit (empty when it does).
    """

    dense_parameters: int
    parameters: int
    architecture: str
    stock: bool
    reasons: tuple[str, ...]

    @property
    def removed_share(self) -> float:
        """Share of the dense parameters that is gone, in [0, 1)."""
        return 1 - self.parameters / self.dense_parameters


def compact_(model: PreTrainedModel, plan: PrunePlan) -> CompactReport:
    """Cut the model to the plan, in place: it becomes an instance of the target architecture.

    The logits equal those of the masked dense model (:func:`pyprune.mask.mask_`) up to float32 rounding.
    Peak memory is the dense weights plus the kept ones.

    Args:
        model: a dense model of a known family; dtype and device are kept.
        plan: what stays.

    Returns:
        Sizes before and after, and whether the result is a stock architecture.

    Raises:
        PlanError: the plan is inconsistent or was made for another model.
        UnsupportedModelError: unknown model type, variant or parameter.
    """
    family = family_for(model)
    check_plan(plan, family, model.config)
    target = choose_target(family, model.config, plan)
    before = count_parameters(model)
    if plan.removed_hidden and family.gauges(model.config):
        gauge_(model, plan.hidden)
    state = dict(_compact_state(model, family, plan, target))
    smaller = _empty_model(target.config, model)
    smaller.load_state_dict(state, strict=False, assign=True)
    smaller.tie_weights()
    _check_complete(smaller, state)
    _become(model, smaller)
    return CompactReport(
        dense_parameters=before,
        parameters=count_parameters(model),
        architecture=type(model).__name__,
        stock=target.stock is not None,
        reasons=target.why_not_stock,
    )


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
    from pyprune.files import atomic_folder, check_output
    from pyprune.load import copy_tokenizer, read_dense_config
    from pyprune.record import PruningRecord, inherited_facts, write_record

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
    from pyprune.load import read_generation_config

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
    buffers = _Buffers()
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


class _Buffers:
    """Two pieces of memory that take turns, small enough to stay in the cache until they are written and hashed."""

    nbytes = 4 << 20

    def __init__(self) -> None:
        self.free = itertools.cycle([torch.empty(self.nbytes, dtype=torch.uint8) for _ in range(2)])

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the memory of the last but one; of its own where it is larger."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            return torch.empty(shape, dtype=dtype)
        return next(self.free)[:nbytes].view(dtype).view(shape)


def choose_target(family: Family, config: PretrainedConfig, plan: PrunePlan) -> Target:
    """Pick the first stock architecture that can hold the plan, else the pruned one.

    Args:
        family: of the dense model.
        config: of the dense model.
        plan: what stays.
    """
    reasons: list[str] = []
    for stock in family.stock_targets:
        reason = stock.why_not(config, plan)
        if not reason:
            zeros = stock.zero_biases(config)
            return Target(_stock_config(family, config, plan, stock), stock, tuple(reasons), zeros)
        reasons.append(f"{stock.model_type}: {reason}")
    return Target(_pruned_config(family, config, plan), None, tuple(reasons))


@dataclass(frozen=True, eq=False)
class TensorCut:
    """What becomes of one dense tensor.

    Attributes:
        name: new parameter name.
        rows: kept positions along the first dimension, int64; None = all.
        columns: the same along the second.
        factor: what the values are multiplied by, in float32 (float64) and rounded once.
        offset: the factor is one on ``value + offset``.
    """

    name: str
    rows: Tensor | None
    columns: Tensor | None
    factor: float
    offset: float

    def of(self, tensor: Tensor) -> Tensor:
        """The new tensor, any dtype."""
        return slice_gather(tensor, self.rows, self.columns, self.factor, offset=self.offset)

    def pieces(self, tensor: Tensor, buffers: _Buffers) -> Iterator[Tensor]:
        """The new tensor in runs of rows that fit the buffers."""
        rows = torch.arange(len(tensor)) if self.rows is None else self.rows
        row_shape = tensor.shape[1:] if self.columns is None else self.columns.shape
        most = max(1, buffers.nbytes // max(1, row_shape.numel() * tensor.itemsize))
        for some in rows.split(most):
            out = buffers.take((len(some), *row_shape), tensor.dtype)
            yield slice_gather(tensor, some, self.columns, self.factor, offset=self.offset, out=out)


def tensor_cut(name: str, family: Family, plan: PrunePlan, *, tied: bool) -> TensorCut | None:
    """What becomes of one dense tensor, or None when it goes.

    Args:
        name: dense parameter name.
        family: of the dense model.
        plan: what stays.
        tied: the head shares the embedding's tensor.

    Raises:
        UnsupportedModelError: no table row describes ``name``.
    """
    row, index = family.match(name)
    position = {layer.index: i for i, layer in enumerate(plan.layers)}
    layer: LayerPlan | None = None
    if index is not None:
        if index not in position:
            return None
        layer = plan.layers[position[index]]
        if block_is_skipped(row, layer):
            return None
        name = row.pattern.replace("{i}", str(position[index]))
    kept = [kept_indices(axis, layer, plan) for axis in row.axes]
    rows, columns = (None if i is None else torch.tensor(i, dtype=torch.int64) for i in (*kept, None)[:2])
    offset = 1.0 if family.unit_offset_norm and row.is_norm_weight else 0.0
    return TensorCut(name, rows, columns, stream_factor(row, family, plan, tied=tied), offset)


def stream_factor(row: Row, family: Family, plan: PrunePlan, *, tied: bool) -> float:
    """The factor that slicing the hidden axis puts on a tensor (on 1 + w for unit-offset norms).

    See METHODS "exact compaction of the hidden axis": s = sqrt(d'/d) scales the residual stream.
    """
    s = stream_scale(family, plan, tied=tied)
    # Gemma multiplies the embedding by sqrt(hidden_size), which shrinks by s on its own.
    head_scale = s if tied and not family.scaled_embedding else 1.0
    match row.role:
        case "embedding":
            return 1.0 if family.scaled_embedding else s
        case "writer":
            return s
        case "pre_norm":
            return 1.0 if row.is_bias else 1 / s
        case "final_norm":
            return (1.0 if row.is_bias else 1 / s) / head_scale
        case _:
            return 1.0


def stream_scale(family: Family, plan: PrunePlan, *, tied: bool) -> float:
    """What the cut multiplies the residual stream by: s = sqrt(d'/d), or 1 where a virtual LayerNorm spares it.

    Args:
        family: of the dense model.
        plan: what stays.
        tied: the head shares the embedding's tensor.
    """
    virtual_norm = family.norm == "layer" and (tied or not family.gauge)
    return 1.0 if virtual_norm else math.sqrt(len(plan.hidden) / plan.dense.hidden_size)


def _compact_state(
    model: PreTrainedModel, family: Family, plan: PrunePlan, target: Target
) -> Iterator[tuple[str, Tensor]]:
    tied = bool(model.config.tie_word_embeddings)
    for name, parameter in model.named_parameters():
        cut = tensor_cut(name, family, plan, tied=tied)
        if cut is not None:
            yield cut.name, cut.of(parameter.detach())
    yield from zero_biases(target, plan, dtype=model.dtype, device=model.device)


def zero_biases(
    target: Target, plan: PrunePlan, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Biases that the stock target has and the source lacks: (name, zeros)."""
    for i, layer in enumerate(plan.layers):
        heads, kv_heads, ffn = layer.widths
        head_dim = plan.dense.head_dim
        width = {"hidden": len(plan.hidden), "heads": heads * head_dim, "kv_heads": kv_heads * head_dim, "ffn": ffn}
        for pattern, axis in target.zero_biases:
            yield pattern.replace("{i}", str(i)), torch.zeros(width[axis], dtype=dtype, device=device)


def _common_values(family: Family, config: PretrainedConfig, plan: PrunePlan) -> dict[str, Any]:
    """Dense config values with the layers and the hidden axis already sliced."""
    values = config.to_dict()
    # The class names the model type; the folder and writer of the source do not describe the result.
    for key in (
        "model_type",
        "architectures",
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        "auto_map",
    ):
        values.pop(key, None)
    values["num_hidden_layers"] = len(plan.layers)
    values["hidden_size"] = len(plan.hidden)
    for key in PER_LAYER_LISTS:
        if values.get(key) is not None:
            values[key] = [values[key][i] for i in plan.kept_layers]
    if family.model_type == "opt":
        values["word_embed_proj_dim"] = len(plan.hidden)
    return values


def _stock_config(family: Family, config: PretrainedConfig, plan: PrunePlan, stock: StockTarget) -> PretrainedConfig:
    heads, kv_heads, ffn = plan.layers[0].widths
    values = _common_values(family, config, plan)
    values |= {"num_attention_heads": heads, family.intermediate_field: ffn}
    if family.has_head_dim_field:
        values |= {"num_key_value_heads": kv_heads, "head_dim": plan.dense.head_dim}
    values |= stock.config_changes(config)
    # A stock architecture that takes biases on its output projections has a switch of its own for them.
    values.pop("output_bias", None)
    return AutoConfig.for_model(stock.model_type, **values)


def _pruned_config(family: Family, config: PretrainedConfig, plan: PrunePlan) -> PretrainedConfig:
    from pyprune.modeling import pruned_config_class

    values = _common_values(family, config, plan)
    values["head_dim"] = plan.dense.head_dim
    values["num_key_value_heads"] = plan.dense.num_key_value_heads
    if family.needs_virtual_norm(config, plan):
        values["norm_size"] = plan.dense.hidden_size
    values["per_layer_config"] = {
        i: overrides for i, layer in enumerate(plan.layers) if (overrides := _layer_overrides(family, layer, plan))
    }
    return cast(PretrainedConfig, pruned_config_class(family.model_type)(**values))


def _layer_overrides(family: Family, layer: LayerPlan, plan: PrunePlan) -> dict[str, Any]:
    """Transformers' per_layer_config notation: what differs in this layer from the dense widths."""
    heads, kv_heads, ffn = layer.widths
    skip = [block for block, width in (("attention", heads), ("mlp", ffn)) if not width]
    overrides: dict[str, Any] = {"skip": skip} if skip else {}
    if heads and heads != plan.dense.num_attention_heads:
        overrides["num_attention_heads"] = heads
    if kv_heads and kv_heads != plan.dense.num_key_value_heads:
        overrides["num_key_value_heads"] = kv_heads
    if ffn and ffn != plan.dense.intermediate_size:
        overrides[family.intermediate_field] = ffn
    return overrides


def _empty_model(config: PretrainedConfig, like: PreTrainedModel) -> PreTrainedModel:
    """Build the target without initialising weights (untouched memory is not resident)."""
    config = copy.deepcopy(config)
    config.dtype = like.dtype
    with no_init_weights(), torch.device(like.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=like.config._attn_implementation)
    model.train(like.training)
    model.generation_config = copy.deepcopy(like.generation_config)
    return model  # type: ignore[no-any-return]


def _check_complete(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Every parameter of the target must have come from the source, and every tensor must have a place."""
    own = dict(model.named_parameters())
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = sorted(n for n in own.keys() & state.keys() if own[n].shape != state[n].shape)
    if missing or extra or wrong:
        raise RuntimeError(
            f"Compaction does not fit its target: missing {missing[:3]}, extra {extra[:3]}, shapes {wrong[:3]}. "
            "This is a bug in a family table."
        )


def _become(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Turn ``model`` into ``other`` while keeping its identity: every reference sees the smaller model."""
    name_or_path = model.name_or_path
    model.__class__ = other.__class__
    model.__dict__ = other.__dict__
    model.name_or_path = name_or_path
