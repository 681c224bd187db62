"""FLAP's bias compensation: what a cut takes away on average comes back as a bias (An et al., "Fluctuation-based
Adaptive Structured Pruning for Large Language Models", baseline bias compensation).

The output projection of a block is Y = W X. Without the channels R of X it loses W[:, R] X[R]; the mean of that over
the calibration text, W[:, R] mean(X[R]), is added to the projection's bias (the paper's baseline bias). The means are
the dense model's. What is left of the error is the fluctuation of X[R] alone, which FLAP's score measures.

The compensated model is still a dense model, only with biases, so that masking and compaction mean the same as before.
A model without biases on its output projections gets them, zero where nothing was removed, and ``output_bias`` in its
configuration; ``stock_targets`` in pyprune.families say what carries them, else the pruned architectures do.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pyprune.cut.target import Target, choose_target
from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, check_plan, family_for
from pyprune.families.base import BLOCKS, Block, kept_indices
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.activations import gather_moments
from pyprune.probe.streams import LayerRunner


@dataclass(frozen=True)
class CompensationReport:
    """What was compensated.

    Attributes:
        blocks: attention and MLP blocks whose output projection got the mean of what they lose.
        skipped: blocks that go as a whole (and with them the place for a bias); their mean is lost.
        tokens: calibration tokens behind the means.
        added_parameters: biases that the model did not have, as the plan cuts them.
    """

    blocks: int
    skipped: int
    tokens: int
    added_parameters: int

    def notes(self) -> list[str]:
        """Sentences for the report."""
        if not self.blocks:
            return ["The bias compensation had no effect: no block that stays loses heads or FFN channels."]
        found = [
            f"Bias compensation: the output projections of {self.blocks} blocks carry the mean of what they lose "
            f"({self.tokens:,} calibration tokens; {self.added_parameters:,} new bias parameters, which lower the "
            "share removed)."
        ]
        if self.skipped:
            found.append(
                f"{self.skipped} blocks go as a whole and leave no place for a bias: they are not compensated."
            )
        return found


def compensate_(
    model: PreTrainedModel | LayerRunner, plan: PrunePlan, samples: Tensor, *, batch_size: int | None = None
) -> CompensationReport:
    """Add to every output projection the mean of what the plan takes from its input, in place; shapes stay dense.

    Args:
        model: the dense model, before :func:`pyprune.cut.mask.mask_` or :func:`pyprune.cut.compact.compact_`; or its
            layers as something else holds and keeps them.
        plan: what stays.
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
    removed = _removed_inputs(plan)
    losing = {place: gone for place, gone in removed.items() if gone}
    skipped = sum(gone is None for gone in removed.values()) + len(BLOCKS) * len(plan.removed_layers)
    if not losing:
        return CompensationReport(0, skipped, 0, 0)
    names = {place: _output_name(family, *place) for place in losing}
    # A model in memory runs as a whole; layers that lie elsewhere run one by one.
    moments = gather_moments(model, samples, inputs=names.values(), batch_size=batch_size)
    given = _with_output_biases_(runner)
    stay = {_output_name(family, *place) for place, gone in removed.items() if gone is not None}
    added = len(given & stay) * len(plan.hidden)
    for place, gone in losing.items():
        index, name = place[0], family.output_projection(place[1])
        with runner.layer(index) as layer:
            _add_lost_mean(cast(nn.Linear, layer.get_submodule(name)), gone, moments[names[place]].mean)
            runner.keep(index, [f"{name}.bias"])
    return CompensationReport(len(losing), skipped, samples.numel(), added)


def _removed_inputs(plan: PrunePlan) -> dict[tuple[int, Block], list[int] | None]:
    """(layer, block) -> :func:`_removed`, of the layers that stay."""
    return {(layer.index, block): _removed(layer, block, plan) for layer in plan.layers for block in BLOCKS}


def _removed(layer: LayerPlan, block: Block, plan: PrunePlan) -> list[int] | None:
    """Input channels that a block's output projection loses; None when the block goes as a whole."""
    kept = kept_indices("heads" if block == "attention" else "ffn", layer, plan)
    if kept is None:
        return []
    if not kept:
        return None
    dense = plan.dense
    width = dense.num_attention_heads * dense.head_dim if block == "attention" else dense.intermediate_size
    return sorted(set(range(width)) - set(kept))


@torch.no_grad()
def _add_lost_mean(module: nn.Linear, gone: list[int], mean: Tensor) -> None:
    index = torch.tensor(gone, device=module.weight.device)
    lost = module.weight.index_select(1, index).double() @ mean.index_select(0, index)
    module.bias.copy_(module.bias.double() + lost)


def _with_output_biases_(runner: LayerRunner) -> set[str]:
    """Give every output projection of attention and MLP a bias, zero where it had none; returns the names of those.

    Raises:
        UnsupportedModelError: the family cannot carry such biases.
    """
    missing = _without_bias(runner.model, runner.family)
    for name, module in missing.items():
        weight = module.weight
        zeros = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        module.bias = nn.Parameter(zeros, requires_grad=weight.requires_grad)
        runner.keep_zeros(f"{name}.bias", len(zeros))
    if missing:
        runner.model.config.output_bias = True
    return set(missing)


def _output_name(family: Family, index: int, block: Block) -> str:
    return f"{family.layers_path}.{index}.{family.output_projection(block)}"


def target_of(model: PreTrainedModel, plan: PrunePlan, *, biases: bool) -> Target:
    """What a plan turns a dense model into.

    Args:
        model: dense.
        plan: what stays.
        biases: whether the cut will give back biases, where a block loses some of its heads or channels.

    Raises:
        UnsupportedModelError: the family cannot carry the biases.
    """
    family = family_for(model)
    added = biases and any(_removed_inputs(plan).values())
    return choose_target(family, compensated_config(model, family) if added else model.config, plan)


def compensated_config(model: PreTrainedModel, family: Family) -> PretrainedConfig:
    """The configuration that the model will have once it is compensated; the model stays as it is.

    Raises:
        UnsupportedModelError: the family cannot carry the biases.
    """
    config = copy.deepcopy(model.config)
    if _without_bias(model, family):
        config.output_bias = True
    return config


def _without_bias(model: PreTrainedModel, family: Family) -> dict[str, nn.Linear]:
    """Output projections that need a bias of their own, by name."""
    names = [_output_name(family, index, block) for index in range(len(family.layers(model))) for block in BLOCKS]
    projections = {name: cast(nn.Linear, model.get_submodule(name)) for name in names}
    missing = {name: module for name, module in projections.items() if module.bias is None}
    if missing and not family.carries_output_bias:
        raise UnsupportedModelError(
            f"This {family.model_type!r} model has no biases on its output projections, and no architecture of its "
            "family can carry them. Set cut.reconstruct to none to cut without compensation."
        )
    return missing
