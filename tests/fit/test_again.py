"""`pyprune fit` called again: for another budget, and to go on where it was interrupted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.record import read_pruning_json
from pyprune.config.train import TrainConfig
from pyprune.fit import attempts, search, trials
from pyprune.methods import training
from pyprune.plan import PrunePlan
from pyprune.runtime import device
from tests._support.cli import run
from tests._support.interrupt import failing_step
from tests.fit.test_engines import place_of
from tests.fit.test_fit import arguments


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_of(tmp_path_factory.mktemp("again"), "llama")


@pytest.mark.second
@pytest.mark.parametrize("faster", [True, False])
def test_a_resumed_search_goes_on_in_the_arithmetic_in_which_it_began(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """On a machine that is faster in the other dtype losses would be others, and another candidate might win."""
    short = TrainConfig(steps=2, batch_size=2, micro_batch_size=2, warmup_steps=0, checkpoint_interval=1)
    monkeypatch.setattr(training, "short_training", lambda: short)
    monkeypatch.setattr(device, "computes_bfloat16", lambda _: True)
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", lambda: faster)
    cache = tmp_path / "cache"
    given = [*arguments(place, tmp_path / "out", "parameters=70%"), "--cache", cache, "--set", "values.dtype=auto"]
    with failing_step(2, KeyboardInterrupt()):
        assert "--resume continues" in run(*given).output
    known = {path: path.read_text() for path in cache.glob("*.jsonl")}
    monkeypatch.setattr(device, "cpu_is_faster_in_bfloat16", lambda: not faster)
    result = run(*given, "--resume")
    assert result.exit_code == 0, result.output
    assert {path.name for path in known} >= {"block-losses.jsonl", "attempts.jsonl"}
    assert {path: path.read_text() for path in cache.glob("*.jsonl")} == known, "measured again, in the other dtype"
    dtype = read_pruning_json(tmp_path / "out").provenance["report"]["reconstruction"]["dtype"]
    assert dtype == ("bfloat16" if faster else "float32")


def fails(*_: Any, **__: Any) -> Any:
    raise AssertionError("measured again")


@pytest.mark.parametrize("named", [True, False])
def test_another_budget_is_found_by_the_command_that_was_named_without_measuring_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "out"
    first = run(*command(place, out, "parameters=80%", cache=tmp_path / "cache" if named else None), "--no-recover")
    assert first.exit_code == 0, first.output
    said = "another --budget and --out, and --cache "
    kept = last_word(first.stdout, said)
    assert kept == tmp_path / ("cache" if named else "out.fit")
    monkeypatch.setattr(search, "score_units", fails)
    monkeypatch.setattr(trials.BlockTrials, "blocks", lambda _, wanted: fails() if wanted else ())
    other = run(*command(place, tmp_path / "other", "parameters=70%", cache=kept), "--no-recover")
    assert other.exit_code == 0, other.output
    record = read_pruning_json(tmp_path / "other").provenance["fit"]
    assert record["budget"] == "parameters<=70%"


def test_a_point_of_a_sweep_is_written_by_the_command_that_was_named_without_candidates_of_its_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    budgets = ("parameters=80%", "parameters=70%")
    swept = run(*command(place, tmp_path / "sweep", *budgets), "--sweep")
    assert swept.exit_code == 0, swept.output
    said = "the same command without --sweep, with its budget alone, another --out, and --cache "
    kept = last_word(swept.stderr, said)
    monkeypatch.setattr(attempts, "reconstruct_", fails)
    result = run(*command(place, tmp_path / "out", budgets[1], cache=kept), "--no-recover")
    assert result.exit_code == 0, result.output
    plan = PrunePlan.from_json((tmp_path / "sweep" / "plan-2.json").read_text())
    assert read_pruning_json(tmp_path / "out").plan == plan


def command(place: Path, out: Path, *budgets: str, cache: Path | None = None) -> list[str | Path]:
    """The same run, with a cache where one is named."""
    given = arguments(place, out, *budgets)
    at = given.index("--cache")
    return [*given[:at], *given[at + 2 :], *(["--cache", cache] if cache else [])]


def last_word(said: str, sentence: str) -> Path:
    """What a command names behind these words."""
    found = re.search(rf"{re.escape(sentence)}([^\s,]+)", said)
    assert found, said
    return Path(found[1])
