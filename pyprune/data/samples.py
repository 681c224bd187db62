"""Samples drawn from a text: a :class:`~pyprune.data.tokens.Batch` with the place of each row in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pyprune.data.encoding import Ids
from pyprune.data.overlap import SpanSet
from pyprune.data.stream import ExampleStream, TokenStream
from pyprune.data.tokens import IGNORED, Batch


@dataclass(frozen=True, eq=False)
class TokenSamples(Batch):
    """Windows of equal length, or whole instruction records padded to it, drawn from one stream.

    Every stage takes them, since they are a :class:`~pyprune.data.tokens.Batch`: windows have their ids as labels,
    records have :data:`IGNORED` for tokens that are not predicted. A part of them (``samples[rows]``) is a plain Batch.

    Attributes:
        spans: place of each row in its stream, in the order of the rows.
    """

    spans: SpanSet = field(kw_only=True)

    @property
    def records(self) -> bool:
        """True for whole instruction records, not windows of a text."""
        return isinstance(self.spans.stream, ExampleStream)

    @property
    def as_read(self) -> Ids:
        """The tokens as in the text, without a bos token that replaced one: int64 [N, T]."""
        if self.records:
            return self.ids.numpy()
        return np.stack([self.spans.stream.tokens[start:end] for start, end in self.spans.spans])

    def beginning_with(self, bos: int) -> TokenSamples:
        """Set the first token of windows, which is never predicted, to ``bos``; records are unchanged."""
        if self.records:
            return self
        ids = self.ids.clone()
        ids[:, 0] = bos
        return replace(self, ids=ids, labels=ids)

    @classmethod
    def cut(cls, stream: TokenStream, spans: Sequence[tuple[int, int]]) -> TokenSamples:
        """Cut windows of equal length out of a stream."""
        rows = np.stack([stream.tokens[start:end] for start, end in spans])
        ids = torch.from_numpy(rows)
        kinds = tuple(stream.kind_at(start) for start, _ in spans)
        return cls(ids, ids, kinds, spans=SpanSet(stream, tuple(spans)))

    @classmethod
    def pad(
        cls, stream: ExampleStream, chosen: Sequence[int], sequence_length: int, *, mask_prompt: bool
    ) -> TokenSamples:
        """Take whole examples, one a row, padded on the right."""
        ids = np.full((len(chosen), sequence_length), IGNORED, dtype=np.int64)
        labels = ids.copy()
        places = [stream.examples[i] for i in chosen]
        for row, (start, response, end) in enumerate(places):
            ids[row, : end - start] = stream.tokens[start:end]
            predicted = response if mask_prompt else start
            labels[row, predicted - start : end - start] = stream.tokens[predicted:end]
        kinds = tuple(stream.kind_at(start) for start, _, _ in places)
        spans = SpanSet(stream, tuple((start, end) for start, _, end in places))
        return cls(torch.from_numpy(ids), torch.from_numpy(labels), kinds, spans=spans)
