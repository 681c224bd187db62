"""The whole-step bench at toy size: three implementations of each form, timed and weighed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import train_step
from bench.train_step import FORMS, FULL, LABELS, LEAN, PLAIN, PLAIN_NARROW

SHAPES = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=21, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def test_every_form_is_timed_and_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_config(SHAPES)
    monkeypatch.setattr(train_step, "the_model", lambda folder: ("tiny", model, None))
    path = tmp_path / "steps.jsonl"
    train_step.main(["--batch", "2", "--length", "16", "--repeats", "2", "--jsonl", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    names = [PLAIN, FULL, LEAN]
    assert [(r["op"], r["implementation"]) for r in records] == [(LABELS[f], n) for f in FORMS for n in names]
    assert all(len(record["samples_ms"]) == 2 for record in records)
    peaks = {(r["op"], r["implementation"]): r["peak_bytes"] for r in records}
    for form in ("dress", "elder", "distil"):
        assert peaks[LABELS[form], LEAN] < 0.6 * peaks[LABELS[form], PLAIN]
    assert "tokens/s" in capsys.readouterr().out


def test_what_does_not_fit_alone_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ratios are then to the plain loop that fits."""
    real = train_step.contender

    def small(name: str, *args: Any) -> Any:
        if name in (PLAIN, FULL):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(name, *args)

    monkeypatch.setattr(train_step, "contender", small)
    path = tmp_path / "steps.jsonl"
    options = ["--shapes", "tiny", "--batch", "1", "--length", "16", "--repeats", "1", "--forms", "dress"]
    train_step.main([*options, "--jsonl", str(path)])
    records = {r["implementation"]: r for r in map(json.loads, path.read_text().splitlines())}
    assert list(records) == [PLAIN, PLAIN_NARROW, FULL, LEAN]
    assert {name for name, record in records.items() if record.get("failed") == "out of memory"} == {PLAIN, FULL}
    assert records[FULL]["peak_bytes"] is None
    assert records[FULL]["predicted_bytes"] > 2 * records[LEAN]["predicted_bytes"]
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| DReSS")]
    faster = {line[1]: line[5] for line in lines}
    assert faster[PLAIN_NARROW] == "1.00"
    assert faster[PLAIN] == faster[FULL] == "-"
    assert float(faster[LEAN]) > 0
