"""Records that are damaged, and folders that cannot be annotated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.record import (
    PruningRecord,
    annotate_checkpoint,
    check_annotatable,
    read_pruning_json,
)
from pyprune.errors import CheckpointError, OutputError
from tests._support.paths import REPO
from tests._support.suspect import RECORD

RECOVERY = {"report": {"objective": "lora", "steps": 3, "tokens": 400}}
DAMAGED: list[dict[str, Any]] = [
    {"training_marks": 3}, {"training_marks": "no base64!"}, {"training_marks": "AAAA"}, {"training_marks": None},
    {"training_marks": "é"}, {"recoveries": {}}, {"recoveries": [3]}, {"recoveries": [{}]},
    {"recoveries": [{"report": {"objective": "lora", "steps": "3", "tokens": 4}}]},
    {"recoveries": [{"report": {"objective": "lora", "steps": 3}}]}, {"quality": []}, {"quality": 3}, {"speed": "x"},
    {"before": []}, {"report": 3}, {"report": {"decision": []}}, {"method": 3}, {"source": None}, {"architecture": []},
    {"dtype": {}}, {"parameters": "9"}, {"parameters": True}, {"dense_parameters": 1.5}, {"measured_before": 1},
]  # fmt: skip


def write_record(folder: Path, provenance: Any, files: Any = None) -> None:
    (folder / RECORD).write_text(PruningRecord(None, provenance, {} if files is None else files).to_json())


@pytest.mark.parametrize("facts", DAMAGED, ids=str)
def test_damaged_provenance_is_refused_when_it_is_read(tmp_path: Path, facts: dict[str, Any]) -> None:
    write_record(tmp_path, facts)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        read_pruning_json(tmp_path)
    assert next(iter(facts)) in str(caught.value) or "decision" in str(caught.value)


def test_whole_provenance_is_read(tmp_path: Path) -> None:
    facts = {"training_marks": "AAAAAAAAAAE=", "recoveries": [RECOVERY], "quality": {"ppl": 3.0}, "before": {}}
    write_record(tmp_path, facts | {"parameters": 3, "report": {"decision": {}}, "other": [1]})
    assert read_pruning_json(tmp_path).provenance["recoveries"] == [RECOVERY]


@pytest.mark.parametrize(
    "files",
    [{"/etc/passwd": "0" * 64}, {"../x": "0" * 64}, {"a/../../x": "0" * 64}, {"": "0" * 64}, {"x": "0" * 63},
     {"x": "G" * 64}, {"x": None}, {"pruning.json": "0" * 64}, [["x", "0" * 64]], "x"],
    ids=str,
)  # fmt: skip
def test_damaged_lists_of_files_are_refused(tmp_path: Path, files: Any) -> None:
    write_record(tmp_path, {}, files)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_pruning_json(tmp_path)


def test_annotating_a_folder_that_cannot_be_written_is_refused_beforehand(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(checkpoint))
    check_annotatable(checkpoint)
    assert sorted(os.listdir(checkpoint)) == before
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: allowed(path, mode) and not mode & os.W_OK)
    with pytest.raises(OutputError, match="permission denied"):
        check_annotatable(checkpoint)


FULL = """
import resource, signal, sys
sys.path.insert(0, {repo!r})
from pathlib import Path
from pyprune.errors import OutputError
from pyprune.checkpoint.record import annotate_checkpoint, check_annotatable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for attempt in (lambda: check_annotatable({folder!r}), lambda: annotate_checkpoint({folder!r}, quality={{"ppl": 1.0}})):
    try:
        attempt()
    except OutputError as error:
        assert "larger than this process may write" in str(error), error
    else:
        sys.exit("it was written")
"""


@pytest.mark.process
def test_annotating_without_room_is_noticed_beforehand_and_leaves_nothing(checkpoint: Path) -> None:
    before = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    script = FULL.format(repo=str(REPO), folder=str(checkpoint))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name: p.read_bytes() for p in checkpoint.iterdir()} == before


@pytest.mark.parametrize("kind", ["bytes", "folder", "link"])
def test_a_card_that_is_not_ours_is_left_alone(checkpoint: Path, kind: str) -> None:
    card = checkpoint / "README.md"
    card.unlink()
    if kind == "bytes":
        card.write_bytes(b"caf\xe9")
    elif kind == "folder":
        card.mkdir()
    else:
        card.symlink_to("nowhere")
    annotate_checkpoint(checkpoint, quality={"ppl": 2.0})
    assert read_pruning_json(checkpoint).provenance["quality"] == {"ppl": 2.0}
    assert kind != "bytes" or card.read_bytes() == b"caf\xe9"
