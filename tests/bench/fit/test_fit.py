"""The plans that fitted models are compared with keep the budget, and no smaller cut of their kind does."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.fit.fit import (
    ARMS,
    SEARCH,
    USUAL,
    WINDOW,
    Bench,
    _first_that_keeps,
    _plan_of,
    _rows,
    _spread_layers,
    _stored_amount,
    _widths,
    table,
)
from pyprune.checkpoint.save import save_checkpoint
from pyprune.config.data import DataConfig
from pyprune.families import count_parameters
from pyprune.fit.choices import ChoiceOptions
from pyprune.fit.limits import Budget
from pyprune.fit.options import FitOptions
from pyprune.fit.profile import DENSE, Profile, this_machine
from pyprune.fit.profiling import turns
from pyprune.fit.quantities import Quantity
from pyprune.fit.search import Fitting
from pyprune.runtime.records import RecordFile
from tests._support.models import tiny_model
from tests._support.text import write_text
from tests._support.tokenizer import tiny_tokenizer
from tests.fit._profiles import fake_profile

MACHINE = {"device": "a CPU", "cpus": 2, "isa": []}


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> Fitting:
    """Of a tiny model."""
    folder = tmp_path_factory.mktemp("fit")
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder / "dense", plan=None, provenance={"source": "tiny"})
    text = write_text(folder / "text.txt", words=1500)
    options = FitOptions(
        data=DataConfig(str(text), samples=12, sequence_length=32), window=32,
        score_samples=4, value_samples=6, judge_samples=4, choices=ChoiceOptions(ffn_multiple=8), keep_multiples=True,
    )  # fmt: skip
    return Fitting.of(folder / "dense", cache=folder / "cache", options=options)


def test_every_arm_keeps_the_budget(fitting: Fitting) -> None:
    budget = Budget.parse("parameters=85%")
    found = {arm: _plan_of(fitting, budget, arm)[0] for arm in USUAL}
    parameters = Quantity("parameters")
    most = 0.85 * fitting.costs.predict(parameters, fitting.identity)
    assert all(fitting.costs.predict(parameters, plan) <= most for plan in found.values())
    whole = fitting.identity.layers[0].widths
    assert all(layer.widths == whole for layer in found["spread layers"].layers), "whole layers only"
    assert len({layer.widths for layer in found["one width"].layers}) == 1
    assert found["one width"].kept_layers == fitting.identity.kept_layers


def test_the_plans_beside_it_remove_no_more_than_they_must(fitting: Fitting) -> None:
    budget = Budget.parse("parameters=85%")
    plans = list(_spread_layers(fitting))
    assert [len(plan.removed_layers) for plan in plans] == list(range(1, len(fitting.identity.layers)))
    assert _first_that_keeps(fitting, budget, iter(plans)) in plans
    widths = [plan.layers[0].widths[2] for plan in _widths(fitting)]
    assert widths == sorted(widths, reverse=True)


def test_the_table_is_in_the_order_of_the_arms(tmp_path: Path) -> None:
    rows = [
        {"budget": "memory<=80%", "arm": arm, "seed": 0, "share": 0.79, "plan": arm, "perplexity": {"prose": 20.0 + i}}
        for i, arm in enumerate(reversed(ARMS))
    ]
    lines = table(rows).splitlines()
    assert [next(arm for arm in ARMS if f"| {arm} |" in line) for line in lines if line.startswith("| memory")] == list(
        ARMS
    )
    assert "Mean perplexity of fitted below that of one width: 0 of 1." in lines, "fitted is the worst of these"
    assert table([]) == "No row is recorded yet."


def test_rows_of_an_earlier_search_are_shown_where_there_is_no_other() -> None:
    records = RecordFile(None)
    row = {"kind": "row", "arm": "fitted", "seed": 0, "plan": "x", "window": WINDOW}
    records.add({**row, "key": "a", "budget": "memory<=80%"})
    records.add({**row, "key": "b", "budget": "memory<=80%", "search": SEARCH})
    records.add({**row, "key": "c", "budget": "memory<=70%"})
    records.add({**row, "key": "d", "budget": "memory<=60%", "window": WINDOW // 2})
    assert [(found["key"], found.get("earlier")) for found in _rows(records)] == [("b", None), ("c", True)]


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    row = {"arm": "fitted", "seed": 0, "share": 0.79, "plan": "x", "perplexity": {"prose": 20.0}}
    rows = [
        {**row, "key": "a", "budget": "prefill@2048<=80%", "engine": "llamacpp", "environment": MACHINE},
        {**row, "key": "b", "budget": "memory@2048<=80%", "measured_share": 0.78},
    ]
    found = table(rows, {"a": {"measured_share": 0.812}})
    memory, prefill = (line for line in found.splitlines() if line.startswith(("| memory", "| prefill")))
    assert "\n* `memory@2048<=80%`, seed 0, fitted: x.\n" in found
    assert "| 79.0% | 78.0% |" in memory
    assert "| 79.0% | 81.2% |" in prefill
    kept = "fitted models keep {} of 1 budgets, 1 within 3 % above. They measure {} to {} from them."
    assert f"Measured (counted), {kept.format(1, '-2.5%', '-2.5%')}" in found
    assert f"Measured (llamacpp, a CPU (2 CPUs)), {kept.format(0, '+1.5%', '+1.5%')}" in found


def test_plans_are_compared_with_those_of_their_engine() -> None:
    records = RecordFile(None)
    row = {"kind": "row", "budget": "prefill@2048<=80%", "seed": 0, "share": 0.8, "plan": "x", "window": WINDOW,
           "environment": MACHINE}  # fmt: skip
    rows = [("vllm", "fitted", 9.0), ("vllm", "one width", 8.0), ("llamacpp", "one width", 7.0)]
    for engine, arm, perplexity in rows:
        key = f"{engine} {arm}"
        own = {"engine": engine} if arm == "fitted" else {}  # older rows have it in the record of their time
        records.add({**row, **own, "key": key, "arm": arm, "search": SEARCH, "perplexity": {"prose": perplexity}})
        records.add({"kind": "time", "key": key, "engine": engine, "measured_share": 0.8})
    found = table(_rows(records), records.of("time"))
    assert "Mean perplexity of fitted below that of one width: 0 of 1." in found
    sections = [line.partition(",")[0] for line in found.splitlines() if line.endswith(":") or "| prefill" in line]
    assert [name.partition(" ")[0] for name in sections] == ["llamacpp", "|", "vllm", "|", "|"]


def test_stored_bytes_are_those_of_the_cut_model(fitting: Fitting) -> None:
    memory = Quantity("memory", 64)
    plan = fitting.identity.drop_layers([1]).with_layer(0, query_heads=[0, 1], kv_heads=[0], ffn=range(16))
    counted = fitting.costs.predict(memory, plan)
    assert _stored_amount(count_parameters(fitting.tries.model(plan)), plan, memory) == pytest.approx(counted)


def test_an_arm_without_a_plan_says_so(fitting: Fitting) -> None:
    least = fitting.costs.base(Quantity("parameters"), fitting.identity.dense.hidden_size)
    share = least / fitting.costs.predict(Quantity("parameters"), fitting.identity)
    budget = Budget.parse(f"parameters={100 * share + 0.1:.2f}%")
    assert _plan_of(fitting, budget, "one width")[0] is None


class _Engine:
    """The dense model takes twice the time of every other."""

    device = None

    def __init__(self, engine: str, options: dict[str, Any]) -> None:
        self.seconds = 0.4 if Path(options["model"]).name == DENSE else 0.2

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        return self.seconds, len(prompts) * new_tokens

    def close(self) -> None:
        pass


def test_recorded_plans_are_timed_beside_the_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Engine", _Engine)
    monkeypatch.setattr(turns, "QUICK_S", 0.0)
    text = write_text(tmp_path / "text.txt", words=200)
    monkeypatch.setattr("bench._texts.load_dense", lambda _: ("tiny", tiny_model("llama"), tiny_tokenizer()))
    monkeypatch.setattr("bench._texts.write_demo_mixture", lambda _: SimpleNamespace(tests={"prose": text}))
    quantity = Quantity("prefill", 64)
    profile = replace(fake_profile(quantities=[quantity]), machine=this_machine()).save(tmp_path / "p.json")
    options = argparse.Namespace(
        profile=profile, budget=["prefill@64<=80%"], seeds=[0], arms=["fitted", "one width"], cache=tmp_path, data=None,
        resident=2, repeats=1, times=True, solutions=1,
    )  # fmt: skip
    bench = Bench(options, RecordFile(None), tmp_path)
    (budget,) = bench.budgets
    for arm in options.arms:
        key = bench._key(budget, arm, 0)
        bench._plan_file(key).write_text(bench.identity.drop_layers([1]).to_json())
        bench.records.add({"kind": "row", "key": key, "arm": arm})
    bench._time(Profile.load(options.profile))
    found = bench.records.of("time")
    assert set(found) == set(bench.records.of("row"))
    assert {row["measured_share"] for row in found.values()} == {0.5}
    assert all(row["seconds"] == 0.2 and row["dense_seconds"] == 0.4 for row in found.values())
    assert not bench._rows_to_time(), "nothing is measured twice"
