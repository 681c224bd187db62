"""The demo, end to end in seconds: a tiny random model, a small text, the Transformers engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench._demo_options import Settings, choice
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.methods.base import own_options
from pyprune.methods.registry import preset
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.runtime.files import foreign_names, seal
from tests._support.models import tiny_model
from tests._support.paths import REPO
from tests._support.tokenizer import tiny_tokenizer

HEADLINE = [
    "dense_ppl",
    "dense_finetuned_ppl",
    "published_ppl",
    "direct_ppl",
    "prune_then_finetune_ppl",
    "reconstructed_ppl",
    "pruned_ppl",
    "train_tokens",
    "dense_parameters",
    "pruned_parameters",
    "generation_speedup",
    "prefill_speedup",
    "seconds",
]


def demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/end_to_end.py", "--quick", "--engine", "transformers", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    folder = tmp_path_factory.mktemp("inputs")
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder / "tiny", plan=None, provenance={})
    lines = (f"Document {i} tells of the {i * i} things that happened in the year {1000 + i}." for i in range(120))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return ["--model", folder / "tiny", "--text", folder / "text.jsonl"]


@pytest.fixture(scope="module")
def out(inputs: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(seal({"files": ["old.txt"]})))
    (folder / "old.txt").write_text("a former run")
    done = demo("--out", folder, "--dtype", "float32", *inputs)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "TI" in done.stdout
    assert "direct removal" in done.stdout
    return folder


@pytest.fixture(scope="module")
def metrics(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return data


def test_the_folder_is_replaced_whole(out: Path) -> None:
    assert sorted(p.name for p in out.iterdir()) == ["dense", "metrics.json", "pruned", "report.html", "report.md"]
    assert [p.name for p in out.parent.iterdir()] == ["demo"], "nothing temporary is left"
    assert list(foreign_names(out)) == [], "a later run may replace all of it"


def test_metrics_have_the_headline_keys_first(metrics: dict[str, Any]) -> None:
    figures = [key for key in metrics if key != "out_of_domain"]
    assert figures == [*HEADLINE, "details", "files", "sha256"]
    assert metrics["out_of_domain"] == {}, "a text that was given has no other kinds"
    assert all(metrics[key] > 0 for key in HEADLINE)
    assert metrics["pruned_parameters"] < metrics["dense_parameters"]
    assert metrics["train_tokens"] == 2 * 2 * 32


def test_every_trained_arm_saw_the_same_tokens_with_the_same_options(metrics: dict[str, Any]) -> None:
    arms = metrics["details"]["arms"]
    assert {key: len(a["losses"]) for key, a in arms.items()} == {
        "dense_finetuned_ppl": 2,
        "published_ppl": 2,
        "direct_ppl": 0,
        "prune_then_finetune_ppl": 2,
        "reconstructed_ppl": 0,
        "pruned_ppl": 2,
    }
    trainings = {
        json.dumps(options)
        for config in (a["config"] for a in arms.values())
        for options in (config["finetune"], config["recover"]["train"], config["elder"]["train"])
    }
    assert len(trainings) == 1
    first = {key: a["losses"][0] for key, a in arms.items() if a["losses"]}
    # Before its first update an arm's loss shows its data: the uncut, ungated ones must agree exactly.
    assert first["published_ppl"] == pytest.approx(first["dense_finetuned_ppl"], rel=1e-6)
    assert len({first[key] for key in ("dense_finetuned_ppl", "prune_then_finetune_ppl", "pruned_ppl")}) == 3


def test_the_default_is_reconstructed_and_every_other_arm_is_not(metrics: dict[str, Any], out: Path) -> None:
    arms = metrics["details"]["arms"]
    reconstructed = {key for key, arm in arms.items() if arm["config"]["cut"]["reconstruct"] == "least_squares"}
    assert reconstructed == {"reconstructed_ppl", "pruned_ppl"}
    assert metrics["reconstructed_ppl"] != metrics["direct_ppl"]
    default = json.loads(json.dumps(preset("elder").to_dict()))
    ours = arms["pruned_ppl"]["config"]
    assert all(ours[part] == default[part] for part in ("stages", "method"))
    assert ours["recover"] | {"train": None} == default["recover"] | {"train": None}
    assert ours["cut"]["reconstruct"] == default["cut"]["reconstruct"]


def test_every_arm_lost_the_same_layers(metrics: dict[str, Any], out: Path) -> None:
    removed = metrics["details"]["removed_layers"]
    assert len(removed) == 1
    assert all(a["config"]["elder"]["layers"] == removed for a in metrics["details"]["arms"].values())
    record = read_pruning_json(out / "pruned", verify_files=True)
    assert record.plan is not None
    assert list(record.plan.removed_layers) == removed
    assert "speed" in record.provenance


def test_both_checkpoints_load(out: Path, metrics: dict[str, Any]) -> None:
    for name in ("dense", "pruned"):
        model, tokenizer = load_model(out / name)
        assert sum(p.numel() for p in model.parameters()) == metrics[f"{name}_parameters"]
        assert tokenizer is not None


def test_everything_is_in_the_chosen_dtype(out: Path, metrics: dict[str, Any]) -> None:
    for arm in metrics["details"]["arms"].values():
        assert arm["config"]["elder"]["train"]["dtype"] == arm["config"]["finetune"]["dtype"] == "float32"
    assert {json.loads((out / name / "config.json").read_text())["dtype"] for name in ("dense", "pruned")} == {
        "float32"
    }
    text = (out / "report.md").read_text()
    assert "float32 compute" in text
    assert "float32 weights" in text
    assert "bfloat16" not in text
    assert own_options(choice(replace(Settings(), compute_dtype="float32")), ElderOptions).train.dtype == "float32"


def test_the_reports_show_every_arm(out: Path, metrics: dict[str, Any]) -> None:
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert page.count("<svg") == 2
    for arm in metrics["details"]["arms"].values():
        assert arm["label"] in text
        assert arm["label"].replace("'", "&#x27;") in page
    for condition in ("no document in common", "learning rate", "penalty_weight"):
        assert condition in text
        assert condition in page
    assert str(out.parent) not in text, "no path of this machine"


def test_its_own_text_is_measured_on_other_kinds_as_well(inputs: list[str | Path], tmp_path: Path) -> None:
    done = demo("--out", tmp_path / "demo", *inputs[:2])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "On text of other kinds" in done.stdout
    found = json.loads((tmp_path / "demo" / "metrics.json").read_text())
    assert list(found["out_of_domain"]) == ["web", "code", "languages"]
    rows = [key for key in HEADLINE if key.endswith("_ppl")]
    assert all(sorted(row) == sorted(rows) for row in found["out_of_domain"].values())
    assert len({row["dense_ppl"] for row in found["out_of_domain"].values()} | {found["dense_ppl"]}) == 4


def test_a_folder_of_something_else_is_refused_at_once(inputs: list[str | Path], tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    done = demo("--out", tmp_path, "--model", tmp_path / "nothing", *inputs[2:])
    assert done.returncode == 2
    assert "holds letters, which no record of pyprune in it names" in done.stderr
    assert (tmp_path / "letters").is_dir()


def test_a_failure_keeps_the_former_results(inputs: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    former = json.dumps(seal({"files": []}))
    (out / "metrics.json").write_text(former)
    done = demo("--out", out, "--model", tmp_path / "nothing", *inputs[2:])
    assert done.returncode == 2
    assert "nothing is not a folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert (out / "metrics.json").read_text() == former
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
