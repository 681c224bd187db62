"""The commands from a GGUF file to two servers: each is run as typed, and its figures are those that it wrote."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from bench._texts import ELSEWHERE
from bench.quality.commands import GRID, Commands
from bench.quality.grid import show
from tests._support.llama_cpp import Case
from tests._support.text import prose, write_text


@pytest.mark.second
def test_a_step_is_a_command_that_is_run_and_measured(tmp_path: Path) -> None:
    for name in ("wikitext-2", "novel"):
        (tmp_path / ELSEWHERE[name]).parent.mkdir()
        write_text(tmp_path / ELSEWHERE[name], words=4000)
    (tmp_path / "c4_sample").mkdir()
    line = json.dumps({"text": prose(9000, 1)}) + "\n"
    (tmp_path / "c4_sample/train.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    Case("llama", lambda plan: plan, "llama", values={"max_position_embeddings": 4096}).write(tmp_path)
    out = tmp_path / "out"
    chosen = {"method": ["taylor"], "step": ["export", "export as GGUF", "prune", "evaluate", "serve with llama.cpp"]}
    bench = Commands(argparse.Namespace(gemma=tmp_path / "model.gguf", data=tmp_path, out=out, **chosen))
    cases = bench.cases()
    steps = [tuple(case.fields.values()) for case in cases]
    assert steps[:3] == [("dense", step) for step in ("export", "export as GGUF", "evaluate")]
    own = ("prune", "evaluate", "export", "export as GGUF", "serve with llama.cpp")
    assert steps[3:] == [("taylor", step) for step in own]
    figures = {(case.fields["method"], case.fields["step"]): bench.measure(case) for case in cases}
    assert set(figures["taylor", "evaluate"]["perplexity"]) == {"wikitext-2", "novel"}
    assert figures["taylor", "serve with llama.cpp"]["speedup"] > 0
    assert json.loads((out / "taylor/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    rows = [
        {
            "case": case.fields,
            "setting": bench.setting,
            "error": "",
            "figures": figures[case.fields["method"], case.fields["step"]],
            "environment": {"commit": "0" * 40, "cpus": 2, "device": "-", "isa": [], "versions": {}, "variables": {}},
        }
        for case in cases
    ]
    assert "`pyprune export GEMMA --dtype float32 --out OUT/dense`" in show(rows, GRID.layout)
