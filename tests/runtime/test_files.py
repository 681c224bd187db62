"""Files: what may be replaced, who may write, and what is left behind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pyprune.errors import OutputError
from pyprune.runtime.files import (
    MARK,
    atomic_folder,
    check_file,
    check_output,
    claim_work_folder,
    foreign_names,
    read_json,
    seal,
    unseal,
    whole_folder,
    work_folder,
    write_text,
)
from tests._support.paths import REPO


def ours(folder: Path, *more: str, manifest: str = "pruning.json") -> Path:
    """A folder whose manifest names all that it holds."""
    names = ("config.json", *more)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / manifest).write_text(json.dumps(seal({"files": dict.fromkeys(names, "")})))
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# --- what may be replaced ------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", ["pruning.json", "metrics.json"])
def test_what_its_manifest_names_is_replaced(tmp_path: Path, manifest: str) -> None:
    out = ours(tmp_path / "out", "chat/tool.jinja", manifest=manifest)
    with atomic_folder(out, overwrite=True) as folder:
        (folder / "new").write_text("1")
    assert tree(tmp_path) == ["out", "out/new"]


def put_a_file(out: Path) -> None:
    (out / "thesis.tex").write_text("years")


def put_a_file_into_a_folder_of_ours(out: Path) -> None:
    (out / "chat" / "mine.jinja").write_text("mine")


def put_an_empty_folder(out: Path) -> None:
    (out / "src").mkdir()


def put_a_link(out: Path) -> None:
    (out / "link").symlink_to(out.parent)


def put_a_link_in_place_of_a_file(out: Path) -> None:
    """The name is ours, and unlinking it would not touch what it points to: it goes."""
    (out / "chat" / "link").symlink_to("/etc")


def put_a_repository(out: Path) -> None:
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main")


def forge_the_manifest(out: Path) -> None:
    """Another program's file of that name carries no checksum of ours."""
    (out / "pruning.json").write_text(json.dumps({"files": ["config.json", "chat/tool.jinja"]}))


def damage_the_manifest(out: Path) -> None:
    (out / "pruning.json").write_text((out / "pruning.json").read_text()[:-20])


@pytest.mark.parametrize(
    "spoil",
    [
        put_a_file,
        put_a_file_into_a_folder_of_ours,
        put_an_empty_folder,
        put_a_link,
        put_a_link_in_place_of_a_file,
        put_a_repository,
        forge_the_manifest,
        damage_the_manifest,
    ],
)
def test_a_folder_that_holds_anything_else_is_not_replaced(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    out = ours(tmp_path / "out", "chat/tool.jinja")
    spoil(out)
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="which no record of pyprune in it names"):
        check_output(out, overwrite=True)
    assert tree(tmp_path) == before


def test_an_empty_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        check_output(tmp_path / "out")
    check_output(tmp_path / "out", overwrite=True)


def test_what_is_read_and_what_holds_it_are_not_replaced(tmp_path: Path) -> None:
    out = ours(tmp_path / "out", "model/config.json")
    with pytest.raises(OutputError, match=r"holds .*/out/model, which the command reads"):
        check_output(out, overwrite=True, reads=[None, "owner/name", out / "model"])
    (tmp_path / "link").symlink_to(out / "config.json")
    with pytest.raises(OutputError, match="which the command reads"):
        check_output(out, overwrite=True, reads=[tmp_path / "link"])
    with pytest.raises(OutputError, match="is what the command reads"):
        check_output(out, overwrite=True, reads=[out])


def test_the_current_folder_and_those_above_it_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ours(tmp_path / "out", "inside/file")
    for here, name in ((out, "."), (out / "inside", ".."), (out / "inside", str(out))):
        monkeypatch.chdir(here)
        with pytest.raises(OutputError, match="is or holds the current folder"):
            check_output(name, overwrite=True)


@pytest.mark.parametrize("target", ["nowhere", "real"])
def test_a_symbolic_link_is_no_output_folder(tmp_path: Path, target: str) -> None:
    ours(tmp_path / "real")
    (tmp_path / "out").symlink_to(tmp_path / target)
    with pytest.raises(OutputError, match="is a symbolic link to"):
        check_output(tmp_path / "out", overwrite=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="no folder that may be written"):
        check_output(tmp_path / "file" / "out")


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="exists already"), atomic_folder(out):
        ours(out, "somebody's")
    assert tree(tmp_path) == ["out", "out/config.json", "out/pruning.json", "out/somebody's"]
    ours(tmp_path / "again")
    with pytest.raises(OutputError, match=r"holds late\.txt"), atomic_folder(tmp_path / "again", overwrite=True):
        (tmp_path / "again" / "late.txt").write_text("kept")
    assert tree(tmp_path / "again") == ["config.json", "late.txt", "pruning.json"]
    assert not work_folder(tmp_path / "again").exists()


# --- one run at a time ---------------------------------------------------------------------------


