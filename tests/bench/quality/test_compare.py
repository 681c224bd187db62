"""compare.py: what its steps do to a model, what shares a step, and what its table says."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench._settings import Settings
from bench.quality import compare
from bench.quality.compare_cases import CASES, CUTS, DENSE, TRAININGS, Arm
from bench.quality.compare_steps import Steps
from bench.quality.compare_table import table
from pyprune.cut.compact import compact_
from pyprune.data.tokens import Batch
from pyprune.families import count_parameters, family_for
from pyprune.plan import PrunePlan
from pyprune.runtime.records import Json, append_jsonl
from tests._support.models import tiny_batch, tiny_model

MACHINE = {"device": "a CPU", "cpus": 2, "isa": []}
PROSE, MIXTURE = tiny_batch(seed=1, batch=8, length=16), tiny_batch(seed=2, batch=8, length=16)


def steps_on(dense: PreTrainedModel, plan: PrunePlan | None, method: str = "elder") -> Steps:
    kinds = ("prose", "prose", "web", "web", "code", "code", "languages", "languages")
    texts = {"prose": Batch.of(PROSE), "mixture": Batch(MIXTURE, MIXTURE, kinds)}
    settings = Settings(steps=2, batch_size=2, sequence_length=16, dtype="float32")
    return Steps(dense, settings, texts.__getitem__, 0, method, plan)


def vector(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def dense() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize("action", TRAININGS)
def test_a_training_changes_the_weights_and_not_the_sizes(dense: PreTrainedModel, action: Any) -> None:
    plan = family_for(dense).plan(dense.config).drop_layers([1])
    model = copy.deepcopy(dense)
    if action.startswith(("distil", "both")):  # from a teacher that is what it is itself a model learns nothing
        compact_(model, plan)
    before = copy.deepcopy(model)
    cost = steps_on(dense, plan).do(action, model)
    assert not torch.equal(vector(model), vector(before))
    assert count_parameters(model) == count_parameters(before)
    assert cost["name"] == action
    assert cost["first_loss"] > 0
    assert cost["seconds"] >= 0


def test_the_cuts_differ_in_the_text_that_they_are_reconstructed_on(dense: PreTrainedModel) -> None:
    plan = family_for(dense).plan(dense.config).drop_layers([1])
    found = {}
    for action in CUTS:
        found[action] = copy.deepcopy(dense)
        steps_on(dense, plan).do(action, found[action])
    assert len({count_parameters(model) for model in found.values()}) == 1
    assert count_parameters(found["cut"]) < count_parameters(dense)
    vectors = [vector(model) for model in found.values()]
    assert not any(torch.equal(vectors[i], vectors[j]) for i in range(len(CUTS)) for j in range(i))


def test_hidden_channels_are_regularised_by_dress(dense: PreTrainedModel) -> None:
    plan = family_for(dense).plan(dense.config).keep_hidden(range(36))
    after = {}
    for action in ("papers", "anneal"):
        model = copy.deepcopy(dense)
        steps_on(dense, plan, "dress").do(action, model)
        after[action] = model.get_input_embeddings().weight[:, 36:].abs().sum().item()
    assert after["anneal"] == 0 < after["papers"]


@pytest.mark.parametrize("name", CASES)
def test_every_arm_cuts_once_and_ends_with_sizes_of_the_case(name: str) -> None:
    arms = CASES[name].arms
    assert all(sum(action in CUTS for action in arm) == 1 for arm in arms.values())
    assert all(sum(action in TRAININGS for action in arm) <= 1 for arm in arms.values()), "equal tokens"
    assert all(set(arm) <= {*CUTS, *TRAININGS} for arm in arms.values())
    assert len(set(arms.values())) == len(arms)


def test_arms_share_the_steps_that_they_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, ...]] = []
    measured: dict[str, list[str]] = {}

    class Recorded:
        seed, plan = 0, None

        def do(self, action: str, model: list[str]) -> Json:
            taken.append((*model, action))
            model.append(action)
            return {"name": action}

    bench: Any = object.__new__(compare.Bench)
    bench.options = Namespace(arm=None)
    monkeypatch.setattr(bench, "_measure", lambda case, label, seed, model, *_: measured.update({label: list(model)}))
    monkeypatch.setattr(bench, "_fine_tuned_dense", lambda seed: (["finetune"], [{"name": "finetune"}]))
    arms: dict[str, Arm] = {**DENSE, **CASES["layers-7"].arms}
    bench._grow(CASES["layers-7"], Recorded(), arms, (), [], [])
    assert {label: tuple(path) for label, path in measured.items()} == arms
    assert len(taken) == len(set(taken)), "each step once"


def row(arm: str, seed: int, prose: float, case: str = "layers-7", **changes: Any) -> Json:
    step = {"name": "finetune", "seconds": 10.0, "cpu_seconds": 19.0, "peak_bytes": 3_000_000}
    return {
        "kind": "row", "key": f"{case}{arm}{seed}", "case": case, "arm": arm, "seed": seed,
        "perplexity": {"prose": prose, "code": 2 * prose}, "parameters": 109_734_336, "tokens_trained": 36_864,
        "tokens_calibrated": 0, "steps": [step, step], "removed": {"layers": 7, "heads": 63, "ffn": 9, "hidden": 0},
        "limits": {"prose": 12288, "code": 8192}, "dtype": "bfloat16", "environment": MACHINE,
        **changes,
    }  # fmt: skip


def test_the_table_has_means_and_spreads_and_says_what_went() -> None:
    rows = [row("direct", 0, 60.0), row("direct", 1, 64.0), row("reconstructed", 0, 37.0), row("dense", 0, 19.0, "")]
    rows.append(row("direct", 0, 90.0, "heads-ffn-20", removed={"layers": 0, "heads": 0, "ffn": 12, "hidden": 0}))
    found = table(rows)
    assert "7 layers went; 109,734,336 parameters stay" in found
    assert "12 FFN channels went" in found, "no head is named where none went"
    assert "| direct | 2 | 62.0 (60.0 to 64.0) | 124.0 (120.0 to 128.0) | 36,864 | 0 | 20 | 38 | 3 |" in found
    assert found.count("| dense | 1 | 19.0 |") == 2, "every case has its controls"


def test_the_table_comes_from_the_records_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "compare.jsonl"
    assert compare.main(["--only-table", "--jsonl", str(records)]) == 2
    assert "No row is recorded" in capsys.readouterr().err
    append_jsonl(records, [row("direct", 0, 60.0)])
    assert compare.main(["--only-table", "--jsonl", str(records)]) == 0
    assert "| direct | 1 | 60.0 |" in capsys.readouterr().out


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--case", "layers-8"])
    assert "Did you mean 'layers-7'" in capsys.readouterr().err
