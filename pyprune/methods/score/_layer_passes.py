"""Gradients one decoder layer at a time, of a model in memory or on disk: only one layer's gradients exist at once.

Forwards, the streams that enter some of the layers are kept. Backwards, from the last layer to the first open one, a
layer runs once more, with a graph, from its kept input, and its gradients are handed over. Parameters that are open
outside of the layers (embeddings, final norm, head: the hidden axis) come last. For them the stream that leaves the
last layer is kept, and the loss is taken again.

All passes go through a layer together, and their sums over passes are complete before the next layer. On disk each
layer is then read rarely. The kept streams take at most :data:`KEPT_BYTES` of host memory, and at least one is kept. If
that is less than one for every layer, layers are read and run again from the kept stream before them. Griewank and
Walther's binomial schedule ("Algorithm 799: Revolve", 2000) chooses the places with the fewest such runs. In memory
every stream is kept, on the model's device, and the caller takes one pass at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import cast

import torch
from torch import Tensor, nn

from pyprune.data.tokens import Batch
from pyprune.families import NamedParam
from pyprune.methods.score._passes import Pass, Segment, call_with_weights
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.progress import track

KEPT_BYTES = 2 << 30
"""Bytes of streams of a model on disk that are kept between layers, in host memory."""

Streams = list[Tensor]
"""The stream [B, T, H] of every pass at one point of the model."""


class LayerPasses:
    """Passes that go through the layers of a model together.

    Args:
        source: the layers.
        passes: one or more, in the order in which their parts are handed over.
        on_disk: whether the layers are read from disk, so that streams rest in host memory and few are kept.

    Attributes:
        bytes: bytes of the streams that were held at once.
    """

    def __init__(self, source: LayerRunner, passes: Sequence[Pass], *, on_disk: bool) -> None:
        self.source = source
        self.passes = passes
        self.on_disk = on_disk
        self.bytes = 0

    @torch.no_grad()
    def take(self) -> float:
        """Hand the gradients over, the last layer's first.

        Returns:
            The passes' share of the mean loss, nats a token.

        Raises:
            NotLayerwiseError: a layer does not return hidden states alone.
        """
        with frozen_eval(self.source.model):
            first, end, outer = self.passes[0].first, len(self.source.layers), bool(self.passes[0].outer)
            embeddings = self._outer(front=True)
            streams = [self._rest(self._embed(one, one.leaves(embeddings, graph=False))) for one in self.passes]
            size = sum(stream.nbytes for stream in streams)
            kept = min(max(1, KEPT_BYTES // size), end - first) if self.on_disk else end - first
            self.bytes = (kept + 2 + outer) * size
            walk = self._backwards(self._run(streams, 0, first), first, end + 1, kept)
            del streams
            _, entered = next(walk)
            loss, gradients = self._loss_and_gradients(entered)
            left = list(entered) if outer else []
            del entered  # or it would be held while layers run again
            for index, entered in track(walk, "gradients of layers", total=end - first) if self.on_disk else walk:
                self._layer_backwards(index, entered, gradients)
                del entered
            if outer:
                self._outer_backwards(left, gradients)
        return loss

    def _rest(self, stream: Tensor) -> Tensor:
        """Move a stream to where it is kept: to the host if the layers are on disk."""
        return stream.cpu() if self.on_disk else stream

    def _backwards(self, streams: Streams, start: int, stop: int, kept: int) -> Iterator[tuple[int, Streams]]:
        """Yield ``stop`` - 1 to ``start``, each with the streams that enter there.

        Args:
            streams: streams that enter ``start``.
            start: a layer.
            stop: a later one; the index after the last layer stands for the final norm.
            kept: streams that may be kept on the way.
        """
        while stop - start > 1:
            middle = start + stride(stop - start, kept)
            yield from self._backwards(self._run(streams, start, middle), middle, stop, kept - 1)
            stop = middle
        yield start, streams

    def _run(self, streams: Streams, start: int, stop: int) -> Streams:
        """Return the streams that enter layer ``stop``, from those that enter ``start``."""
        streams = list(streams)
        for index in range(start, stop):
            with self.source.layer(index) as layer:
                self._layer_forwards(index, layer, streams)
        return streams

    def _layer_forwards(self, index: int, layer: nn.Module, streams: Streams) -> None:
        """Take the streams through a layer, in their list; nothing of the layer is held afterwards."""
        for number, segment in enumerate(self._segments(index, layer)):
            hidden = streams[number].to(self.source.model.device)
            streams[number] = self._rest(segment.forward(hidden, self.source.keywords(index, hidden)))

    def _loss_and_gradients(self, streams: Streams) -> tuple[float, Streams]:
        """Return the loss, and its gradients in the streams that leave the last layer."""
        loss, gradients = 0.0, []
        with self.source.head():
            tied = self.source.model.config.tie_word_embeddings
            params = [p for p in self._outer() if p.row.role != "embedding" or tied]
            for one, stream in zip(self.passes, streams, strict=True):
                last = stream.to(self.source.model.device).detach().requires_grad_()
                with torch.enable_grad(), self.source.continue_from(last) as model:
                    value = one.loss(model, one.leaves(params, graph=False))
                gradients.append(self._rest(torch.autograd.grad(value, last)[0]))
                loss += float(value.detach())
        return loss, gradients

    def _layer_backwards(self, index: int, streams: Streams, gradients: Streams) -> None:
        """Hand the gradients of a layer over.

        Args:
            index: index of the layer.
            streams: streams that enter it.
            gradients: gradients of the loss in the streams that leave it. They are replaced by those in ``streams`` if
                an earlier layer needs them.
        """
        needed = index > self.passes[0].first or bool(self.passes[0].outer)
        with self.source.layer(index) as layer:
            for number, segment in enumerate(self._segments(index, layer)):
                hidden = streams[number].to(self.source.model.device)
                gradient = gradients[number].to(hidden.device)
                before = segment.backward(hidden, self.source.keywords(index, hidden), gradient, needed)
                if before is not None:
                    gradients[number] = self._rest(before)

    def _outer_backwards(self, streams: Streams, gradients: Streams) -> None:
        """Hand the gradients of the open parameters outside of the layers over.

        Args:
            streams: streams that leave the last layer.
            gradients: gradients of the loss in the streams that enter the first layer.
        """
        with self.source.head():
            params = self._outer()
            for one, stream, gradient in zip(self.passes, streams, gradients, strict=True):
                one.hand_over(params, self._outer_gradients(one, params, stream, gradient), one.last)

    @torch.enable_grad()
    def _outer_gradients(
        self, one: Pass, params: Sequence[NamedParam], stream: Tensor, gradient: Tensor
    ) -> list[Tensor]:
        """Return the loss's gradients in these parameters: through the head, and through the first layer's input."""
        leaves, device = one.leaves(params), self.source.model.device
        with self.source.continue_from(stream.to(device)) as model:
            one.loss(model, leaves).backward()
        self._embed(one, leaves).backward(gradient.to(device))
        return [cast(Tensor, leaf.grad) for leaf in leaves.values()]

    def _embed(self, one: Pass, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the stream that enters the first layer in a pass, at these weights."""
        return call_with_weights(self.source.model, leaves, self.source.embed, Batch.of(one.batch).inputs)

    def _outer(self, *, front: bool = False) -> list[NamedParam]:
        """Return the open parameters outside of the layers, loaded; or only those before the first layer."""
        params = self.passes[0].outer
        return self._load_params([p for p in params if p.row.role == "embedding"] if front else params)

    def _segments(self, index: int, layer: nn.Module) -> list[Segment]:
        """Return the layer in every pass, with its open parameters loaded."""
        params = self._load_params(self.passes[0].params_by_layer.get(index, []))
        return [Segment(one, layer, index, params) for one in self.passes]

    def _load_params(self, params: Sequence[NamedParam]) -> list[NamedParam]:
        return [replace(p, parameter=self.source.model.get_parameter(p.name)) for p in params]


def stride(count: int, kept: int) -> int:
    """Return how many layers further the next stream is kept, so that the fewest layers run again.

    Args:
        count: points to visit from the last to the first, the present one among them; at least 2.
        kept: streams that may be kept between them; at least 1.
    """
    runs = 1  # of any layer; this number of runs allows comb(kept + runs, kept) points
    while comb(kept + runs, kept) < count:
        runs += 1
    return max(1, comb(kept + runs - 2, kept), count - comb(kept + runs - 1, kept - 1))
