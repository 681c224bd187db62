"""Shared by the methods that remove layers or blocks: how many are removed, which are open, and the loss without each.

The residual stream goes through the model one layer at a time, on a micro batch of calibration text, without gradients.
The layers in front of a layer compute the same whether that layer is removed or not. The model without each of n layers
in turn therefore costs about n/2 forward passes, not n, and gives the same numbers. The streams of several candidates
and micro batches may go together, so that layers on disk are read few times. Each keeps its shape, and so its bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.layers import StoredLayers
from pyprune.config.train import micro_batch_for
from pyprune.errors import ConfigError, DataError, ScoreError
from pyprune.families import check_table
from pyprune.methods.base import PlanDecision, PlanRequest, RunOptions
from pyprune.methods.ratio import UNIT_NAMES, Unit, decide_layer_count, drop_units, share_of_parameters
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner, Part
from pyprune.runtime.progress import track
from pyprune.train.loss import causal_loss

Item = TypeVar("Item")


@dataclass(frozen=True)
class Removal:
    """How many units are removed, and which may be.

    Attributes:
        request: the goal of the plan.
        unit: the unit that is removed.
        open_layers: layers whose unit may be removed, ascending.
        count: how many of them are removed.
        notes: one sentence for each rounding.
    """

    request: PlanRequest
    unit: Unit
    open_layers: tuple[int, ...]
    count: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, request: PlanRequest, unit: Unit = "layer", *, keep_first: int = 0, keep_last: int = 0) -> Removal:
        """Count the units to remove.

        Args:
            request: its ``ratio`` and ``ratio_of`` (layers, also for None, or parameters) determine the count.
            unit: the unit that is removed.
            keep_first: layers at the beginning of the model that are kept whole.
            keep_last: layers at its end that are kept whole.

        Raises:
            ConfigError: the ratio removes nothing, or more than the layers that are not kept.
            UnsupportedModelError: blocks are removed from a type without a table.
        """
        if unit != "layer":
            check_table(request.family, f"{request.method} with unit {unit!r}")
        decision = decide_layer_count(request, unit)
        total = request.identity.dense.num_layers
        able = request.removable_layers
        if unit != "layer":
            able = tuple(i for i in range(total) if unit in request.identity.dense.blocks(i))
        open_layers = tuple(i for i in able if keep_first <= i < total - keep_last)
        if decision.count > len(open_layers):
            raise ConfigError(
                f"ratio {request.ratio} (of {request.ratio_of or 'layers'}) removes {decision.count} of {total} "
                f"{UNIT_NAMES[unit]}, but only {len(open_layers)} may be removed: the first {keep_first} and the "
                f"last {keep_last} layers are kept. Use a smaller ratio, keep_first or keep_last."
            )
        return cls(request, unit, open_layers, decision.count, decision.notes)

    def smallest(self, scores: Mapping[int, float], count: int | None = None) -> tuple[int, ...]:
        """Return the layers whose units are removed, smallest score first, ties by the smaller index.

        Args:
            scores: layer -> score.
            count: how many are removed; None = all of them.

        Raises:
            ScoreError: fewer scores are finite than units must be removed.
        """
        count = self.count if count is None else count
        usable = sorted((score, index) for index, score in scores.items() if math.isfinite(score))
        if len(usable) < count:
            wrong = [index for index, score in scores.items() if not math.isfinite(score)]
            raise ScoreError(
                f"The scores of layers {wrong} are not finite, and {count} of {len(scores)} must be removed. "
                "The weights or their dtype are broken: check them for NaN, or work in float32 (dtype)."
            )
        return tuple(index for _, index in usable[:count])

    def decision(self, order: Sequence[int], **details: Any) -> PlanDecision:
        """Return the plan without the units of these layers.

        Args:
            order: layers, in the order in which they were chosen.
            details: plain JSON data for the report.
        """
        plan = drop_units(self.request.identity, order, self.unit)
        share = share_of_parameters(self.request.family, self.request.shapes, plan)
        note = f"Removed: {UNIT_NAMES[self.unit]} {sorted(order)}, {share:.2%} of the parameters."
        shown = {"unit": self.unit, "removed": list(order), "share_removed": share, **details}
        return PlanDecision(plan, (*self.notes, note), {"layers": shown})


def json_scores(scores: Mapping[int, float]) -> dict[str, float | None]:
    """Return scores by layer for the report; None stands for a score that is not finite, which JSON cannot hold."""
    return {str(index): score if math.isfinite(score) else None for index, score in scores.items()}


def layer_runner(model: PreTrainedModel, run: RunOptions) -> LayerRunner:
    """Return the layers of a model in memory, or those of its checkpoint if the run reads the weights from disk."""
    return LayerRunner.of(model) if run.stored is None else StoredLayers(run.stored)


def micro_batches(model: PreTrainedModel, samples: Tensor, method: str) -> tuple[Tensor, ...]:
    """Return the samples, int64 [N, T], on the model's device in batches of equal size of about 2,048 tokens.

    Raises:
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError(f"{method} measures layers on calibration text; give samples.")
    size = micro_batch_for(len(samples), samples.shape[1])
    return tuple(samples.to(model.device).split(size))


