"""What a checkpoint remembers of the text it was trained on, so that a test on that text is refused.

A mark is a 64-bit hash of :data:`pyprune.data.overlap.SHINGLE` tokens of a training window; the marks of a
window tile it. A test text that shares twice as many tokens in a row with a window holds one of its marks.
Of instruction records only whole marks count. What is found again and again in the training text (a prompt's header,
a licence) is no mark.
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
    ids = samples.as_read
    everywhere = shingle_hashes(ids, SHINGLE)
    found = everywhere[:, ::SHINGLE]
    if samples.records:
        whole = ids[:, SHINGLE - 1 :: SHINGLE] >= 0  # padding is on the right, so the last token decides
        found, counts = np.unique(found[whole], return_counts=True)
        return found[counts <= BOILERPLATE]
    # Windows may overlap: each place of the text counts once.
    starts = np.array([start for start, _ in samples.spans.spans])
    places = starts[:, None] + np.arange(everywhere.shape[1])
    _, once = np.unique(places, return_index=True)
    values, counts = np.unique(everywhere.ravel()[once], return_counts=True)
    return np.setdiff1d(found.ravel(), values[counts > BOILERPLATE])


def _read(marks: str) -> Hashes:
    try:
        return np.frombuffer(base64.b64decode(marks, validate=True), dtype="<u8")
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"The training marks in {RECORD_NAME} are damaged: {error}.") from error


def _long(samples: TokenSamples) -> bool:
    return samples.ids.shape[1] >= SHINGLE


def unguarded(samples: Iterable[TokenSamples]) -> list[str]:
    """What to warn of where sequences are too short to be marked, one sentence a length."""
    what = f"shorter than {SHINGLE} and leave no marks: pyprune eval cannot tell that a test text was read here."
    given = list(samples)
    lengths = sorted({s.ids.shape[1] for s in given if not _long(s)})
    found = [f"Sequences of {length} tokens are {what}" for length in lengths]
    records = [s for s in given if s.records and _long(s)]
    return found + [f"All records are {what}" for s in records if not bool((s.ids[:, SHINGLE - 1] >= 0).any())]


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


def refuse_training_text(marks: str, passages: Tensor, source: str, model: str) -> None:
    """Refuse a test text that a checkpoint was trained on, and warn of one that shares a few passages with it.

    A few are those that files of many kinds share, such as the header of a licence: at most :data:`BOILERPLATE`
    passages, and less than a tenth of the text.

    Args:
        marks: of :func:`training_marks`.
        passages: the test text as training reads it, int64 [N].
        source: its name.
        model: what was trained, in words.

    Raises:
        CheckpointError: the marks are damaged.
        DataError: how many passages of the text were training text.
    """
    shared = marked_passages(marks, passages)
    if not shared:
        return
    found = f"{shared} passages of {SHINGLE} tokens in it were used to train that checkpoint"
    if shared > BOILERPLATE or 10 * shared * SHINGLE >= passages.numel():
        raise DataError(
            f"{source!r} is not a test text for {model}: {found}. Evaluate on another text or another split."
        )
    warn(f"{source!r} shares text with {model}: {found}. So few may be what many files hold, such as a licence.")
