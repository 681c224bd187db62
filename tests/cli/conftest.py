"""A tiny checkpoint, dense and pruned, and text, for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyprune.checkpoint.save import save_checkpoint
from tests._support.cli import run, tiny_elder
from tests._support.models import tiny_model
from tests._support.tokenizer import tiny_tokenizer


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("cli") / "dense"
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder, plan=None, provenance={"source": "tiny"})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 400 short paragraphs."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("\n\n".join(f"Line {i}: a sentence about the number {i * i}." for i in range(400)))
    return path


@pytest.fixture(scope="module")
def pruned(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the command prune wrote."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    result = run(*tiny_elder(checkpoint, text, "--out", out))
    assert result.exit_code == 0, result.output
    assert "2 of 4 layers" in result.stdout
    assert f"pyprune serve {out}" in result.stdout
    return out
