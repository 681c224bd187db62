"""The principal directions of the residual stream; the cut keeps the first of them.

Let x_l [tokens, H] be the stream that enters layer l on calibration text. Q holds the eigenvectors of M, largest
eigenvalue first:

    M = sum over l of  X_l^T X_l / trace(X_l^T X_l),     X_l = each token of x_l divided by its norm, or x_l itself.

M is not centred: the sliced channels are set to zero, not to a mean. Every point between layers counts alike, because
the stream grows along the model and the last layers would otherwise decide alone. Of all rotations, Q leaves the
largest share of this energy in the first k channels, for every k. No rotation at all, with the strongest k channels of
the model, is one of those that it is compared with.

The rotation belongs to the weights at the moment of the cut, and is computed then, on the same text. A run that was
interrupted computes it again, so that nothing of the size of the model must be stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.train import micro_batch_for
from pyprune.errors import DataError, ScoreError, UnsupportedModelError
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.hidden.pca import PcaOptions
from pyprune.methods.hidden.pca.rotation import check_rotatable, rotate_
from pyprune.methods.ratio import decide_hidden_count
from pyprune.plan import PrunePlan
from pyprune.probe.activations import frozen_eval
from pyprune.probe.moments import add_moments_
from pyprune.probe.streams import LayerRunner
from pyprune.runtime import processes
from pyprune.runtime.progress import track

NO_TEXT = "The directions of the stream are found on calibration text; give samples."
_SMALLEST = 1e-30
_ROUNDING = 0.1
"""Largest relative change of the logits that rounding rotated weights to bfloat16 explains."""


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Choose how many channels of the rotated stream are kept, from the first. :func:`prepare` rotates it.

    Raises:
        ConfigError: the ratio removes nothing or does not fit.
        DataError: there is no sample.
        UnsupportedModelError: the stream of this model cannot be rotated.
    """
    check_rotatable(model)
    decision = decide_hidden_count(request)
    hidden, tokens = request.identity.dense.hidden_size, samples.numel()
    if not tokens:
        raise DataError(NO_TEXT)
    few = f"The calibration text has {tokens:,} tokens for {hidden:,} directions; read more of it (data.samples)."
    return PlanDecision(
        request.identity.keep_hidden(range(hidden - decision.count)),
        (*decision.notes, "The plan counts channels of the rotated stream, strongest first."),
        {"pca": {"tokens": own_options(request, PcaOptions).tokens, "calibration_tokens": tokens}},
        (few,) if tokens < hidden else (),
    )


def prepare(layers: LayerRunner, plan: PrunePlan, samples: Tensor, details: Mapping[str, Any]) -> tuple[str, ...]:
    """Rotate the stream of the dense model to its principal directions, in place.

    Raises:
        ScoreError: the stream is not finite.
        UnsupportedModelError: the rotated model computes something else, so its family's table is wrong.
    """
    tokens = details["pca"]["tokens"]
    moment = stream_moment(layers, samples, alike=tokens == "alike")
    rotation = principal_directions(moment)
    if processes.is_divided():  # different rounding would mix directions of equal strength
        rotation = processes.from_first(rotation)
    before = _logits(layers, samples)
    rotate_(layers, rotation)
    moved = float((_logits(layers, samples) - before).norm() / before.norm().clamp(min=_SMALLEST))
    if not moved <= _ROUNDING:
        raise UnsupportedModelError(
            f"Rotating the residual stream changed the logits by {moved:.1%}, but it must change nothing: this "
            f"{plan.model_type!r} model uses single channels in a way that its family's table does not list. "
            "Use another method (dress)."
        )
    kept, total = len(plan.hidden), moment.trace()
    rotated = (rotation.T @ moment @ rotation).diagonal()[:kept].sum() / total
    plain = moment.diagonal().topk(kept).values.sum() / total
    counted = "each token counting alike" if tokens == "alike" else "tokens counting by their energy"
    return (
        f"The stream was rotated (logits moved by {moved:.1g} of their size): the first {kept} directions hold "
        f"{rotated:.3%} of its energy, the strongest {kept} channels held {plain:.3%} ({counted}).",
    )


@torch.no_grad()
def stream_moment(model: PreTrainedModel | LayerRunner, samples: Tensor, *, alike: bool) -> Tensor:
    """Return M, the second moment of the stream summed over all points between layers (see the module's docstring).

    Products and sums are float64. It holds the stream of all samples and a few matrices [H, H].

    Args:
        model: a dense model of a known family, or a runner of its layers; it comes back unchanged.
        samples: token ids, int64 [N, T].
        alike: whether each token of the stream is divided by its norm.

    Returns:
        Float64 [H, H] on the CPU, symmetric; its trace is the number of layers (less those with a stream of zero).

    Raises:
        DataError: there is no sample.
        ScoreError: the stream is not finite.
    """
    if not samples.numel():
        raise DataError(NO_TEXT)
    runner = LayerRunner.of(model)
    hidden = int(runner.model.config.hidden_size)
    total = torch.zeros(hidden, hidden, dtype=torch.float64)
    with frozen_eval(runner.model):
        size = micro_batch_for(len(samples), samples.shape[1])
        streams = [runner.embed(batch) for batch in samples.split(size)]
        for _ in track(runner.points_(streams), "directions of the stream", total=len(runner.layers)):
            total += _point_moment(streams, alike)
    if not math.isfinite(float(total.sum())):
        raise ScoreError(
            "The residual stream is not finite on the calibration text. The weights or their dtype are broken: check "
            "them for NaN, or work in float32 (dtype)."
        )
    return total


def _point_moment(streams: list[Tensor], alike: bool) -> Tensor:
    """Return the second moment of the stream at one point, divided by its trace; float64 [H, H] on the CPU."""
    hidden = streams[0].shape[-1]
    moment = streams[0].new_zeros(hidden, hidden, dtype=torch.float64)
    for stream in streams:
        x = stream.flatten(0, -2).double()
        if alike:
            x = x / x.norm(dim=-1, keepdim=True).clamp(min=_SMALLEST)
        add_moments_(moment, x)
    return (moment / moment.trace().clamp(min=_SMALLEST)).cpu()


def principal_directions(moment: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix as columns, largest eigenvalue first.

    The sign of each is chosen so that its largest component is positive.

    Args:
        moment: float64 [H, H] on the CPU.

    Returns:
        Float64 [H, H], orthogonal.
    """
    _, ascending = torch.linalg.eigh(moment)
    vectors: Tensor = ascending.flip(-1)
    largest = vectors.abs().argmax(0, keepdim=True)
    return vectors * vectors.gather(0, largest).sign()


@torch.no_grad()
def _logits(layers: LayerRunner, samples: Tensor) -> Tensor:
    """Return the logits of the first sample, float32 [1, T, V]."""
    with frozen_eval(layers.model):
        streams = [layers.embed(samples[:1])]
        layers.through_(streams)
        with layers.head(), layers.continue_from(streams[0]) as model:
            logits: Tensor = model(input_ids=samples[:1].to(model.device), use_cache=False).logits
    return logits.float()
