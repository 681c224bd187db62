"""The grids whose models are steps away from the dense one: each step has its effect, common steps are taken once."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench._settings import Settings
from bench.quality import compare, reconstruction, rounding
from bench.quality.__main__ import main
from bench.quality.steps import STEPS, Cut, PathBench, State, kept_share
from pyprune.data.tokens import Batch
from pyprune.families import count_parameters, family_for
from pyprune.runtime.records import Json, RecordFile
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model

KINDS = ("prose", "prose", "web", "web", "code", "code", "languages", "languages")
TRAININGS = ["finetune prose", "finetune prose lean", "finetune prose lean each", "regularise paper"]
RECOVERIES = ["recover lora", "recover distil mixture", "recover both prose", "train lora 1e-3", "train none 1e-3"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> PathBench:
    """A bench of a tiny model, with texts of two kinds."""
    made: Any = object.__new__(PathBench)
    made.options = argparse.Namespace()
    made.settings = Settings(steps=2, batch_size=2, sequence_length=16, dtype="float32")
    made.dense = tiny_model("llama-head-dim")
    made.cuts = {"layers": Cut("", layers=[1], regulariser="elder")}
    made._states = {}
    prose, mixture = tiny_batch(seed=1, batch=8, length=16), tiny_batch(seed=2, batch=8, length=16)
    texts = {"prose": Batch.of(prose), "mixture": Batch(mixture, mixture, KINDS)}
    monkeypatch.setattr(PathBench, "samples", lambda self, text, seed: texts[text])
    return made  # type: ignore[no-any-return]


def vector(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def take(bench: PathBench, *steps: str, case: str = "layers") -> State:
    return bench._reach(case, 0, steps)


@pytest.mark.parametrize("step", [*TRAININGS, *RECOVERIES])
def test_a_training_changes_the_weights_and_not_the_sizes(bench: PathBench, step: str) -> None:
    first = ("cut",) if step in RECOVERIES else ()  # from a teacher that it equals a model learns nothing
    before, after = take(bench, *first), take(bench, *first, step)
    assert not torch.equal(vector(after.model), vector(before.model))
    assert count_parameters(after.model) == count_parameters(before.model)
    assert after.figures["tokens_trained"] == 2 * 2 * 16
    assert after.figures["seconds"] >= 0


def test_cuts_differ_in_the_text_and_dtype_of_their_reconstruction(bench: PathBench) -> None:
    steps = ["cut", "reconstruct mixture", "reconstruct prose", "reconstruct mixture bfloat16"]
    models = [take(bench, step).model for step in steps]
    assert len({count_parameters(model) for model in models}) == 1 < count_parameters(bench.dense)
    vectors = [vector(model) for model in models]
    assert not any(torch.equal(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i))
    assert take(bench, "solve mixture", "cut", "price mixture").figures["times_passes"] >= 0


def test_hidden_channels_are_regularised_by_dress(bench: PathBench) -> None:
    bench.cuts = {"layers": Cut("", layers=[1], regulariser="dress")}
    plan = family_for(bench.dense).plan(bench.dense.config).keep_hidden(range(36))
    after = {}
    for form in ("paper", "anneal"):
        state = State(copy.deepcopy(bench.dense), plan, bench.dense, bench.cuts["layers"], 0)
        STEPS["regularise"](bench, state, form)
        after[form] = state.model.get_input_embeddings().weight[:, 36:].abs().sum().item()
    assert after["anneal"] == 0 < after["paper"]


def test_every_choice_of_hidden_channels_starts_from_the_same_function(bench: PathBench) -> None:
    text = tiny_batch(3, 2, 16)
    with torch.no_grad():
        expected = bench.dense(text).logits
        for how in reconstruction.CHOICES.values():
            state = take(bench, "untie", f"choose {how} mixture")
            assert not state.model.config.tie_word_embeddings
            assert_same_logits(state.model(text).logits, expected, tolerance=3e-5)
            assert state.plan is not None
            assert len(state.plan.hidden) == 36
            assert (state.plan.hidden == tuple(range(36))) == (how != "energy")
    assert bench.dense.config.tie_word_embeddings


def test_written_weights_keep_their_share_of_the_change(bench: PathBench) -> None:
    share = {how: take(bench, "store", "cut", "train lora 2e-5", f"write {how}").figures["kept"] for how in (
        "float32", "nearest", "written")}  # fmt: skip
    assert share["float32"] == pytest.approx(1)
    assert share["nearest"] < 0.5 < share["written"]
    before, after = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 1.0])}
    assert kept_share(before, after, {"w": torch.tensor([1.0, 0.0])}) == 0.5


@pytest.mark.parametrize("name", compare.CUTS)
def test_every_arm_cuts_once_and_trains_once_at_most(name: str) -> None:
    arms = compare.arms_of(name)
    verbs = [[step.split()[0] for step in path] for path in arms.values()]
    assert all(sum(verb in ("cut", "reconstruct") for verb in path) == 1 for path in verbs)
    assert all(sum(verb in ("finetune", "regularise", "recover") for verb in path) <= 1 for path in verbs)
    assert len(set(arms.values())) == len(arms)
    assert all(verb in STEPS for path in verbs for verb in path)


def test_cases_share_the_steps_that_they_have_in_common(bench: PathBench, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, ...]] = []

    def record(self: PathBench, step: str, before: State) -> State:
        path = (*before.figures.get("path", ()), step)
        taken.append(path)
        return State(before.model, None, before.dense, None, 0, before, {"path": path})

    monkeypatch.setattr(PathBench, "_take", record)
    cases = {**compare.DENSE, **compare.arms_of("layers-7")}
    for name in ("", "layers"):
        arms = compare.DENSE if not name else compare.arms_of("layers-7")
        for path in sorted(arms.values()):
            assert bench._reach(name, 0, path).figures.get("path", ()) == path
    assert len(taken) == len(set(taken)), "each step once"
    assert set(cases.values()) <= {*taken, ()}


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options of a model of 30 layers with a window for PPL-2048."""
    model = tiny_model("llama-head-dim", num_hidden_layers=30, max_position_embeddings=2048)
    write_model(model, tmp_path / "tiny")
    return ["--model", str(tmp_path / "tiny"), "--tokens", "2048", "--jsonl", str(tmp_path / "rows.jsonl")]


