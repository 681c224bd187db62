"""Tokenizers and chat templates that came with a model and are damaged or hostile."""

from __future__ import annotations

import resource
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyprune.config.data import DataConfig
from pyprune.data import encoding, instructions
from pyprune.data.encoding import Ids, encode, encode_each, encode_first, join_ids, pieces, render
from pyprune.data.sampling import sample_sequences
from pyprune.data.stream import token_stream
from pyprune.errors import DataError
from pyprune.quality.perplexity import evaluation_text
from tests._support.llama_cpp import byte_level_tokenizer, sentencepiece_tokenizer
from tests._support.text import prose
from tests._support.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class PanicException(BaseException):
    """As pyo3's: no Exception."""


def text_file(folder: Path, text: str) -> str:
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


class Recorder:
    """The tiny tokenizer, writing down what it is given."""

    is_fast = True
    eos_token = "</s>"
    eos_token_id = 1
    bos_token_id = 0
    chat_template = None

    def __init__(self, add_bos: bool = True) -> None:
        self.tokenizer = tiny_tokenizer(add_bos=add_bos)
        self.calls: list[list[str]] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.calls.append(texts)
        return self.tokenizer(texts, **options)


# Pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc def", ["abc def"]),
        ("abcdefgh ijk", ["abcdefgh", " ijk"]),
        ("abcd\n\nef ghijk", ["abcd\n\n", "ef ghijk"]),
        ("a\n\nbcd\nef ghijk", ["a\n\nbcd\n", "ef ghijk"]),
        ("a" * 25, ["a" * 10, "a" * 10, "a" * 5]),
        (" " * 12, [" " * 9, " " * 3]),
    ],
)
def test_a_long_text_is_cut_at_a_break(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", 10)
    assert list(pieces(text)) == expected


@pytest.mark.parametrize("words", [1, 40, 400])
def test_pieces_give_the_ids_of_the_whole(words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n\n".join(prose(words, seed) for seed in range(3)) + "x" * 90
    source, config = text_file(tmp_path, text), DataConfig(source=text_file(tmp_path, text))
    whole = evaluation_text(Recorder(), source), token_stream(Recorder(), config)  # type: ignore[arg-type]
    monkeypatch.setattr(encoding, "PIECE", 32)
    monkeypatch.setattr(encoding, "TOGETHER", 32)
    evaluated, drawn = Recorder(), Recorder()
    ours = evaluation_text(evaluated, source), token_stream(drawn, config)  # type: ignore[arg-type]
    assert ours[0].token_ids.tolist() == whole[0].token_ids.tolist()
    assert ours[0].token_ids[0] == 0, "one bos in front"
    assert ours[1].sha256 == whole[1].sha256
    for recorder in (evaluated, drawn):
        assert max(sum(map(len, texts)) for texts in recorder.calls) <= 32
        assert len(recorder.calls) > 2


def test_short_texts_go_to_the_tokenizer_together_and_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    texts = [f"text {i}" for i in range(3000)]
    ids = list(encode(recorder, texts, "a"))
    assert list(map(len, recorder.calls)) == [1024, 1024, 952]
    assert TOKENIZER.decode(np.concatenate(ids).tolist()) == "".join(texts)
    monkeypatch.setattr(encoding, "TOGETHER", 500)
    assert list(encoding.groups([5, 500, 501, 499, 1, 1], int)) == [[5], [500], [501], [499, 1], [1]]
    lazy = Recorder()
    next(encode(lazy, texts, "a"))
    assert len(lazy.calls) == 1


def test_each_text_has_its_ids_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", 10)
    monkeypatch.setattr(encoding, "TOGETHER", 12)
    texts = ["short", "", "a text that is cut in pieces", "and", "two more"]
    assert [TOKENIZER.decode(ids.tolist()) for ids in encode_each(Recorder(), texts, "a")] == texts


def freed_parts(count: int) -> Iterator[Ids]:
    """Each part, made only when the one before is gone: its place is where the tokenizer's memory grows."""
    for n in range(count):
        part = np.array([n, n])
        before = weakref.ref(part)
        handed = [part]
        del part
        yield handed.pop()
        assert before() is None


def test_ids_are_laid_end_to_end_without_a_second_copy() -> None:
    parts = 64
    tracemalloc.start()
    try:
        ids = join_ids(np.full(100_000, n, dtype=np.int64) for n in range(parts))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(ids, np.repeat(np.arange(parts), 100_000))
    assert peak < 1.3 * ids.nbytes
    assert join_ids(freed_parts(3)).tolist() == [0, 0, 1, 1, 2, 2]
    made: list[int] = []
    few = join_ids((made.append(n) or np.array([n, n]) for n in range(9)), limit=3)  # type: ignore[func-returns-value]
    assert (few.tolist(), made) == ([0, 0, 1], [0, 1])
    assert join_ids([]).tolist() == []


def test_a_record_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"instruction": "a", "output": "%s"}\n' % ("b" * 500))
    monkeypatch.setattr(encoding, "PIECE", 300)
    monkeypatch.setattr(instructions, "PIECE", 300)
    config = DataConfig(source=str(path), samples=1, sequence_length=400, layout="instructions")
    with pytest.raises(DataError, match="characters as it is laid out; at most 300 are fed"):
        sample_sequences(TOKENIZER, config)


# Tokenizers


class Broken(Recorder):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, texts: list[str], **options: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def tokenise_by_all(tokenizer: Any, folder: Path) -> list[Callable[[], Any]]:
    source = text_file(folder, "some text")
    records = folder / "r.jsonl"
    records.write_text('{"instruction": "a", "output": "b"}\n')
    config = DataConfig(source=str(records), samples=1, sequence_length=400, layout="instructions")
    return [
        lambda: evaluation_text(tokenizer, source),
        lambda: token_stream(tokenizer, DataConfig(source=source)),
        lambda: token_stream(tokenizer, config),
    ]


@pytest.mark.parametrize(
    "error",
    [TypeError("x"), AttributeError(), IndexError(), ZeroDivisionError(), OverflowError(), PanicException("at x.rs")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_tokenizer_raises_names_the_text(error: BaseException, tmp_path: Path) -> None:
    for call in tokenise_by_all(Broken(error), tmp_path):
        with pytest.raises(DataError, match=rf"tokenizer failed on '.*(txt|jsonl)': {type(error).__name__}"):
            call()


def test_ctrl_c_in_a_tokenizer_stays_ctrl_c(tmp_path: Path) -> None:
    for call in tokenise_by_all(Broken(KeyboardInterrupt()), tmp_path):
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize(
    "row", [[-1], ["1"], [1.5], [True], [2**63], [2**70], [None], [[1]], 5, None], ids=lambda row: repr(row)[:12]
)
def test_what_is_no_token_id_is_refused(row: Any, tmp_path: Path) -> None:
    for call in tokenise_by_all(Broken({"input_ids": [row], "offset_mapping": [[(0, 1)]]}), tmp_path):
        with pytest.raises(DataError, match="gave no token ids for") as caught:
            call()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("answer", [None, {}, {"input_ids": []}, {"input_ids": 3}, {"input_ids": [[1], [1]]}])
def test_answers_of_another_shape_are_refused(answer: Any, tmp_path: Path) -> None:
    for call in tokenise_by_all(Broken(answer), tmp_path):
        with pytest.raises(DataError, match="gave no token ids for"):
            call()


# Chat templates

HOSTILE = {
    "error": "{{ 1 / 0 }}",
    "type": "{{ messages + 1 }}",
    "raised": "{{ raise_exception('roles must\nalternate') }}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at.all }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "no text": "{% set x = 1 %}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "memory": "{{ 'x' * 10 ** 10 }}",
    "format": "{{ '%9999999999d' % 1 }}",
    "doubling": "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TEMPLATE_SECONDS", 0.4)
    monkeypatch.setattr(encoding, "TEMPLATE_BYTES", 256 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HOSTILE[name]
    records = tmp_path / "r.jsonl"
    records.write_text('{"instruction": "a", "output": "b"}\n')
    for options in ({"source": text_file(tmp_path, "a b")}, {"source": str(records), "layout": "instructions"}):
        with pytest.raises(DataError, match=r"chat template (failed on|made '' of).*Turn chat_template off") as caught:
            token_stream(tokenizer, DataConfig(chat_template=True, **options))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("answer", [None, 3, ["a"], b"a", ""])
def test_a_template_that_gives_no_text_is_refused(answer: Any) -> None:
    class Odd:
        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return answer

    with pytest.raises(DataError, match=r"template made .* of a document of 'a'"):
        render(Odd(), [("user", "b")], "a")


def test_a_long_document_gets_memory_and_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TEMPLATE_BYTES", 0)
    tokenizer = tiny_tokenizer(chat_template=True)
    text = "x" * 50_000_000
    assert render(tokenizer, [("user", text)], "a") == f"<|user|>{text}<|end|>"


@pytest.mark.parametrize("made", [tiny_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize(
    "text", [prose(20_000), "the and on " * 9000, "\u4e16\u754c" * 20_000, "a" * 50_000, "the", ""]
)
@pytest.mark.parametrize("limit", [1, 700, 5000, None])
def test_the_first_tokens_are_those_of_the_whole_text(made: Callable[[], Any], text: str, limit: int | None) -> None:
    tokenizer = made()
    whole = join_ids(encode(tokenizer, [text], "text", special=True))
    assert (encode_first(tokenizer, text, "text", limit, special=True) == whole[:limit]).all()


def test_a_long_line_is_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    tokenizer: Any = Recorder()
    path = text_file(tmp_path, prose(400_000))
    text = evaluation_text(tokenizer, path, max_tokens=2000)
    assert len(text.token_ids) == 2000
    assert sum(len(given) for call in tokenizer.calls for given in call) < 50_000 < len(Path(path).read_text())
