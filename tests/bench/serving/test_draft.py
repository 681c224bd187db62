"""draft.py: drafts are trained once, what servers count becomes rows, and rows are not measured again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from bench.serving import draft
from pyprune.checkpoint.record import read_pruning_json
from pyprune.runtime.records import RecordFile
from tests._support.models import tiny_model
from tests._support.text import write_model

NEW_TOKENS, PROMPTS, TURNS = 5, 3, 2


class Answers:
    """What a server of these options would say: a draft proposes 10 tokens an answer, of which 4 are accepted."""

    model = "dense"
    started: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], model: str) -> None:
        self.asked = 0
        self.drafts = "--speculative-config" in command
        self.started.append(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def post(self, path: str, body: dict[str, Any], timeout: float) -> str:
        assert path == "/v1/completions"
        assert body["temperature"] == 0
        self.asked += 1
        time.sleep(0.002)
        wrong = self.drafts and self.asked % PROMPTS == 0
        return json.dumps({"choices": [{"token_ids": [int(wrong)] * body["max_tokens"]}]})

    def metrics(self) -> str:
        if not self.drafts:
            return "# nothing"
        counts = {"proposed": 10 * self.asked, "accepted": 4 * self.asked}
        lines = [f'{draft.COUNTERS[name]}{{engine="0"}} {count}.0' for name, count in counts.items()]
        return "\n".join(["# HELP of something", *lines])


def run(folder: Path, *more: str) -> int:
    sizes = ["--prompts", PROMPTS, "--prompt-tokens", 6, "--new-tokens", NEW_TOKENS, "--turns", TURNS, "--steps", 1]
    given = ["--model", folder / "dense", "--cache", folder / "drafts", "--jsonl", folder / "rows.jsonl", "--proposed"]
    return draft.main([str(word) for word in (*sizes, *given, "1,3", *more)])


def test_a_draft_is_trained_once_and_measured_beside_the_dense_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = tiny_model("llama")
    write_model(dense, tmp_path / "dense")
    monkeypatch.setattr("pyprune.serving.load.server.Server", Answers)
    monkeypatch.setattr(Answers, "started", [])
    assert run(tmp_path, "--layers", "2", "--only-train") == 0
    assert not Answers.started
    (folder,) = (tmp_path / "drafts").glob("2-layers-????????")
    record = read_pruning_json(folder)
    assert record.plan is not None
    assert record.plan.kept_layers == (0, dense.config.num_hidden_layers - 1)
    assert [stage["action"] for stage in record.provenance["report"]["stages"]] == ["recover"]
    written = (folder / "model.safetensors").stat().st_mtime_ns

    assert run(tmp_path, "--layers", "2") == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    speculations = [json.loads(c[c.index("--speculative-config") + 1]) for c in Answers.started[1:]]
    assert [s["num_speculative_tokens"] for s in speculations] == [1, 3]
    assert {s["model"] for s in speculations} == {str(folder)}
    rows = list(RecordFile(tmp_path / "rows.jsonl").of("draft").values())
    assert [row["proposed_at_a_time"] for row in rows] == [1, 3]
    for row in rows:
        answers = TURNS * PROMPTS  # not the one before the turns
        assert (row["proposed"], row["accepted"]) == (10 * answers, 4 * answers)
        assert row["same_answers"] == PROMPTS - 1
        assert len(row["seconds"]) == len(row["dense_seconds"]) == TURNS
    assert "40.0%" in capsys.readouterr().out

    Answers.started.clear()
    assert run(tmp_path, "--layers", "2") == 0
    assert not Answers.started
    assert run(tmp_path, "--layers", "2", "--turns", "3") == 0
    assert len(Answers.started) == 3
    now = draft.serving_environment()
    later = {**now, "versions": {"vllm": "99.0"}}
    monkeypatch.setattr(draft, "serving_environment", lambda: later)
    assert run(tmp_path, "--layers", "2") == 0
    assert len(Answers.started) == 6, "what an earlier release did is measured again"
    assert len(RecordFile(tmp_path / "rows.jsonl").of("draft")) == 2 + 2 + 2, "and is kept"
    capsys.readouterr()
    assert run(tmp_path, "--layers", "2", "--only-table") == 0
    assert capsys.readouterr().out.count("| 99.0 |") == 2


def test_a_draft_that_proposes_nothing_costs_no_other_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Idle(Answers):
        def metrics(self) -> str:
            is_idle = any('"num_speculative_tokens": 1' in word for word in self.command)
            return "\n".join(f"{name} 0.0" for name in draft.COUNTERS.values()) if is_idle else super().metrics()

        def __init__(self, command: list[str], model: str) -> None:
            super().__init__(command, model)
            self.command = command

    write_model(tiny_model("llama"), tmp_path / "dense")
    monkeypatch.setattr("pyprune.serving.load.server.Server", Idle)
    monkeypatch.setattr(Answers, "started", [])
    assert run(tmp_path, "--layers", "2") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "proposed nothing: the dense model with a draft of 2 layers, 1 tokens at a time." in said
    (row,) = RecordFile(tmp_path / "rows.jsonl").of("draft").values()
    assert row["proposed_at_a_time"] == 3


def test_on_a_gpu_one_server_is_up_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up: list[Answers] = []

    class Alone(Answers):
        def __enter__(self) -> Self:
            up.append(self)
            assert len(up) == 1, "another server has the memory"
            return self

        def __exit__(self, *_: object) -> None:
            up.remove(self)

    write_model(tiny_model("llama"), tmp_path / "dense")
    monkeypatch.setattr("pyprune.serving.load.server.Server", Alone)
    monkeypatch.setattr(Answers, "started", [])
    monkeypatch.setattr(draft, "fills_gpu", lambda engine: engine == "vllm")
    assert run(tmp_path, "--layers", "2") == 0
    assert len(Answers.started) == TURNS * 3
    for row in RecordFile(tmp_path / "rows.jsonl").of("draft").values():
        answers = TURNS * PROMPTS
        assert (row["proposed"], row["accepted"]) == (10 * answers, 4 * answers)
        assert len(row["seconds"]) == len(row["dense_seconds"]) == TURNS


@pytest.mark.parametrize(("more", "message"), [
    (["--layers", "9"], "--layers has 9; a draft has 2 to 3 of the 4 layers"),
    (["--layers", "2", "--prompts", "100000"], "--prompts is 100000, but the text has"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tiny_model("llama"), tmp_path / "dense")
    assert run(tmp_path, *more) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "drafts").glob("*-layers-*")), "it is found before a draft is trained"


def test_drafts_of_other_weights_are_others(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        write_model(tiny_model("llama", seed=seed), tmp_path / name / "dense")
        assert run(tmp_path / name, "--layers", "2", "--only-train", "--cache", str(tmp_path / "drafts")) == 0
    assert len(list((tmp_path / "drafts").glob("2-layers-????????"))) == 2
