"""Gradients of a model on disk: every micro batch goes through a decoder layer before the next layer is read.

Forwards, the streams that enter some of the layers are kept. Backwards, from the last layer to the first open one, a
layer is read again, run once more with a graph from its kept input, and its gradients are handed over; what a consumer
sums over micro batches is complete before the next layer is read. What is open outside of the layers (embeddings, final
norm, head: the hidden axis) comes last, for which the stream behind the last layer is kept and the loss taken again.
Beside one layer and its gradients, or those outside of the layers, what is held is the embeddings, the final norm, for
the loss the head and the logits of a micro batch, two streams [N, T, H] of all the samples (of SmoothGrad also of all
draws), and the kept ones: as many as :data:`KEPT_BYTES` hold, at least one. Where that is not one for every layer,
layers are read and run again from the kept stream before them, at the places of Griewank and Walther's binomial
schedule ("Algorithm 799: Revolve", 2000), which makes the fewest such runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import comb
from typing import cast

import torch
from torch import Tensor, nn

from pyprune.checkpoint.layers import StoredLayers
from pyprune.data.tokens import Batch
from pyprune.errors import ScoreError
from pyprune.families import NamedParam
from pyprune.methods.score._passes import NotLayerwiseError, Pass, Segment, at_weights
from pyprune.probe.activations import still
from pyprune.runtime.progress import track

KEPT_BYTES = 2 << 30
"""Of streams that are kept between layers, in host memory."""

Streams = list[Tensor]
"""The stream [B, T, H] of every pass at one point of the model, in host memory."""


class StoredPasses:
    """Passes over the layers of a checkpoint folder.

    Args:
        source: the layers.
        passes: one or more, in the order in which their parts are handed over.

    Attributes:
        bytes: of the streams that were held at once.
    """

    def __init__(self, source: StoredLayers, passes: Sequence[Pass]) -> None:
        self.source = source
        self.passes = passes
        self.bytes = 0

    @torch.no_grad()
    def take(self) -> float:
        """Hand the gradients over, the last layer's first.

        Returns:
            The mean loss, nats a token.
        """
        with still(self.source.model), _layerwise():
            first, ending, outer = self.passes[0].first, len(self.source.layers), bool(self.passes[0].outer)
            streams = [self._embed(one, one.leaves(self._outer(front=True), graph=False)).cpu() for one in self.passes]
            size = sum(stream.nbytes for stream in streams)
            kept = min(max(1, KEPT_BYTES // size), ending - first)
            self.bytes = (kept + 2 + outer) * size
            walk = self._backwards(self._run(streams, 0, first), first, ending + 1, kept)
            del streams
            _, entered = next(walk)
            loss, gradients = self._ending(entered)
            left = list(entered) if outer else []
            del entered  # or it would be held while layers are run again
            for index, entered in track(walk, "gradients of layers", total=ending - first):
                self._layer_backwards(index, entered, gradients)
                del entered
            if outer:
                self._outer_backwards(left, gradients)
        return loss

    def _backwards(self, streams: Streams, start: int, stop: int, kept: int) -> Iterator[tuple[int, Streams]]:
        """Give ``stop`` - 1 to ``start``, each with the streams that enter there.

        Args:
            streams: what enters ``start``.
            start: a layer.
            stop: a later one; the one after the last layer is what follows the layers.
            kept: streams that may be kept on the way.
        """
        while stop - start > 1:
            middle = start + stride(stop - start, kept)
            yield from self._backwards(self._run(streams, start, middle), middle, stop, kept - 1)
            stop = middle
        yield start, streams

    def _run(self, streams: Streams, start: int, stop: int) -> Streams:
        """What enters layer ``stop``, given what enters ``start``."""
        found = list(streams)
        for index in range(start, stop):
            with self.source.layer(index) as layer:
                self._layer_forwards(index, layer, found)
        return found

    def _layer_forwards(self, index: int, layer: nn.Module, streams: Streams) -> None:
        """Take the streams through a layer, in their list; nothing of the layer is held behind it."""
        for number, segment in enumerate(self._segments(index, layer)):
            hidden = streams[number].to(self.source.model.device)
            streams[number] = segment.forward(hidden, self.source.keywords(index, hidden)).cpu()

    def _ending(self, streams: Streams) -> tuple[float, Streams]:
        """The mean loss, and its gradients in the streams behind the last layer."""
        loss, found = 0.0, []
        with self.source.head():
            tied = self.source.model.config.tie_word_embeddings
            params = [p for p in self._outer() if p.row.role != "embedding" or tied]
            for one, stream in zip(self.passes, streams, strict=True):
                given = stream.to(self.source.model.device).detach().requires_grad_()
                with torch.enable_grad(), self.source.ending(given) as model:
                    value = one.loss(model, one.leaves(params, graph=False))
                found.append(torch.autograd.grad(value, given)[0].cpu())
                loss += float(value.detach())
        return loss, found

    def _layer_backwards(self, index: int, streams: Streams, gradients: Streams) -> None:
        """Hand the gradients of a layer over.

        Args:
            index: of the layer.
            streams: what enters it.
            gradients: of the loss in what leaves it; those in ``streams`` take their place, where an earlier layer
                needs them.
        """
        wanted = index > self.passes[0].first or bool(self.passes[0].outer)
        with self.source.layer(index) as layer:
            for number, segment in enumerate(self._segments(index, layer)):
                hidden = streams[number].to(self.source.model.device)
                gradient = gradients[number].to(hidden.device)
                before = segment.backward(hidden, self.source.keywords(index, hidden), gradient, wanted)
                if before is not None:
                    gradients[number] = before.cpu()

    def _outer_backwards(self, streams: Streams, gradients: Streams) -> None:
        """Hand the gradients of what is open outside of the layers over.

        Args:
            streams: what leaves the last layer.
            gradients: of the loss in what enters the first.
        """
        with self.source.head():
            params = self._outer()
            for one, stream, gradient in zip(self.passes, streams, gradients, strict=True):
                one.hand_over(params, self._outer_gradients(one, params, stream, gradient), one.last)

    @torch.enable_grad()
    def _outer_gradients(
        self, one: Pass, params: Sequence[NamedParam], stream: Tensor, gradient: Tensor
    ) -> list[Tensor]:
        """Of the loss in these parameters: by what they make of ``stream``, and of what enters the first layer."""
        leaves, device = one.leaves(params), self.source.model.device
        with self.source.ending(stream.to(device)) as model:
            one.loss(model, leaves).backward()
        self._embed(one, leaves).backward(gradient.to(device))
        return [cast(Tensor, leaf.grad) for leaf in leaves.values()]

    def _embed(self, one: Pass, leaves: Mapping[str, Tensor]) -> Tensor:
        """The stream that enters the first layer in a pass, at these weights."""
        return at_weights(self.source.model, leaves, self.source.embed, Batch.of(one.batch).inputs)

    def _outer(self, *, front: bool = False) -> list[NamedParam]:
        """The open parameters outside of the layers, in memory; or only those before the first layer."""
        found = self.passes[0].outer
        return self._in_memory([p for p in found if p.row.role == "embedding"] if front else found)

    def _segments(self, index: int, layer: nn.Module) -> list[Segment]:
        """The layer in every pass, its open parameters being those in memory."""
        params = self._in_memory(self.passes[0].opened.get(index, []))
        return [Segment(one, layer, index, params) for one in self.passes]

    def _in_memory(self, params: Sequence[NamedParam]) -> list[NamedParam]:
        return [replace(p, parameter=self.source.model.get_parameter(p.name)) for p in params]


@contextmanager
def _layerwise() -> Iterator[None]:
    """Say what is wrong with a family whose layers cannot be run one by one."""
    try:
        yield
    except NotLayerwiseError as error:
        raise ScoreError(
            "A decoder layer of this model does not return hidden states alone, so that gradients cannot be taken "
            "layer by layer from disk. Set score.layerwise=false, which loads the whole model."
        ) from error


def stride(count: int, kept: int) -> int:
    """How many layers further a stream is kept next, so that the fewest layers are run again.

    Args:
        count: points that are to be visited from the last to the first, the present one among them; at least 2.
        kept: streams that may be kept between them; at least 1.
    """
    runs = 1  # of any layer; so many allow comb(kept + runs, kept) points
    while comb(kept + runs, kept) < count:
        runs += 1
    return max(1, comb(kept + runs - 2, kept), count - comb(kept + runs - 1, kept - 1))
