"""The tokenizer of a checkpoint: split as tokenizer.json says, written as the source has it."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pyprune import build_config, build_recovery, load_model, prune, recover
from pyprune.checkpoint.save import save_checkpoint
from pyprune.checkpoint.tokenizer import load_tokenizer
from pyprune.serving.export import export
from tests._support.llama_cpp import byte_level_tokenizer, sentencepiece_tokenizer
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text
from tests._support.tokenizer import tiny_tokenizer

SAMPLE = "Under the green hill, seven letters.\n\n    12345  and <b>more</b>"
CONFIG = "tokenizer_config.json"


def write_files(folder: Path, tokenizer: Any, **values: Any) -> Path:
    """tokenizer.json, and beside it a tokenizer_config.json with these values alone."""
    folder.mkdir(exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / CONFIG).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("made", [byte_level_tokenizer, sentencepiece_tokenizer, tiny_tokenizer])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "Unknown"])
def test_text_is_split_as_tokenizer_json_says(tmp_path: Path, model_type: str, made: Any, name: str) -> None:
    folder = write_files(tmp_path / "m", made(), tokenizer_class=name, bos_token="<s>", eos_token="</s>")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    own, loaded = Tokenizer.from_file(str(folder / "tokenizer.json")), load_tokenizer(str(folder))
    assert loaded(SAMPLE, add_special_tokens=False)["input_ids"] == own.encode(SAMPLE, add_special_tokens=False).ids
    ids = own.encode(SAMPLE, add_special_tokens=False).ids
    assert loaded(SAMPLE, add_special_tokens=False)["input_ids"] == ids
    assert loaded.decode(ids) == own.decode(ids)
    assert len(loaded) == own.get_vocab_size()  # nothing was added to the vocabulary
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")


def test_a_class_reads_it_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test above would pass without effect if Transformers itself followed the file."""
    folder = write_files(tmp_path / "m", byte_level_tokenizer(), tokenizer_class="LlamaTokenizerFast")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAMPLE).ids
    if AutoTokenizer.from_pretrained(folder)(SAMPLE)["input_ids"] == own:
        pytest.skip("this release of Transformers follows the file itself, as 5.24 does")
    for _ in range(2):
        load_tokenizer(str(folder))
    assert capsys.readouterr().err.count("splits text in another way than its tokenizer.json") == 1


def test_a_class_s_usual_tokens_are_taken_where_the_vocabulary_has_them(tmp_path: Path) -> None:
    """GPT-2's own tokenizer_config.json names no token."""
    with_end, without = tiny_tokenizer(), tiny_tokenizer()
    with_end.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    for name, tokenizer, end in (("with", with_end, "<|endoftext|>"), ("without", without, None)):
        folder = write_files(tmp_path / name, tokenizer, tokenizer_class="GPT2Tokenizer")
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        loaded = load_tokenizer(str(folder))
        assert loaded.eos_token == end
        assert len(loaded) == len(tokenizer)


def test_the_flags_of_its_configuration_hold(tmp_path: Path) -> None:
    values = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": 77}
    folder = write_files(tmp_path / "m", byte_level_tokenizer(add_bos=True), **values, chat_template="{{ messages }}")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    loaded = load_tokenizer(str(folder))
    assert loaded("a")["input_ids"][0] == loaded.bos_token_id
    assert (loaded.chat_template, loaded.model_max_length) == ("{{ messages }}", 77)


FILES = {
    "tokenizer.model": b"\x00not read\xff", "tokenizer.model.v3": b"3", "tekken.json": b"{}", "vocab.json": b"{}",
    "merges.txt": b"#version: 0.2\n", "qwen.tiktoken": b"YQ== 0\n", "added_tokens.json": b'{"<x>": 1}\n',
    "special_tokens_map.json": b'{ "bos_token": "<s>" }', "chat_template.jinja": b"{{ 1 }}\r\n",
    "chat_template.json": b'{"chat_template": "{{ 2 }}"}', "additional_chat_templates/tool.jinja": b"{{ 3 }}",
}  # fmt: skip


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A checkpoint with a mixture of formats, and flags of its own."""
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    values = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    write_files(folder, tiny_tokenizer(), **values, custom={"kept": [1]})
    (folder / "additional_chat_templates").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def assert_same_files(dense: Path, folder: Path) -> None:
    for name in (*FILES, "tokenizer.json", CONFIG):
        assert (folder / name).read_bytes() == (dense / name).read_bytes(), name


@pytest.mark.parametrize("method", ["last", "magnitude", "taylor"])
def test_every_road_writes_the_source_s_files(dense: Path, tmp_path: Path, method: str) -> None:
    text = str(write_text(tmp_path / "text.txt", words=300))
    options = {"method": method, "ratio": 0.34, "data.source": text, "data.samples": 2, "data.sequence_length": 32}
    prune(dense, build_config(options=options), out=tmp_path / "pruned")
    settings = ["recover.train.steps=1", "recover.train.batch_size=1", "data.samples=1", "data.sequence_length=32"]
    again = build_recovery(options={"data.source": str(write_text(tmp_path / "b.txt", seed=5))}, settings=settings)
    recover(tmp_path / "pruned", again, out=tmp_path / "recovered")
    export(tmp_path / "recovered", tmp_path / "exported", dtype="bfloat16")
    for name in ("pruned", "recovered", "exported"):
        assert_same_files(dense, tmp_path / name)
        load_model(tmp_path / name)  # nothing is there that the record does not list


def test_of_a_hub_id_too(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, commit = "somebody/model", "0123456789" * 4
    repository = tmp_path / "hub" / "models--somebody--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    dense.rename(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    prune(name, build_config(options={"method": "last", "ratio": 0.34}), out=tmp_path / "pruned")
    assert_same_files(repository / "snapshots" / commit, tmp_path / "pruned")


def test_a_tokenizer_that_was_changed_is_written_as_it_is_now(dense: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(dense)
    tokenizer.chat_template = "{{ messages }}"
    save_checkpoint(model, tokenizer, tmp_path / "out", plan=None, provenance={})
    assert load_tokenizer(str(tmp_path / "out")).chat_template == "{{ messages }}"


def test_what_is_written_says_nothing_of_the_run(tmp_path: Path) -> None:
    write_files(tmp_path / "m", tiny_tokenizer(), bos_token="<s>")
    made = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    save_checkpoint(tiny_model(), made, tmp_path / "out", plan=None, provenance={})
    values = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert not {"local_files_only", "is_local", "name_or_path"} & set(values)
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"  # which Transformers 4 has too


def test_a_tekken_vocabulary_alone_is_copied(tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    for path in folder.glob("token*"):
        path.unlink()
    vocabulary = [{"rank": i, "token_bytes": b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(["<unk>", "<s>", "</s>"])]
    config = {"pattern": r"\p{L}+|\s+", "num_vocab_tokens": 256, "default_vocab_size": 259,
              "default_num_special_tokens": 3, "version": "v7"}  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    prune(folder, build_config(options={"method": "last", "ratio": 0.34}), out=tmp_path / "pruned")
    assert (tmp_path / "pruned" / "tekken.json").read_bytes() == (folder / "tekken.json").read_bytes()
    assert load_tokenizer(str(folder))("ab")["input_ids"] == [97 + 3, 98 + 3]
