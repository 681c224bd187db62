"""The bench of several processes: its table on paper, and what one process measures, at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.training import processes as bench
from pyprune.train.memory import PARTS
from tests.bench.training.test_train_step import SHAPES


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def the_model(folder: str | None) -> tuple[str, Any, None]:
        return "tiny", AutoModelForCausalLM.from_config(SHAPES), None

    monkeypatch.setattr(bench, "the_model", the_model)
    monkeypatch.setattr(bench, "LENGTH", 16)


def test_on_paper_every_training_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four small layers in place of LLaMA's eighty."""
    monkeypatch.setattr(bench, "SEVENTY", LlamaConfig(**SHAPES.to_dict() | {"num_hidden_layers": 4}))
    rows = list(bench.paper_trainings())
    monkeypatch.setattr(bench, "paper_trainings", lambda: iter(rows))
    found = {(name, number): memory for name, number, memory in rows}
    assert {number for _, number in found} == {8, 16, 32}
    for name, number in found:
        more = found.get((name, 2 * number))
        assert more is None or more.weights < found[name, number].weights, "they are divided"
    assert found["all weights, lean", 8].total < found["all weights, full", 8].total
    assert all(sum(getattr(memory, part) for part in PARTS) >= memory.total > 0 for memory in found.values())
    assert "| all weights, lean | 8 |" in bench.paper_table()


@pytest.mark.usefixtures("tiny")
def test_the_peak_of_one_process_is_near_what_is_predicted() -> None:
    found = bench.measure(3)
    assert (found["processes"], len(found["seconds"])) == (1, 2), "the first step is not timed"
    assert found["peak_bytes"] == pytest.approx(bench.predict(1).total, rel=0.1)
    assert bench.predict(2).total < 0.75 * bench.predict(1).total


@pytest.mark.usefixtures("tiny")
def test_a_record_and_a_row_for_each_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(number: int, steps: int) -> dict[str, Any]:
        return {"processes": number, "peak_bytes": 8_000_000 // number, "seconds": [1.0 * steps], "whole_bytes": 1}

    monkeypatch.setattr(bench, "launch", launch)
    path = tmp_path / "records.jsonl"
    assert bench.main(["--processes", "1,2", "--steps", "3", "--jsonl", str(path)]) == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["processes"] for record in records] == [1, 2]
    assert all(record["predicted_bytes"] > 0 and record["versions"]["torch"] == torch.__version__ for record in records)
    table = capsys.readouterr().out
    assert "| 2 | 3.00 | 4 | 0.50 |" in table
