"""What a checkpoint remembers of the text it was trained on, so that a test on that text is refused.

A mark is a 64-bit hash of :data:`pyprune.data.overlap.SHINGLE` tokens of a training window; the marks of a
window tile it. A test text that shares twice as many tokens in a row with a window holds one of its marks.
Of instruction records only whole marks count, and none that many records begin with (the prompt's header).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from pyprune.checkpoint.record import RECORD_NAME, has_record, read_pruning_json
from pyprune.data.overlap import BOILERPLATE, SHINGLE, Hashes, shingle_hashes
from pyprune.data.sampling import TokenSamples
from pyprune.errors import CheckpointError, DataError


def training_marks(samples: Iterable[TokenSamples], earlier: str = "") -> str:
    """Marks of every window: base64 of sorted little-endian uint64, 8 bytes per 64 training tokens.

    Args:
        samples: what a model was trained on.
        earlier: marks of its training before that, which are kept.

    Raises:
        CheckpointError: the earlier marks are damaged.
    """
    found = [_marks(s) for s in samples if _long(s)]
    marks = np.unique(np.concatenate([_read(earlier), *found]))
    return base64.b64encode(marks.astype("<u8").tobytes()).decode()


def _marks(samples: TokenSamples) -> Hashes:
    ids = samples.ids.numpy()
    hashes = shingle_hashes(ids, SHINGLE)[:, ::SHINGLE]
    if not samples.records:
        return hashes.ravel()
    whole = ids[:, SHINGLE - 1 :: SHINGLE] >= 0  # padding is on the right, so the last token decides
    found, counts = np.unique(hashes[whole], return_counts=True)
    return found[counts <= BOILERPLATE]


def _read(marks: str) -> Hashes:
    try:
        return np.frombuffer(base64.b64decode(marks, validate=True), dtype="<u8")
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"The training marks in {RECORD_NAME} are damaged: {error}.") from error


def _long(samples: TokenSamples) -> bool:
    return samples.ids.shape[1] >= SHINGLE


def unguarded(samples: Iterable[TokenSamples]) -> list[str]:
    """What to warn of where sequences are too short to be marked, one sentence a length."""
    lengths = sorted({s.ids.shape[1] for s in samples if not _long(s)})
    return [
        f"Sequences of {length} tokens are shorter than {SHINGLE} and leave no marks: pyprune eval cannot tell that a "
        "test text was read here."
        for length in lengths
    ]


def marked_passages(marks: str, tokens: Tensor) -> int:
    """How many marks occur in a test stream.

    Args:
        marks: of :func:`training_marks`.
        tokens: token ids of the test text, int64 [N], from the same tokenizer.

    Raises:
        CheckpointError: the marks are damaged.
    """
    known = _read(marks)
    ids = tokens.reshape(-1).numpy()
    if len(known) == 0 or len(ids) < SHINGLE:
        return 0
    return int(np.isin(known, shingle_hashes(ids, SHINGLE)).sum())


def assert_not_trained_on(folder: str | Path, tokens: Tensor, source: str) -> None:
    """Refuse a test text that the checkpoint in ``folder`` was trained on (nothing to check without a record).

    Raises:
        DataError: how many passages of the text were training text.
    """
    if not has_record(folder):
        return
    marks = read_pruning_json(folder).provenance.get("training_marks") or ""
    shared = marked_passages(marks, tokens)
    if shared:
        raise DataError(
            f"{source!r} is not a test text for {folder}: {shared} passages of {SHINGLE} tokens in it were used to "
            "train that checkpoint. Evaluate on another text or another split."
        )
