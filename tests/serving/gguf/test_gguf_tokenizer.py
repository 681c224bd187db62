"""Tokenizers in GGUF files: what a real llama.cpp makes of text, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from pyprune.checkpoint.save import save_checkpoint
from pyprune.errors import CheckpointError
from pyprune.serving.gguf.tokenizer import NORMAL, SPACE, SPLITS
from pyprune.serving.gguf.write import export_gguf
from tests._support.llama_cpp import (
    Case,
    LlamaCpp,
    byte_level_tokenizer,
    identity,
    sentencepiece_tokenizer,
    values_of,
)
from tests._support.models import tiny_model

pytest.importorskip("gguf")

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LLAMA = Case("llama", identity, "llama")
TEXTS = ("the thing in the garden", "  two spaces,\nand a line 2026!", "[tool]ing and </s>", "a")


def test_byte_level_tokens_and_the_chat_template(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(add_bos=True, chat_template=CHAT)
    _, report = LLAMA.write(tmp_path, tokenizer=tokenizer)
    assert values_of(report)["tokenizer.ggml.pre"] == "gpt-2"
    assert values_of(report)["tokenizer.chat_template"] == CHAT
    with LlamaCpp(report.path) as server:
        for text in TEXTS:
            assert server.tokenize(text, add_special=True) == tokenizer(text)["input_ids"]
        messages = [{"role": "user", "content": "the garden"}]
        assert server.post("/apply-template", messages=messages)["prompt"] == "the garden"


@pytest.mark.parametrize("ends", [[1, 5], [6, 1, 5], [1, 5, 6, 7], 5])
def test_llama_cpp_stops_at_every_end_of_generation_config(ends: list[int] | int, tmp_path: Path) -> None:
    """None has a name that llama.cpp knows; a file names three of them, and a note the others."""
    LLAMA.write(tmp_path)
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    report = export_gguf(tmp_path / "model", tmp_path / "again.gguf", quantise="f32")
    others = [end for end in ([ends] if isinstance(ends, int) else ends) if end != 1]
    keys = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    assert [values_of(report)[key] for key in keys if key in values_of(report)] == others[:2]
    assert any("llama.cpp may go on after" in note for note in report.notes) is (len(others) > 2)
    with LlamaCpp(report.path) as server:
        for end in (1, *others[:2]):
            answer = server.post("/completion", prompt=[20, 21], n_predict=6, logit_bias=[[end, 1000]])
            assert answer["stop_type"] == "eos", end


def split(pattern: str) -> dict[str, Any]:
    """What splits text by a pattern, then writes bytes as characters."""
    first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [first, {**BYTES, "use_regex": False}]}


CASED = ("theThing inThe", "DON'T in't", "a.\n/b !/\n", "THE'D and", "and")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}
KINDS = {
    "gpt-2": (BYTES, False),
    "smollm": (DIGITS, False),
    **{name: (split(pattern), whole) for (pattern, whole), name in SPLITS.items()},
}


@pytest.mark.parametrize("name", KINDS)
def test_text_is_split_as_llama_cpp_does_under_that_name(name: str, tmp_path: Path) -> None:
    splitter, whole = KINDS[name]
    tokenizer = changed(byte_level_tokenizer(), model={"ignore_merges": whole}, pre_tokenizer=splitter)
    _, report = LLAMA.write(tmp_path, tokenizer=tokenizer)
    assert values_of(report)["tokenizer.ggml.pre"] == name
    with LlamaCpp(report.path) as server:
        for text in (*TEXTS, "12345 1234", "don't DON'T!\n\n  the  12 in", "a!\nb  \n c", *CASED):
            assert server.tokenize(text, add_special=True) == tokenizer(text)["input_ids"], text


def test_characters_that_llama_cpp_does_not_compose_are_said(tmp_path: Path) -> None:
    """Decomposed accents: the note must go if llama.cpp learns it."""
    tokenizer = changed(byte_level_tokenizer(), normalizer={"type": "NFC"})
    _, report = LLAMA.write(tmp_path, tokenizer=tokenizer)
    assert any("composes characters (NFC), which llama.cpp does not" in note for note in report.notes)
    with LlamaCpp(report.path) as server:
        assert server.tokenize("caf\u00e9", add_special=True) == tokenizer("caf\u00e9")["input_ids"]
        assert server.tokenize("cafe\u0301", add_special=True) != tokenizer("cafe\u0301")["input_ids"]


def test_the_kinds_of_splitting_differ() -> None:
    text = "and 1234 12345 DON'T!\n theThe! in't .\n/ and and"
    found = {
        name: tuple(
            changed(byte_level_tokenizer(), model={"ignore_merges": whole}, pre_tokenizer=kind)(text)["input_ids"]
        )
        for name, (kind, whole) in KINDS.items()
    }
    assert len(set(found.values())) == len(KINDS)


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    case = Case("llama", identity, "llama", values={"vocab_size": 300})
    _, report = case.write(tmp_path, tokenizer=sentencepiece_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with LlamaCpp(report.path) as server:
        for text in ("the thing in the garden", "and then the other ant ran on", "caf\u00e9 \u732b", "a"):
            assert server.tokenize(text, add_special=True) == tokenizer(text)["input_ids"]


def test_added_tokens_of_gemmas_kind(tmp_path: Path) -> None:
    """One of a model with images has no row here; runs of spaces stand among the added tokens too."""
    tokenizer = sentencepiece_tokenizer()
    rows, the = len(tokenizer), tokenizer.convert_tokens_to_ids(f"{SPACE}the")
    tokenizer.add_tokens([AddedToken(f"{SPACE}the", normalized=False), AddedToken("<image>", special=True)])
    assert tokenizer.convert_tokens_to_ids("<image>") == rows
    _, report = Case("llama", identity, "llama", values={"vocab_size": rows}).write(tmp_path, tokenizer=tokenizer)
    assert "Tokens without a row in the embedding are left out: <image>." in report.notes
    assert values_of(report)["tokenizer.ggml.token_type"][the] == NORMAL
    with LlamaCpp(report.path) as server:
        text = "the thing in the garden"
        assert server.tokenize(text, add_special=True) == tokenizer(text)["input_ids"]
        assert server.post("/detokenize", tokens=[the, the])["content"].strip() == "the the"
    too_few = Case("llama", identity, "llama", values={"vocab_size": rows - 1})
    with pytest.raises(CheckpointError, match=f"it has the id {rows - 1}, but the embedding has {rows - 1} rows"):
        too_few.write(tmp_path / "fewer", tokenizer=tokenizer)


def changed(tokenizer: Any, **parts: Any) -> Any:
    """The tokenizer with other parts of its description."""
    from tokenizers import Tokenizer

    data = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, part in parts.items():
        data[name] = {**data[name], **part} if name == "model" else part
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(data))
    return tokenizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: sentencepiece_tokenizer(lacking=("t", "he")), "do not name all ways to make 'the'"),
        (lambda: changed(byte_level_tokenizer(), model={"merges": []}), "no merges"),
        (lambda: changed(byte_level_tokenizer(), model={"ignore_merges": True}), "whole words without merging"),
        (lambda: changed(byte_level_tokenizer(), normalizer={"type": "Lowercase"}), "normalises text by Lowercase"),
        (
            lambda: changed(byte_level_tokenizer(), pre_tokenizer={"type": "Whitespace"}),
            "neither byte-level nor",
        ),
    ],
)
def test_tokenizers_that_llama_cpp_would_read_in_another_way(
    make: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    case = Case("llama", identity, "llama", values={"vocab_size": 300})
    with pytest.raises(CheckpointError, match=reason):
        case.write(tmp_path, tokenizer=make())


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("llama"), None, tmp_path / "model", plan=None, provenance={})
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        export_gguf(tmp_path / "model", tmp_path / "x.gguf")
