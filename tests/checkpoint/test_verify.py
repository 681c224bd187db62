"""What is compared with the record, what an operator may edit, and that a server's processes look once."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyprune.checkpoint import verify
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.manifest import PruningRecord
from pyprune.checkpoint.record import read_pruning_json, write_record
from pyprune.checkpoint.save import save_checkpoint
from pyprune.errors import CheckpointError
from pyprune.serving.checkpoints import verify_checkpoint
from tests._support.cli import refused, run
from tests._support.models import tiny_model
from tests._support.served import flip_a_weight_bit
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer and a chat template."""
    tokenizer = tiny_tokenizer(chat_template=True)
    return save_checkpoint(tiny_model(), tokenizer, tmp_path / "c", plan=None, provenance={"method": "none"})


def set_value(path: Path, name: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


EDITS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "sampling": (GENERATION, lambda path: set_value(path, "temperature", 0.5)),
    "template": (TEMPLATE, lambda path: path.write_text("{{ messages[0].content }}")),
    "template-in-config": ("tokenizer_config.json", lambda path: set_value(path, "chat_template", "{{ messages }}")),
}
"""What an operator edits: name -> (file, how)."""


@pytest.mark.parametrize("name", EDITS)
def test_what_an_operator_may_edit_is_a_warning_that_names_the_file(written: Path, name: str) -> None:
    file, edit = EDITS[name]
    edit(written / file)
    result = run("inspect", written)
    assert result.exit_code == 0, result.output
    assert f"Warning: {written / file} was edited after the checkpoint was written" in result.stderr
    assert result.stderr.count("Warning") == 1


@pytest.mark.process
def test_an_edited_checkpoint_is_measured_with_the_warning(written: Path, tmp_path: Path) -> None:
    file, edit = EDITS["sampling"]
    edit(written / file)
    text = write_text(tmp_path / "text.txt")
    result = run("eval", written, "--ppl", text, "--max-tokens", "256", "--protocol", "ppl-128")
    assert result.exit_code == 0, result.output
    assert f"{file} was edited" in result.stderr


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("model.safetensors", lambda path: flip_a_weight_bit(path.parent)),
    "config": ("config.json", lambda path: set_value(path, "rope_theta", 5.0)),
    "tokenizer": ("tokenizer.json", lambda path: path.write_text(path.read_text() + " ")),
    "tokenizer-config": ("tokenizer_config.json", lambda path: set_value(path, "model_max_length", 7)),
    "sampling-no-json": (GENERATION, lambda path: path.write_text('{"temperature": 0.5')),
    "sampling-no-object": (GENERATION, lambda path: path.write_text("[1]")),
    "template-empty": (TEMPLATE, lambda path: path.write_text("")),
    "template-no-text": (TEMPLATE, lambda path: path.write_bytes(b"\xff\xfe")),
}
"""What stays an error: name -> (file, how)."""


@pytest.mark.parametrize("name", DAMAGE)
def test_everything_else_stays_an_error(written: Path, name: str) -> None:
    file, damage = DAMAGE[name]
    damage(written / file)
    assert f"{file} differs from what was written" in refused("inspect", written)


def test_a_removed_file_is_no_edit(written: Path) -> None:
    (written / GENERATION).unlink()
    assert f"lacks the file '{GENERATION}'" in refused("inspect", written)


def test_a_record_of_an_early_release_cannot_tell_the_template_from_the_tokenizer(written: Path) -> None:
    record = read_pruning_json(written)
    assert record.tokenizer_config is not None
    (written / "pruning.json").write_text(PruningRecord(None, record.provenance, record.files).to_json())
    assert run("inspect", written).exit_code == 0
    file, edit = EDITS["template-in-config"]
    edit(written / file)
    assert f"{file} differs from what was written" in refused("inspect", written)


