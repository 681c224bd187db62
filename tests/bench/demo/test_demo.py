"""The demo, short and full, end to end in seconds: a tiny random model, a small text, the Transformers engine."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench._settings import SHORT_GATES, Settings, choice
from bench.demo.end_to_end import main
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

PERPLEXITIES = ["dense_ppl", "direct_ppl", "reconstructed_ppl", "pruned_ppl"]
CONTROLS = ["dense_finetuned_ppl", "published_ppl", "prune_then_finetune_ppl"]
FIGURES = [
    "train_tokens",
    "dense_parameters",
    "pruned_parameters",
    "generation_speedup",
    "prefill_speedup",
    "seconds",
    "engine_start_seconds",
]
SHORT = Settings(
    batch_size=2,
    sequences=8,
    sequence_length=32,
    calibration=8,
    gates=replace(SHORT_GATES, first_round_steps=2, round_steps=1, batch_size=2),
    gate_sequence_length=16,
    protocol="ppl-128",
    test_tokens=4 * 128,
    elsewhere_tokens=2 * 128,
    batch_prompts=2,
    new_tokens=4,
    prompt_tokens=32,
    repeats=2,
    sample_tokens=4,
)
FULL = replace(SHORT, steps=2)


@dataclass(frozen=True)
class Run:
    """What a run wrote and printed."""

    out: Path
    metrics: dict[str, Any]
    printed: str


def demo(settings: Settings, out: Path, *arguments: str | Path) -> Run:
    printed = io.StringIO()
    everything = ["--engine", "transformers", "--out", out, *arguments]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main([str(argument) for argument in everything], settings) == 0
    return Run(out, json.loads((out / "metrics.json").read_text()), printed.getvalue())


def refused(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "bench.demo.end_to_end", "--engine", "transformers", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    return done.stderr


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    folder = tmp_path_factory.mktemp("inputs")
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder / "tiny", plan=None, provenance={})
    lines = (f"Document {i} tells of the {i * i} things that happened in the year {1000 + i}." for i in range(120))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return ["--model", folder / "tiny", "--text", folder / "text.jsonl"]


@pytest.fixture(scope="module")
def short(inputs: list[str | Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps(seal({"files": ["old.txt"]})))
    (folder / "old.txt").write_text("a former run")
    return demo(SHORT, folder, "--dtype", "float32", *inputs)


@pytest.fixture(scope="module")
def full(inputs: list[str | Path], short: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """After the short demo, whose layers are changed to see that they are taken."""
    chosen = tmp_path_factory.mktemp("chosen")
    details = {**short.metrics["details"], "removed_layers": [0]}
    (chosen / "metrics.json").write_text(json.dumps({**short.metrics, "details": details}))
    out = tmp_path_factory.mktemp("full") / "demo-full"
    return demo(FULL, out, "--full", "--dtype", "float32", "--chosen", chosen, *inputs)


def test_the_folder_is_replaced_whole(short: Run) -> None:
    names = sorted(p.name for p in short.out.iterdir())
    assert names == ["dense", "metrics.json", "pruned", "report.html", "report.md"]
    assert [p.name for p in short.out.parent.iterdir()] == ["demo"], "nothing temporary is left"
    assert list(foreign_names(short.out)) == [], "a later run may replace all of it"


def test_the_short_form_has_the_headline_keys_and_none_of_the_controls(short: Run) -> None:
    figures = [key for key in short.metrics if key not in ("out_of_domain", "intervals")]
    assert figures == [*PERPLEXITIES, *FIGURES, "details", "files", "sha256"]
    assert all(short.metrics[key] > 0 for key in (*PERPLEXITIES, *FIGURES) if key != "train_tokens")
    assert short.metrics["train_tokens"] == 0
    assert short.metrics["pruned_ppl"] == short.metrics["reconstructed_ppl"] != short.metrics["direct_ppl"]
    assert short.metrics["pruned_parameters"] < short.metrics["dense_parameters"]
    assert list(short.metrics["details"]["arms"]) == ["direct_ppl", "reconstructed_ppl"]
    assert not any(arm["losses"] for arm in short.metrics["details"]["arms"].values())


def test_the_full_form_has_the_controls_too(full: Run) -> None:
    assert set(full.metrics) >= {*PERPLEXITIES, *CONTROLS, *FIGURES}
    assert all(full.metrics[key] > 0 for key in (*PERPLEXITIES, *CONTROLS, *FIGURES))
    assert full.metrics["pruned_ppl"] != full.metrics["reconstructed_ppl"]
    assert full.metrics["train_tokens"] == 2 * 2 * 32


def test_every_perplexity_lies_in_its_interval(short: Run, full: Run) -> None:
    for run in (short, full):
        assert set(run.metrics["intervals"]) == {key for key in run.metrics if key.endswith("_ppl")}
        for key, (low, high) in run.metrics["intervals"].items():
            assert low < run.metrics[key] < high


def test_the_gates_weigh_half_of_the_layers(short: Run) -> None:
    assert SHORT.gates.weighed_share == Settings().gates.weighed_share == 0.5
    assert Settings.full().gates.weighed_share == 1
    assert short.metrics["details"]["gates"]["weighed_share"] == 0.5
    assert "50% of the layers" in (short.out / "report.md").read_text()


def test_the_full_form_takes_the_layers_of_the_short_one_and_announces_its_time(full: Run) -> None:
    assert full.metrics["details"]["removed_layers"] == [0]
    assert "The layers are those that the run in" in full.printed
    assert "minutes on this machine (a training step takes" in full.printed
    assert "taken from the run in chosen" in (full.out / "report.md").read_text()


@pytest.mark.parametrize("other", [{"model": "another"}, {"text": "another"}, {"ratio": 0.5}])
def test_layers_that_were_chosen_for_something_else_are_not_taken(
    short: Run, inputs: list[str | Path], other: dict[str, Any], tmp_path: Path
) -> None:
    from bench.demo.demo import Demo, chosen_layers

    (tmp_path / "work").mkdir()
    of = Demo(SHORT, tmp_path / "work", "transformers", str(inputs[1]), str(inputs[3]))
    assert chosen_layers(short.out, of) == tuple(short.metrics["details"]["removed_layers"])
    (tmp_path / "metrics.json").write_text(json.dumps({"details": {**short.metrics["details"], **other}}))
    assert chosen_layers(tmp_path, of) == ()
    assert chosen_layers(tmp_path / "nothing", of) == ()


def test_phases_are_printed_with_their_seconds_and_the_engines_starts_apart(short: Run) -> None:
    for phase in ("dense: measure and export", "choose the layers", "cut and reconstructed", "time dense and pruned"):
        assert phase in short.printed
    assert "s of CPU" in short.printed
    assert "s for the two starts of transformers" in short.printed
    assert short.metrics["seconds"] == pytest.approx(sum(short.metrics["details"]["phases"].values()), abs=0.1)


def test_every_trained_arm_saw_the_same_tokens_with_the_same_options(full: Run) -> None:
    arms = full.metrics["details"]["arms"]
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


def test_the_default_is_reconstructed_and_every_other_arm_is_not(full: Run) -> None:
    arms = full.metrics["details"]["arms"]
    reconstructed = {key for key, arm in arms.items() if arm["config"]["cut"]["reconstruct"] == "least_squares"}
    assert reconstructed == {"reconstructed_ppl", "pruned_ppl"}
    assert full.metrics["reconstructed_ppl"] != full.metrics["direct_ppl"]
    default = json.loads(json.dumps(preset("elder-trained").to_dict()))
    ours = arms["pruned_ppl"]["config"]
    assert all(ours[part] == default[part] for part in ("stages", "method"))
    assert ours["recover"] | {"train": None} == default["recover"] | {"train": None}
    assert ours["cut"]["reconstruct"] == default["cut"]["reconstruct"]


def test_every_arm_lost_the_same_layers(short: Run, full: Run) -> None:
    for run in (short, full):
        removed = run.metrics["details"]["removed_layers"]
        assert len(removed) == 1
        assert all(a["config"]["elder"]["layers"] == removed for a in run.metrics["details"]["arms"].values())
        record = read_pruning_json(run.out / "pruned", verify_files=True)
        assert record.plan is not None
        assert list(record.plan.removed_layers) == removed
        assert "speed" in record.provenance


def test_both_checkpoints_load(short: Run) -> None:
    for name in ("dense", "pruned"):
        model, tokenizer = load_model(short.out / name)
        assert sum(p.numel() for p in model.parameters()) == short.metrics[f"{name}_parameters"]
        assert tokenizer is not None


def test_everything_is_in_the_chosen_dtype(full: Run) -> None:
    for arm in full.metrics["details"]["arms"].values():
        assert arm["config"]["elder"]["train"]["dtype"] == arm["config"]["finetune"]["dtype"] == "float32"
    assert {json.loads((full.out / name / "config.json").read_text())["dtype"] for name in ("dense", "pruned")} == {
        "float32"
    }
    text = (full.out / "report.md").read_text()
    assert "float32 compute" in text
    assert "float32 weights" in text
    assert "bfloat16" not in text
    assert own_options(choice(replace(Settings(), compute_dtype="float32")), ElderOptions).train.dtype == "float32"


def test_the_report_begins_with_a_picture_and_names_the_next_commands(short: Run) -> None:
    page, text = (short.out / "report.html").read_text(), (short.out / "report.md").read_text()
    body = page[page.index("<body>") :]
    assert body.index('<div class="picture">') < body.index("<p>")
    assert page.count("<svg") == 3
    assert page.index("What to type next") < page.index("Conditions")
    assert "make demo-full" in page
    assert "No weight was trained" in text
    both = short.metrics["details"]["dense_sample"], short.metrics["details"]["arms"]["reconstructed_ppl"]["sample"]
    assert f"<td>{html.escape(both[0])}</td><td>{html.escape(both[1])}</td>" in page, "side by side"
    assert str(short.out.parent) not in page + text, "no path of this machine"


def test_the_full_report_shows_every_arm(full: Run) -> None:
    page, text = (full.out / "report.html").read_text(), (full.out / "report.md").read_text()
    assert page.count("<svg") == 4
    for arm in full.metrics["details"]["arms"].values():
        assert arm["label"] in text
        assert arm["label"].replace("'", "&#x27;") in page
    for condition in ("no document in common", "peak learning rate", "penalty_weight"):
        assert condition in text
        assert condition in page


def test_its_own_text_is_measured_on_other_kinds_as_well(inputs: list[str | Path], tmp_path: Path) -> None:
    run = demo(SHORT, tmp_path / "demo", *inputs[:2])
    found = run.metrics["out_of_domain"]
    assert list(found) == ["web", "code", "languages"]
    assert all(list(row) == ["dense_ppl", "reconstructed_ppl", "pruned_ppl"] for row in found.values())
    assert len({row["dense_ppl"] for row in found.values()} | {run.metrics["dense_ppl"]}) == 4
    assert "| model | layers | Wikipedia | web | code | languages |" in run.printed


def test_a_folder_of_something_else_is_refused_at_once(inputs: list[str | Path], tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    error = refused("--out", tmp_path, "--model", tmp_path / "nothing", *inputs[2:])
    assert "holds letters, which no record of pyprune in it names" in error
    assert (tmp_path / "letters").is_dir()


def test_a_failure_keeps_the_former_results(inputs: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    former = json.dumps(seal({"files": []}))
    (out / "metrics.json").write_text(former)
    error = refused("--out", out, "--model", tmp_path / "nothing", *inputs[2:])
    assert "nothing is not a folder" in error
    assert "Traceback" not in error
    assert (out / "metrics.json").read_text() == former
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
