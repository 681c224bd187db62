"""The tokenizer of a checkpoint as llama.cpp reads it: byte-level BPE, or BPE made from a SentencePiece model.

Everything is read off the fast tokenizer. A tokenizer whose text llama.cpp would split differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyprune.errors import CheckpointError, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""GGUF's kinds of tokens."""
SPECIAL = ("bos", "eos", "unk", "pad")
"""Tokens that a file names by id."""
SPACE = "\u2581"
"""SentencePiece's character for a space."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str, digits: str) -> str:
    """Return a pattern that splits words where capital letters begin, with what may end a word, and a run of digits."""
    start, upper = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}|{digits}"
    return words + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


SPLITS = {
    (_WORDS + r"\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_WORDS + r"\p{N}{1,3}" + _REST, False): "dbrx",  # OLMo 2, GLM-4
    (_WORDS + r"\p{N}" + _REST, False): "qwen2",
    (_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), False): "gpt-4o",  # GPT-OSS, Llama 4
    (_cased("", r"\p{N}"), True): "tekken",  # Mistral Nemo, Ministral
}
"""(Pattern by which text is split, whether a whole word is taken without merging) -> llama.cpp's name for both."""
COMPOSES = "The tokenizer composes characters (NFC), which llama.cpp does not: decomposed text gets other tokens there."


@dataclass
class Vocabulary:
    """The tokenizer in the file.

    Attributes:
        model: gpt2 (byte-level BPE) or llama (SentencePiece).
        pre: llama.cpp's name of the pre-tokenizer.
        tokens: texts by id, one for every row of the embedding.
        types: kinds by id.
        merges: "left right", of byte-level BPE.
        scores: by id, of SentencePiece; a higher one is merged first.
        space_prefix: a space is put before the text (SentencePiece).
        composes: the tokenizer composes characters first (NFC), which llama.cpp does not.
        left_out: texts of added tokens that have no row, so that the model cannot read them.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False
    composes: bool = False
    left_out: list[str] = field(default_factory=list)


def add_tokenizer(writer: Any, tokenizer: Any, rows: int, ends: Sequence[int] = ()) -> list[str]:
    """Add the vocabulary, the special tokens and the chat template.

    Args:
        writer: a ``gguf.GGUFWriter``.
        tokenizer: of the checkpoint; None = it has none.
        rows: of the embedding; ids without a token become unused ones.
        ends: ids that end an answer (``generation_config.json``), with or without the tokenizer's end.

    Returns:
        Notes for the user, one sentence each.

    Raises:
        CheckpointError: there is none, or llama.cpp would split text differently; the message has the reason.
    """
    vocabulary, (before, after) = read_tokenizer(tokenizer, rows)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    else:
        writer.add_token_merges(vocabulary.merges)
    for kind in SPECIAL:
        number = getattr(tokenizer, f"{kind}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(before)
    writer.add_add_eos_token(after)
    notes = [f"Tokens without a row in the embedding are left out: {', '.join(vocabulary.left_out)}."]
    notes = notes * bool(vocabulary.left_out) + [COMPOSES] * vocabulary.composes
    notes += _add_ends(writer, [end for end in ends if end != tokenizer.eos_token_id and end < rows], vocabulary.tokens)
    return notes + _add_chat_template(writer, tokenizer.chat_template)


def read_tokenizer(tokenizer: Any, rows: int) -> tuple[Vocabulary, tuple[bool, bool]]:
    """Return what a GGUF file holds of a tokenizer: the vocabulary, and whether (bos, eos) are added to a text.

    Args:
        tokenizer: see :func:`add_tokenizer`.
        rows: see there.

    Raises:
        CheckpointError: see there.
    """
    if tokenizer is None:
        raise CheckpointError(
            "The checkpoint has no tokenizer, and a GGUF file holds one. Put its files into the folder."
        )
    return read_vocabulary(tokenizer, rows), _added_ids(tokenizer)


def _add_ends(writer: Any, ends: Sequence[int], tokens: Sequence[str]) -> list[str]:
    """Add up to two further ends, of a turn and of a message; llama.cpp stops at all of them."""
    for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False):
        add(end)
    if len(ends) <= 2:
        return []
    others = ", ".join(tokens[end] for end in ends[2:])
    return [f"A GGUF file names three ends of an answer; llama.cpp may go on after {others}."]


def _add_chat_template(writer: Any, template: Any) -> list[str]:
    if isinstance(template, Mapping):
        others = sorted(name for name in template if name != "default")
        note = [f"Only the default chat template is written, not {', '.join(others)}."] if others else []
        return note + _add_chat_template(writer, template.get("default"))
    if template:
        writer.add_chat_template(str(template))
    return []


def _added_ids(tokenizer: Any) -> tuple[bool, bool]:
    """Check whether the bos token is put before a text, and the eos token after it."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for before in (False, True):
        for after in (False, True):
            if full == [tokenizer.bos_token_id] * before + plain + [tokenizer.eos_token_id] * after:
                return before, after
    raise CheckpointError(
        f"The tokenizer puts other tokens around a text than bos and eos ({shown(full)} around {shown(plain)}); "
        "llama.cpp knows only these."
    )


