"""The commands that prune and serve a mixture: each is run as typed, and its figures are those that it wrote."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from bench.quality import mixtures
from bench.quality.mixtures import GRID, Mixtures
from pyprune.runtime.records import Json
from tests._support.text import prose

SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.second
def test_half_of_the_experts_are_pruned_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "SIZES", mixtures.SIZES | SMALL)
    (tmp_path / "c4_sample").mkdir()
    line = json.dumps({"text": prose(9000, 1)}) + "\n"
    (tmp_path / "c4_sample/train.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    steps = ["prune, not reconstructed", "export dense as GGUF", "export as GGUF", "serve with llama.cpp, 1 at once"]
    chosen = {"model": ["2 layers", "4 layers"], "step": steps}
    bench = Mixtures(argparse.Namespace(data=tmp_path, out=tmp_path / "out", **chosen))
    figures: dict[tuple[str, str], Json] = {}
    for case in bench.cases():
        figures[case.fields["model"], case.fields["step"]] = found = bench.measure(case)
        assert GRID.layout.command({"figures": found}) == f"pyprune {case.task.replace(' --json JSON', '')}".replace(
            "MODEL", case.fields["model"].replace(" ", "-")
        )
    assert list(figures) == [("2 layers", "prune, not reconstructed"), *(("4 layers", step) for step in steps)]
    (stored, read), (left, still) = figures["4 layers", "prune, not reconstructed"]["parameters"]
    expert = 3 * 64 * 32
    assert stored - left == 4 * 4 * (expert + 64), "half of the experts, and of the rows of the routers"
    assert stored - read == 4 * 6 * expert
    assert read - still == 4 * 4 * 64, "a token reads as many experts as before"
    served = figures["4 layers", "serve with llama.cpp, 1 at once"]
    assert min(*served["tokens_per_second"], *served["prompt_ms"], *served["memory"]) > 0
    row = {"figures": served}
    (column,) = [c for c in GRID.layout.columns([]) if c.name == "result"]
    assert "tokens/s" in column.value(row)