def rows(tiny: list[str]) -> list[Json]:
    return [json.loads(line) for line in Path(tiny[-1]).read_text().splitlines()]


def table(text: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [line for line in lines if not line[0].startswith("---")]


HOME = ["--home-tokens", "2048"]
ASKED: dict[str, tuple[list[str], Callable[[Json], bool], int]] = {
    "compare": (
        ["--case", "layers-15", "--arm", "direct", "fine-tuned, then cut", "--seeds", "0", "--steps", "1", *HOME],
        lambda row: row["case"]["case"] == "" or row["figures"]["removed"]["layers"] == 15,
        len(compare.DENSE) + 2,
    ),
    "reconstruction": (
        ["--case", "layers-7", "--calibration", "web"],
        lambda row: row["case"]["arm"] != "reconstructed, web" or row["figures"]["times_passes"] > 0,
        3,
    ),
    "rounding": (["--steps", "1"], lambda row: row["figures"]["removed"]["layers"] == 7, 1 + 9),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_grid_from_end_to_end_and_again(
    name: str, tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, holds, count = ASKED[name]
    measure = PathBench.measure
    ran: list[Json] = []

    def stop(self: PathBench, case: Any) -> Json:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(case.fields)
        return measure(self, case)

    monkeypatch.setattr(PathBench, "measure", stop)
    assert main([name, *options, *tiny]) == 130
    assert "the same command continues" in capsys.readouterr().err
    monkeypatch.setattr(PathBench, "measure", measure)
    assert main([name, *options, *tiny]) == 0
    printed = capsys.readouterr().out
    found = [row for row in rows(tiny) if row["kind"] == name]
    assert len(found) == count == len({row["key"] for row in found})
    assert not any(row["error"] for row in found)
    assert all(holds(row) for row in found)
    assert main([name, "--table", *tiny]) == 0
    assert sorted(table(capsys.readouterr().out)) == sorted(table(printed))
    assert len(rows(tiny)) == count + sum(row["kind"] == "plan" for row in rows(tiny))
    assert {rounding.GRID.name, reconstruction.GRID.name} < set(ASKED)
    assert RecordFile(Path(tiny[-1])).of(name)
