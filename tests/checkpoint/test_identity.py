"""What identifies a model's weights: for resuming a run, and for naming a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyprune.checkpoint.load import load_model, weights_identity
from pyprune.errors import CheckpointError, UnsupportedModelError
from tests._support.gguf import write_gguf
from tests._support.suspect import RECORD, change_config


def test_identity_follows_the_weights_and_nothing_else(foreign: Path) -> None:
    first = weights_identity(foreign)
    assert len(first) == 64
    (foreign / "notes.md").write_text("x")
    (foreign / "tokenizer.json").write_text("{}")
    (foreign / "other.safetensors").write_bytes(b"x")
    assert weights_identity(foreign) == first
    change_config(foreign, rms_norm_eps=0.5)
    second = weights_identity(foreign)
    data = bytearray((foreign / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (foreign / "model.safetensors").write_bytes(data)
    assert len({first, second, weights_identity(foreign)}) == 3


def test_identity_of_a_verified_checkpoint_hashes_nothing_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record = weights_identity(checkpoint)
    monkeypatch.setattr("pyprune.checkpoint.load.file_digest", lambda path: pytest.fail("hashed again"))
    assert weights_identity(checkpoint) == with_record
    monkeypatch.undo()
    (checkpoint / RECORD).unlink()
    assert weights_identity(checkpoint) == with_record


def test_identity_of_what_cannot_be_read_says_what_loading_would(foreign: Path, tmp_path: Path) -> None:
    (foreign / "model.safetensors").unlink()
    for change, error, match in (
        ({}, CheckpointError, r"neither model\.safetensors"),
        ({"model_type": "bert"}, UnsupportedModelError, "Unknown model type 'bert'"),
    ):
        change_config(foreign, **change)
        for reader in (weights_identity, load_model):
            with pytest.raises(error, match=match):
                reader(foreign)
    with pytest.raises(CheckpointError, match="is not a folder"):
        weights_identity(tmp_path / "nowhere")


def test_identity_of_a_gguf_is_the_file(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    first = weights_identity(gguf_folder, gguf_file="x.gguf")
    (gguf_folder / "x.gguf").write_bytes((gguf_folder / "x.gguf").read_bytes() + b"\0")
    assert weights_identity(gguf_folder, gguf_file="x.gguf") != first
    with pytest.raises(CheckpointError, match=r"has no file 'y\.gguf'"):
        weights_identity(gguf_folder, gguf_file="y.gguf")


def test_identity_of_a_hub_id_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / "models--a--b" / "snapshots" / commit / "config.json"
    monkeypatch.setattr("pyprune.checkpoint.load.cached_file", lambda *args, **options: str(file))
    assert weights_identity("a/b") == commit
