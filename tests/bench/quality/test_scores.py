"""The table of scorers on a tiny model: every cell is measured once and kept, and one failure stops no other."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.quality.scores import RECORDS, _parser, main
from bench.quality.scores_cases import TEXTS, Setting, choose_scorers, make_cases, scorers
from bench.quality.scores_run import PROTOCOLS
from bench.quality.scores_table import make_table, verdicts
from pyprune import prune
from pyprune.checkpoint.load import load_model
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.methods.registry import score_presets
from pyprune.plan import PrunePlan
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
    for number, name in enumerate(("wikitext2_raw/test.txt", "ptb/ptb.valid.txt", "c4.txt")):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(data / name, seed=number)
    (data / "alpaca").mkdir()
    lines = [{"instruction": prose(40, n)[:20], "input": "", "output": prose(40, n + 99)[:40]} for n in range(12)]
    with gzip.open(data / "alpaca" / "train_5k.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    few = ["data.samples=4", "data.sequence_length=32", "score.first_layer=1", "score.last_layer=-1"]
    recovery = ["data.samples=8", "data.sequence_length=192", *(f"recover.train.{s}" for s in STEPS.split(","))]
    return [
        "--model", str(tmp_path / "tiny"), "--data", str(data), "--calibration", "c4.txt", "--max-tokens", "2048",
        "--jsonl", str(tmp_path / "cells.jsonl"), "--out", str(tmp_path / "out"),
        *(part for text in [*few, "score.normalise=size", "moreau.steps=2"] for part in ("--set", text)),
        *(part for text in recovery for part in ("--set-recovery", text)),
    ]  # fmt: skip


def records(inputs: list[str]) -> list[dict[str, Any]]:
    path = Path(inputs[inputs.index("--jsonl") + 1])
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(text: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in lines if not line[0].startswith("---")]


def test_cells_are_cut_recovered_measured_and_not_run_twice(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--scorers", "taylor:param_first,moreau,magnitude:l2", "--recover", "moreau"]
    assert main([*inputs, *chosen]) == 0
    printed = capsys.readouterr().out
    dense, *cells = records(inputs)
    assert dense["kind"] == "dense"
    found = [(c["scorer"], c["seed"], bool(c["recovery"])) for c in cells]
    assert found == [
        ("taylor:param_first", 0, False),
        ("moreau", 0, False),
        ("magnitude:l2", 0, False),
        ("taylor:param_first", 1, False),
        ("moreau", 1, False),
        ("moreau", 0, True),
        ("moreau", 1, True),
    ]
    assert all(not c["error"] and 0.75 < c["parameters"] / c["dense_parameters"] < 0.9 for c in cells)
    assert {c["prune"]["magnitude"]["norm"] for c in cells if "magnitude" in c["scorer"]} == {"l2"}
    moreau = [c for c in cells if c["scorer"] == "moreau"]
    assert moreau[0]["plan"] != moreau[1]["plan"], "another seed is other text and noise"
    assert moreau[0]["memory"]["peak_bytes"] > moreau[0]["memory"]["layer_bytes"] > 0
    assert moreau[0]["memory"]["model_bytes"] == 0, "it scores from the files"
    assert moreau[0]["perplexity"] != moreau[2]["perplexity"], "recovery has an effect"
    assert moreau[2]["parameters"] == moreau[0]["parameters"]
    assert moreau[2]["recover_steps"] == 2

    kept = sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("."))
    assert kept == ["dense", "moreau-seed0", "moreau-seed0-recovered"]
    for name, cell in (("dense", dense), ("moreau-seed0", moreau[0]), ("moreau-seed0-recovered", moreau[2])):
        model, tokenizer = load_model(tmp_path / "out" / name)
        text = tmp_path / "data" / "ptb" / "ptb.valid.txt"
        alone = evaluate_perplexity(model, tokenizer, str(text), "ppl-2048", max_tokens=2048).perplexity
        assert cell["perplexity"]["PTB"]["ppl-2048"] == alone

    table = rows(printed)
    assert [(row[0].partition(",")[0], row[1]) for row in table[1:]] == [
        ("dense", "-"),
        ("taylor:param_first", "no"),
        ("moreau", "no"),
        ("moreau", table[4][1]),
        ("magnitude:l2", "no"),
    ]
    assert table[4][1].startswith("yes, data.samples=8")
    pair = [c["perplexity"]["WikiText-2"]["ppl-128"] for c in moreau[:2]]
    cell = table[3][table[0].index("WikiText-2 PPL-128")]
    assert cell.count(" / ") == 1, "each seed's value is shown"
    assert float(cell.split(" ")[0].replace(",", "")) == pytest.approx(sum(pair) / 2, rel=1e-3)
    for row in table[1:]:
        cuts = [c for c in cells if c["scorer"] == row[0].partition(",")[0] and not c["recovery"]]
        for column, axis in (("heads removed", "query_heads"), ("FFN channels removed", "ffn")):
            whole = {"query_heads": 6, "ffn": 40}[axis] * 4
            plans = [PrunePlan.from_dict(c["plan"]) for c in cuts]
            gone = [str(whole - sum(len(getattr(x, axis)) for x in plan.layers)) for plan in plans] or ["0"]
            assert row[table[0].index(column)] == " / ".join(dict.fromkeys(gone)), (row[0], column)
    assert "c4.txt" in printed
    assert "--engine vllm" in printed
    assert str(tmp_path) not in Path(inputs[inputs.index("--jsonl") + 1]).read_text()

    assert main([*inputs, *chosen]) == 0
    assert len(records(inputs)) == 8, "nothing runs twice"
    assert rows(capsys.readouterr().out) == table
    assert main(["--only-table", "--jsonl", inputs[inputs.index("--jsonl") + 1]]) == 0
    assert rows(capsys.readouterr().out) == table


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_recovery_continues_from_its_last_step(
    number: signal.Signals, inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the second of two steps; the same command then runs that step alone, to the same bits."""
    chosen = ["--scorers", "magnitude:l2", "--recover", "magnitude:l2", "--seeds", "0"]
    apart = {str(tmp_path / name): str(tmp_path / "whole" / name) for name in ("cells.jsonl", "out")}
    whole = [apart.get(text, text) for text in inputs]
    assert main([*whole, *chosen]) == 0
    uninterrupted = records(whole)[-1]
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
    assert not any(r["kind"] == "cell" and r["recovery"] for r in records(inputs))
    assert main([*inputs, *chosen]) == 0
    assert done == [1, 2], "no step is done twice"
    cell = records(inputs)[-1]
    assert cell["perplexity"] == uninterrupted["perplexity"]
    assert cell["recover_steps"] == 2
    assert cell["recover_seconds"] is None


