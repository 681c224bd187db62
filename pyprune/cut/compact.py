"""The only code that cuts: a dense model and a plan become a physically smaller model.

``tensor_cut`` describes the cut of one tensor, and ``compact_`` applies it to a model in memory. The hidden axis is
exact because the residual stream is rescaled by s = sqrt(d'/d) instead of touching any epsilon: writers and the
embedding times s, norms of the stream times 1/s (readers, where no norm stands before them), the final norm once more
times 1/s when the head is tied to the scaled embedding. RMSNorm of s*x over d' channels is then s times RMSNorm of x
over d channels whose removed ones are zero.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pyprune.cut.mask import gauge_
from pyprune.cut.proof import assert_proven
from pyprune.cut.shorter import check_shorter, kept_names, shorter_model
from pyprune.cut.target import Target, choose_target, class_obstacle, zero_biases
from pyprune.families import Family, check_plan, count_parameters, family_for, stored_buffers
from pyprune.families.base import block_is_skipped, kept_positions
from pyprune.families.scale import stream_factor, stream_scale, width_factor
from pyprune.modeling.shapes import model_of_shapes, uninitialised_model
from pyprune.ops import slice_gather
from pyprune.plan import LayerPlan, PrunePlan


@dataclass(frozen=True)
class CompactReport:
    """The sizes before and after a compaction, and its architecture.

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
        """Share of the dense parameters that was removed, in [0, 1)."""
        return 1 - self.parameters / self.dense_parameters


def compact_(model: PreTrainedModel, plan: PrunePlan) -> CompactReport:
    """Cut the model to the plan, in place: it becomes an instance of the target architecture.

    The logits equal those of the masked dense model (:func:`pyprune.cut.mask.mask_`) up to float32 rounding.
    Peak memory is the dense weights plus the kept ones.

    Args:
        model: a dense model of a known family; dtype and device are kept.
        plan: the parts to keep.

    Returns:
        Sizes before and after, and whether the result is a stock architecture.

    Raises:
        PlanError: the plan is inconsistent or was made for another model.
        UnsupportedModelError: unknown model type, variant or parameter; or an inferred table that is wrong.
    """
    family = family_for(model)
    check_plan(plan, family, model.config)
    assert_proven(family, compact_)
    target = choose_target(family, model.config, plan, class_obstacle(model))
    before = count_parameters(model)
    places = getattr(model, "places", None)
    tower = getattr(model, "tower", None)
    if tower is not None and plan.removed_hidden:
        factor = stream_scale(family, plan, tied=bool(model.config.tie_word_embeddings))
        model.tower = tower.cut(target.config, plan.hidden, factor)
    if family.layers_alone:
        check_shorter(model, plan, target.config)
        _become(model, shorter_model(model, plan.kept_layers, family.layers_path, target.config))
        _keep_places(model, places, family, plan)
        return CompactReport(before, count_parameters(model), type(model).__name__, stock=True, reasons=())
    if plan.removed_hidden and family.gauges(model.config):
        gauge_(model, plan.hidden)
    state = dict(_compact_state(model, family, plan, target))
    smaller = _empty_model(target.config, model)
    smaller.load_state_dict(state, strict=False, assign=True)
    smaller.load_state_dict(dict(_kept_buffers(model, family, plan)), strict=False, assign=True)
    smaller.tie_weights()
    _check_complete(smaller, state)
    _become(model, smaller)
    _keep_places(model, places, family, plan)
    return CompactReport(
        dense_parameters=before,
        parameters=count_parameters(model),
        architecture=type(model).__name__ if tower is None else tower.class_name(stock=target.stock is not None),
        stock=target.stock is not None,
        reasons=target.reasons,
    )


class Buffers:
    """Two pieces of memory that take turns, small enough to stay in the cache until they are written and hashed."""

    nbytes = 4 << 20

    def __init__(self) -> None:
        self.free = itertools.cycle([torch.empty(self.nbytes, dtype=torch.uint8) for _ in range(2)])

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the memory of the last but one, or in new memory if it is larger."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            return torch.empty(shape, dtype=dtype)
        return next(self.free)[:nbytes].view(dtype).view(shape)


