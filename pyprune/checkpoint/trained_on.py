"""Marks of the text that a checkpoint was trained on, by which a test on that text is refused.

A mark is a 64-bit hash of :data:`pyprune.data.overlap.SHINGLE` tokens of a training window; the marks of a
window tile it. A test text that shares twice as many tokens in a row with a window holds one of its marks.
Of instruction records only whole marks count. A passage that recurs in the training text (a prompt's header, a licence)
is no mark.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from pyprune.checkpoint.manifest import RECORD_NAME
from pyprune.data.overlap import BOILERPLATE, SHINGLE, Hashes, shingle_hashes
from pyprune.data.sampling import TokenSamples
from pyprune.errors import CheckpointError, DataError
from pyprune.runtime.progress import warn


def training_marks(samples: Iterable[TokenSamples], earlier: str = "") -> str:
    """Return the marks of every window: base64 of sorted little-endian uint64, 8 bytes per 64 training tokens.

    Args:
        samples: of the training.
        earlier: marks of the model's earlier training, which are kept.

    Raises:
        CheckpointError: the earlier marks are damaged.
    """
    marks = np.unique(np.concatenate([_decode(earlier), *(_marks(s) for s in samples if _is_markable(s))]))
    return base64.b64encode(marks.astype("<u8").tobytes()).decode()


def _marks(samples: TokenSamples) -> Hashes:
    ids = samples.as_read
    hashes = shingle_hashes(ids, SHINGLE)
    tiles = hashes[:, ::SHINGLE]
    if samples.records:
        whole = ids[:, SHINGLE - 1 :: SHINGLE] >= 0  # padding is on the right, so the last token decides
        marks, counts = np.unique(tiles[whole], return_counts=True)
        return marks[counts <= BOILERPLATE]
    # Windows may overlap: each place of the text counts once.
    starts = np.array([start for start, _ in samples.spans.spans])
    places = starts[:, None] + np.arange(hashes.shape[1])
    _, once = np.unique(places, return_index=True)
    values, counts = np.unique(hashes.ravel()[once], return_counts=True)
    return np.setdiff1d(tiles.ravel(), values[counts > BOILERPLATE])


def _decode(marks: str) -> Hashes:
    try:
        return np.frombuffer(base64.b64decode(marks, validate=True), dtype="<u8")
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(
            f"The training marks in {RECORD_NAME} are damaged: {error}. Write the checkpoint again."
        ) from error


def _is_markable(samples: TokenSamples) -> bool:
    return samples.ids.shape[1] >= SHINGLE


def unmarked_text_warnings(samples: Iterable[TokenSamples]) -> list[str]:
    """Return warnings about sequences that are too short for marks, one sentence for each length."""
    problem = f"shorter than {SHINGLE} and leave no marks: pyprune eval cannot tell that a test text was read here."
    samples = list(samples)
    lengths = sorted({s.ids.shape[1] for s in samples if not _is_markable(s)})
    warnings = [f"Sequences of {length} tokens are {problem}" for length in lengths]
    records = [s for s in samples if s.records and _is_markable(s)]
    return warnings + [f"All records are {problem}" for s in records if not bool((s.ids[:, SHINGLE - 1] >= 0).any())]


def marked_passages(marks: str, tokens: Tensor) -> int:
    """Count the marks that occur in a test stream.

    Args:
        marks: from :func:`training_marks`.
        tokens: token ids of the test text, int64 [N], from the same tokenizer.

    Raises:
        CheckpointError: the marks are damaged.
    """
    trained = _decode(marks)
    ids = tokens.reshape(-1).numpy()
    if len(trained) == 0 or len(ids) < SHINGLE:
        return 0
    return int(np.isin(trained, shingle_hashes(ids, SHINGLE)).sum())


def refuse_training_text(marks: str, passages: Tensor, source: str, model: str) -> None:
    """Refuse a test text that a checkpoint was trained on, and warn about one that shares a few passages with it.

    A few are passages that files of many kinds share, such as the header of a licence: at most :data:`BOILERPLATE`,
    and less than a tenth of the text.

    Args:
        marks: from :func:`training_marks`.
        passages: the test text as training reads it, int64 [N].
        source: its name.
        model: the trained model, in words.

    Raises:
        CheckpointError: the marks are damaged.
        DataError: passages of the text were training text; the message has their number.
    """
    shared = marked_passages(marks, passages)
    if not shared:
        return
    overlap = f"{shared} passages of {SHINGLE} tokens in it were used to train that checkpoint"
    if shared > BOILERPLATE or 10 * shared * SHINGLE >= passages.numel():
        raise DataError(
            f"{source!r} is not a test text for {model}: {overlap}. Evaluate on another text or another split."
        )
    warn(f"{source!r} shares text with {model}: {overlap}. So few may be passages of many files, such as a licence.")
