"""formats.py: every format is written, judged and timed in one run of a real llama.cpp; the table shows it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.serving import formats
from pyprune.plan import PrunePlan
from tests._support.llama_cpp import Case, identity
from tests._support.text import write_text

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")


def fewer(plan: PrunePlan) -> PrunePlan:
    """One layer less."""
    return plan.drop_layers([1])


def test_a_run_and_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    Case("llama", identity, "llama", values=sizes).write(tmp_path / "dense")
    Case("llama", fewer, "llama", values=sizes).write(tmp_path / "pruned")
    text = write_text(tmp_path / "text.txt", words=400)
    monkeypatch.setattr("bench._texts.write_demo_mixture", lambda _: SimpleNamespace(tests={"prose": text}))
    monkeypatch.setitem(formats.TOKENS, "llamacpp", 256)
    given = ["--engine", "llamacpp", "--model", str(tmp_path / "dense" / "model")]
    given += ["--pruned", str(tmp_path / "pruned" / "model"), "--protocol", "ppl-128", "--batch-size", "2"]
    given += ["--new-tokens", "3", "--prompt-tokens", "20", "--repeats", "2", "--jsonl", str(tmp_path / "rows.jsonl")]
    assert formats.main(given) == 0
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    names = list(formats.FORMATS["llamacpp"])
    assert set(row["models"]) == set(names)
    sizes_of = row["sizes"]
    assert sizes_of["pruned, q4_0"] < sizes_of["pruned, q8_0"] < sizes_of["pruned, f16"]
    assert sizes_of["pruned, q8_0"] < sizes_of["dense, q8_0"]
    assert len(row["samples"]) == 4 * 2 * 2
    perplexity = {name: found["prose"] for name, found in row["perplexity"].items()}
    assert len(set(perplexity.values())) == 4, "each format was judged by itself"
    assert perplexity["pruned, q8_0"] == pytest.approx(perplexity["pruned, f16"], rel=0.02)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("| dense,", "| pruned,"))]
    assert [line.split("|")[1].strip() for line in lines] == names
    assert "ppl-128; pruned: model." in printed
    assert formats.main(["--engine", "vllm", "--only-table", "--jsonl", str(tmp_path / "rows.jsonl")]) == 0
    assert "No run of vllm is recorded yet." in capsys.readouterr().out
