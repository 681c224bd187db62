"""The folder that every hostile case starts from, made once, and the server that runs the commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyprune.checkpoint.record import annotate_checkpoint
from pyprune.families import family_for
from tests._support.models import tiny_model
from tests._support.text import write_model, write_text
from tests.hostile._cases import BRIEF, CHEAP, EVAL, READS, Case
from tests.hostile._check import check
from tests.hostile._server import Outcome, Run, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("server")
    dense = str(write_model(tiny_model("llama"), scratch / "dense"))
    text = str(write_text(scratch / "text.txt"))
    warm_up = ["evil", f"{EVAL} {text}", f"{READS} {text}", f"export dense --out {scratch / 'exported'}"]
    warm_up += [f"prune dense --method magnitude --dry-run {CHEAP}"]
    words = [[dense if word == "dense" else word for word in command.split()] for command in warm_up]
    with Server.started(scratch, words) as made:
        yield made


@pytest.fixture(scope="session")
def materials(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, a checkpoint that was cut and recovered and measured, text, a plan and a recipe."""
    folder = tmp_path_factory.mktemp("materials")
    model = tiny_model("llama")
    write_model(model, folder / "dense")
    write_text(folder / "text.txt")
    plan = family_for(model).plan(model.config).drop_layers([1])
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "recipe.yaml").write_text("preset: magnitude\nratio: 0.2\n")
    _done(server, folder, "prune dense --plan plan.json --out pruned")
    _done(server, folder, f"{BRIEF} --out recovered")
    shutil.rmtree(folder / "pruned")
    (folder / "recovered").rename(folder / "pruned")
    annotate_checkpoint(folder / "pruned", quality={"ppl-128 text": 7.0}, speed={"prompt speedup": 1.5})
    record = json.loads((folder / "pruned/pruning.json").read_text())
    assert {"training_marks", "recoveries", "quality", "speed"} <= record["provenance"].keys()
    return folder


def _done(server: Server, folder: Path, command: str) -> None:
    (outcome,) = server.run(Run(command.split(), str(folder)))
    assert outcome.code == 0, outcome.stderr


@pytest.fixture
def folder(materials: Path, tmp_path: Path) -> Iterator[Path]:
    """A fresh copy of the materials, gone after the test: there are thousands of them."""
    place = tmp_path / "place"
    shutil.copytree(materials, place)
    yield place
    shutil.rmtree(tmp_path)


@pytest.fixture
def refused(server: Server, folder: Path) -> Callable[[Case], Outcome]:
    return lambda case: check(server, case, folder)