def test_verification_can_be_turned_off_and_says_so(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_a_weight_bit(written)
    monkeypatch.setenv(verify.VERIFY, "1")
    assert "differs from what was written" in refused("inspect", written)
    monkeypatch.setenv(verify.VERIFY, "0")
    result = run("inspect", written)
    assert result.exit_code == 0, result.output
    assert f"The files of {written} were not verified: PYPRUNE_VERIFY is 0;" in result.stderr
    load_model(written)
    monkeypatch.setenv(verify.VERIFY, "no")
    assert "PYPRUNE_VERIFY is 'no'; allowed are 1" in refused("inspect", written)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of the servers that would take the place of this process."""
    found: list[dict[str, str]] = []
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    monkeypatch.setattr(os, "execve", lambda _, __, environment: found.append(environment))
    return found


def test_serve_refuses_warns_and_can_be_told_not_to_look(written: Path, executed: list[dict[str, str]]) -> None:
    file, edit = EDITS["sampling"]
    edit(written / file)
    assert f"{file} was edited" in run("serve", written).stderr
    flip_a_weight_bit(written)
    assert "model.safetensors differs from what was written" in refused("serve", written)
    result = run("serve", written, "--no-verify", "--port", "9000")
    assert result.exit_code == 0, result.output
    assert f"The files of {written} were not verified" in result.stderr
    assert [environment.get(verify.VERIFY) for environment in executed] == [None, "0"]
    assert verify.VERIFY not in os.environ


# --- the index of the weights --------------------------------------------------------------------


def leave_out(names: dict[str, str]) -> None:
    del names["model.norm.weight"]


def name_another(names: dict[str, str]) -> None:
    names["model.norm.bias"] = names["model.norm.weight"]


def name_another_file(names: dict[str, str]) -> None:
    own = names["model.norm.weight"]
    names["model.norm.weight"] = next(file for file in names.values() if file != own)


@pytest.mark.parametrize("change", [leave_out, name_another, name_another_file])
@pytest.mark.parametrize("recorded", [False, True])
def test_an_index_that_names_other_tensors_than_the_files_hold_is_refused(
    tmp_path: Path, change: Callable[[dict[str, str]], None], recorded: bool
) -> None:
    folder = tmp_path / "c"
    tiny_model().save_pretrained(folder, max_shard_size="50KB")
    index = folder / verify.INDEX
    assert run("inspect", folder).exit_code == 0
    data = json.loads(index.read_text())
    assert len(set(data["weight_map"].values())) > 1
    change(data["weight_map"])
    index.write_text(json.dumps(data))
    if recorded:
        write_record(folder, PruningRecord(None))
        with pytest.raises(CheckpointError, match="does not fit the weight files"):
            verify_checkpoint(folder)
    message = refused("inspect", folder)
    assert f"{index} does not fit the weight files" in message
    assert "model.norm." in message
    with pytest.raises(CheckpointError, match="does not fit the weight files"):
        load_model(folder)


# --- once for a server ---------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """How often this process, which belongs to a server, hashed each file; verdicts lie in a folder of the test."""
    counts: Counter[str] = Counter()
    original = verify.file_digest

    def digest(path: Path) -> str:
        counts[path.name] += 1
        return original(path)

    (tmp_path / "verdicts").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "verdicts"))
    monkeypatch.setattr(verify, "file_digest", digest)
    monkeypatch.setattr(verify, "SETTLED_S", -1.0)
    monkeypatch.setenv(verify.SERVER, "one")
    return counts


def verdict_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"pyprune-{os.geteuid()}"


def test_a_server_hashes_every_file_once(written: Path, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(read_pruning_json(written).files)
    before = sorted(path.name for path in written.iterdir())
    for _ in range(3):
        verify_checkpoint(written)
    assert hashed == Counter(files)
    assert sorted(path.name for path in written.iterdir()) == before
    monkeypatch.setenv(verify.SERVER, "another")
    verify_checkpoint(written)
    assert hashed == Counter(files * 2)


def test_a_verdict_that_cannot_be_written_ends_no_server(
    written: Path, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are right; each process of the server then finds that out for itself."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        verify_checkpoint(written)
    assert hashed == Counter(list(read_pruning_json(written).files) * 2)


def test_a_command_always_hashes(written: Path, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    verify_checkpoint(written)
    assert run("inspect", written).exit_code == 0
    assert set(hashed.values()) == {2}
    monkeypatch.delenv(verify.SERVER)
    verify_checkpoint(written)
    assert set(hashed.values()) == {3}


def test_what_serve_has_verified_its_server_does_not(
    written: Path, hashed: Counter[str], executed: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(verify.SERVER)
    assert run("serve", written).exit_code == 0
    [environment] = executed
    assert verify.current_server() == ""
    monkeypatch.setenv(verify.SERVER, environment[verify.SERVER])
    verify_checkpoint(written)
    assert hashed == Counter(list(read_pruning_json(written).files))


def rewritten(path: Path) -> None:
    """The same bytes in a new file."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def touched(path: Path) -> None:
    os.utime(path)


def changed_with_old_times(path: Path) -> None:
    """Another byte, with the time of the last change set back."""
    times = path.stat()
    flip_a_weight_bit(path.parent)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [rewritten, touched, changed_with_old_times])
