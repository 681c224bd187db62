"""The table of bench/profile_error.py: errors of predictions that are off by a known share, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import profile_error
from bench._profile_plans import never_profiled
from pyprune.budget.measured import MeasuredCosts
from pyprune.budget.probes import probe_plans
from pyprune.plan import PrunePlan
from pyprune.runtime.records import append_jsonl
from tests.budget._profiles import fake_profile


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


@pytest.fixture
def records(tmp_path: Path) -> tuple[Path, Path]:
    """(profile, records): every measured time is 5 % above the prediction, every share of the dense model 10 %."""
    profile = fake_profile(quantities=profile_error.WORKLOADS)
    costs = MeasuredCosts(profile)
    identity = PrunePlan.identity(profile.model_type, profile.dense)
    rows: list[dict[str, Any]] = []
    for name, plan in {"fewer": identity.drop_layers([1]), "narrow": identity.keep_hidden(range(300))}.items():
        measured = {}
        for quantity in profile_error.WORKLOADS:
            seconds = costs.predicted(quantity, plan)
            share = seconds / costs.predicted(quantity, identity)
            measured[str(quantity)] = {"seconds": [1.05 * seconds], "share_of_dense": 1.1 * share}
        rows.append(
            {"kind": "row", "key": name, "name": name, "engine": "transformers", "plan": plan.to_dict(),
             "measured": measured}
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


def test_rows_of_another_engine_are_not_shown(records: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    profile, rows = records
    given = ["--only-table", "--engine", "vllm", "--profile", str(profile), "--jsonl", str(rows)]
    assert profile_error.main(given) == 2
    assert "No row of" in capsys.readouterr().err
