"""The grid of scores on a tiny model: checkpoints are cut, recovered, measured and deleted."""

from __future__ import annotations

import argparse
import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.quality.__main__ import main
from bench.quality.scores import GRID, TEXTS, make_cases, scorers
from pyprune import prune
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.methods.registry import score_presets
from pyprune.quality.perplexity import evaluate_perplexity
from pyprune.run.recipe import build_config
from pyprune.train.objective import Objective
from tests._support.models import tiny_model
from tests._support.text import prose, write_model, write_text

STEPS = "steps=2,batch_size=4,micro_batch_size=2,warmup_steps=0,learning_rate=1e-2"


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    write_model(tiny_model("llama", max_position_embeddings=2048), tmp_path / "tiny")
    data = tmp_path / "data"
    for number, name in enumerate((*TEXTS.values(), "c4.txt")):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(data / name, seed=number)
    (data / "alpaca").mkdir()
    lines = [{"instruction": prose(40, n)[:20], "input": "", "output": prose(40, n + 99)[:40]} for n in range(12)]
    with gzip.open(data / "alpaca" / "train_5k.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    few = ["data.samples=4", "data.sequence_length=32", "score.first_layer=1", "score.last_layer=-1"]
    recovery = ["data.samples=8", "data.sequence_length=192", *(f"recover.train.{s}" for s in STEPS.split(","))]
    return [
        "scores", "--model", str(tmp_path / "tiny"), "--data", str(data), "--calibration", "c4.txt", "--tokens", "2048",
        "--dtype", "float32", "--jsonl", str(tmp_path / "cells.jsonl"), "--out", str(tmp_path / "out"),
        *(part for text in [*few, "score.normalise=size", "moreau.steps=2"] for part in ("--set", text)),
        *(part for text in recovery for part in ("--set-recovery", text)),
    ]  # fmt: skip


def records(inputs: list[str]) -> list[dict[str, Any]]:
    path = Path(inputs[inputs.index("--jsonl") + 1])
    return [json.loads(line) for line in path.read_text().splitlines()]


def scorer(row: dict[str, Any]) -> str:
    return str(row["case"]["scorer"]).partition(",")[0]


def test_cells_are_cut_recovered_measured_and_not_run_twice(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--scorers", "taylor:param_first,moreau,magnitude:l2", "--recover", "moreau"]
    assert main([*inputs, *chosen]) == 0
    printed = capsys.readouterr().out
    dense, *cells = records(inputs)
    found = [(scorer(c), c["case"]["seed"], c["case"]["recovery"][:3]) for c in cells]
    assert found == [
        ("taylor:param_first", 0, "no"),
        ("moreau", 0, "no"),
        ("magnitude:l2", 0, "no"),
        ("taylor:param_first", 1, "no"),
        ("moreau", 1, "no"),
        ("moreau", 0, "yes"),
        ("moreau", 1, "yes"),
    ]
    figures = [c["figures"] for c in cells]
    assert all(0.75 < f["parameters"] / f["dense_parameters"] < 0.9 for f in figures)
    moreau = [c["figures"] for c in cells if scorer(c) == "moreau"]
    assert moreau[0]["perplexity"] != moreau[1]["perplexity"], "another seed is other text and noise"
    assert moreau[0]["peak_bytes"] > 0
    assert moreau[0]["model_bytes"] == 0, "it scores from the files"
    assert moreau[0]["perplexity"] != moreau[2]["perplexity"], "recovery has an effect"
    assert moreau[2]["removed"] == moreau[0]["removed"]
    assert moreau[2]["recover_steps"] == 2

    kept = sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("."))
    assert kept == ["dense", "moreau-seed0", "moreau-seed0-recovered"]
    for name, row in (("dense", dense["figures"]), ("moreau-seed0", moreau[0]), ("moreau-seed0-recovered", moreau[2])):
        model, tokenizer = load_model(tmp_path / "out" / name)
        text = tmp_path / "data" / TEXTS["ptb"]
        alone = evaluate_perplexity(model, tokenizer, str(text), "ppl-2048", max_tokens=2048).perplexity
        assert row["perplexity"]["ppl-2048"]["ptb"] == pytest.approx(alone, abs=1e-4)

    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [line[2:].partition(",")[0].partition(" ")[0] for line in lines[1:]] == [
        "dense", "taylor:param_first", "moreau", "moreau", "magnitude:l2",
    ]  # fmt: skip
    assert "yes, data.samples=8" in lines[4]
    assert str(tmp_path) not in Path(inputs[inputs.index("--jsonl") + 1]).read_text()
    assert main([*inputs, *chosen]) == 0
    assert len(records(inputs)) == 8, "nothing runs twice"
    assert main([*inputs, "--table"]) == 0
    assert capsys.readouterr().out == printed * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_recovery_continues_from_its_last_step(
    number: signal.Signals, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the second of two steps; the same command then runs that step alone, to the same bits."""
    chosen = ["--scorers", "magnitude:l2", "--recover", "magnitude:l2", "--seeds", "0"]
    apart = {str(tmp_path / name): str(tmp_path / "whole" / name) for name in ("cells.jsonl", "out")}
    whole = [apart.get(text, text) for text in inputs]
    assert main([*whole, *chosen]) == 0
    uninterrupted = records(whole)[-1]["figures"]
    assert uninterrupted["recover_seconds"] > 0
    begun: list[int] = []
    done: list[int] = []

    def before_step(self: Objective, model: object, step: int) -> None:
        begun.append(step)
        if begun == [1, 2]:
            signal.raise_signal(number)

    def after_step(self: Objective, model: object, optimizer: object, step: int, learning_rate: float) -> None:
        done.append(step)

    monkeypatch.setattr(Objective, "before_step", before_step)
    monkeypatch.setattr(Objective, "after_optimizer_step", after_step)
    assert main([*inputs, *chosen]) == 130
    assert not any(row["case"]["recovery"].startswith("yes") for row in records(inputs))
    assert main([*inputs, *chosen]) == 0
    assert done == [1, 2], "no step is done twice"
    figures = records(inputs)[-1]["figures"]
    assert figures["perplexity"] == uninterrupted["perplexity"]
    assert figures["recover_steps"] == 2
    assert figures["recover_seconds"] is None


def test_a_cut_that_another_scorer_made_too_is_recovered_once(
    inputs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Next to the first-order term the second one is too small to change the order of so few channels.
    chosen = ["--scorers", "none", "--recover", "taylor:param_first,taylor:param_mix,taylor:vectorize", "--seeds", "0"]
    done: list[int] = []
    monkeypatch.setattr(Objective, "before_step", lambda self, model, step: done.append(step))
    assert main([*inputs, *chosen]) == 0
    rows = {scorer(row).partition(":")[2]: row["figures"] for row in records(inputs)[1:]}
    assert done == [1, 2, 1, 2], "two recoveries, not three"
    first, mix, other = rows["param_first"], rows["param_mix"], rows["vectorize"]
    assert mix["same_cut_as"].startswith("taylor:param_first")
    assert mix["cut_sha256"] == first["cut_sha256"] != other["cut_sha256"]
    for name in ("perplexity", "losses"):
        assert mix[name] == first[name] != other[name]
    assert "its recovery is shared" in capsys.readouterr().out


def test_a_cell_equals_the_same_options_run_alone(inputs: list[str], tmp_path: Path) -> None:
    chosen = ["--scorers", "taylor:param_mix", "--recover", "none", "--seeds", "3", "--keep"]
    assert main([*inputs, *chosen]) == 0
    given = [inputs[i + 1] for i, text in enumerate(inputs) if text == "--set"]
    settings = [text for text in given if not text.startswith("moreau.")]  # the grid gives these to moreau alone
    wanted = ["taylor.form=param_mix", "ratio=0.2", "score.ranking=global", "data.seed=3"]
    wanted.append(f"data.source={tmp_path / 'data' / 'c4.txt'}")
    config = build_config(preset="taylor-paper", settings=[*settings, *wanted])
    result = prune(tmp_path / "tiny", config, out=tmp_path / "own")
    assert read_pruning_json(tmp_path / "out" / "taylor-param_mix-seed3").plan == result.plan


def test_a_failed_cell_is_recorded_and_the_others_run(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Noise of this size makes the loss infinite.
    broken = ["--set", "moreau.steps=1", "--set", "moreau.sigma=1e30"]
    assert main([*inputs, "--scorers", "moreau,magnitude:l1", "--seeds", "0", "--recover", "none", *broken]) == 1
    _, failed, good = records(inputs)
    assert failed["error"]
    assert not good["error"]
    assert f"{failed['error']}" in capsys.readouterr().out


def test_every_preset_is_a_scorer_with_the_values_of_its_own_option() -> None:
    assert {name.partition(":")[0] for name in scorers()} == set(score_presets()) - {"obs", "modegpt"}
    assert [*scorers()][:3] == ["taylor:param_first", "smoothgrad", "moreau"]
    assert {"magnitude:l1", "magnitude:l2"} < set(scorers())


def test_a_cell_is_known_by_the_options_that_were_given(inputs: list[str]) -> None:
    parser = argparse.ArgumentParser()
    GRID.add_arguments(parser)
    options = parser.parse_args([*inputs[1:], "--scorers", "moreau,taylor:param_first", "--recover", "moreau"])
    options.scorers, options.recover = options.scorers[0], options.recover[0]
    _, *cases = make_cases(options)
    given = cases[0].identity["prune"]
    assert given["data"]["source"] == "c4.txt"
    assert given["score"] == {"first_layer": 1, "normalise": "size"}
    assert "finetune" not in given, "a default that comes with a new option must not make an old cell a new one"
    assert cases[0].identity["recovery"] is None
    assert {case.task[2].options.seed for case in cases if case.task[0] == "moreau"} == {0, 1}
    assert len({json.dumps([c.fields, c.identity]) for c in cases}) == len(cases) == 6


def test_missing_data_and_wrong_options_stop_before_anything_runs(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*inputs, "--data", str(tmp_path), "--recover", "none"]) == 2
    message = capsys.readouterr().err
    assert TEXTS["wikitext-2"] in message
    assert "alpaca" not in message
    assert main([*inputs, "--set", "score.rankin=local"]) == 2
    assert "Did you mean 'ranking'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