def read_vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Read the vocabulary off a fast tokenizer.

    Args:
        tokenizer: of Transformers.
        rows: of the embedding.

    Raises:
        CheckpointError: it is of another kind than byte-level BPE or SentencePiece BPE.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise _refusal("it has no tokenizer.json (it is not a fast tokenizer)")
    data: dict[str, Any] = json.loads(core.to_str())
    model = data["model"]
    if model.get("type") != "BPE":
        raise _refusal(f"its model is {model.get('type')}, not BPE")
    left_out = _tokens_after_rows(tokenizer, data, rows)
    tokens, types = _tokens(data, rows)
    steps = list(_steps(data.get("pre_tokenizer"), "pretokenizers"))
    if any(step["type"] == "ByteLevel" for step in steps):
        pre = _pre_tokenizer(data, steps)
        merges = [" ".join(_pair(merge)) for merge in model["merges"]]
        if not merges:
            raise _refusal("it has no merges, without which llama.cpp does not load a file")
        composes = any(step["type"] == "NFC" for step in _steps(data.get("normalizer"), "normalizers"))
        return Vocabulary("gpt2", pre, tokens, types, merges=merges, composes=composes, left_out=left_out)
    prefix = _space_prefix(data, steps)
    scores = _scores(data, tokens)
    return Vocabulary("llama", "default", tokens, types, scores=scores, space_prefix=prefix, left_out=left_out)


def _refusal(reason: str) -> CheckpointError:
    return CheckpointError(
        f"The tokenizer cannot be written as GGUF: {reason}. Export the checkpoint as safetensors, or write the file "
        "with llama.cpp's own converter."
    )


def _tokens_after_rows(tokenizer: Any, data: Mapping[str, Any], rows: int) -> list[str]:
    """Return the texts of added tokens after the embedding's last row; Gemma 3 has one, for its models with images.

    Raises:
        CheckpointError: other ids are after it: of the vocabulary itself, or of bos, eos, unk and pad.
    """
    vocabulary: Mapping[str, int] = data["model"]["vocab"]
    ids = [*vocabulary.values(), *(getattr(tokenizer, f"{kind}_token_id", None) for kind in SPECIAL)]
    largest = max(number for number in ids if number is not None)
    if largest >= rows:
        raise _refusal(f"it has the id {largest}, but the embedding has {rows} rows")
    return [added["content"] for added in data.get("added_tokens", ()) if added["id"] >= rows]


