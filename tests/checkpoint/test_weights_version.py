"""What identifies a model's weights: for resuming a run, and for naming a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.errors import CheckpointError, UnsupportedModelError
from tests._support.gguf import write_gguf
from tests._support.suspect import RECORD, change_config


def test_identity_follows_the_weights_and_nothing_else(foreign: Path) -> None:
    first = ModelSource.of(foreign).version
    assert len(first) == 64
    (foreign / "notes.md").write_text("x")
    (foreign / "tokenizer.json").write_text("{}")
    (foreign / "other.safetensors").write_bytes(b"x")
    assert ModelSource.of(foreign).version == first
    change_config(foreign, rms_norm_eps=0.5)
    second = ModelSource.of(foreign).version
    data = bytearray((foreign / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (foreign / "model.safetensors").write_bytes(data)
    assert len({first, second, ModelSource.of(foreign).version}) == 3


def test_identity_of_a_verified_checkpoint_hashes_nothing_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record = ModelSource.of(checkpoint).version
    monkeypatch.setattr("pyprune.checkpoint.load.file_digest", lambda path: pytest.fail("hashed again"))
    assert ModelSource.of(checkpoint).version == with_record
    monkeypatch.undo()
    (checkpoint / RECORD).unlink()
    assert ModelSource.of(checkpoint).version == with_record


def test_identity_of_what_cannot_be_read_says_what_loading_would(foreign: Path, tmp_path: Path) -> None:
    (foreign / "model.safetensors").unlink()
    for change, error, match in (
        ({}, CheckpointError, r"neither model\.safetensors"),
        ({"model_type": "bert"}, UnsupportedModelError, "Unknown model type 'bert'"),
    ):
        change_config(foreign, **change)
        for reader in (lambda folder: ModelSource.of(folder).version, load_model):
            with pytest.raises(error, match=match):
                reader(foreign)
    with pytest.raises(CheckpointError, match="is not a folder"):
        _ = ModelSource.of(tmp_path / "nowhere").version


def test_identity_of_a_gguf_is_the_file(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    first = ModelSource.of(gguf_folder, gguf_file="x.gguf").version
    (gguf_folder / "x.gguf").write_bytes((gguf_folder / "x.gguf").read_bytes() + b"\0")
    assert ModelSource.of(gguf_folder, gguf_file="x.gguf").version != first
    with pytest.raises(CheckpointError, match=r"has no file 'y\.gguf'"):
        _ = ModelSource.of(gguf_folder, gguf_file="y.gguf").version


def test_identity_of_a_hub_id_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / "models--a--b" / "snapshots" / commit / "config.json"
    monkeypatch.setattr("pyprune.checkpoint.load.cached_file", lambda *args, **options: str(file))
    assert ModelSource.of("a/b").version == commit
    of_files = {ModelSource.of("a/b", gguf_file=name).version for name in ("a-q4_0.gguf", "a-f16.gguf")}
    assert len(of_files) == 2, "one repository holds a model in several formats"
    assert all(version.startswith(commit) for version in of_files)