def kept_part(runner: LayerRunner, unit: Unit, index: int) -> Part | None:
    """Return the kept part of a layer whose unit is removed; None if nothing is kept."""
    blocks = tuple(block for block in runner.blocks[index] if unit not in ("layer", block))
    return Part(index, blocks) if blocks else None


@torch.no_grad()
def losses_without(
    runner: LayerRunner,
    batches: Sequence[Tensor],
    unit: Unit,
    gone: Collection[int],
    candidates: Collection[int],
    description: str,
) -> dict[int, float]:
    """Return the loss of the model without each candidate, and without the units that are removed already.

    Args:
        runner: the layers of a dense model, which comes back unchanged. Each layer of a checkpoint on disk is read once
            for as many batches and candidates as :meth:`LayerRunner.branch_group_sizes` allows.
        batches: token ids, int64 [B, T] each, of one T.
        unit: the unit that is removed.
        gone: layers whose unit is removed in every case.
        candidates: layers whose unit is removed one at a time.
        description: text of the progress bar.

    Returns:
        Layer -> mean next-token cross-entropy over all predicted tokens, nats.
    """
    starts = sorted(candidates)
    totals = dict.fromkeys(starts, 0.0)
    many, together = runner.branch_group_sizes(batches, starts)
    groups, pieces = _chunks(batches, many), _chunks(starts, together)
    with frozen_eval(runner.model):
        walks = (losses for group in groups for losses in _walks(runner, group, unit, gone, pieces))
        for losses in track(walks, description, total=len(groups) * len(pieces)):
            for index, batch_losses in losses.items():
                for loss in batch_losses:  # in the order of the batches, however they are grouped
                    totals[index] += loss
    rows = sum(map(len, batches))
    return {index: total / rows for index, total in totals.items()}


def _chunks(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _walks(
    runner: LayerRunner,
    batches: Sequence[Tensor],
    unit: Unit,
    gone: Collection[int],
    pieces: Iterable[Sequence[int]],
) -> Iterator[dict[int, list[float]]]:
    """Take batches through the layers once for each piece of the candidates; yield :func:`_final_losses`."""
    common = _CommonStreams(runner, unit, gone, [runner.embed(batch) for batch in batches])
    for piece in pieces:
        yield _final_losses(runner, batches, common.branches(piece))


def _final_losses(
    runner: LayerRunner, batches: Sequence[Tensor], ends: Mapping[int, Sequence[Tensor]]
) -> dict[int, list[float]]:
    """Return the loss of streams after the last layer: candidate -> one for each batch, summed over sequences."""
    with runner.head():
        return {
            index: [_head_loss(runner, end, batch) * len(batch) for end, batch in zip(streams, batches, strict=True)]
            for index, streams in ends.items()
        }


@dataclass
class _CommonStreams:
    """The streams of some batches on their way through the model without the removed units; others branch off them.

    Attributes:
        runner: the layers.
        unit: the unit that is removed.
        gone: layers whose unit is removed in every case.
        streams: [B, T, H] for each batch, in front of the layer ``at``.
        at: index of that layer.
    """

    runner: LayerRunner
    unit: Unit
    gone: Collection[int]
    streams: list[Tensor]
    at: int = 0

    def branches(self, starts: Sequence[int]) -> dict[int, list[Tensor]]:
        """Branch off at each of these layers without its unit, run the branches to the end, and move past the last.

        Args:
            starts: layers, ascending, none in front of ``at``.

        Returns:
            Layer -> the streams [B, T, H] after the last layer of the model without its unit, one for each batch.
        """
        branches: dict[int, list[Tensor]] = {}
        for index in range(self.at, len(self.runner.layers)):
            part = kept_part(self.runner, self.unit, index) if index in self.gone else self.runner.whole_layer(index)
            if part is None:
                continue
            running = [*branches.values(), *([self.streams] if index <= starts[-1] else [])]
            with self.runner.layer(index) as layer:
                if index in starts:
                    branches[index] = list(self.streams)
                    if (kept := kept_part(self.runner, self.unit, index)) is not None:
                        self.runner.run_(layer, kept, branches[index])
                for streams in running:
                    self.runner.run_(layer, part, streams)
        self.at = starts[-1] + 1
        return branches


def _head_loss(runner: LayerRunner, stream: Tensor, batch: Tensor) -> float:
    """Return the loss of the head on the stream [B, T, H] that leaves the last layer."""
    with runner.continue_from(stream) as model:
        return float(causal_loss(model, batch))
