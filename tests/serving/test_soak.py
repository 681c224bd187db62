"""soak.py: its counts and verdicts, and a short run with a real server of a tiny model, killed at the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyprune.checkpoint.save import save_checkpoint
from pyprune.serving.engines import end_group
from tests._support.models import VOCAB, tiny_model
from tests._support.served import REAL_VLLM, damp_
from tests._support.tokenizer import tiny_tokenizer
from tests.serving import soak
from tests.serving.soak_client import Request, draw_requests

pytestmark = pytest.mark.second

SIZES = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}


def test_requests_are_mixed_and_drawn_again() -> None:
    drawn = draw_requests(200, range(4, 21), range(2, 9), VOCAB, 0.05, seed=1)
    assert drawn == draw_requests(200, range(4, 21), range(2, 9), VOCAB, 0.05, seed=1)
    assert drawn != draw_requests(200, range(4, 21), range(2, 9), VOCAB, 0.05, seed=2)
    assert {len(request.prompt) for request in drawn} == set(range(4, 21))
    assert {request.new_tokens for request in drawn} == set(range(2, 9))
    cancelled = [request for request in drawn if request.cancel_after is not None]
    assert len(cancelled) == 10
    assert all(0 < request.cancel_after < request.new_tokens for request in cancelled if request.cancel_after)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", **SIZES)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    for _ in range(new_tokens):
        prompt = [*prompt, int(model(torch.tensor([prompt])).logits[0, -1].argmax())]
    return prompt[-new_tokens:]


def test_every_wrong_token_counts(model: Any) -> None:
    prompt = [5, 6, 7, 8]
    tokens = greedy(model, prompt, 6)
    assert soak.differences(model, prompt, tokens) == (0, 0)
    other = [*tokens[:3], (tokens[3] + 1) % VOCAB]
    follows = [*other, *greedy(model, [*prompt, *other], 2)]
    assert soak.differences(model, prompt, follows) == (1, 0), "what follows is judged by its own beginning"


def test_two_logits_that_are_as_good_as_equal_are_counted_apart(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = greedy(model, [5, 6], 3)
    monkeypatch.setattr(soak, "TIE", 1e9)
    assert soak.differences(model, [5, 6], [*tokens[:2], (tokens[2] + 1) % VOCAB]) == (0, 1)


def test_memory_that_grows_is_seen() -> None:
    flat = soak.memory_of([(float(i), 1000 + i % 3) for i in range(100)])
    growing = soak.memory_of([(float(i), 1000 + i) for i in range(100)])
    assert abs(flat["growth"]) < 0.002
    assert growing["growth"] == pytest.approx(1094.5 / 1004.5 - 1)
    assert soak.memory_of([(0.0, 1), (1.0, 2)])["growth"] is None, "too short to say"
    warmed = soak.memory_of([(float(i), 900 if i < 10 else 1000) for i in range(100)])
    assert (round(warmed["growth"], 3), warmed["settled"]) == (0.111, 0.0), "what is kept from the start on is no leak"
    assert growing["settled"] == pytest.approx(1094.5 / 1014.5 - 1)
    said = "+11.11% (+0.00% since the second tenth)"
    assert said in soak.summary(record(memory=warmed))


def test_what_grew_is_named() -> None:
    before = {"pyprune": {"anonymous": 5 * 10**6, "file": 10**6}, "VLLM::Worker": {"anonymous": 10**9, "file": 10**6}}
    after = {
        "pyprune": {"anonymous": 2 * 10**6, "file": 10**6},
        "VLLM::Worker": {"anonymous": 1_250 * 10**6, "file": 1_500_000},
        "helper": {"anonymous": 7 * 10**6, "file": 0},
    }
    said = (
        "+250 MB anonymous memory of VLLM::Worker, +7 MB anonymous memory of helper, -3 MB anonymous memory of pyprune"
    )
    assert soak.grown(before, after) == said
    assert soak.grown(before, before) == "nothing"
    whole = {"first": 1e9, "last": 1.01e9, "growth": 0.01, "before": before, "after": after}
    assert f"against before the load: {said}.\n" in soak.summary(record(memory=whole)) + "\n"


def record(**values: Any) -> dict[str, Any]:
    options = {"requests": 30, "concurrency": 4, "dtype": "float32", "eager": True, "prompt_tokens": "4 to 20",
               "new_tokens": "2 to 8"}  # fmt: skip
    return {
        "model": "tiny", "options": options, "seconds": 10.0, "tokens": 200, "errors": [],
        "counts": {"finished": 28, "cancelled": 2, "failed": 0},
        "memory": {"first": 1e9, "last": 1.01e9, "growth": 0.01},
        "compared": {"answers": 20, "tokens": 100, "wrong": 0, "ties": 1},
        "rest": {"healthy": True, "gauges": dict.fromkeys(soak.GAUGES, 0.0)},
        "killed": {"what": "engine", "seconds": 3.0, "status": 1, "left": [], "requests": {}}, **values,
    }  # fmt: skip


def test_a_run_in_which_everything_holds() -> None:
    assert all(holds for _, holds in soak.verdicts(record()))
    text = soak.summary(record())
    assert text.count(": holds.") == 7
    assert "1 more with a logit that is less than 0.001 below the largest" in text
    assert "20 tokens/s over 10 s." in text


@pytest.mark.parametrize(
    "broken",
    [
        {"counts": {"finished": 27, "cancelled": 2, "failed": 1}},
        {"compared": {"answers": 20, "tokens": 100, "wrong": 1, "ties": 0}},
        {"memory": {"first": 1e9, "last": 1.03e9, "growth": 0.03}},
        {"rest": {"healthy": True, "gauges": {**dict.fromkeys(soak.GAUGES, 0.0), soak.GAUGES[0]: 1.0}}},
        {"rest": {"healthy": False, "gauges": dict.fromkeys(soak.GAUGES, 0.0)}},
        {"killed": {"what": "engine", "seconds": 3.0, "status": 0, "left": [], "requests": {}}},
        {"killed": {"what": "engine", "seconds": 31.0, "status": 1, "left": [], "requests": {}}},
        {"killed": {"what": "engine", "seconds": 3.0, "status": 1, "left": ["VLLM::Worker"], "requests": {}}},
        {"killed": {"what": "engine", "seconds": 120.0, "status": None, "left": ["vllm serve"], "requests": {}}},
    ],
)
def test_each_thing_that_may_go_wrong_is_said(broken: dict[str, Any]) -> None:
    assert [holds for _, holds in soak.verdicts(record(**broken))].count(False) == 1
    assert soak.summary(record(**broken)).count(": does not hold.") == 1


def test_a_server_that_ended_by_itself_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing left to kill then, and the run is no run without a record."""
    run = object.__new__(soak.Soak)
    run.options = Namespace(requests=1, concurrency=1, eager=True, kill_worker="engine",
                            prompt_tokens=range(4, 9), new_tokens=range(2, 5))  # fmt: skip
    run.name, run.folder, run.outcomes, run.memory = "tiny", Path("tiny"), [], [(0.0, 1)]

    async def nothing(*_: Any) -> None: ...

    def died(*_: Any) -> Any:
        return {"healthy": False, "gauges": {}}

    monkeypatch.setattr(soak, "Server", lambda *_: nullcontext(SimpleNamespace(pid=-1)))
    monkeypatch.setattr(soak, "at_rest", died)
    for name, value in (("_command", list), ("_check_asked", lambda _: None), ("_load", nothing), ("_compare", dict)):
        monkeypatch.setattr(run, name, value, raising=False)
    monkeypatch.setattr(run, "_kill", lambda *_: pytest.fail("nothing is there to be killed"), raising=False)
    found = run.run()
    assert (found["killed"], found["rest"]["healthy"]) == (None, False)


