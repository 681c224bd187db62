"""What a training step is fed and what it must predict: token ids, and labels that may leave some of them out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pyprune.config.train import largest_divisor

IGNORED = -100
"""In ids: padding, on the right only. In labels: a token that is fed but not predicted."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of equal length.

    Attributes:
        ids: int64 [N, T]; :data:`IGNORED` marks right padding.
        labels: int64 [N, T]; the token that position t - 1 has to predict at t, or :data:`IGNORED`. The first
            column is never predicted.
    """

    ids: Tensor
    labels: Tensor

    @classmethod
    def of(cls, samples: Tensor | Batch) -> Batch:
        """Take plain ids [N, T] as text of which every token is predicted; return :class:`Batch` as they are."""
        return samples if isinstance(samples, Batch) else cls(samples, samples)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> Self:
        """Return some of the sequences."""
        return type(self)(self.ids[rows], self.labels[rows])

    @property
    def inputs(self) -> Tensor:
        """What the model is fed, int64 [N, T]; padding is fed as token 0, which causal attention hides."""
        return self.ids.clamp(min=0)

    @property
    def targets(self) -> Tensor:
        """What logits[:, :-1] have to predict, int64 [N, T - 1]; :data:`IGNORED` where nothing counts."""
        return self.labels[:, 1:]

    @property
    def predicted(self) -> Tensor:
        """Which of the first T - 1 positions predict a token that counts, bool [N, T - 1]."""
        return self.targets >= 0

    @property
    def real(self) -> Tensor:
        """Which positions hold a token and no padding, bool [N, T]."""
        return self.ids >= 0

    def fed(self) -> int:
        """Number of tokens without padding."""
        return int(self.real.sum())

    def to(self, device: torch.device | str) -> Self:
        """Return the same on another device."""
        return type(self)(self.ids.to(device), self.labels.to(device))

    def micro_batches(self, size: int) -> list[Self]:
        """Split into batches of ``size`` rows, rows of like length together, each cut to its longest row.

        The order of rows inside a step changes the gradient by rounding only; without padding it stays.
        """
        lengths = self.real.sum(1)
        rows = torch.argsort(lengths, stable=True)
        ordered = self[rows]
        pieces = [ordered[i : i + size] for i in range(0, len(self), size)]
        return [piece._trimmed() for piece in pieces]

    def _trimmed(self) -> Self:
        longest = max(2, int(self.real.sum(1).max()))
        return type(self)(self.ids[:, :longest], self.labels[:, :longest])

    def digest(self) -> str:
        """SHA-256 of ids and labels, hexadecimal."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.labels):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()


def micro_batch_for(batch_size: int, sequence_length: int, max_tokens: int = 2048) -> int:
    """The largest divisor of ``batch_size`` whose micro batch holds at most ``max_tokens`` (at least 1)."""
    return largest_divisor(batch_size, max(1, max_tokens // sequence_length))
