"""What every stage is fed: token ids, labels that may leave some of them out, and what kind of text each row is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORED = -100
"""In ids: padding, on the right only. In labels: a token that is fed but not predicted."""
UNNAMED = "text"
"""The kind of rows that carry none."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of equal length.

    Attributes:
        ids: int64 [N, T]; :data:`IGNORED` marks right padding.
        labels: int64 [N, T]; the token that position t - 1 has to predict at t, or :data:`IGNORED`. The first
            column is never predicted.
        kinds: what kind of text each row is (prose, code, ...), one name a row; empty = not known.
        source: the same in the host's memory, where :meth:`to` has moved it away from there. What decides how to go on
            is read from it: a read of the device's memory waits until the device has done all it was given.
    """

    ids: Tensor
    labels: Tensor
    kinds: tuple[str, ...] = ()
    source: Batch | None = field(default=None, repr=False)

    @classmethod
    def of(cls, samples: Tensor | Batch) -> Batch:
        """Take plain ids [N, T] as text of which every token is predicted; return :class:`Batch` as they are."""
        return samples if isinstance(samples, Batch) else cls(samples, samples)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """Return some of the sequences."""
        return Batch(self.ids[rows], self.labels[rows], self._kinds_of(rows))

    def _kinds_of(self, rows: Tensor | slice) -> tuple[str, ...]:
        if not self.kinds or isinstance(rows, slice):
            return self.kinds[rows] if isinstance(rows, slice) else ()
        chosen = rows.nonzero() if rows.dtype == torch.bool else rows
        return tuple(self.kinds[i] for i in chosen.flatten().tolist())

    def rows_by_kind(self) -> dict[str, Tensor]:
        """Which rows are of each kind: kind -> ascending row numbers, int64 [n], in the order of their first row."""
        found: dict[str, list[int]] = {}
        for row, kind in enumerate(self.kinds or [UNNAMED] * len(self)):
            found.setdefault(kind, []).append(row)
        return {kind: torch.tensor(rows) for kind, rows in found.items()}

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

    @property
    def counts_every_token(self) -> bool:
        """Whether there is no padding and every token is predicted, as in windows of a text."""
        if self.source is not None:
            return self.source.counts_every_token
        return bool(self.real.all()) and (self.labels is self.ids or torch.equal(self.labels, self.ids))

    def predicting_rows(self) -> Tensor | None:
        """Which of the first T - 1 positions predict a token that counts, in [N (T - 1)]: int64 [n]; None for all."""
        return self._where(self.predicted if self.source is None else self.source.predicted)

    def real_rows(self) -> Tensor | None:
        """Which positions hold a token and no padding, in [N T]: int64 [n]; None for all."""
        return self._where(self.real if self.source is None else self.source.real)

    def _where(self, chosen: Tensor) -> Tensor | None:
        flat = chosen.flatten()
        return None if bool(flat.all()) else _moved(flat.nonzero().squeeze(1), self.ids.device)

    def fed(self) -> int:
        """Number of tokens without padding."""
        return int(self.real.sum()) if self.source is None else self.source.fed()

    def to(self, device: torch.device | str) -> Batch:
        """Return the same on another device."""
        place = torch.device(device)
        source = self if self.source is None else self.source
        away = place.type != "cpu" and source.ids.device.type == "cpu"
        return Batch(_moved(self.ids, place), _moved(self.labels, place), self.kinds, source if away else None)

    def micro_batches(self, size: int) -> list[Batch]:
        """Split into batches of ``size`` rows, rows of like length together, each cut to its longest row.

        The order of rows inside a step changes the gradient by rounding only; without padding it stays.
        """
        lengths = self.real.sum(1)
        rows = torch.argsort(lengths, stable=True)
        ordered = self[rows]
        pieces = [ordered[i : i + size] for i in range(0, len(self), size)]
        return [piece._trimmed() for piece in pieces]

    def _trimmed(self) -> Batch:
        longest = max(2, int(self.real.sum(1).max()))
        return Batch(self.ids[:, :longest], self.labels[:, :longest], self.kinds)

    def digest(self) -> str:
        """SHA-256 of ids and labels (not of the kinds), hexadecimal."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.labels):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On another device; to a GPU out of pinned memory, which does not wait for what the GPU is doing."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