PROCESSES = """
import os, shutil, subprocess, sys
names = ("VLLM::EngineCore", "VLLM::Worker")
children = [subprocess.Popen([name, "60"], executable=shutil.which("sleep")) for name in names]
print("up", flush=True)
ended, _ = os.wait()
for child in children:
    if child.pid != ended:
        child.kill()
        child.wait()
sys.exit(3 + [child.pid for child in children].index(ended))
"""
"""A process with two children that have the names of vLLM's; its status says which of them ended first."""


@pytest.mark.parametrize(("what", "status"), [("engine", 3), ("worker", 4)])
def test_the_process_that_was_named_is_killed(what: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send_all(*given: Any) -> None:
        given[-1](soak.Outcome(Request((1,), 2), "finished", (3, 4)))

    monkeypatch.setattr(soak, "send_all", send_all)
    run = object.__new__(soak.Soak)
    run.options = Namespace(concurrency=1, prompt_tokens=range(4, 9), new_tokens=range(2, 5))
    run.vocab_size = VOCAB
    command = [sys.executable, "-c", PROCESSES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        try:
            assert leader.stdout is not None
            assert leader.stdout.readline() == b"up\n"
            server: Any = SimpleNamespace(pid=leader.pid, url="", model="", exit_status=leader.wait)
            found = asyncio.run(run._kill(server, what))
        finally:
            end_group(leader, patience=0)
    assert found.pop("seconds") >= 0
    assert found == {"what": what, "status": status, "left": [], "requests": {"finished": 1}}


def test_what_cannot_be_told_apart_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks have a worker each; a server on a GPU has none."""
    server: Any = SimpleNamespace(pid=1)
    ranks = {7: "vllm serve /m", 8: "VLLM::EngineCore", 9: "VLLM::Worker_TP0", 10: "VLLM::Worker_TP1"}
    monkeypatch.setattr(soak, "group_processes", lambda _: ranks)
    assert soak.process_called(server, soak.KILLED["engine"]) == 8
    with pytest.raises(soak.ConfigError, match=r"2 processes of the server are called VLLM::Worker.*VLLM::EngineCore"):
        soak.process_called(server, soak.KILLED["worker"])
    monkeypatch.setattr(soak, "group_processes", lambda _: {8: "VLLM::EngineCore"})
    with pytest.raises(soak.ConfigError, match="0 processes of the server are called VLLM::Worker"):
        soak.process_called(server, soak.KILLED["worker"])


def test_what_cannot_be_asked_is_refused_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    run = object.__new__(soak.Soak)
    run.options = Namespace(kill_worker="worker")
    monkeypatch.setattr(soak, "group_processes", lambda _: {8: "VLLM::EngineCore"})
    server: Any = SimpleNamespace(pid=1, metrics=lambda: "vllm:other 1.0\n")
    with pytest.raises(soak.ConfigError, match="0 processes of the server are called VLLM::Worker"):
        run._check_asked(server)
    run.options = Namespace(kill_worker=None)
    with pytest.raises(soak.ConfigError, match="/metrics has no vllm:num_requests_running"):
        run._check_asked(server)


def test_a_metric_is_summed_over_its_labels() -> None:
    text = '# HELP vllm:a of a\nvllm:a{engine="0"} 1.0\nvllm:a{engine="1"} 2.0\nvllm:a_total{engine="0"} 50.0\n'
    assert soak.metric(text, "vllm:a") == 3.0
    with pytest.raises(soak.ConfigError, match="has no vllm:b"):
        soak.metric(text, "vllm:b")


@pytest.mark.parametrize(
    "given",
    [["--new-tokens", "1-4"], ["--prompt-tokens", "9-4"], ["--requests", "0"]],
)
def test_wrong_options_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        soak.main(given)
    assert stop.value.code == 2
    assert given[0] in capsys.readouterr().err


class TestServed:
    pytestmark = REAL_VLLM

    def test_thirty_requests_and_a_kill(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        dense = tiny_model("llama", **SIZES)
        damp_(dense)
        save_checkpoint(dense, tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={"source": "tiny"})
        rows = tmp_path / "rows.jsonl"
        given = ["--model", str(tmp_path / "dense"), "--requests", "30", "--concurrency", "4"]
        given += ["--prompt-tokens", "4-40", "--new-tokens", "8-24"]
        status = soak.main([*given, "--eager", "--kill-worker", "--jsonl", str(rows)])
        printed = capsys.readouterr().out
        (row,) = map(json.loads, rows.read_text().splitlines())
        assert [said for said, holds in soak.verdicts(row) if holds is False] == [], printed
        assert status == 0, printed
        assert row["counts"] == {"finished": 28, "cancelled": 2, "failed": 0}
        assert row["compared"]["answers"] == 28
        assert row["compared"]["tokens"] >= 28 * 8
        assert row["compared"]["wrong"] == 0
        assert set(row["rest"]["gauges"].values()) == {0.0}
        assert row["memory"]["first"] > 100e6, "a server with torch in it"
        for when in ("before", "after"):
            assert row["memory"][when]["VLLM::EngineCore"]["anonymous"] > 10e6
        assert row["killed"]["status"] == 1, "what restarts it on failure has to see one"
        assert row["killed"]["seconds"] <= 30
        assert row["killed"]["requests"]["failed"] >= 1, "it was killed during load"
        assert row["killed"]["left"] == []
        assert "0 wrong tokens of" in printed
