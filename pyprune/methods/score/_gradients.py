"""Gradients of the language-model loss at changed weights, one decoder layer at a time.

In addition to the model, memory holds one layer's changed weights and gradients, every layer's input [B, T, H] and the
logits. Open parameters outside of the layers (hidden axis: embedding, final norm, head) change for the whole pass.
Layers before the first open one run unchanged and are never differentiated. A model on disk gives the same gradients,
bit for bit: :mod:`pyprune.methods.score._layer_passes` takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pyprune.errors import DataError, ScoreError
from pyprune.families import NamedParam
from pyprune.methods.score._layer_passes import LayerPasses
from pyprune.methods.score._passes import Consume, NotLayerwiseError, Pass, Weights
from pyprune.methods.score.base import Scoring
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.progress import track


@dataclass(frozen=True)
class GradientReport:
    """How a mean gradient was taken.

    Attributes:
        loss: mean loss over samples and draws at the changed weights, nats a token.
        passes: forward and backward passes.
        layerwise: whether one layer was held at a time; otherwise the changed weights and gradients of all open
            parameters were held.
        together: whether all passes went through a layer before the next one, as they do if layers are read from disk.
            Then the sums over passes were those of one layer.
        streams: bytes of the residual streams that were held at once, if ``together``.
    """

    loss: float
    passes: int
    layerwise: bool
    together: bool = False
    streams: int = 0


def unchanged_weights(param: NamedParam, draw: int) -> Tensor:
    """Return the parameter's own values: :data:`Weights` that change nothing."""
    return param.parameter.detach()


class GradientSum:
    """A consumer that sums the parts of each parameter and passes the whole gradient on.

    It holds nothing if a parameter has one part, else the sums of all parameters whose last part is still missing.
    """

    def __init__(self, consume: Callable[[NamedParam, Tensor], None]) -> None:
        self.consume = consume
        self.held: dict[str, Tensor] = {}

    def __call__(self, param: NamedParam, part: Tensor, last: bool) -> None:
        held = self.held.pop(param.name, None)
        total = part if held is None else held.add_(part)
        if last:
            self.consume(param, total)
        else:
            self.held[param.name] = total


def take_gradients(
    run: Scoring, weights: Weights, consume: Consume, *, draws: int = 1, per_sample: bool = False
) -> GradientReport:
    """Take the mean gradient of all open parameters over the samples and ``draws`` changed weights.

    Args:
        run: model, samples [N, T], options (``score.batch_size``, ``score.layerwise``) and open parameters.
        weights: the changed weights.
        consume: receives the gradients; float32 (float64 for float64 models), whatever the model's dtype.
        draws: how many changed weights to average over.
        per_sample: one part a sample, each divided by the number of samples.

    Raises:
        DataError: there is no sample.
        ScoreError: a layer of a model on disk does not return hidden states alone.
    """
    samples = run.samples.to(run.device)
    if not samples.numel():
        raise DataError(f"{run.request.method} reads gradients on calibration text; give samples.")
    # Open parameters outside of the layers see all rows at once, so that parts a sample need a pass a sample.
    alone = per_sample and any(param.layer is None for param in run.open_params)
    batches = samples.split(1 if alone else run.score.batch_size or len(samples))
    order = [(draw, batch) for draw in range(draws) for batch in batches]
    passes = [
        Pass(
            run,
            batch,
            len(batch) / (len(samples) * draws),
            partial(_draw_weights, weights, draw),
            consume,
            last=number == len(order) - 1,
            per_sample=per_sample,
        )
        for number, (draw, batch) in enumerate(order)
    ]
    if run.layers is None:
        loss, layerwise = _take_in_memory(run, passes)
        return GradientReport(loss, len(passes), layerwise)
    together = LayerPasses(run.layers, passes, on_disk=True)
    try:
        loss = together.take()
    except NotLayerwiseError as error:
        raise ScoreError(
            "A decoder layer of this model does not return hidden states alone, so that gradients cannot be taken "
            "layer by layer from disk. Set score.layerwise=false, which loads the whole model."
        ) from error
    return GradientReport(loss, len(passes), layerwise=True, together=True, streams=together.bytes)


def _draw_weights(weights: Weights, draw: int, param: NamedParam) -> Tensor:
    return weights(param, draw)


def _take_in_memory(run: Scoring, passes: Sequence[Pass]) -> tuple[float, bool]:
    """Return the mean loss, and whether one layer was held at a time in all passes."""
    loss, layerwise, runner = 0.0, run.score.layerwise, LayerRunner.of(run.model)
    with frozen_eval(run.model):
        for one in track(passes, "gradients"):
            try:
                loss += LayerPasses(runner, [one], on_disk=False).take() if layerwise else one.differentiate_whole()
            except NotLayerwiseError:
                layerwise = False
                loss += one.differentiate_whole()
    return loss, layerwise