def test_a_verdict_holds_for_the_very_files(
    written: Path, hashed: Counter[str], change: Callable[[Path], None]
) -> None:
    verify_checkpoint(written)
    change(written / "model.safetensors")
    if change is changed_with_old_times:
        with pytest.raises(CheckpointError, match="differs from what was written"):
            verify_checkpoint(written)
    else:
        verify_checkpoint(written)
    assert hashed["model.safetensors"] == 2


def test_a_failure_is_no_verdict_and_stray_files_are_seen_after_one(written: Path, hashed: Counter[str]) -> None:
    verify_checkpoint(written)
    (written / "zz.safetensors").touch()
    with pytest.raises(CheckpointError, match="does not list"):
        verify_checkpoint(written)
    (written / "zz.safetensors").unlink()
    flip_a_weight_bit(written)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="differs from what was written"):
            verify_checkpoint(written)
    assert hashed["model.safetensors"] == 3


def test_files_that_were_just_written_get_no_verdict(
    written: Path, hashed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "SETTLED_S", 3600.0)
    verify_checkpoint(written)
    verify_checkpoint(written)
    assert set(hashed.values()) == {2}


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_file(folder: Path) -> None:
    folder.touch()


def of_another_user(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("take", [open_to_others, a_link, a_file, of_another_user])
def test_verdicts_of_others_are_not_believed(written: Path, hashed: Counter[str], take: Callable[[Path], None]) -> None:
    take(verdict_folder())
    verify_checkpoint(written)
    verify_checkpoint(written)
    assert set(hashed.values()) == {2}


def test_a_forged_verdict_in_a_link_is_not_believed(written: Path, hashed: Counter[str], tmp_path: Path) -> None:
    verify_checkpoint(written)
    [verdict] = verdict_folder().iterdir()
    (tmp_path / "forged").write_bytes(verdict.read_bytes())
    verdict.unlink()
    verdict.symlink_to(tmp_path / "forged")
    verify_checkpoint(written)
    assert set(hashed.values()) == {2}


def test_old_verdicts_are_removed(written: Path, hashed: Counter[str]) -> None:
    verify_checkpoint(written)
    [old] = verdict_folder().iterdir()
    os.utime(old, (0, 0))
    touched(written / "config.json")
    verify_checkpoint(written)
    [left] = verdict_folder().iterdir()
    assert left.name != old.name


CHILD = """
import sys, time
from pathlib import Path
from pyprune.checkpoint import verify
from pyprune.serving.checkpoints import verify_checkpoint

original = verify.file_digest

def digest(path):
    time.sleep(0.05)  # long enough for the others to arrive
    with open(sys.argv[2], "a") as log:
        log.write(path.name + "\\n")
    return original(path)

verify.file_digest, verify.SETTLED_S = digest, -1.0
print("ready", flush=True)
sys.stdin.readline()
verify_checkpoint(Path(sys.argv[1]))
assert "torch" not in sys.modules
"""


@pytest.mark.process
def test_ranks_that_start_together_wait_for_the_first(written: Path, tmp_path: Path) -> None:
    """Four processes of one server ask at the same moment; every file is read by one of them."""
    (tmp_path / "verdicts").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "verdicts"), verify.SERVER: "one"}
    command = [sys.executable, "-c", CHILD, str(written), str(tmp_path / "log")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=environment, **pipes) for _ in range(4)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    assert Counter((tmp_path / "log").read_text().split()) == Counter(list(read_pruning_json(written).files))


def test_an_index_without_a_record_names_what_its_files_hold(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    verify_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"index"):
        verify_checkpoint(tmp_path)
