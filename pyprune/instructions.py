"""Instruction records -> token ids with a known place where the response begins.

The layout is Stanford Alpaca's prompt (with or without an input; the same one that LLM-Pruner recovers with), or the
tokenizer's own chat template. The whole text is tokenised at once, as it is when generating, and a token counts as
response when it holds at least one character of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyprune.errors import DataError
from pyprune.sources import Corpus, Document

Ids = npt.NDArray[np.int64]

_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Example:
    """One instruction record as it is fed.

    Attributes:
        ids: int64 [n], n at most the cutoff.
        response: position of the first token of the response; everything from there on, the end-of-sequence token
            included, is to be predicted.
    """

    ids: Ids
    response: int


def encode_examples(tokenizer: Any, corpus: Corpus, *, cutoff: int, chat_template: bool = False) -> Iterator[Example]:
    """Tokenise every record of which something is left to predict.

    An example is the beginning-of-sequence token (where the tokenizer uses one), prompt, response, end-of-sequence
    token. What is longer than ``cutoff`` is cut on the right, as LLM-Pruner does; records whose prompt alone fills it,
    or whose response is blank, are left out.

    Args:
        tokenizer: of the model.
        corpus: instruction records.
        cutoff: most tokens in an example.
        chat_template: lay the records out by the tokenizer's chat template, which brings its own marks.

    Raises:
        DataError: the corpus holds no instruction records, the tokenizer has no end-of-sequence token, or its chat
            template does not begin an answer with its own prompt.
    """
    if not corpus.instructions:
        raise DataError(
            f"{corpus.name!r} holds no instruction records (fields instruction, input, output); use layout 'stream' "
            "for plain text."
        )
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token, which ends a response; set its eos_token.")
    lay_out = _chat if chat_template else _alpaca
    beginning = () if chat_template else _beginning(tokenizer)
    answered = [d for d in corpus.documents if d.turns[-1][1].strip()]
    for at in range(0, len(answered), _AT_ONCE):
        pairs = [lay_out(tokenizer, document) for document in answered[at : at + _AT_ONCE]]
        for ids, response in _encode(tokenizer, pairs):
            example = _finish([*beginning, *ids], len(beginning) + response, tokenizer.eos_token_id, cutoff)
            if example.response < len(example.ids):
                yield example


def _alpaca(tokenizer: Any, document: Document) -> tuple[str, str]:
    return document.prompt, document.text


def _chat(tokenizer: Any, document: Document) -> tuple[str, str]:
    """Return the template's text up to the answer, and with it."""
    messages = [{"role": role, "content": content} for role, content in document.turns]
    prompt = str(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    if not text.startswith(prompt):
        raise DataError(
            "The tokenizer's chat template writes an answered question differently from an open one, so the answer "
            "cannot be told from the prompt. Turn chat_template off to use Alpaca's layout."
        )
    return prompt, text


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    """The beginning-of-sequence token, if this tokenizer puts one before a text."""
    special = tokenizer("", add_special_tokens=True)["input_ids"]
    bos = tokenizer.bos_token_id
    return (bos,) if bos is not None and list(special[:1]) == [bos] else ()


def _encode(tokenizer: Any, pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[list[int], int]]:
    """Ids of each text, and the position of the first token that reaches beyond its prompt."""
    prompts, texts = zip(*pairs, strict=True)
    if not tokenizer.is_fast:  # no character positions: count the prompt's own tokens, as Alpaca does
        plain = [tokenizer(list(t), add_special_tokens=False, verbose=False)["input_ids"] for t in (texts, prompts)]
        yield from ((ids, len(prompt)) for ids, prompt in zip(*plain, strict=True))
        return
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for prompt, ids, offsets in zip(prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield ids, next((i for i, (_, end) in enumerate(offsets) if end > len(prompt)), len(ids))


def _finish(ids: list[int], response: int, eos: int, cutoff: int) -> Example:
    """End with one end-of-sequence token (a chat template may have written it, and more behind it); cut off."""
    ended = next((i for i in range(len(ids) - 1, response - 1, -1) if ids[i] == eos), None)
    whole = [*ids, eos] if ended is None else ids[: ended + 1]
    return Example(np.asarray(whole[:cutoff], dtype=np.int64), response)
