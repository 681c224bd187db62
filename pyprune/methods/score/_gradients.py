"""Gradients of the language-model loss at changed weights, one decoder layer in memory at a time.

The forward pass runs every layer with its changed weights without recording a graph and keeps only the layer's input.
The backward pass makes the same weights once more, layer by layer from the last to the first open one, and hands each
gradient over as soon as it exists: beside the model, what is held is one layer's changed weights and gradients, every
layer's input [B, T, H] and the logits. Open parameters outside of the layers (hidden axis: embedding, final norm,
head) are changed for the whole pass. Layers before the first open one are run as they are and never differentiated.

A model that stays on disk gives the same gradients, bit for bit: :mod:`pyprune.methods.score._stored_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pyprune.errors import DataError
from pyprune.families import NamedParam
from pyprune.methods.score._passes import Consume, NotLayerwiseError, Pass, Weights
from pyprune.methods.score._stored_passes import StoredPasses
from pyprune.methods.score.base import Scoring
from pyprune.probe.activations import still
from pyprune.runtime.progress import track


@dataclass(frozen=True)
class GradientReport:
    """How a mean gradient was taken.

    Attributes:
        loss: mean loss over samples and draws at the changed weights, nats a token.
        passes: forward and backward passes.
        layerwise: whether one layer was held at a time; otherwise the changed weights and gradients of all open
            parameters were.
        together: whether all passes went through a layer before the next one, as they do where layers are read from
            disk, so that the sums over passes were those of one layer.
        streams: bytes of the residual streams that were held at once, where ``together``.
    """

    loss: float
    passes: int
    layerwise: bool
    together: bool = False
    streams: int = 0


def own_values(param: NamedParam, draw: int) -> Tensor:
    """The values as they are: :data:`Weights` that change nothing."""
    return param.parameter.detach()


class Summed:
    """A consumer that wants whole gradients: sums the parts of each parameter and passes the sum on.

    Holds nothing while there is one part a parameter, else the sums of all parameters whose last part is to come.
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
    """Take the mean gradient over the samples and ``draws`` changed weights of all open parameters.

    Args:
        run: model, samples [N, T], options (``score.batch_size``, ``score.layerwise``) and open parameters.
        weights: the changed weights.
        consume: gets the gradients; float32 (float64 for float64 models), whatever the model's dtype.
        draws: how many changed weights to average over.
        per_sample: one part a sample, each divided by the number of samples.

    Raises:
        DataError: there is no sample.
    """
    samples = run.samples.to(run.device)
    if not samples.numel():
        raise DataError(f"{run.request.method} reads gradients on calibration text; give samples.")
    # What is open outside of the layers sees all rows at once, so that parts a sample need a pass a sample.
    alone = per_sample and any(param.layer is None for param in run.opened)
    batches = samples.split(1 if alone else run.score.batch_size or len(samples))
    order = [(draw, batch) for draw in range(draws) for batch in batches]
    passes = [
        Pass(
            run,
            batch,
            len(batch) / (len(samples) * draws),
            partial(_at, weights, draw),
            consume,
            last=number == len(order) - 1,
            per_sample=per_sample,
        )
        for number, (draw, batch) in enumerate(order)
    ]
    if run.layers is not None:
        stored = StoredPasses(run.layers, passes)
        return GradientReport(stored.take(), len(passes), layerwise=True, together=True, streams=stored.bytes)
    with still(run.model):
        loss, layerwise = _in_memory(passes, layerwise=run.score.layerwise)
    return GradientReport(loss, len(passes), layerwise)


def _at(weights: Weights, draw: int, param: NamedParam) -> Tensor:
    return weights(param, draw)


def _in_memory(passes: Sequence[Pass], *, layerwise: bool) -> tuple[float, bool]:
    """The mean loss, and whether one layer was held at a time in all passes."""
    loss = 0.0
    for one in track(passes, "gradients"):
        try:
            loss += one.layerwise() if layerwise else one.whole()
        except NotLayerwiseError:
            layerwise = False
            loss += one.whole()
    return loss, layerwise