def _tokens(data: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Texts and kinds by id, of those that have a row."""
    model = data["model"]
    vocabulary = dict(model["vocab"])
    kinds = {}
    made = {"".join(_pair(merge)) for merge in model.get("merges", ())}
    for added in data.get("added_tokens", ()):
        if added["id"] >= rows:
            continue
        vocabulary.setdefault(added["content"], added["id"])
        # llama.cpp writes a space for SPACE only in tokens of the vocabulary itself.
        merged = SPACE in added["content"] and added["content"] in made
        kinds[added["id"]] = CONTROL if added["special"] else NORMAL if merged else USER_DEFINED
    tokens = [f"[UNUSED{i}]" for i in range(rows)]
    types = [UNUSED] * rows
    bytes_too = bool(model.get("byte_fallback"))
    for text, number in vocabulary.items():
        is_byte = bytes_too and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        tokens[number], types[number] = text, kinds.get(number, BYTE if is_byte else NORMAL)
        if bytes_too and text == model.get("unk_token"):
            types[number] = UNKNOWN
    return tokens, types


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _steps(stage: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normaliser or pre-tokenizer."""
    if stage is None:
        return
    if stage["type"] == "Sequence":
        for step in stage[inner]:
            yield from _steps(step, inner)
    else:
        yield stage


def _pre_tokenizer(data: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level tokenizer."""
    normaliser = [step["type"] for step in _steps(data.get("normalizer"), "normalizers")]
    if normaliser not in ([], ["NFC"]):
        raise _refusal(f"it normalises text by {', '.join(normaliser)}")
    *first, last = steps
    name, whole = None, bool(data["model"].get("ignore_merges"))
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space") and len(first) <= 1:
        name = _split_name(first[0] if first else None, whole=whole, uses_regex=last.get("use_regex", True))
    if name is None:
        words = ", whole words without merging" if whole else ""
        raise _refusal(f"llama.cpp's name for its way of splitting text is not known ({shown(steps)}{words})")
    return name


def _split_name(step: Mapping[str, Any] | None, *, whole: bool, uses_regex: bool) -> str | None:
    """Return llama.cpp's name for a step in front of ByteLevel; ``uses_regex``: GPT-2's pattern follows."""
    if uses_regex and not whole:
        digits = step is not None and step["type"] == "Digits" and step["individual_digits"]
        return "gpt-2" if step is None else "smollm" if digits else None
    own = step is not None and step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return SPLITS.get((step["pattern"].get("Regex", ""), whole)) if step and own and not uses_regex else None


def _space_prefix(data: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> bool:
    """Check whether a SentencePiece tokenizer puts a space before a text."""
    if not data["model"].get("byte_fallback"):
        raise _refusal("it is neither byte-level nor does it fall back to bytes")
    prefix = False
    for step in _steps(data.get("normalizer"), "normalizers"):
        replaces = step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefix = True
        elif not replaces:
            raise _refusal(f"it normalises text by {step['type']}")
    for step in steps:
        if step["type"] == "Metaspace" and step["replacement"] == SPACE:
            prefix = prefix or step.get("prepend_scheme", "always") != "never"
        elif not (step["type"] == "Split" and step["pattern"] == {"String": " "}):
            raise _refusal(f"it splits text by {step['type']}")
    return prefix


def _scores(data: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores with which SentencePiece merges in the order of the merges: earlier tokens have higher scores.

    llama.cpp merges any two neighbours that form a token. So the merges must name all of these pairs, and the pairs of
    one token must follow each other.
    """
    order: dict[str, int] = {}
    last = None
    pairs = [_pair(merge) for merge in data["model"]["merges"]]
    for left, right in pairs:
        made = left + right
        if made in order and made != last:
            raise _refusal(f"the merges that make {shown(made)} do not follow each other, as SentencePiece's do")
        order.setdefault(made, len(order))
        last = made
    known, named = set(data["model"]["vocab"]), set(pairs)
    whole = {added["content"] for added in data.get("added_tokens", ())}  # found in the text before anything is merged
    for text in known - whole:
        parts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        if any(left in known and right in known and (left, right) not in named for left, right in parts):
            raise _refusal(f"its merges do not name all ways to make {shown(text)}, as SentencePiece's do")
    return [-float(order.get(token, len(order))) for token in tokens]
