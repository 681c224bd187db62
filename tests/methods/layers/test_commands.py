"""Methods that remove layers, from the command line to a checkpoint that loads and means the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE
from pyprune.cut.mask import masked
from pyprune.run.streamed import NOTE
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model, write_text


def prune(folder: Path, *arguments: str) -> Result:
    """Run `pyprune prune` on a tiny model of four layers in ``folder``."""
    dense = folder / "dense"
    if not dense.exists():
        write_model(tiny_model(), dense)
        write_text(folder / "text.txt")
    text = ["--calibration", str(folder / "text.txt"), "--samples", "4", "--sequence-length", "64"]
    return CliRunner().invoke(app, ["prune", str(dense), *text, *arguments])


@pytest.mark.parametrize("method", ["shortgpt-plain", "sleb-plain", "shortened_llama-plain", "last", "laco"])
def test_every_method_writes_a_stock_checkpoint_of_fewer_layers(method: str, tmp_path: Path) -> None:
    result = prune(tmp_path, "--method", method, "--ratio", "0.5", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.provenance["method"] == method.partition("-")[0]
    assert record.plan is not None
    assert len(record.plan.layers) == 2
    assert any(note.startswith("Removed: layers [") for note in record.provenance["report"]["notes"])
    assert NOTE in record.provenance["report"]["notes"]
    assert bool(record.provenance["training_marks"]) == (method != "last")
    model, _ = load_model(tmp_path / "out")
    assert type(model).__name__ == "LlamaForCausalLM"
    dense = tiny_model()
    batch = tiny_batch()
    with torch.no_grad(), masked(dense, record.plan):
        expected, found = dense(input_ids=batch).logits, model(input_ids=batch).logits
    if method == "laco":
        assert not torch.allclose(found, expected, atol=1e-3), "the merge is in the weights that were written"
    else:
        assert_same_logits(found, expected)


@pytest.mark.parametrize("unit", ["attention", "mlp"])
def test_blocks_go_by_option_and_the_checkpoint_loads(unit: str, tmp_path: Path) -> None:
    arguments = [
        "--method",
        "sleb-plain",
        "--ratio",
        "0.5",
        "--set",
        f"sleb.unit={unit}",
        "--out",
        str(tmp_path / "out"),
    ]
    result = prune(tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    plan = read_pruning_json(tmp_path / "out", verify_files=True).plan
    assert plan is not None
    assert [len(layer.query_heads if unit == "attention" else layer.ffn) for layer in plan.layers].count(0) == 2
    model, _ = load_model(tmp_path / "out")
    dense = tiny_model()
    batch = tiny_batch()
    with torch.no_grad(), masked(dense, plan):
        assert_same_logits(model(input_ids=batch).logits, dense(input_ids=batch).logits)


def test_two_runs_write_the_same_weights(tmp_path: Path) -> None:
    for out in ("one", "two"):
        assert prune(tmp_path, "--method", "laco", "--out", str(tmp_path / out)).exit_code == 0
    one, two = (load_model(tmp_path / out)[0] for out in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_dry_run_prints_the_plan_and_what_is_asked_too_much_ends_in_one_line(tmp_path: Path) -> None:
    result = prune(tmp_path, "--method", "shortgpt", "--dry-run")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["layers"]) == 3
    result = prune(tmp_path, "--method", "sleb", "--ratio", "0.9", "--out", str(tmp_path / "out"))
    assert result.exit_code == ERROR_CODE
    assert "only 2 may be removed: the first 1 and the last 1 layers" in result.output
    assert not (tmp_path / "out").exists()
