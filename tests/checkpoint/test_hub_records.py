"""The record of a checkpoint on the hub counts as that of a folder does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pyprune import build_config, build_recovery, evaluate, prune, recover
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.record import read_pruning_json, read_record
from pyprune.errors import DataError
from pyprune.run.replay import was_rotated
from pyprune.serving.export import export
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text

NAME, COMMIT = "somebody/pruned", "0123456789" * 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", words=400)


@pytest.fixture
def folder(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pruned checkpoint, which the hub's cache holds too."""
    dense = write_model(tiny_model("llama"), tmp_path / "dense")
    options = {"method": "taylor", "ratio": 0.1, "data.source": str(text), "data.samples": 4}
    prune(dense, build_config(options={**options, "data.sequence_length": 128}), out=tmp_path / "pruned")
    repository = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(tmp_path / "pruned", repository / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "pruned"


def test_the_record_is_read(folder: Path) -> None:
    found = read_record(NAME)
    assert found is not None
    assert found.plan == read_pruning_json(folder).plan
    assert ModelSource(NAME).inherited_facts() == ModelSource.of(folder).inherited_facts()
    assert not was_rotated(ModelSource(NAME))


def test_without_one_there_is_none(folder: Path, tmp_path: Path) -> None:
    assert read_record("somebody/unknown") is None
    assert read_record(tmp_path / "dense") is None
    assert read_record(tmp_path / "nowhere") is None
    assert read_record("./nowhere") is None


def test_a_file_of_that_name_of_another_program_is_none(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT / "pruning.json"
    path.write_text('{"ratio": 0.5}')
    assert read_record(NAME) is None


def test_training_text_is_refused(folder: Path, text: Path) -> None:
    with pytest.raises(DataError, match="is not a test text for somebody/pruned"):
        evaluate(NAME, ppl=str(text), protocol="ppl-128")


def test_recovery_and_export_keep_the_plan(folder: Path, text: Path, tmp_path: Path) -> None:
    plan = read_pruning_json(folder).plan
    settings = ["recover.train.steps=1", "recover.train.batch_size=2", "data.samples=2", "data.sequence_length=64"]
    config = build_recovery(options={"data.source": str(write_text(tmp_path / "more.txt", seed=5))}, settings=settings)
    recover(NAME, config, out=tmp_path / "recovered")
    export(NAME, tmp_path / "exported")
    for name in ("recovered", "exported"):
        record = read_pruning_json(tmp_path / name)
        assert record.plan == plan
        assert record.provenance["training_marks"]


def test_inspect_prints_the_plan(folder: Path) -> None:
    result = run("inspect", folder)
    assert "none (not written by pyprune)" not in result.stdout
    result = run("inspect", NAME)
    assert result.exit_code == 0, result.output
    assert "none (not written by pyprune)" not in result.stdout
