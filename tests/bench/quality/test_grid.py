"""The engine of the quality grids: cases run once, failures stop nothing, tables come from the records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.quality.__main__ import GRIDS, main
from bench.quality.grid import RESULTS, Axis, Case, Column, Grid, Layout, find_plan, keep_plan, mean_and_range
from bench.quality.grid import figure as figure_of
from bench.quality.scores import make_cases
from pyprune.families import family_for
from pyprune.runtime.records import Json, RecordFile, digest
from tests._support.models import tiny_model

GOOD = {"a": 1.0, "b": 2.0, "control": 3.0}


class FakeBench:
    """Measures names; "broken" fails."""

    def __init__(self, options: argparse.Namespace, ran: list[str]) -> None:
        self.options, self.ran = options, ran
        self.setting: Json = {"model": "m", "texts": {"prose": [8, "abc"]}}

    def cases(self) -> list[Case]:
        named = [Case({"case": n, "arm": "cut", "seed": s}) for n in self.options.case for s in self.options.seeds]
        return [Case({"case": "", "arm": "control", "seed": None}, task="control"), *named]

    def measure(self, case: Case) -> Json:
        self.ran.append(name := case.task or case.fields["case"])
        return {"value": GOOD[name] + (case.fields["seed"] or 0)}

    def finish(self, case: Case, later: Sequence[Case]) -> None:
        pass


def grid(ran: list[str]) -> Grid:
    def columns(rows: Sequence[Json]) -> list[Column]:
        return [Column("value", figure_of("value"), mean_and_range)]

    layout = Layout(("arm",), columns, section="case", title=lambda row: f"Case {row['case']['case']}")
    axes = {"case": Axis(["a", "b", "broken"], ["a", "b"])}
    return Grid("fake", "A fake grid.", lambda options, *_: FakeBench(options, ran), layout, axes, seeds=(0, 1))


def run(ran: list[str], path: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    grid(ran).add_arguments(parser)
    return grid(ran).run(parser.parse_args([*arguments, "--jsonl", str(path)]))


def test_cases_run_once_and_every_section_has_the_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    assert run(ran, tmp_path / "r.jsonl") == 0
    printed = capsys.readouterr().out
    assert ran == ["control", "a", "a", "b", "b"]
    assert printed.count("| control | 3.0 |") == 2, "in the tables of both cases"
    assert "| cut | 1.5 (1.0 to 2.0) |" in printed
    assert "model m; perplexity on prose (8 tokens)." in printed
    assert run(ran, tmp_path / "r.jsonl") == 0
    assert len(ran) == 5, "nothing runs twice"
    assert run(ran, tmp_path / "r.jsonl", "--table") == 0
    assert capsys.readouterr().out == printed * 2
    assert run(ran, tmp_path / "r.jsonl", "--table", "--case", "b") == 0
    shown = capsys.readouterr().out
    assert "Case a" not in shown
    assert "Case b" in shown
    assert run(ran, tmp_path / "r.jsonl", "--case", "b", "--seeds", "0,7") == 0
    assert len(ran) == 6, "one new case"


def test_controls_of_another_setting_have_no_table_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    run([], path)
    printed = capsys.readouterr().out
    other = next(row for row in map(json.loads, path.read_text().splitlines()) if not row["case"]["case"])
    other |= {"key": "other", "setting": {"model": "m", "texts": {"prose": [4, "abc"]}}}
    path.write_text(path.read_text() + json.dumps(other) + "\n")
    run([], path, "--table")
    assert capsys.readouterr().out == printed


def test_a_stopped_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    measure = FakeBench.measure

    def stop(self: FakeBench, case: Case) -> Json:
        if len(ran) == 2:
            raise KeyboardInterrupt
        return measure(self, case)

    monkeypatch.setattr(FakeBench, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        run(ran, tmp_path / "r.jsonl")
    path = tmp_path / "r.jsonl"
    path.write_text(path.read_text()[:-20])  # the last line is torn
    monkeypatch.setattr(FakeBench, "measure", measure)
    assert run(ran, path) == 0
    assert ran == ["control", "a", "a", "a", "b", "b"], "the torn case runs again"


def test_a_failure_is_recorded_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    asked = ["--case", "broken,a", "--seeds", "0"]
    assert run(ran, tmp_path / "r.jsonl", *asked) == 1
    assert ran == ["control", "broken", "a"]
    assert "* Failed: case broken, arm cut, seed 0: KeyError: 'broken'" in capsys.readouterr().out
    assert run(ran, tmp_path / "r.jsonl", *asked) == 1
    assert len(ran) == 3
    assert run(ran, tmp_path / "r.jsonl", *asked, "--retry-failed") == 1
    assert len(ran) == 4


def test_plans_are_kept_with_the_rows(tmp_path: Path) -> None:
    model = tiny_model("llama")
    plan = family_for(model).plan(model.config).drop_layers([1])
    records = RecordFile(tmp_path / "r.jsonl")
    assert find_plan(records, "k") is None
    keep_plan(records, "k", plan)
    assert find_plan(RecordFile(tmp_path / "r.jsonl"), "k") == plan


@pytest.mark.parametrize("name", [grid.name for grid in GRIDS])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert "--table" in capsys.readouterr().out


def test_wrong_names_and_empty_records_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--case", "layers-8"])
    assert "Did you mean 'layers-7'" in capsys.readouterr().err
    assert main(["axes", "--table", "--jsonl", str(tmp_path / "none.jsonl")]) == 2
    assert "has no row" in capsys.readouterr().err


PUBLISHED = {
    "compare": [
        "7 of 30 layers (ELDeR's gates): 7 layers are removed; 109,734,336 parameters are kept",
        "15,548 FFN channels are removed",
        "| reconstructed, then text and logit KL | 3 | 25.6 (25.1 to 25.9) | 50.9 (50.2 to 52.0) |",
        "| dense, fine-tuned in lean memory | 3 | 16.5 (16.4 to 16.6) | 32.2 (32.1 to 32.3) |",
    ],
    "scores": [
        "| taylor:param_second | yes | 107,613,504 | 0 | 15,568 | 110.9 (111.5 / 110.2) | 43.57 ",
        "| flap | no | 107,646,912 / 107,648,064 | 48 / 54 |",
        "taylor:param_mix, seed 0: the same cut as taylor:param_first, seed 0, byte for byte",
    ],
    "axes": [
        "| taylor:param_second | per parameter (size) | 20.00% | 0 / 3 | 15,568 / 15,398 | 165.9 (154.3 / 177.4) |"
    ],
    "reconstruction": ["| 1.08 |", "| 1.36 |", "| 2.53 |"],
    "rounding": ["| LoRA, 2e-5 | bfloat16, to nearest | 2% | 63.30 |", "| none | float32 | - | 63.38 |"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_are_printed_from_the_records(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--table"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in PUBLISHED[name] if line not in printed] == []


def rows_of(name: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return {row["key"]: row for row in rows if row["kind"] == name}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recorded_rows_are_known_by_what_they_hold(name: str) -> None:
    if name != "scores":
        assert all(digest([row["setting"], row["case"], {}])[:16] == key for key, row in rows_of(name).items())


def test_the_recorded_scores_are_the_cases_of_today() -> None:
    """A changed preset must not make new cases of the recorded ones: their options are named."""
    scores = next(grid for grid in GRIDS if grid.name == "scores")
    parser = argparse.ArgumentParser()
    scores.add_arguments(parser)
    options = parser.parse_args([])
    options.scorers, options.recover = (list(scores.axes[name].default or ()) for name in ("scorers", "recover"))
    rows = rows_of("scores")
    setting = next(iter(rows.values()))["setting"]
    cases = make_cases(options)
    assert {digest([setting, case.fields, case.identity])[:16] for case in cases} == set(rows)
    assert {case.task[2].score_options.ranking for case in cases if case.task} == {"global"}
