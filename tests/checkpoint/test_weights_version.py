"""What identifies a model's weights: for resuming a run, and for naming a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyprune.checkpoint.load import load_model, weights_version
from pyprune.errors import CheckpointError, UnsupportedModelError
from tests._support.gguf import write_gguf
from tests._support.suspect import RECORD, change_config


def test_identity_follows_the_weights_and_nothing_else(foreign: Path) -> None:
    first = weights_version(foreign)
    assert len(first) == 64
    (foreign / "notes.md").write_text("x")
    (foreign / "tokenizer.json").write_text("{}")
    (foreign / "other.safetensors").write_bytes(b"x")
    assert weights_version(foreign) == first
    change_config(foreign, rms_norm_eps=0.5)
    second = weights_version(foreign)
    data = bytearray((foreign / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (foreign / "model.safetensors").write_bytes(data)
    assert len({first, second, weights_version(foreign)}) == 3


def test_identity_of_a_verified_checkpoint_hashes_nothing_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record = weights_version(checkpoint)
    monkeypatch.setattr("pyprune.checkpoint.load.file_digest", lambda path: pytest.fail("hashed again"))
    assert weights_version(checkpoint) == with_record
    monkeypatch.undo()
    (checkpoint / RECORD).unlink()
    assert weights_version(checkpoint) == with_record


def test_identity_of_what_cannot_be_read_says_what_loading_would(foreign: Path, tmp_path: Path) -> None:
    (foreign / "model.safetensors").unlink()
    for change, error, match in (
        ({}, CheckpointError, r"neither model\.safetensors"),
        ({"model_type": "bert"}, UnsupportedModelError, "Unknown model type 'bert'"),
    ):
        change_config(foreign, **change)
        for reader in (weights_version, load_model):
            with pytest.raises(error, match=match):
                reader(foreign)
    with pytest.raises(CheckpointError, match="is not a folder"):
        weights_version(tmp_path / "nowhere")


def test_identity_of_a_gguf_is_the_file(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    first = weights_version(gguf_folder, gguf_file="x.gguf")
    (gguf_folder / "x.gguf").write_bytes((gguf_folder / "x.gguf").read_bytes() + b"\0")
    assert weights_version(gguf_folder, gguf_file="x.gguf") != first
    with pytest.raises(CheckpointError, match=r"has no file 'y\.gguf'"):
        weights_version(gguf_folder, gguf_file="y.gguf")


def test_identity_of_a_hub_id_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / "models--a--b" / "snapshots" / commit / "config.json"
    monkeypatch.setattr("pyprune.checkpoint.load.cached_file", lambda *args, **options: str(file))
    assert weights_version("a/b") == commit
    of_files = {weights_version("a/b", gguf_file=name) for name in ("a-q4_0.gguf", "a-f16.gguf")}
    assert len(of_files) == 2, "one repository holds a model in several formats"
    assert all(version.startswith(commit) for version in of_files)
