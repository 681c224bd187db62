"""Checkpoints to damage, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.plan import PrunePlan
from pyprune.run.cut_on_disk import compact_checkpoint
from pyprune.serving.checkpoints import read_checkpoint, verify_checkpoint
from pyprune.serving.export import export
from tests._support.models import tiny_model

RECORD = "pruning.json"
"""Name of the record in a checkpoint."""


def change_config(folder: Path, **values: Any) -> None:
    """Replace entries of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def refused(folder: Path, match: str) -> str:
    """Check that load_model refuses a folder in one line of bounded length, and return that line."""
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1500
    return text


def smaller_plan() -> PrunePlan:
    """A plan of the tiny model that drops one layer."""
    model = tiny_model()
    return family_for(model).plan(model.config).drop_layers([1])


READERS: dict[str, Callable[[Path], object]] = {
    "load": load_model,
    "inspect and bench": read_checkpoint,
    "vllm": verify_checkpoint,
    "prune": lambda folder: ModelSource.of(folder).inherited_facts(verify_files=True),
    "export": lambda folder: export(folder, folder.parent / "exported"),
    "compact": lambda folder: compact_checkpoint(folder, smaller_plan(), folder.parent / "cut"),
}
"""What reads a checkpoint -> how."""
