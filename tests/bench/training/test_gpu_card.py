"""gpu_card.py: every kind of part in small, and what becomes of parts that fail, last too long or cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench._card_plans import UNEQUAL
from bench.training import gpu_card
from bench.training.gpu_card import KERNELS, LIMITS, PATIENCE, Part, parts, run_part
from bench.training.train_step import FORMS, LABELS, LEAN, PLAIN
from pyprune.fit.profile import DENSE
from pyprune.runtime.records import RecordFile

NOTHING = ("timeit", "-n", "1", "-r", "1")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(text: str) -> dict[str, list[str]]:
    """Part -> cells of the last table."""
    lines = text[text.index("| part |") :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {part: others for part, *others in cells}


@pytest.mark.second
def test_every_kind_of_part_runs_in_small(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The four forms of a step are one kind."""
    names = ("kernels", "bandwidth", "dress", "serving")
    status = gpu_card.main(["--small", "--results", str(tmp_path), "--parts", ",".join(names)])
    printed = capfd.readouterr().out
    assert {name: cells[0] for name, cells in rows(printed).items()} == dict.fromkeys(names, "ran")
    assert status == 0
    served = list(RecordFile(tmp_path / "serving_card.jsonl").of("engine").values())
    assert "\n4 passed" in printed, "of tests/gpu, in the interpreter"
    assert [row["quantity"] for row in served] == ["prefill@16", "generation@2x4"]
    assert all(row["figures"][name]["seconds"] > 0 for row in served for name in (DENSE, UNEQUAL))
    timed = records(tmp_path / "ops.jsonl")
    assert {row["op"] for row in timed if row["implementation"] == "triton"} == {"perturb", "slice_gather"}
    steps = records(tmp_path / "optimizer.jsonl")
    assert {row["op"] for row in steps} == {LABELS["dress"]}
    (lean,) = [row for row in steps if row["implementation"] == LEAN]
    assert lean["peak_bytes"] == pytest.approx(lean["predicted_bytes"], rel=0.1)
    assert all(row["device"] for row in (*timed, *steps, *(row["environment"] for row in served)))


def test_all_of_it_takes_at_most_40_minutes(tmp_path: Path) -> None:
    assert sum(LIMITS.values()) + len(LIMITS) * PATIENCE / 60 <= 40
    assert max(LIMITS.values()) <= 10, "what a lent machine may allow a command"
    made = parts(list(LIMITS), tmp_path, small=False)
    assert [part.name for part in made] == list(LIMITS)
    assert sum(part.seconds for part in made) == 60 * sum(LIMITS.values())
    assert {part.name for part in made} >= set(FORMS)


def test_parts_that_fail_or_last_too_long_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"

    def record(line: dict[str, str]) -> tuple[str, ...]:
        return (*NOTHING, f"open({str(file)!r}, 'a').write({json.dumps(line)!r} + '\\n')")

    full = {"implementation": PLAIN, "failed": "out of memory"}
    made = [
        Part("wrong", (*NOTHING, "raise ValueError('a reason')"), file, 60),
        Part("slow", (*NOTHING, "import time; time.sleep(600)"), file, 0.5),
        Part("silent", (*NOTHING, "pass"), file, 60),
        Part("full", record(full), file, 60),
        Part("absent", (), file, 60, left_out="it is not installed"),
        Part("right", record({"op": "x"}), file, 60),
    ]
    monkeypatch.setattr(gpu_card, "parts", lambda *args, **options: made)
    assert gpu_card.main(["--small", "--results", str(tmp_path)]) == 1
    found = {name: (cells[0], cells[2]) for name, cells in rows(capfd.readouterr().out).items()}
    assert [found[part.name][0] for part in made] == ["failed", "failed", "failed", "failed", "left out", "ran"]
    assert "status 1: ValueError: a reason" in found["wrong"][1]
    assert "stopped after its limit of 0.5 s" in found["slow"][1]
    assert "nothing was measured" in found["silent"][1]
    assert f"{PLAIN}: out of memory" in found["full"][1]
    assert found["absent"][1] == "it is not installed"
    assert found["right"][1] == "recorded in records.jsonl: 1"


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_card.main(["--results", str(tmp_path)]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("Error: There is no NVIDIA GPU")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_vllm_serving_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_card, "check_gpu", lambda: None)
    monkeypatch.setattr(gpu_card, "vllm_installed", lambda: False)
    assert gpu_card.main(["--parts", "serving", "--results", str(tmp_path)]) == 0
    assert rows(capfd.readouterr().out) == {"serving": ["left out", "0", "vLLM is not installed"]}


def test_kernels_that_no_test_tried_are_a_failure() -> None:
    found = run_part(Part("kernels", (*KERNELS, "-k", "no_such_test"), None, 120))
    assert found.state == "failed"
    assert "ended with status 5" in found.note


def test_unknown_parts_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_card.main(["--parts", "kernel"])
    assert "Did you mean 'kernels'" in capfd.readouterr().err
