"""What the methods that remove layers or blocks share: how many go, which are open, and the loss without each.

The residual stream walks through the model one layer at a time, on a micro batch of calibration text, without
gradients. What is in front of a layer is the same whether that layer is removed or not, so the model without each of n
layers in turn costs about n/2 forward passes, not n, and gives the same numbers. The streams of several candidates and
micro batches may walk together, so that layers on disk are read few times; each has the shape that it has by itself,
and so the same bits.
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
from pyprune.families.base import BLOCKS
from pyprune.methods.base import PlanDecision, PlanRequest, RunOptions
from pyprune.methods.ratio import UNIT_NAMES, Unit, decide_layer_count, drop_units, share_of_parameters
from pyprune.probe.activations import still
from pyprune.probe.streams import LayerRunner, Part
from pyprune.runtime.progress import track
from pyprune.train.loss import causal_loss

Item = TypeVar("Item")


@dataclass(frozen=True)
class Removal:
    """How many units go, and which may.

    Attributes:
        request: what is to be reached.
        unit: what goes.
        open_layers: layers whose unit may go, ascending.
        count: how many of them go.
        notes: what was rounded.
    """

    request: PlanRequest
    unit: Unit
    open_layers: tuple[int, ...]
    count: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, request: PlanRequest, unit: Unit = "layer", *, keep_first: int = 0, keep_last: int = 0) -> Removal:
        """Count what goes.

        Args:
            request: ``ratio`` and ``ratio_of`` (layers, also for None, or parameters) say how many go.
            unit: what goes.
            keep_first: layers at the beginning of the model that stay whole.
            keep_last: layers at its end that stay whole.

        Raises:
            ConfigError: the ratio removes nothing, or more than the layers that are not kept.
        """
        decision = decide_layer_count(request, unit)
        total = request.identity.dense.num_layers
        open_layers = tuple(range(keep_first, total - keep_last))
        if decision.count > len(open_layers):
            raise ConfigError(
                f"ratio {request.ratio} (of {request.ratio_of or 'layers'}) removes {decision.count} of {total} "
                f"{UNIT_NAMES[unit]}, but only {len(open_layers)} may be removed: the first {keep_first} and the last "
                f"{keep_last} layers are kept. Use a smaller ratio, or keep fewer layers (options of {request.method})."
            )
        return cls(request, unit, open_layers, decision.count, decision.notes)

    def smallest(self, scores: Mapping[int, float], count: int | None = None) -> tuple[int, ...]:
        """The layers whose units go, smallest score first, ties by the smaller index.

        Args:
            scores: layer -> score.
            count: how many go; None = all that have to.

        Raises:
            ScoreError: fewer scores are finite than units have to go.
        """
        wanted = self.count if count is None else count
        usable = sorted((score, index) for index, score in scores.items() if math.isfinite(score))
        if len(usable) < wanted:
            wrong = [index for index, score in scores.items() if not math.isfinite(score)]
            raise ScoreError(
                f"The scores of layers {wrong} are not finite, and {wanted} of {len(scores)} have to go. "
                "The weights or their dtype are broken: check them for NaN, or work in float32 (dtype)."
            )
        return tuple(index for _, index in usable[:wanted])

    def decision(self, order: Sequence[int], **details: Any) -> PlanDecision:
        """The plan without the units of these layers.

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
    """Scores by layer for the report; JSON has no infinity, so that what is not finite is None."""
    return {str(index): score if math.isfinite(score) else None for index, score in scores.items()}


def layers_of(model: PreTrainedModel, run: RunOptions) -> LayerRunner:
    """The layers of a model: its own, or, where it is decided on from disk, those of its checkpoint."""
    return LayerRunner.of(model) if run.stored is None else StoredLayers(run.stored)


