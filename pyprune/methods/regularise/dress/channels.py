"""Which hidden channels DReSS removes: by position, by a list, by their weights, or by the stream they carry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.stored import StoredModel
from pyprune.errors import ConfigError, ScoreError
from pyprune.families import family_for, named_axes
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.ratio import decide_hidden_count
from pyprune.methods.regularise.dress import DressOptions
from pyprune.probe.energy import stream_energy


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Choose R by the ratio and the options."""
    decision = decide_hidden_count(request)
    options = own_options(request, DressOptions)
    removed = select_channels(model, decision.count, options, samples, run.stored)
    plan = request.identity.keep_hidden(set(request.identity.hidden) - set(removed))
    return PlanDecision(plan, decision.notes, {"select": options.select, "removed": list(removed)})


def select_channels(
    model: PreTrainedModel,
    count: int,
    config: DressOptions,
    samples: Tensor | None = None,
    stored: StoredModel | None = None,
) -> tuple[int, ...]:
    """Choose R: ``count`` hidden channels, the same in every layer.

    ``last`` and ``first`` are the ends of the axis; ``segments`` takes the last part of each of equal segments;
    ``explicit`` is the list of the options. ``scored`` takes the channels of the smallest scores: in each tensor with a
    hidden axis, a channel's l2 norm is divided by the mean norm of its channels; the score is the mean over these
    tensors, so each counts alike, whatever its scale. ``energy`` takes those with the smallest share of the residual
    stream's energy (:func:`pyprune.probe.energy.stream_energy`). Of equal scores the lower index is taken first.

    Args:
        model: a dense model.
        count: channels to remove, 0 < count < hidden size.
        config: the method's options.
        samples: token ids, int64 [N, T]; only ``energy`` reads them.
        stored: the files to read the weights from, a tensor or a layer at a time; None = from the model.

    Raises:
        ConfigError: a count that leaves nothing, or an explicit list of another length or with bad indices.
        DataError: ``energy`` without samples.
        ScoreError: the stream is not finite.
    """
    hidden = int(model.config.hidden_size)
    if not 0 < count < hidden:
        raise ConfigError(f"{count} of {hidden} hidden channels cannot be removed; use 1 to {hidden - 1}.")
    match config.select:
        case "last":
            return tuple(range(hidden - count, hidden))
        case "first":
            return tuple(range(count))
        case "segments":
            return _segment_tails(hidden, count, config.segments)
        case "explicit":
            return _explicit(hidden, count, config.channels)
        case "scored":
            return _smallest(channel_scores(model, stored), count)
        case "energy":
            layers = model if stored is None else StoredLayers(stored)
            return _smallest(stream_energy(layers, torch.empty(0, 0) if samples is None else samples), count)


def _smallest(scores: Tensor, count: int) -> tuple[int, ...]:
    """Return the indices of the smallest scores [hidden], ascending; of equal ones the lower index first."""
    if not bool(scores.isfinite().all()):
        raise ScoreError(
            f"The scores of {int((~scores.isfinite()).sum())} of {len(scores)} hidden channels are not finite. The "
            "weights or their dtype are broken: check them for NaN, or work in float32 (dtype)."
        )
    return tuple(sorted(torch.argsort(scores, stable=True)[:count].tolist()))


@torch.no_grad()
def channel_scores(model: PreTrainedModel, stored: StoredModel | None = None) -> Tensor:
    """Score every hidden channel as :func:`select_channels` defines it, float64 [hidden]; same arguments."""
    family = family_for(model)
    total = torch.zeros(int(model.config.hidden_size), dtype=torch.float64)
    tensors = 0
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is None:
            continue
        value = family.effective(param.row, param.parameter if stored is None else stored.read(param.name))
        norms = torch.linalg.vector_norm(value.float().movedim(dim, 0).reshape(len(total), -1), dim=1)
        mean = norms.double().mean()
        if mean > 0:
            total += (norms.double() / mean).cpu()
            tensors += 1
    return total / max(1, tensors)


def _segment_tails(hidden: int, count: int, segments: int) -> tuple[int, ...]:
    if segments > hidden:
        raise ConfigError(f"segments is {segments}; the hidden size is only {hidden}.")
    bounds = [i * hidden // segments for i in range(segments + 1)]
    wanted = [(i + 1) * count // segments - i * count // segments for i in range(segments)]
    removed: list[int] = []
    spill = 0
    for i, want in enumerate(wanted):
        size = bounds[i + 1] - bounds[i]
        take = min(size, want + spill)
        spill += want - take
        removed.extend(range(bounds[i + 1] - take, bounds[i + 1]))
    free = [c for c in range(hidden - 1, -1, -1) if c not in set(removed)]
    return tuple(sorted(removed + free[:spill]))


def _explicit(hidden: int, count: int, channels: Sequence[int]) -> tuple[int, ...]:
    chosen = tuple(sorted(set(channels)))
    outside = [c for c in chosen if not 0 <= c < hidden]
    if outside or len(chosen) != len(channels):
        raise ConfigError(f"channels must be distinct indices in 0..{hidden - 1}; wrong: {outside[:5] or 'repeats'}.")
    if len(chosen) != count:
        raise ConfigError(
            f"channels names {len(chosen)} channels, but the ratio and hidden_multiple ask for {count}. "
            f"Name {count}, or change the ratio."
        )
    return chosen
