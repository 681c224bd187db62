"""Checkpoints of a tiny model, with and without a record, and a folder for GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyprune.checkpoint.save import save_checkpoint
from tests._support.models import tiny_model
from tests._support.suspect import RECORD
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a record."""
    return save_checkpoint(tiny_model(), tiny_tokenizer(), tmp_path / "c", plan=None, provenance={"method": "none"})


@pytest.fixture
def foreign(checkpoint: Path) -> Path:
    """A checkpoint without one: another program wrote it."""
    (checkpoint / RECORD).unlink()
    return checkpoint


@pytest.fixture
def gguf_folder(tmp_path: Path) -> Path:
    """An empty folder, where the package gguf is installed."""
    pytest.importorskip("gguf")
    return tmp_path
