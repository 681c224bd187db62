"""Instruction records -> token ids, with the position of the first token of the response.

The layout is Stanford Alpaca's prompt (with or without an input; LLM-Pruner recovers with it), or the tokenizer's own
chat template. The whole text is tokenised at once, as in generation, and a token counts as response when it holds at
least one character of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyprune.data.documents import Corpus, Document
from pyprune.data.encoding import PIECE, Ids, call, groups, render, token_ids
from pyprune.errors import DataError


@dataclass(frozen=True, eq=False)
class Example:
    """One instruction record as it is fed.

    Attributes:
        ids: int64 [n], n at most the cutoff.
        response: position of the first token of the response; all from there on, with the end-of-sequence token,
            are predicted.
    """

    ids: Ids
    response: int


def encode_examples(
    tokenizer: Any, corpus: Corpus, *, cutoff: int, chat_template: bool = False, bos: int | None = None
) -> Iterator[Example]:
    """Tokenise every record with something left to predict.

    An example is the beginning-of-sequence token (if the tokenizer uses one), prompt, response, end-of-sequence
    token. A longer one than ``cutoff`` is cut on the right, as LLM-Pruner does; records whose prompt alone fills it,
    or whose response is blank, are left out.

    Args:
        tokenizer: of the model.
        corpus: instruction records.
        cutoff: most tokens in an example.
        chat_template: lay the records out by the tokenizer's chat template, which brings its own marks.
        bos: id of a token that every example begins with, once; None = that of the tokenizer or its template.

    Raises:
        DataError: the corpus holds no instruction records, or one of many millions of characters; the tokenizer fails
            or has no end-of-sequence token, or its chat template fails or does not begin an answer with its own prompt.
    """
    if not corpus.instructions:
        raise DataError(
            f"{corpus.name!r} holds no instruction records (fields instruction, input, output); use layout 'stream' "
            "for plain text."
        )
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token, which ends a response; set its eos_token.")
    name = corpus.name
    usual = () if chat_template else _bos_prefix(tokenizer, name)
    answered = (d for d in corpus.documents if d.turns[-1][1].strip())
    laid_out = (_chat(tokenizer, d, name) if chat_template else (d.prompt, d.text) for d in answered)
    for ids, response in _encode(tokenizer, laid_out, name):
        beginning = usual if bos is None else () if ids[:1].tolist() == [bos] else (bos,)
        example = _finish([*beginning, *ids.tolist()], len(beginning) + response, tokenizer.eos_token_id, cutoff)
        if example.response < len(example.ids):
            yield example


def _chat(tokenizer: Any, document: Document, name: str) -> tuple[str, str]:
    """Return the template's text up to the answer, and with it."""
    prompt = render(tokenizer, document.turns[:-1], name, add_generation_prompt=True)
    text = render(tokenizer, document.turns, name)
    if not text.startswith(prompt):
        raise DataError(
            "The tokenizer's chat template writes an answered question differently from an open one, so the answer "
            "cannot be told from the prompt. Turn chat_template off to use Alpaca's layout."
        )
    return prompt, text


def _bos_prefix(tokenizer: Any, name: str) -> tuple[int, ...]:
    """Return the beginning-of-sequence token, if this tokenizer adds one before a text."""
    special = _ids(tokenizer, [""], name, special=True)[0]
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and special[:1].tolist() == [bos] else ()


def _encode(tokenizer: Any, laid_out: Iterable[tuple[str, str]], name: str) -> Iterator[tuple[Ids, int]]:
    """Yield the ids of each text, and the position of the first token that reaches beyond its prompt."""
    for pairs in groups(laid_out, lambda pair: len(pair[1])):
        prompts, texts = ([pair[side] for pair in pairs] for side in (0, 1))
        if len(texts[0]) > PIECE:
            raise DataError(
                f"A record of {name!r} has {len(texts[0]):,} characters as it is laid out; at most {PIECE:,} are fed. "
                "Shorten it."
            )
        if tokenizer.is_fast:
            yield from _encode_by_offsets(tokenizer, prompts, texts, name)
        else:  # no character positions: count the prompt's own tokens, as Alpaca does
            ids, before = (_ids(tokenizer, rows, name) for rows in (texts, prompts))
            yield from zip(ids, map(len, before), strict=True)


def _encode_by_offsets(tokenizer: Any, prompts: list[str], texts: list[str], name: str) -> Iterator[tuple[Ids, int]]:
    encoded = call(tokenizer, texts, name, add_special_tokens=False, return_offsets_mapping=True)
    every = token_ids(encoded, len(texts), name)
    for prompt, ids, offsets in zip(prompts, every, encoded["offset_mapping"], strict=True):
        yield ids, next((i for i, (_, end) in enumerate(offsets) if end > len(prompt)), len(ids))


def _ids(tokenizer: Any, texts: list[str], name: str, *, special: bool = False) -> list[Ids]:
    return token_ids(call(tokenizer, texts, name, add_special_tokens=special), len(texts), name)


def _finish(ids: list[int], response: int, eos: int, cutoff: int) -> Example:
    """End with one end-of-sequence token (a chat template may have written it, and more after it); cut off."""
    ended = next((i for i in range(len(ids) - 1, response - 1, -1) if ids[i] == eos), None)
    whole = [*ids, eos] if ended is None else ids[: ended + 1]
    return Example(np.asarray(whole[:cutoff], dtype=np.int64), response)
