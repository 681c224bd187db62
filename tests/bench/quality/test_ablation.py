"""The ablation grid on a tiny model: shared choices change nothing, and every option is part of a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.quality.__main__ import main
from bench.quality.ablation import make_cases, parse_grid
from pyprune import prune_
from pyprune.checkpoint.load import load_model
from pyprune.errors import ConfigError
from pyprune.quality.perplexity import evaluate_perplexity
from pyprune.quality.tasks import evaluate_tasks
from pyprune.run.recipe import build_config
from pyprune.run.text import draw_samples
from tests._support.models import tiny_model
from tests._support.tasks import choice_task
from tests._support.text import write_model, write_text

TRAIN = "{steps: 3, batch_size: 2, micro_batch_size: 2, learning_rate: 1e-3}"
ELDER = (
    "elder: {schedule: published, gates: {first_round_steps: 3, round_steps: 2, batch_size: 2}, train: " + TRAIN + "}\n"
)
RECIPE = f"""
preset: elder-anneal
ratio: 0.5
data: {{source: SOURCE, samples: 6, sequence_length: 64}}
{ELDER}"""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    write_model(tiny_model("llama"), tmp_path / "dense")
    recipe = tmp_path / "elder.yaml"
    recipe.write_text(RECIPE.replace("SOURCE", str(write_text(tmp_path / "train.txt"))))
    test = write_text(tmp_path / "test.txt", seed=9)
    return [
        "ablation", str(tmp_path / "dense"), "--config", str(recipe), "--ppl", str(test), "--protocol", "ppl-128",
        "--tokens", "512", "--jsonl", str(tmp_path / "cells.jsonl"),
    ]  # fmt: skip


def records(inputs: list[str]) -> list[dict[str, Any]]:
    rows = (json.loads(line) for line in Path(inputs[-1]).read_text().splitlines())
    return [row for row in rows if row["kind"] == "ablation"]


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_a_grid_is_measured_kept_and_not_run_twice(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--grid", "elder.gates.penalty_weight=1e-3,1e-1", "--grid", "elder.penalty_weight=1e-3,1"]
    assert main([*inputs, *grid]) == 0
    first = table(capsys.readouterr().out)
    assert first[0][:4] == ["recipe", "elder.gates.penalty_weight", "elder.penalty_weight", inputs[5]]
    values = [["1e-3", "1e-3"], ["1e-3", "1"], ["1e-1", "1e-3"], ["1e-1", "1"]]
    assert [row[1:3] for row in first[2:]] == [["-", "-"], *values], "the dense model, then the grid"
    dense, *cells = [row["figures"] for row in records(inputs)]
    assert "parameters" not in dense
    assert [cell["plan_reused"] for cell in cells] == [False, True, False, True]
    assert all(cell["parameters"] < cell["dense_parameters"] for cell in cells)
    assert cells[0]["perplexity"] != cells[1]["perplexity"], "the weight of the penalty has an effect"
    assert main([*inputs, *grid]) == 0
    assert table(capsys.readouterr().out) == first
    assert len(records(inputs)) == 5
    assert main([*inputs, "--grid", "elder.gates.penalty_weight=1e-1", "--grid", "elder.penalty_weight=1,10"]) == 0
    assert len(records(inputs)) == 6
    assert records(inputs)[-1]["figures"]["plan_reused"], "also across runs"


def test_a_cell_equals_the_same_options_run_alone(inputs: list[str]) -> None:
    assert main([*inputs, "--grid", "elder.penalty_weight=1e-3,1"]) == 0
    model, tokenizer = load_model(inputs[1])
    config = build_config(recipe=inputs[3], settings=["elder.penalty_weight=1"])
    prune_(model, draw_samples(model, tokenizer, config), config)
    alone = evaluate_perplexity(model, tokenizer, inputs[5], "ppl-128", max_tokens=512).perplexity
    figures = records(inputs)[-1]["figures"]
    assert figures["plan_reused"]
    assert figures["perplexity"]["ppl-128"][inputs[5]] == alone


def test_a_ratio_that_removes_nothing_fails_alone(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(inputs[inputs.index("--config") + 1])
    ours = recipe.read_text().replace(ELDER, f"dress: {{train: {TRAIN}}}\n")
    recipe.write_text(ours.replace("elder-anneal", "dress-anneal"))
    assert main([*inputs, "--grid", "ratio=0.01,0.25"]) == 1
    printed = capsys.readouterr().out
    rows = table(printed)
    assert "* Failed: recipe elder, ratio 0.01: " in printed
    assert "removes nothing" in printed
    assert rows[2][rows[0].index("preserved ratio")] == "-"
    assert rows[3][rows[0].index("preserved ratio")].endswith("%")


def test_several_recipes_make_a_table_of_cases(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(inputs[3]).read_text()
    for name, stages in {"npn": "{before: [], after: []}", "rnn": "{prune: false}"}.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text + f"stages: {stages}\n")
        inputs[2:2] = ["--config", str(path)]
    assert main(inputs) == 0
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows[2:]] == ["dense", "rnn", "npn", "elder"]
    removed = rows[0].index("parameters removed")
    assert rows[3][removed] == "0"
    assert rows[4][removed] == rows[5][removed] != "0"


def test_an_option_that_the_others_leave_unused_is_named(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--set", "elder.layers=[1]", "--set", "elder.schedule=anneal"]
    assert (
        main(
            [
                *inputs,
                *fixed,
                "--grid",
                "elder.train.last_good_interval=1,2",
                "--grid",
                "elder.train.learning_rate=1e-3,1e-2",
            ]
        )
        == 0
    )
    message = capsys.readouterr().out
    assert "elder.train.last_good_interval made no difference" in message
    assert "learning_rate made no" not in message
    assert main([*inputs, *fixed, "--grid", "elder.penalty_weight=1,2"]) == 2
    assert "elder.penalty_weight would do nothing beside elder.schedule 'anneal'" in capsys.readouterr().err


def test_training_text_is_no_test_text(inputs: list[str], tmp_path: Path) -> None:
    inputs[5] = str(tmp_path / "train.txt")
    inputs[inputs.index("512")] = "100000"
    assert main(inputs) == 1
    assert "is not a test text for these options" in records(inputs)[-1]["error"]


def test_wrong_options_stop_before_anything_runs(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*inputs, "--grid", "elder.penalty_wieght=1"]) == 2
    assert "Did you mean 'penalty_weight'" in capsys.readouterr().err
    assert main([*inputs, "--grid", "dtype=float32,bfloat16"]) == 2
    assert not Path(inputs[-1]).exists()


def test_grids_are_read_as_yaml_and_may_be_joined() -> None:
    assert parse_grid("a.b=1, x,[2, 3]") == [{"a.b": 1}, {"a.b": "x"}, {"a.b": [2, 3]}]
    assert parse_grid("a+b=3+1,2+x") == [{"a": 3, "b": 1}, {"a": 2, "b": "x"}]
    for wrong in ("a", "a=", "=1", "a+b=1", "a=[1"):
        with pytest.raises(ConfigError):
            parse_grid(wrong)
    joined = "data.samples+recovery_data.samples=800+200,500+500"
    cases = make_cases(
        [],
        "dress",
        ["stages.before=[regularise]", "dress.schedule=published"],
        [joined, "dress.penalty_weight=1e-5,1e-1"],
    )
    sizes = [(c.task.data.samples, c.task.recovery_data.samples) for c in cases if c.task.recovery_data]
    assert sizes == [(800, 200), (800, 200), (500, 500), (500, 500)]
    assert [c.task.options.penalty_weight for c in cases] == [1e-5, 1e-1] * 2


def test_tasks_are_columns_and_part_of_the_key(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    folder = choice_task(tmp_path)
    choice_task(tmp_path, "wrong_sums", label=1)
    assert main(inputs) == 0
    assert "acc" not in " ".join(table(capsys.readouterr().out)[0]), "no task, no column"
    assert not {"accuracy", "mean_accuracy"} & {name for record in records(inputs) for name in record["figures"]}

    tasks = ["--tasks", "tiny_sums,wrong_sums", "--task-folder", str(folder), *inputs[-2:]]
    asked = [*inputs[:-2], *tasks]
    assert main(asked) == 0
    *_, dense, cell = [row["figures"] for row in records(inputs)]
    assert len(records(inputs)) == 4, "the cell without tasks is another one, and so is the dense model"
    model, tokenizer = load_model(inputs[1])
    alone = evaluate_tasks(model, tokenizer, ["tiny_sums", "wrong_sums"], include_path=folder)
    assert dense["task_metrics"] == alone
    config = build_config(recipe=inputs[3])
    prune_(model, draw_samples(model, tokenizer, config), config)
    pruned = evaluate_tasks(model, tokenizer, ["tiny_sums", "wrong_sums"], include_path=folder)
    assert cell["task_metrics"] == pruned
    assert cell["accuracy"] == {task: pruned[task]["acc"] for task in ("tiny_sums", "wrong_sums")}
    assert cell["accuracy"]["tiny_sums"] + cell["accuracy"]["wrong_sums"] == 1.0, "what is right is turned round"
    assert cell["mean_accuracy"] == 0.5
    assert records(inputs)[-1]["setting"]["tasks"] == ["tiny_sums", "wrong_sums"]
    assert str(tmp_path / "tasks") not in json.dumps(cell)

    head, _, before, row = table(capsys.readouterr().out)
    shown = dict(zip(head, row, strict=True))
    assert [name for name in head if "acc" in name] == ["acc tiny_sums", "acc wrong_sums", "mean acc"]
    assert float(shown["acc tiny_sums"]) == pytest.approx(cell["accuracy"]["tiny_sums"])
    assert float(shown["mean acc"]) == float(before[head.index("mean acc")]) == 0.5
    assert main(asked) == 0
    assert len(records(inputs)) == 4, "nothing runs twice"
    assert main([*asked, "--task-limit", "4"]) == 0
    assert len(records(inputs)) == 6, "other examples are another measurement"


def test_options_of_tasks_without_tasks_are_refused(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*inputs[:-2], "--task-limit", "4", *inputs[-2:]]) == 2
    assert "--tasks alone" in capsys.readouterr().err
    assert main([*inputs[:-2], "--tasks", "no_such_task_at_all", *inputs[-2:]]) == 2
    assert "Unknown task" in capsys.readouterr().err