def test_claims_nest_in_a_thread_and_exclude_others(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with claim_work_folder(tmp_path / "out"):
                refused.append("")
        except OutputError as error:
            refused.append(str(error))

    with claim_work_folder(tmp_path / "out"), claim_work_folder(tmp_path / "out"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "Another run is writing" in refused[0]
    other()
    assert refused[1] == ""
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from pyprune.runtime.files import claim_work_folder
with claim_work_folder(sys.argv[1]) as folder:
    (folder / "part").mkdir()
    (folder / "part" / "half").write_text("x")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_a_killed_run_holds_nothing_and_its_leftovers_go_with_the_next(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "out"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, cwd=REPO) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match="Another run is writing"), claim_work_folder(out):
            pass
        process.kill()
    assert (work_folder(out) / "part" / "half").exists()
    with atomic_folder(out) as folder:
        (folder / "new").write_text("1")
    assert tree(tmp_path) == ["deep", "deep/er", "deep/er/out", "deep/er/out/new"]


def test_a_run_that_was_killed_while_it_replaced_a_folder_is_settled(tmp_path: Path) -> None:
    """Between its two renames the old folder is in the work folder alone."""
    out, work = ours(tmp_path / "out"), work_folder(tmp_path / "out")
    work.mkdir()
    (work / MARK).touch()
    out.rename(work / "old")
    with claim_work_folder(out):
        assert tree(out) == ["config.json", "pruning.json"]
    assert tree(tmp_path) == ["out", "out/config.json", "out/pruning.json"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_work_folder_of_somebody_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    work = work_folder(tmp_path / "out")
    if kind == "file":
        work.write_text("mine")
    elif kind == "link":
        work.symlink_to(tmp_path)
    else:
        work.mkdir()
        (work / "mine").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match="pyprune did not write"), atomic_folder(tmp_path / "out"):
        pass
    assert tree(tmp_path) == before


def test_parents_that_were_made_go_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a" / "b" / "out"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


# --- one file ------------------------------------------------------------------------------------


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file.json")
    for text in ("first", "second"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "file.json").read_text() == text


def test_devices_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    write_text(Path(os.devnull), "gone")
    write_text(null, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no disk in memory")
def test_a_disk_in_memory_is_no_device() -> None:
    """Its files are replaced, not appended to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "file"
        for text in ("1", "2"):
            write_text(path, text)
            assert path.read_text() == text
        check_file(path)
        with pytest.raises(OutputError, match="there is no folder"):
            check_file(Path(folder) / "none" / "file")


@pytest.mark.process
def test_standard_output_is_written_to_in_place(tmp_path: Path) -> None:
    """Replaced, it would take with it what else is printed there."""
    script = (
        "from pathlib import Path; from pyprune.runtime.files import write_text\n"
        "print('table', flush=True); write_text(Path('/dev/stdout'), 'figures\\n'); print('end')"
    )
    with (tmp_path / "said").open("w") as said:
        subprocess.run([sys.executable, "-c", script], stdout=said, check=True, cwd=REPO)
    assert (tmp_path / "said").read_text() == "table\nfigures\nend\n"


def test_permissions_of_a_replaced_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~0o022
    path.chmod(0o600)
    write_text(path, "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- reading --------------------------------------------------------------------------


def test_reading_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("1" * 100)
    with pytest.raises(ValueError, match="more than 99 bytes"):
        read_json(tmp_path / "long", limit=99)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_json("/dev/zero", limit=1000)
    (tmp_path / "deep").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep")


@pytest.mark.parametrize("body", [{}, {"a": [1, 2.5, None], "b": {"10": 1, "2": 2}}, {"n": {10: 1, 2: 2}}])
def test_a_seal_holds_through_a_file_and_breaks_with_a_change(body: dict[str, object]) -> None:
    sealed = json.loads(json.dumps(seal(body)))
    assert unseal(sealed) == json.loads(json.dumps(body))
    for broken in ({**sealed, "more": 1}, {**sealed, "sha256": "0"}, body, [], None):
        with pytest.raises(ValueError, match="checksum"):
            unseal(broken)


def test_foreign_names_are_found_below_folders_of_ours(tmp_path: Path) -> None:
    out = ours(tmp_path / "out", "a/b/c")
    assert list(foreign_names(out)) == []
    (out / "a" / "b" / "d").touch()
    assert list(foreign_names(out)) == ["a/b/d"]


def test_a_folder_in_the_making_holds_nothing_of_a_killed_process(tmp_path: Path) -> None:
    part, final = tmp_path / "part", tmp_path / "final"
    part.mkdir()
    (part / "old").touch()
    with whole_folder(part, lambda made: made.rename(final)):
        (part / "new").touch()
    assert [path.name for path in final.iterdir()] == ["new"]
    with pytest.raises(ZeroDivisionError), whole_folder(part, lambda made: made.rename(tmp_path / "failed")):
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]
