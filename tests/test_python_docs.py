"""The examples of docs/reference/python.md run, in order, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pyprune
from pyprune.checkpoint.load import load_model
from tests._support.llama_cpp import byte_level_tokenizer
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.text import write_model, write_text

DOCUMENT = (REPO / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
VERBS = (
    "prune",
    "prune_",
    "recover",
    "recover_",
    "evaluate",
    "export",
    "export_gguf",
    "bench",
    "build_config",
    "PrunePlan",
)


def test_every_verb_has_an_example() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL))
    assert [verb for verb in VERBS if not re.search(rf"\b{verb}\b[(.]", code)] == []


def test_every_public_function_is_in_the_table() -> None:
    functions = [name for name in pyprune._PUBLIC if name.islower() and not name.startswith("evaluate_")]
    assert [name for name in functions if f"`{name}`" not in DOCUMENT] == []


@pytest.mark.second
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    first, *blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    assert first.startswith("model, text, test = ")
    monkeypatch.chdir(tmp_path)
    write_model(tiny_model("llama"), tmp_path / "dense")
    byte_level_tokenizer().save_pretrained(tmp_path / "dense")  # llama.cpp wants a vocabulary with merges
    write_text(tmp_path / "text.txt", words=5000)
    write_text(tmp_path / "test.txt", words=400, seed=1)
    names = {"model": "dense", "text": "text.txt", "test": "test.txt"}
    for block in blocks:
        exec(compile(block, "docs/reference/python.md", "exec"), names)
    dense, pruned, edited = (load_model(folder)[0] for folder in ("dense", "pruned", "edited"))
    assert pruned.num_parameters() < dense.num_parameters()
    assert edited.config.num_hidden_layers == dense.config.num_hidden_layers - 1
    assert (tmp_path / "served" / "pruning.json").exists()
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert "layers" in capsys.readouterr().out