def micro_batches(model: PreTrainedModel, samples: Tensor, method: str) -> tuple[Tensor, ...]:
    """The samples, int64 [N, T], on the model's device in batches of equal size that hold about 2,048 tokens.

    Raises:
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError(f"{method} measures layers on calibration text; give samples.")
    size = micro_batch_for(len(samples), samples.shape[1])
    return tuple(samples.to(model.device).split(size))


def stays_of(unit: Unit, index: int) -> Part | None:
    """What stays of a layer whose unit is removed; None for nothing."""
    blocks = tuple(block for block in BLOCKS if unit not in ("layer", block))
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
    """The loss of the model without each candidate, and without what has gone already.

    Args:
        runner: the layers of a dense model, which comes back as it was. Of a checkpoint on disk each layer is read once
            for as many batches and candidates as :meth:`LayerRunner.branching_together` allows.
        batches: token ids, int64 [B, T] each, of one T.
        unit: what is removed.
        gone: layers whose unit is removed in every case.
        candidates: layers whose unit is removed one at a time.
        description: what is being done, for the progress bar.

    Returns:
        Layer -> mean next-token cross-entropy over all predicted tokens, nats.
    """
    starts = sorted(candidates)
    totals = dict.fromkeys(starts, 0.0)
    many, together = runner.branching_together(batches, starts)
    groups, pieces = _pieces(batches, many), _pieces(starts, together)
    with still(runner.model):
        walks = (found for group in groups for found in _walks(runner, group, unit, gone, pieces))
        for found in track(walks, description, total=len(groups) * len(pieces)):
            for index, of_batches in found.items():
                for loss in of_batches:  # in their order, however they are grouped
                    totals[index] += loss
    rows = sum(map(len, batches))
    return {index: total / rows for index, total in totals.items()}


def _pieces(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _walks(
    runner: LayerRunner,
    batches: Sequence[Tensor],
    unit: Unit,
    gone: Collection[int],
    pieces: Iterable[Sequence[int]],
) -> Iterator[dict[int, list[float]]]:
    """Take batches through the layers once for each piece of the candidates; give :func:`_losses_behind`."""
    common = _CommonStreams(runner, unit, gone, [runner.embed(batch) for batch in batches])
    for piece in pieces:
        yield _losses_behind(runner, batches, common.branches(piece))


def _losses_behind(
    runner: LayerRunner, batches: Sequence[Tensor], ends: Mapping[int, Sequence[Tensor]]
) -> dict[int, list[float]]:
    """The loss of streams that have passed the last layer: candidate -> one for each batch, summed over sequences."""
    with runner.head():
        return {
            index: [_loss_behind(runner, end, batch) * len(batch) for end, batch in zip(own, batches, strict=True)]
            for index, own in ends.items()
        }


@dataclass
class _CommonStreams:
    """The streams of some batches on their way through the model without what has gone; others branch off them.

    Attributes:
        runner: the layers.
        unit: what is removed.
        gone: layers whose unit is removed in every case.
        streams: [B, T, H] for each batch, in front of the layer ``at``.
        at: the layer.
    """

    runner: LayerRunner
    unit: Unit
    gone: Collection[int]
    streams: list[Tensor]
    at: int = 0

    def branches(self, starts: Sequence[int]) -> dict[int, list[Tensor]]:
        """Go on behind the last of these layers, and take to the end what branches off by losing the unit of each.

        Args:
            starts: layers, ascending, none in front of ``at``.

        Returns:
            Layer -> the streams [B, T, H] behind the last layer of the model without its unit, one for each batch.
        """
        found: dict[int, list[Tensor]] = {}
        for index in range(self.at, len(self.runner.layers)):
            part = stays_of(self.unit, index) if index in self.gone else Part(index, BLOCKS)
            if part is None:
                continue
            going = [*found.values(), *([self.streams] if index <= starts[-1] else [])]
            with self.runner.layer(index) as layer:
                if index in starts:
                    found[index] = list(self.streams)
                    if (stays := stays_of(self.unit, index)) is not None:
                        self.runner.run_(layer, stays, found[index])
                for streams in going:
                    self.runner.run_(layer, part, streams)
        self.at = starts[-1] + 1
        return found


def _loss_behind(runner: LayerRunner, stream: Tensor, batch: Tensor) -> float:
    """The loss of the head on the stream [B, T, H] that left the last layer."""
    with runner.ending(stream) as model:
        return float(causal_loss(model, batch))
