"""Text to token ids by a model's own tokenizer, with bounded input and a bounded chat template.

Tokenizer and template came with the model, so they may be damaged or hostile; each of their failures is a
:class:`DataError` that names the text.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pyprune.errors import DataError, shown
from pyprune.runtime.limits import bounded_call, foreign_errors
from pyprune.runtime.progress import warn

Ids = npt.NDArray[np.int64]
T = TypeVar("T")

PIECE = 4_000_000
"""Characters of one text that a tokenizer gets at once: a fast one takes up to 200 bytes for each of them."""
TOGETHER = 4_000_000
"""Characters of several texts that it gets at once."""
TEXTS_AT_ONCE = 1024

TEMPLATE_SECONDS = 5.0
TEMPLATE_BYTES = 512 << 20
"""Limits of rendering one document; a long document gets more, in proportion."""
_BYTES_A_SECOND = 10e6
_COPIES = 16

_OWN_TOKENIZER = "Its files may be damaged; use the tokenizer that came with the model."
_OTHER_TEMPLATE = "Turn chat_template off, or use a model whose template works."

_SPARE_TOKENS, _CHARACTERS_A_TOKEN = 256, 8
"""Sizes of the first part of a text that is tokenised for its first tokens."""
_SEPARATORS = (("\n\n", 2), ("\n", 1), (" ", 0))
"""Marks at which a long text is best cut, and their characters before the cut: a space begins the next token."""


def bos_id(tokenizer: Any, asked: bool | None, *, usual: bool = False) -> int | None:
    """Return the token that every window begins with, or None.

    Args:
        tokenizer: of the model.
        asked: the option; None = the habit of the model's family.
        usual: the family's habit (``Family.begins_with_bos``).

    Raises:
        DataError: it is asked for, and the tokenizer has no bos token.
    """
    if not (usual if asked is None else asked):
        return None
    number: int | None = tokenizer.bos_token_id
    if number is None and asked:
        raise DataError("bos is on, but the tokenizer has no bos token. Turn the option off, or set its bos_token.")
    if number is None:
        warn("The model's family expects a bos token before every text, but the tokenizer has none: none is added.")
    return number


def encode(tokenizer: Any, texts: Iterable[str], source: str, *, special: bool = False) -> Iterator[Ids]:
    """Tokenise texts, each alone; one that is longer than :data:`PIECE` is cut at breaks.

    Args:
        tokenizer: of the model.
        texts: taken one after the other, no further than needed.
        source: the name in errors.
        special: let the tokenizer add its special tokens (a bos), before the first piece of a text only.

    Yields:
        int64 [n]: laid end to end, the ids of the texts laid end to end.

    Raises:
        DataError: the tokenizer fails, or does not return token ids.
    """
    for group in groups(texts, len):
        if len(group[0]) > PIECE:  # and alone
            for number, piece in enumerate(pieces(group[0])):
                yield from _rows(tokenizer, [piece], source, special=special and number == 0)
                _return_freed_memory()
        else:
            yield from _rows(tokenizer, group, source, special=special)


def encode_first(tokenizer: Any, text: str, source: str, limit: int | None, *, special: bool = False) -> Ids:
    """Return the first tokens of a text, and tokenise only as much of it as needed.

    Args:
        tokenizer, source, special: as for :func:`encode`.
        text: any.
        limit: most tokens; None = all.

    Returns:
        int64 [n], n at most ``limit``.

    Raises:
        DataError: as :func:`encode`.
    """
    length = len(text) if limit is None else (max(limit, 1) + _SPARE_TOKENS) * _CHARACTERS_A_TOKEN
    while True:
        ids = join_ids(encode(tokenizer, [text[:length]], source, special=special))
        # The last tokens of a part change with the text after it.
        if length >= len(text) or (limit is not None and len(ids) >= limit + _SPARE_TOKENS):
            return ids[:limit]
        length *= 2


def encode_each(tokenizer: Any, texts: Iterable[str], source: str) -> Iterator[Ids]:
    """Tokenise each text alone, without special tokens; see :func:`encode`.

    Yields:
        int64 [n] for each text.

    Raises:
        DataError: the tokenizer fails, or does not return token ids.
    """
    for group in groups(texts, len):
        if len(group[0]) > PIECE:
            yield join_ids(encode(tokenizer, group, source))
        else:
            yield from _rows(tokenizer, group, source, special=False)


def join_ids(parts: Iterable[Ids], limit: int | None = None) -> Ids:
    """Lay ids end to end while they are made, so that they are never in memory twice.

    Args:
        parts: int64 [n] each; only as many as needed are taken.
        limit: most ids; None = all.

    Returns:
        int64 [N].
    """
    data = bytearray()
    for ids in parts:
        data += np.ascontiguousarray(ids).data
        del ids  # or it would keep memory occupied that the tokenizer frees during the next part
        if limit is not None and len(data) >= limit * 8:
            break
    return np.frombuffer(data, dtype=np.int64)[:limit]


def _return_freed_memory() -> None:
    """Return memory that the tokenizer freed to the system: glibc keeps about 150 MB of small blocks for each piece."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def groups(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Group texts (or objects with one) for one call of a tokenizer; a long one is alone."""
    group: list[T] = []
    size = 0
    for item in items:
        if group and (size + length(item) > TOGETHER or len(group) == TEXTS_AT_ONCE):
            yield group
            group, size = [], 0
        group.append(item)
        size += length(item)
    if group:
        yield group


def pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most :data:`PIECE` characters, at a paragraph, line or space if there is one."""
    start = 0
    while len(text) - start > PIECE:
        end = _break(text, start + PIECE // 2, start + PIECE)
        yield text[start:end]
        start = end
    yield text[start:]


def _break(text: str, lowest: int, end: int) -> int:
    for mark, kept in _SEPARATORS:
        position = text.rfind(mark, lowest, end)
        if position >= 0:
            return position + kept
    return end


def _rows(tokenizer: Any, texts: list[str], source: str, *, special: bool) -> list[Ids]:
    encoded = call(tokenizer, texts, source, add_special_tokens=special, return_attention_mask=False)
    return token_ids(encoded, len(texts), source)


def call(tokenizer: Any, texts: str | list[str], source: str, **options: Any) -> Any:
    """Call a tokenizer; its errors become a :class:`DataError` that names ``source``."""
    with foreign_errors(DataError, f"The tokenizer failed on {source!r}", _OWN_TOKENIZER):
        return tokenizer(texts, verbose=False, **options)


def token_ids(encoded: Any, count: int, source: str) -> list[Ids]:
    """Return the ids that a tokenizer gave for ``count`` texts, int64 [n] each.

    Raises:
        DataError: they are not lists of whole numbers from 0.
    """
    with foreign_errors(DataError, f"The tokenizer gave no token ids for {source!r}", _OWN_TOKENIZER):
        rows = [np.asarray(row) for row in encoded["input_ids"]]
    bad = next((row for row in rows if not _are_ids(row)), None)
    if bad is not None or len(rows) != count:
        seen = f"for {count} texts {len(rows)} rows" if bad is None else shown(bad.ravel()[:8].tolist())
        raise DataError(
            f"The tokenizer gave no token ids for {source!r}, but {seen}; ids are whole numbers from 0. "
            f"{_OWN_TOKENIZER}"
        )
    return [row.astype(np.int64, copy=False) for row in rows]


def _are_ids(row: npt.NDArray[Any]) -> bool:
    return row.ndim == 1 and (not len(row) or (row.dtype.kind == "i" and bool(row.min() >= 0)))


def check_chat_template(tokenizer: Any, source: str) -> None:
    """Raise :class:`DataError` when a tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"chat_template is on for {source!r}, but the tokenizer has no chat template. "
            "Turn the option off, or use a model whose tokenizer has one."
        )


def render(
    tokenizer: Any, turns: Iterable[tuple[str, str]], source: str, *, add_generation_prompt: bool = False
) -> str:
    """Lay one document out by the tokenizer's chat template.

    Args:
        turns: (role, content) pairs.
        source: the name in errors.
        add_generation_prompt: end with the mark before an answer.

    Raises:
        DataError: the template fails, gives no text, or takes more time or memory than any real one.
    """
    messages = [{"role": role, "content": content} for role, content in turns]
    size = sum(sys.getsizeof(message["content"]) for message in messages)
    with foreign_errors(DataError, f"The tokenizer's chat template failed on {source!r}", _OTHER_TEMPLATE):
        text = bounded_call(
            lambda: tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            ),
            seconds=round(TEMPLATE_SECONDS + size / _BYTES_A_SECOND, 1),
            extra_bytes=TEMPLATE_BYTES + _COPIES * size,
        )
    if not isinstance(text, str) or not text:
        raise DataError(
            f"The tokenizer's chat template made {shown(text)} of a document of {source!r}, which is no text. "
            f"{_OTHER_TEMPLATE}"
        )
    return text
