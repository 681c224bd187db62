"""The table of profile_error.py: errors of predictions that are off by a known share, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench._plans import never_profiled
from bench.fit import profile_error
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.profile import Profile, this_machine
from pyprune.fit.profiling import turns
from pyprune.fit.profiling.probes import probe_plans
from pyprune.plan import PrunePlan
from pyprune.runtime.records import RecordFile, append_jsonl
from tests._support.models import tiny_model
from tests.fit._profiles import MACHINE, fake_profile


def test_no_plan_is_a_probe() -> None:
    plans = never_profiled()
    assert len(plans) >= 12
    dense = PrunePlan.identity("llama", next(iter(plans.values())).dense)
    shapes = [(len(p.hidden), *(layer.widths for layer in p.layers)) for p in plans.values()]
    probes = [(len(p.hidden), *(layer.widths for layer in p.layers)) for p in probe_plans(dense).values()]
    assert len(set(shapes)) == len(shapes)
    assert not set(shapes) & set(probes)
    for plan in plans.values():
        plan.validate()


ENVIRONMENT = {"device": MACHINE["device"], "cpus": MACHINE["cores"], "isa": MACHINE["isa"]}


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(profile, records): every measured time is 5 % above the prediction, every share of the dense model 10 %."""
    profile = fake_profile(quantities=profile_error.WORKLOADS)
    costs = MeasuredCosts(profile)
    identity = PrunePlan.identity(profile.model_type, profile.dense)
    rows: list[dict[str, Any]] = []
    plans = {"fewer": identity.drop_layers([1]), "narrow": identity.keep_hidden(range(300))}
    monkeypatch.setattr(profile_error, "never_profiled", lambda dense=None: plans)
    for name, plan in plans.items():
        measured = {}
        for quantity in profile_error.WORKLOADS:
            seconds = costs.predict(quantity, plan)
            share = seconds / costs.predict(quantity, identity)
            measured[str(quantity)] = {"seconds": 1.05 * seconds, "share_of_dense": 1.1 * share}
        rows.append(
            {"kind": "row", "key": name, "name": name, "engine": "transformers", "dense": plan.dense.to_dict(),
             "measured": measured, "environment": ENVIRONMENT}
        )  # fmt: skip
    append_jsonl(tmp_path / "rows.jsonl", rows)
    return profile.save(tmp_path / "p.json"), tmp_path / "rows.jsonl"


def test_the_table_shows_both_errors(records: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    profile, rows = records
    given = ["--only-table", "--engine", "transformers", "--profile", str(profile), "--jsonl", str(rows)]
    assert profile_error.main(given) == 0
    printed = capsys.readouterr().out
    summary = "2 plans; seconds: median 4.8%, worst -4.8%; share of the dense model: median 9.1%, worst -9.1%."
    assert f"prefill@2048: {summary}" in printed
    assert f"generation@64x128: {summary}" in printed


def test_plans_are_named_in_a_list_though_names_hold_commas() -> None:
    named = ["heads and ffn", "heads, ffn and layers", "ffn 1 of 3"]
    assert profile_error._parser().parse_args(["--plans", ",".join(named)]).plans == named
    every = list(never_profiled())
    assert profile_error._parser().parse_args(["--plans", ", ".join(every)]).plans == every


def test_rows_of_another_machine_are_not_shown(records: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    profile, rows = records
    other = replace(Profile.load(profile), machine={**MACHINE, "isa": ["avx2", "amx_bf16"]}).save(profile)
    given = ["--engine", "transformers", "--profile", str(other), "--jsonl", str(rows)]
    assert profile_error.main([*given, "--only-table"]) == 2
    assert "No row of transformers is recorded on the machine of this profile" in capsys.readouterr().err
    assert profile_error.main(given) == 2
    assert "was measured on cpu one (2 CPUs, AMX); this is" in " ".join(capsys.readouterr().err.split())


def test_rows_of_another_engine_are_not_shown(records: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    profile, rows = records
    given = ["--only-table", "--engine", "vllm", "--profile", str(profile), "--jsonl", str(rows)]
    assert profile_error.main(given) == 2
    assert "No row of" in capsys.readouterr().err


SECONDS = {"dense": 0.4, "ffn-1-of-3": 0.2, "hidden-2-of-3": 0.3}


class _Engine:
    """Every request to a model takes the same time."""

    device = None
    asked: ClassVar[list[str]] = []

    def __init__(self, engine: str, options: dict[str, Any]) -> None:
        assert engine == "transformers"
        self.model = Path(options["model"]).name

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        self.asked.append(self.model)
        return SECONDS[self.model], len(prompts) * new_tokens

    def close(self) -> None:
        pass


def test_plans_are_timed_beside_the_dense_model_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Engine", _Engine)
    monkeypatch.setattr(turns, "QUICK_S", 0.0)
    monkeypatch.setattr(Profile, "check", lambda *_, **__: None)
    here = replace(fake_profile(quantities=profile_error.WORKLOADS), machine=this_machine())
    profile = here.save(tmp_path / "p.json")
    tiny_model("llama").config.save_pretrained(tmp_path / "dense")
    (tmp_path / "work").mkdir()
    given = ["--engine", "transformers", "--model", tmp_path / "dense", "--profile", profile, "--repeats", 1]
    given += ["--plans", "ffn 1 of 3,hidden 2 of 3", "--resident", 2, "--jsonl", tmp_path / "rows.jsonl"]
    options = profile_error._parser().parse_args(list(map(str, given)))
    profile_error.Bench(options, RecordFile(options.jsonl), tmp_path / "work").run()
    rows = {row["name"]: row["measured"] for row in RecordFile(options.jsonl).of("row").values()}
    assert set(rows) == {"ffn 1 of 3", "hidden 2 of 3"}
    for quantity in map(str, profile_error.WORKLOADS):
        assert rows["ffn 1 of 3"][quantity]["seconds"] == 0.2
        assert rows["ffn 1 of 3"][quantity]["dense_seconds"] == 0.4
        assert rows["ffn 1 of 3"][quantity]["share_of_dense"] == pytest.approx(0.5)
        assert rows["hidden 2 of 3"][quantity]["share_of_dense"] == pytest.approx(0.75)
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"dense"}, "what was timed is removed"
    first, second = (_Engine.asked.index(name) for name in ("ffn-1-of-3", "hidden-2-of-3"))
    assert "ffn-1-of-3" not in _Engine.asked[second:], "there was room for one beside the dense model"
    assert first < second