@pytest.mark.parametrize(
    ("removed", "title", "cells"),
    [
        ([(0, 7), (0, 9)], "Scoring methods: FFN channels removed", ["0", "7 / 9"]),
        ([(0, 7), (3, 7)], "Scoring methods: heads and FFN channels removed", ["0 / 3", "7"]),
        ([(3, 0), (3, 0)], "Scoring methods: heads removed", ["3", "0"]),
    ],
)
def test_the_table_says_what_went(removed: list[tuple[int, int]], title: str, cells: list[str]) -> None:
    dense = PrunePlan.identity("llama", family_for(tiny_model("llama")).sizes(tiny_model("llama").config))
    shared = {
        "scorer": "wanda:output", "set": [], "set_recovery": [], "error": "", "parameters": 10, "dense_parameters": 12,
        "perplexity": {text: dict.fromkeys(PROTOCOLS, 5.0) for text in TEXTS},
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    for seed, (heads, ffn) in enumerate(removed):
        plan = dense.with_layer(1, query_heads=range(heads, 6), kv_heads=range(heads // 3, 2), ffn=range(ffn, 40))
        records.append({**shared, "seed": seed, "recovery": None, "plan": plan.to_dict()})
        records.append({**shared, "seed": seed, "recovery": {"data": {}}})  # its cut was there already
    table = make_table(records, None)
    assert table.title == title
    places = [table.columns.index(name) for name in ("heads removed", "FFN channels removed")]
    assert [[row[i] for i in places] for row in table.rows] == [cells, cells], "with recovery and without"


def test_the_recorded_cells_are_those_of_today() -> None:
    """A changed preset must not make new cells of the recorded ones: what they were cut with is named."""
    options = _parser().parse_args(["--recover", "all"])
    cases = make_cases(options)
    recorded = {r["key"]: r for r in map(json.loads, RECORDS.read_text().splitlines()) if r["kind"] == "cell"}
    one = next(iter(recorded.values()))["setting"]
    setting = Setting(one["model"], Path("data"), one["texts"], one["max_tokens"], one["dtype"])
    keys = {setting.key(case.identity) for case in cases}
    assert len(keys) == len(cases)
    assert keys == set(recorded)
    assert {r["prune"]["score"]["ranking"] for r in recorded.values()} == {"global"}


def test_scorers_are_compared_on_the_same_seeds() -> None:
    def record(scorer: str, seed: int, perplexity: float) -> dict[str, Any]:
        method = scorer.partition(":")[0]
        figures = {text: dict.fromkeys(PROTOCOLS, perplexity) for text in TEXTS}
        shared: dict[str, Any] = {"set": [], "recovery": None, "error": "", "prune": {"method": method}}
        return {**shared, "scorer": scorer, "seed": seed, "perplexity": figures}

    # Seed 1 is harder for all; what was cut on seed 0 alone must not win by that. Magnitude reads no text.
    found = [("moreau", 0, 40.0), ("moreau", 1, 60.0), ("smoothgrad", 0, 45.0), ("magnitude:l2", 0, 90.0)]
    *lines, left_out = verdicts([record(*one) for one in found])
    assert len(lines) == len(TEXTS) * len(PROTOCOLS)
    assert all("best of 2 is moreau (50.00)" in line and "smoothgrad" not in line for line in lines)
    assert left_out == "Not compared without recovery, for a seed is missing: smoothgrad."


def test_a_cut_that_another_scorer_made_too_is_recovered_once(
    inputs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside the first-order term the second one is too small to change the order of so few channels.
    chosen = ["--scorers", "none", "--recover", "taylor:param_first,taylor:param_mix,taylor:vectorize", "--seeds", "0"]
    done: list[int] = []
    monkeypatch.setattr(Objective, "before_step", lambda self, model, step: done.append(step))
    assert main([*inputs, *chosen]) == 0
    cells = {c["scorer"].partition(":")[2]: c for c in records(inputs)[1:]}
    assert done == [1, 2, 1, 2], "two recoveries, not three"
    first, mix = cells["param_first"], cells["param_mix"]
    assert mix["same_cut_as"] == "taylor:param_first, seed 0"
    assert mix["cut_sha256"] == first["cut_sha256"] != cells["vectorize"]["cut_sha256"]
    for name in ("perplexity", "parameters", "losses"):
        assert mix[name] == first[name] != cells["vectorize"][name]
    assert not any("same_cut_as" in cells[name] for name in ("param_first", "vectorize"))
    printed = capsys.readouterr().out
    assert "taylor:param_mix, seed 0: the same cut as taylor:param_first, seed 0" in printed
    assert len(rows(printed)) == 1 + 1 + 3


def test_a_cell_equals_the_same_options_run_alone(inputs: list[str], tmp_path: Path) -> None:
    assert main([*inputs, "--scorers", "taylor:param_mix", "--recover", "none", "--seeds", "3"]) == 0
    cell = records(inputs)[-1]
    given = [inputs[i + 1] for i, text in enumerate(inputs) if text == "--set"]
    settings = [text for text in given if not text.startswith("moreau.")]  # what the bench gives to moreau alone
    wanted = ["taylor.form=param_mix", "ratio=0.2", "score.ranking=global", "data.seed=3"]
    wanted.append(f"data.source={tmp_path / 'data' / 'c4.txt'}")
    result = prune(
        tmp_path / "tiny", build_config(preset="taylor", settings=[*settings, *wanted]), out=tmp_path / "own"
    )
    assert cell["plan"] == result.plan.to_dict()


def test_a_failed_cell_is_recorded_and_the_others_run(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Noise of this size makes the loss infinite.
    broken = ["--set", "moreau.steps=1", "--set", "moreau.sigma=1e30"]
    chosen = ["--scorers", "moreau,magnitude:l1", "--seeds", "0", "--recover", "none"]
    assert main([*inputs, *chosen, *broken]) == 1
    _, failed, good = records(inputs)
    assert failed["error"]
    assert not good["error"]
    printed = capsys.readouterr().out
    assert f"Failed: moreau, seed 0: {failed['error']}" in printed
    assert [row[0].partition(",")[0] for row in rows(printed)[1:]] == ["dense", "magnitude:l1"]
    assert main([*inputs, *chosen, *broken]) == 1
    assert len(records(inputs)) == 3
    assert main([*inputs, *chosen, *broken, "--retry-failed"]) == 1
    assert len(records(inputs)) == 4


def test_every_preset_is_a_scorer_with_the_values_of_its_own_option() -> None:
    reconstructed = {name for name, make in score_presets().items() if make().cut.reconstruct == "least_squares"}
    assert reconstructed == {"obs"}
    assert {name.partition(":")[0] for name in scorers()} == set(score_presets()) - reconstructed
    assert choose_scorers("magnitude") == ["magnitude:l1", "magnitude:l2"]
    assert len(choose_scorers("taylor")) == 4
    assert choose_scorers("all")[:3] == ["taylor:param_first", "smoothgrad", "moreau"]
    with pytest.raises(ConfigError, match="moreau"):
        choose_scorers("moreu")


def test_a_cell_is_known_by_the_options_that_were_given(inputs: list[str]) -> None:
    options = _parser().parse_args([*inputs, "--scorers", "moreau,taylor:param_first", "--recover", "moreau"])
    cases = make_cases(options)
    given = cases[0].identity["prune"]
    assert given["data"]["source"] == "c4.txt"
    assert given["score"] == {"first_layer": 1, "normalise": "size"}
    assert "finetune" not in given, "a default that comes with a new option must not make an old cell a new one"
    assert cases[0].identity["recovery"] is None
    assert {c.config.data.seed for c in cases} == {0, 1}
    assert {c.config.options.seed for c in cases if c.scorer == "moreau"} == {0, 1}
    assert len({json.dumps(c.identity) for c in cases}) == len(cases) == 6


def test_missing_data_and_wrong_options_stop_before_anything_runs(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*inputs, "--data", str(tmp_path), "--recover", "none"]) == 2
    message = capsys.readouterr().err
    assert "wikitext2_raw/test.txt" in message
    assert "alpaca" not in message
    assert main([*inputs, "--set", "score.rankin=local"]) == 2
    assert "Did you mean 'ranking'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["--only-table", "--jsonl", str(tmp_path / "nothing.jsonl")]) == 2