@dataclass(frozen=True, eq=False)
class TensorCut:
    """The cut of one dense tensor.

    Attributes:
        name: new parameter name.
        rows: kept positions along the first dimension, int64; None = all.
        columns: the same along the second. Of three dimensions, the first counts experts, and these are the others.
        factor: multiplies the values, in float32 (float64), rounded once.
        offset: the factor is one on ``value + offset``.
        experts: kept positions along the first of three dimensions.
    """

    name: str
    rows: Tensor | None
    columns: Tensor | None
    factor: float
    offset: float
    experts: Tensor | None = None

    def kept_experts(self, count: int) -> Sequence[int]:
        """Return the kept positions along the first of three dimensions, which has ``count``."""
        return range(count) if self.experts is None else self.experts.tolist()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the cut tensor, any dtype."""
        if tensor.ndim > 2 and self.rows is None and self.columns is None:  # of a convolution, or whole experts
            matrix: Tensor = slice_gather(tensor.flatten(1), self.experts, None, self.factor, offset=self.offset)
            return cast(Tensor, matrix.unflatten(1, tensor.shape[1:]))
        if tensor.ndim == 3:
            kept = tensor if self.experts is None else [tensor[expert] for expert in self.experts]
            return torch.stack([self.of(expert) for expert in kept])
        return slice_gather(tensor, self.rows, self.columns, self.factor, offset=self.offset)

    def pieces(self, tensor: Tensor, buffers: Buffers) -> Iterator[Tensor]:
        """Yield the cut tensor in runs of rows that fit the buffers; of three dimensions that are cut, in experts."""
        if tensor.ndim == 3 and not (self.rows is self.columns is self.experts is None):
            one = replace(self, experts=None)
            yield from (one.of(tensor[expert : expert + 1]) for expert in self.kept_experts(len(tensor)))
            return
        inner, tensor = tensor.shape[1:], _as_matrix(tensor)
        rows = torch.arange(len(tensor)) if self.rows is None else self.rows
        row_shape = tensor.shape[1:] if self.columns is None else self.columns.shape
        most = max(1, buffers.nbytes // max(1, row_shape.numel() * tensor.itemsize))
        for chosen in rows.split(most):
            out = buffers.take((len(chosen), *row_shape), tensor.dtype)
            piece = slice_gather(tensor, chosen, self.columns, self.factor, offset=self.offset, out=out)
            yield piece.unflatten(1, inner) if len(inner) > 1 else piece


def _as_matrix(tensor: Tensor) -> Tensor:
    """Join the dimensions after the first; no column of a tensor with more than two is removed."""
    return tensor.flatten(1) if tensor.ndim > 2 else tensor


def tensor_cut(name: str, family: Family, plan: PrunePlan, *, tied: bool) -> TensorCut | None:
    """Return the cut of one dense tensor, or None if it is removed.

    Args:
        name: dense parameter name.
        family: of the dense model.
        plan: the parts to keep.
        tied: the head shares the embedding's tensor.

    Raises:
        UnsupportedModelError: no table row describes ``name``.
    """
    row, index = family.match(name, plan.dense.layers)
    position = {layer.index: i for i, layer in enumerate(plan.layers)}
    layer: LayerPlan | None = None
    if index is not None:
        if index not in position:
            return None
        layer = plan.layers[position[index]]
        if block_is_skipped(row, layer):
            return None
        name = row.pattern.replace("{i}", str(position[index]))
    kept = [None if i is None else torch.tensor(i, dtype=torch.int64) for i in kept_positions(row, layer, plan)]
    rows, columns = (*kept[-2:], None)[:2]
    factor = stream_factor(row, family, plan, tied=tied) * width_factor(row, layer, plan)
    return TensorCut(name, rows, columns, factor, family.offset(row), kept[0] if len(kept) == 3 else None)


def _compact_state(
    model: PreTrainedModel, family: Family, plan: PrunePlan, target: Target
) -> Iterator[tuple[str, Tensor]]:
    tied = bool(model.config.tie_word_embeddings)
    for name, parameter in model.named_parameters():
        cut = tensor_cut(name, family, plan, tied=tied)
        if cut is not None:
            yield cut.name, cut.of(parameter.detach())
    yield from zero_biases(target, plan, dtype=model.dtype, device=model.device)


def _kept_buffers(model: PreTrainedModel, family: Family, plan: PrunePlan) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint holds, of kept layers and outside of them, by their new names."""
    buffers = stored_buffers(model)
    for name, new in kept_names(buffers, family.layers_path, plan.kept_layers):
        yield new, cut_buffer(name, buffers[name].detach(), family, plan).clone()


def cut_buffer(name: str, buffer: Tensor, family: Family, plan: PrunePlan) -> Tensor:
    """Return what a plan leaves of a buffer of a kept layer, or outside of the layers: all of it, or kept experts."""
    cut = tensor_cut(name, family, plan, tied=False) if family.buffer_row(name) else None
    return buffer if cut is None else cut.of(buffer)


def become_shapes_(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Turn a model, in place, into the shapes that another process has cut it to.

    Args:
        model: a dense model, with or without values.
        config: of the cut model.
    """
    _become(model, model_of_shapes(config, model.dtype))


def _empty_model(config: PretrainedConfig, like: PreTrainedModel) -> PreTrainedModel:
    """Build the target without initialising weights."""
    with torch.device(like.device):
        model = uninitialised_model(config, like.dtype, attn_implementation=like.config._attn_implementation)
    model.train(like.training)
    model.generation_config = copy.deepcopy(like.generation_config)
    return model


def _check_complete(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Check that every parameter of the target came from the source, and that every tensor has a place."""
    parameters = dict(model.named_parameters())
    missing, extra = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    wrong = sorted(n for n in parameters.keys() & state.keys() if parameters[n].shape != state[n].shape)
    if missing or extra or wrong:
        raise RuntimeError(
            f"Compaction does not fit its target: missing {missing[:3]}, extra {extra[:3]}, shapes {wrong[:3]}. "
            "This is a bug in a family table."
        )


def _become(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Turn ``model`` into ``other`` while keeping its identity: every reference sees the smaller model."""
    name_or_path, tower = model.name_or_path, getattr(model, "tower", None)
    model.__class__ = other.__class__
    model.__dict__ = other.__dict__
    model.name_or_path = name_or_path
    if tower is not None:  # pyprune.checkpoint.tower puts the smaller model back into it
        model.tower = tower


def _keep_places(model: PreTrainedModel, places: Any, family: Family, plan: PrunePlan) -> None:
    """Keep with a cut model where the tensors of the kept layers were in files; pyprune.checkpoint writes by it."""
    if places is not None:
        model.places = places.kept(family.layers_path, plan.kept_layers)
