from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyprune.errors import OutputError
from pyprune.runtime.figures import check_figures, check_lines
from pyprune.runtime.files import seal


def test_what_is_sealed_is_no_file_of_figures(tmp_path: Path) -> None:
    """Profiles and records of checkpoints took an hour; they name the version as figures do."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(seal({"pyprune": "1", "profile": 1})))
    with pytest.raises(OutputError, match="so it is not replaced"):
        check_figures(path)


def test_figures_replace_figures_and_nothing_else(tmp_path: Path) -> None:
    for name, text in (("thesis.tex", "years"), ("config.json", "{}"), ("list.json", "[1]"), ("binary", "\0")):
        (tmp_path / name).write_text(text)
        with pytest.raises(OutputError, match="was not written by pyprune"):
            check_figures(tmp_path / name)
    (tmp_path / "figures.json").write_text(json.dumps({"pyprune": "0", "a": 1}))
    check_figures(tmp_path / "figures.json")
    (tmp_path / "empty.json").touch()
    check_figures(tmp_path / "empty.json")
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "figures.json", tmp_path / "model" / "new.json"):
        with pytest.raises(OutputError, match="for something else"):
            check_figures(path, None, tmp_path / "model", tmp_path / "figures.json")


def test_lines_are_appended_to_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("my notes\n")
    with pytest.raises(OutputError, match="does not hold JSON lines"):
        check_lines(tmp_path / "notes")
    (tmp_path / "lines").write_text('{"a": 1}\n')
    check_lines(tmp_path / "lines")
    check_lines(tmp_path / "absent")


def test_a_profile_takes_the_place_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"

    def check() -> None:
        check_figures(path, option="--out", ours=lambda data: "probes" in data)

    for other in ({"probes": 1}, seal({"pyprune": "1", "files": []}), {"pyprune": "1", "a": 1}):
        path.write_text(json.dumps(other))
        with pytest.raises(OutputError, match="so it is not replaced"):
            check()
    path.write_text(json.dumps(seal({"pyprune": "1", "profile": 1, "probes": []})))
    check()


def test_lines_do_not_go_where_something_else_is_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    with pytest.raises(OutputError, match=r"--jsonl is .*, but the command uses .*report for something else"):
        check_lines(tmp_path / "report" / "turns.jsonl", None, tmp_path / "report")
