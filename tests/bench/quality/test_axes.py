"""The grid of axes on a tiny model, and that every comparison is a valid set of options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.quality import axes
from bench.quality.__main__ import main
from bench.quality.scores import CALIBRATION, PRUNING, TEXTS
from pyprune.run.recipe import build_config
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text


def test_comparisons_rank_the_same_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", num_hidden_layers=30, max_position_embeddings=2048)
    write_model(model, tmp_path / "tiny")
    monkeypatch.setattr(axes, "CALIBRATION", "c4.txt")
    command = ["axes", "--model", str(tmp_path / "tiny"), "--data", str(tmp_path), "--tokens", "2048"]
    command += ["--scores", "magnitude:l1,taylor:param_first", "--comparisons", "none", "local", "axis"]
    command += ["--jsonl", str(tmp_path / "axes.jsonl")]
    assert main(command) == 2
    assert TEXTS["wikitext-2"] in capsys.readouterr().err
    for number, name in enumerate((TEXTS["wikitext-2"], "c4.txt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(tmp_path / name, seed=number)
    scored: list[object] = []
    monkeypatch.setattr(axes, "say", scored.append)
    assert main(command) == 0
    assert len(scored) == 3, "magnitude draws nothing, so one seed; two of taylor"
    dense, *rows = [json.loads(line) for line in (tmp_path / "axes.jsonl").read_text().splitlines()]
    assert dense["figures"]["share_removed"] == 0
    assert len(rows) == 3 + 2 * 3
    assert all(0.1 < row["figures"]["share_removed"] < 0.25 and not row["error"] for row in rows)
    assert len({json.dumps(row["figures"]["removed"]) for row in rows}) > 2
    assert "| taylor:param_first | raw sums (none) |" in capsys.readouterr().out
    assert CALIBRATION != axes.CALIBRATION


@pytest.mark.parametrize("name", list(axes.COMPARISONS))
def test_every_comparison_is_a_valid_set_of_options(name: str) -> None:
    label, changes = axes.COMPARISONS[name]
    build_config(preset="taylor", options={**PRUNING, **changes}).validate()
    assert label
