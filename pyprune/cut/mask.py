"""The masked model: the definition that compaction must reproduce, and the gauge that LayerNorm needs.

Masking sets the removed parts of a dense model to zero in place, shapes unchanged. The invariant of the
package is ``logits(compact(model, plan)) == logits(mask(model, plan))`` up to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, NamedParam, Row, check_plan, decoder_layers, family_for, named_axes, stored_buffers
from pyprune.families.base import block_is_skipped, kept_positions
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.hooks import LayerHooks
from pyprune.probe.routers import close_experts, routers


@torch.no_grad()
def mask_(model: PreTrainedModel, plan: PrunePlan) -> None:
    """Zero in place everything that the plan removes; shapes stay dense.

    A removed layer or sub-block keeps its readers but writes nothing, so it is the identity. What a removed layer
    multiplies the stream by (Gemma 4) becomes 1. A removed
    hidden channel is zero in every tensor with a hidden axis (for Gemma's 1 + w norms, 1 + w is zero).
    A removed expert's logit is minus infinity before its router chooses, by a hook, and so is what corrects the choice.
    Of a type without a table, a removed layer runs and its output is replaced by its input, by a hook.
    Families that slice LayerNorm through the gauge are put into it first (see :func:`gauge_`).

    Args:
        model: a dense model of a known family, any dtype.
        plan: the parts to keep.

    Raises:
        PlanError: the plan does not belong to this model.
        UnsupportedModelError: unknown model type or parameter.
    """
    family = family_for(model)
    masking = Masking(family, model.config, plan)
    if family.layers_alone:
        _hook_layers(model, plan)
        return
    for param in named_axes(model):
        masking.apply_(param)
    masking.apply_beside_parameters_(model)


def close_removed_experts(model: PreTrainedModel, plan: PrunePlan) -> None:
    """Let the routers of a dense model choose between the experts that a plan keeps.

    Args:
        model: dense; its weights may be elsewhere.
        plan: the parts to keep.
    """
    layers = {layer.index: layer for layer in plan.layers}
    for index, router in routers(model) if "experts" in plan.dense.axes else ():
        experts = range(plan.dense.units("experts", index))
        kept = layers[index].units("experts") if index in layers else ()
        close_experts(router, [expert for expert in experts if expert not in kept] if kept else (), len(experts))


class Masking:
    """Masks the parameters of a model one by one, so that they need not be in memory together.

    Args:
        family: of the model.
        config: of the dense model.
        plan: the parts to keep.

    Raises:
        PlanError: the plan does not belong to this model.
    """

    def __init__(self, family: Family, config: PretrainedConfig, plan: PrunePlan) -> None:
        check_plan(plan, family, config)
        self._plan = plan
        self._layers = {layer.index: layer for layer in plan.layers}
        self._gauges = bool(plan.removed_hidden) and family.gauges(config)
        self._family = family

    @torch.no_grad()
    def apply_(self, param: NamedParam) -> None:
        """Zero the removed parts of a parameter in place, after :func:`gauge_weight` if the family needs it."""
        layer = self._layers.get(param.layer) if param.layer is not None else None
        removed_layer = param.layer is not None and layer is None
        if self._gauges:
            param.parameter.copy_(gauge_weight(param.parameter, param.row, self._plan.hidden))
        if param.row.role == "writer" and (removed_layer or block_is_skipped(param.row, layer)):
            param.parameter.zero_()
        else:
            # A router of a removed block still runs, and needs something to choose from.
            chooses = param.row.counts_experts and not block_is_skipped(param.row, layer)
            zero = -torch.inf if chooses else -self._family.offset(param.row)
            _zero_removed(param, layer, self._plan, zero=zero)

    @torch.no_grad()
    def apply_beside_parameters_(self, model: PreTrainedModel) -> None:
        """Mask what a model, whose weights may be elsewhere, has besides parameters: buffers and choices of routers."""
        for name, buffer in model.named_buffers():
            if (row := self._family.buffer_row(name)) is not None:
                index = int(row.regex.fullmatch(name)["i"])  # type: ignore[index]
                self.apply_(NamedParam(name, cast(nn.Parameter, buffer), row, index))
        close_removed_experts(model, self._plan)
        for index in self._plan.removed_layers:
            for name in self._family.layer_scales:
                decoder_layers(model)[index].get_buffer(name).fill_(1)


def _zero_removed(param: NamedParam, layer: LayerPlan | None, plan: PrunePlan, *, zero: float) -> None:
    for dim, kept in enumerate(kept_positions(param.row, layer, plan)):
        if kept is None:
            continue
        removed = torch.ones(param.parameter.shape[dim], dtype=torch.bool)
        removed[list(kept)] = False
        where = removed.nonzero().flatten().to(param.parameter.device)
        param.parameter.index_fill_(dim, where, zero)


@contextmanager
def masked(model: PreTrainedModel, plan: PrunePlan) -> Iterator[PreTrainedModel]:
    """Mask for the duration of a ``with`` block and restore every weight bit for bit afterwards.

    Holds a copy of all weights meanwhile (one times the model's bytes).
    """
    if family_for(model).layers_alone:
        check_plan(plan, family_for(model), model.config)
        hooks = _hook_layers(model, plan)
        try:
            yield model
        finally:
            hooks.remove()
        return
    with restored(model):
        mask_(model, plan)
        yield model


def _hook_layers(model: PreTrainedModel, plan: PrunePlan) -> LayerHooks:
    return LayerHooks(decoder_layers(model), plan.removed_layers, lambda index, before, after: before)


@contextmanager
def restored(model: PreTrainedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Give a copy of all weights (by parameter name), and put it back bit for bit when the block ends."""
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in stored_buffers(model).items()}
    try:
        yield saved
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(saved[name])
            for name, buffer in buffers.items():
                model.get_buffer(name).copy_(buffer)
        for _, router in routers(model):
            close_experts(router, (), 0)


@torch.no_grad()
def gauge_(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Subtract the mean over the kept channels from every writer to the residual stream, in place.

    LayerNorm does not see a shift of all channels, so the dense model's function stays the same, while
    the kept channels now have zero mean: a stock LayerNorm over them alone is then exact.

    Args:
        model: a model of a family with a gauge (Phi) with an untied head.
        kept: kept hidden channels, dense indices.

    Raises:
        UnsupportedModelError: the family does not slice LayerNorm this way, or its head is tied.
    """
    family = family_for(model)
    if not family.gauges(model.config):
        raise UnsupportedModelError(
            f"{family.model_type!r} (tied head: {model.config.tie_word_embeddings}) has no LayerNorm gauge; "
            "only LayerNorm families with an untied head have one."
        )
    for param in named_axes(model):
        param.parameter.copy_(gauge_weight(param.parameter, param.row, kept))


def gauge_weight(weight: torch.Tensor, row: Row, kept: Sequence[int]) -> torch.Tensor:
    """Return a tensor in the gauge of :func:`gauge_`, dtype kept; tensors that do not write to the stream unchanged."""
    dim = row.axis_dim("hidden")
    if dim is None or row.role not in ("embedding", "writer"):
        return weight
    index = torch.as_tensor(list(kept), device=weight.device)
    mean = weight.float().index_select(dim, index).mean(dim, keepdim=True)
    return (weight.float() - mean).to(weight.dtype)
