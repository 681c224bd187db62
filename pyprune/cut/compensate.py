"""FLAP's bias compensation: the mean of the lost output comes back as a bias (An et al., "Fluctuation-based
Adaptive Structured Pruning for Large Language Models", baseline bias compensation).

The output projection of a block is Y = W X. Without the channels R of X it loses W[:, R] X[R]; the mean of that over
the calibration text, W[:, R] mean(X[R]), is added to the projection's bias (the paper's baseline bias). The means are
the dense model's. What is left of the error is the fluctuation of X[R] alone, which FLAP's score measures.

The compensated model is still a dense model, only with biases, so that masking and compaction mean the same as before.
A model without biases on its output projections gets them, zero where nothing was removed, and ``output_bias`` in its
configuration. A stock architecture that ``stock_targets`` of pyprune.families names carries them, else the pruned one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pyprune.cut.target import Target, choose_target, class_obstacle
from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, check_plan, family_for
from pyprune.families.base import Block, axis_width, kept_indices
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.activations import gather_moments
from pyprune.probe.streams import LayerRunner


@dataclass(frozen=True)
class CompensationReport:
    """Result of a compensation.

    Attributes:
        blocks: attention and MLP blocks whose output projection got the mean of what they lose.
        skipped: blocks removed as a whole, with the place for a bias; their mean is lost.
        tokens: calibration tokens of the means.
        added_parameters: biases that the model did not have, as the plan cuts them.
    """

    blocks: int
    skipped: int
    tokens: int
    added_parameters: int

    def notes(self) -> list[str]:
        """Sentences for the report."""
        if not self.blocks:
            return ["The bias compensation had no effect: no kept block loses heads or FFN channels."]
        notes = [
            f"Bias compensation: the output projections of {self.blocks} blocks carry the mean of what they lose "
            f"({self.tokens:,} calibration tokens; {self.added_parameters:,} new bias parameters, which lower the "
            "share removed)."
        ]
        if self.skipped:
            notes.append(
                f"{self.skipped} blocks are removed whole, with the place for a bias: they are not compensated."
            )
        return notes


def compensate_(
    model: PreTrainedModel | LayerRunner, plan: PrunePlan, samples: Tensor, *, batch_size: int | None = None
) -> CompensationReport:
    """Add the mean of its lost output to every output projection, in place; shapes stay dense.

    Args:
        model: the dense model, before :func:`pyprune.cut.mask.mask_` or :func:`pyprune.cut.compact.compact_`; or its
            layers, one at a time.
        plan: the parts to keep.
        samples: token ids, int64 [N, T].
        batch_size: sequences in one pass; None = as many as make 2,048 tokens.

    Raises:
        DataError: there is no sample.
        PlanError: the plan is not this model's.
        UnsupportedModelError: neither the model nor a pruned architecture of its family has such biases.
    """
    runner = LayerRunner.of(model)
    family = runner.family
    check_plan(plan, family, runner.model.config)
    removed = _all_lost_inputs(plan, family)
    losing = {place: lost for place, lost in removed.items() if lost}
    skipped = sum(lost is None for lost in removed.values())
    skipped += sum(len(plan.dense.blocks(index)) for index in plan.removed_layers)
    if not losing:
        return CompensationReport(0, skipped, 0, 0)
    kinds = plan.dense.layers
    names = {place: _output_name(family, *place, kinds) for place in losing}
    # A model in memory runs as a whole; layers that are stored elsewhere run one by one.
    moments = gather_moments(model, samples, inputs=names.values(), batch_size=batch_size)
    added_names = _add_output_biases_(runner)
    kept = {_output_name(family, *place, kinds) for place, lost in removed.items() if lost is not None}
    added = len(added_names & kept) * len(plan.hidden)
    for place, lost in losing.items():
        index, name = place[0], family.output_projection(place[1], kinds)
        with runner.layer(index) as layer:
            _add_lost_mean(cast(nn.Linear, layer.get_submodule(name)), lost, moments[names[place]].mean)
            runner.keep(index, [f"{name}.bias"])
    return CompensationReport(len(losing), skipped, samples.numel(), added)


def _all_lost_inputs(plan: PrunePlan, family: Family) -> dict[tuple[int, Block], list[int] | None]:
    """(layer, block) -> :func:`_lost_inputs`, of the kept layers."""
    return {
        (layer.index, block): _lost_inputs(layer, block, plan, family)
        for layer in plan.layers
        for block in plan.dense.blocks(layer.index)
    }


def _lost_inputs(layer: LayerPlan, block: Block, plan: PrunePlan, family: Family) -> list[int] | None:
    """Return the input channels that a block's output projection loses; None if the whole block is removed."""
    if not layer.keeps(block):
        return None
    if layer.is_whole(block, plan.dense):
        return []
    _, (axis,) = family.output_row(block, plan.dense.layers).dimensions
    kept = kept_indices(axis, layer, plan)
    return [] if kept is None else sorted(set(range(axis_width(axis, plan.dense, layer.index))) - set(kept))


@torch.no_grad()
def _add_lost_mean(module: nn.Linear, lost: list[int], mean: Tensor) -> None:
    index = torch.tensor(lost, device=module.weight.device)
    output = module.weight.index_select(1, index).double() @ mean.index_select(0, index)
    module.bias.copy_(module.bias.double() + output)


def _add_output_biases_(runner: LayerRunner) -> set[str]:
    """Add a zero bias to every output projection of attention and MLP that has none, and return their names.

    Raises:
        UnsupportedModelError: the family cannot carry such biases.
    """
    missing = _projections_without_bias(runner.model, runner.family)
    for name, module in missing.items():
        weight = module.weight
        zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        module.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
        runner.keep_zeros(f"{name}.bias", len(zeros))
    if missing:
        runner.model.config.output_bias = True
    return set(missing)


def _output_name(family: Family, index: int, block: Block, kinds: Collection[str]) -> str:
    return f"{family.layers_path}.{index}.{family.output_projection(block, kinds)}"


def target_of(model: PreTrainedModel, plan: PrunePlan, *, biases: bool) -> Target:
    """Return the configuration and architecture after a plan is applied to a dense model.

    Args:
        model: dense.
        plan: the parts to keep.
        biases: whether blocks that lose some of their heads or channels get biases.

    Raises:
        UnsupportedModelError: the family cannot carry the biases.
    """
    family = family_for(model)
    added = biases and not family.layers_alone and any(_all_lost_inputs(plan, family).values())
    config = compensated_config(model, family) if added else model.config
    return choose_target(family, config, plan, class_obstacle(model))


def compensated_config(model: PreTrainedModel, family: Family) -> PretrainedConfig:
    """Return the configuration of the model after compensation; the model is not changed.

    Raises:
        UnsupportedModelError: the family cannot carry the biases.
    """
    config = copy.deepcopy(model.config)
    if _projections_without_bias(model, family):
        config.output_bias = True
    return config


def _projections_without_bias(model: PreTrainedModel, family: Family) -> dict[str, nn.Linear]:
    """Return the output projections without a bias, by name."""
    kinds = family.layer_kinds(model.config)
    layers = enumerate(family.blocks_of_layers(model.config))
    names = [_output_name(family, index, block, kinds) for index, blocks in layers for block in blocks]
    projections = {name: cast(nn.Linear, model.get_submodule(name)) for name in names}
    missing = {name: module for name, module in projections.items() if module.bias is None}
    if missing and not family.carries_output_bias:
        raise UnsupportedModelError(
            f"This {family.model_type!r} model has no biases on its output projections, and no architecture of its "
            "family can carry them. Set cut.reconstruct to none to cut without compensation."
        )
    return missing
