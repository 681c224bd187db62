"""The input of every stage: token ids, labels that may leave some of them out, and the kind of text of each row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORED = -100
"""In ids: padding, on the right only. In labels: a token that is fed but not predicted."""
UNNAMED = "text"
"""The kind of rows without one."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of equal length.

    Attributes:
        ids: int64 [N, T]; :data:`IGNORED` marks right padding.
        labels: int64 [N, T]; the token that position t - 1 has to predict at t, or :data:`IGNORED`. The first
            column is never predicted.
        kinds: kind of text of each row (prose, code, ...), one name a row; empty = unknown.
        source: the batch in the host's memory, if :meth:`to` has moved it from there. Decisions are read from it: a
            read of the device's memory waits until the device has done all its work.
    """

    ids: Tensor
    labels: Tensor
    kinds: tuple[str, ...] = ()
    source: Batch | None = field(default=None, repr=False)

    @classmethod
    def of(cls, samples: Tensor | Batch) -> Batch:
        """Take plain ids [N, T] as text whose tokens are all predicted; return a :class:`Batch` as it is."""
        return samples if isinstance(samples, Batch) else cls(samples, samples)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        """Return these sequences."""
        return Batch(self.ids[rows], self.labels[rows], self._kinds_of(rows))

    def _kinds_of(self, rows: Tensor | slice) -> tuple[str, ...]:
        if not self.kinds or isinstance(rows, slice):
            return self.kinds[rows] if isinstance(rows, slice) else ()
        chosen = rows.nonzero() if rows.dtype == torch.bool else rows
        return tuple(self.kinds[i] for i in chosen.flatten().tolist())

    def rows_by_kind(self) -> dict[str, Tensor]:
        """Return kind -> its ascending row numbers, int64 [n], kinds in the order of their first row."""
        numbers: dict[str, list[int]] = {}
        for row, kind in enumerate(self.kinds or [UNNAMED] * len(self)):
            numbers.setdefault(kind, []).append(row)
        return {kind: torch.tensor(rows) for kind, rows in numbers.items()}

    @property
    def inputs(self) -> Tensor:
        """The model's input, int64 [N, T]; padding is token 0, which causal attention hides."""
        return self.ids.clamp(min=0)

    @property
    def targets(self) -> Tensor:
        """The targets of logits[:, :-1], int64 [N, T - 1]; :data:`IGNORED` for those that do not count."""
        return self.labels[:, 1:]

    @property
    def predicted(self) -> Tensor:
        """Mask of the first T - 1 positions that predict a token that counts, bool [N, T - 1]."""
        return self.targets >= 0

    @property
    def real(self) -> Tensor:
        """Mask of the positions that hold a token and no padding, bool [N, T]."""
        return self.ids >= 0

    @property
    def counts_every_token(self) -> bool:
        """True if there is no padding and every token is predicted, as in windows of a text."""
        if self.source is not None:
            return self.source.counts_every_token
        return bool(self.real.all()) and (self.labels is self.ids or torch.equal(self.labels, self.ids))

    def predicting_rows(self) -> Tensor | None:
        """Return the positions in [N (T - 1)] that predict a token that counts: int64 [n]; None for all."""
        return self._where(self.predicted if self.source is None else self.source.predicted)

    def real_rows(self) -> Tensor | None:
        """Return the positions in [N T] that hold a token and no padding: int64 [n]; None for all."""
        return self._where(self.real if self.source is None else self.source.real)

    def _where(self, chosen: Tensor) -> Tensor | None:
        flat = chosen.flatten()
        return None if bool(flat.all()) else _move(flat.nonzero().squeeze(1), self.ids.device)

    def token_count(self) -> int:
        """Count the tokens without padding."""
        return int(self.real.sum()) if self.source is None else self.source.token_count()

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        place = torch.device(device)
        source = self if self.source is None else self.source
        away = place.type != "cpu" and source.ids.device.type == "cpu"
        return Batch(_move(self.ids, place), _move(self.labels, place), self.kinds, source if away else None)

    def micro_batches(self, size: int) -> list[Batch]:
        """Split into batches of ``size`` rows, rows of like length together, each cut to its longest row.

        The order of rows inside a step changes the gradient by rounding only; without padding it is kept.
        """
        lengths = self.real.sum(1)
        rows = torch.argsort(lengths, stable=True)
        ordered = self[rows]
        pieces = [ordered[i : i + size] for i in range(0, len(self), size)]
        ends = [max(2, int(piece.real.sum(1).max())) for piece in pieces]
        return [Batch(p.ids[:, :end], p.labels[:, :end], p.kinds) for p, end in zip(pieces, ends, strict=True)]

    def digest(self) -> str:
        """SHA-256 of ids and labels (not of the kinds), hexadecimal."""
        digest = hashlib.sha256()
        for tensor in (self.ids, self.labels):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Move to another device; to a GPU from pinned memory, which does not wait for the GPU's work."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
