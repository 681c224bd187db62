"""Scoring methods through the whole flow: command line or prune() to a checkpoint that loads and means the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pyprune import prune, prune_
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.cli.app import app
from pyprune.cli.base import ERROR_CODE
from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig
from pyprune.cut.mask import masked
from pyprune.errors import ConfigError
from pyprune.families import family_for
from pyprune.methods.registry import score_presets
from pyprune.run.recipe import build_config
from pyprune.serving.export import export
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import SCORES, quick
from tests._support.text import write_model, write_text

FEW = {
    "moreau": ("moreau.draws=2", "moreau.steps=2"),
    "moreau_gs": ("moreau_gs.steps=2",),
    "smoothgrad": ("smoothgrad.draws=2",),
    "loraprune": ("loraprune.train.steps=2",),
}
"""Settings with which a method is quick."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def config(method: str, text: Path | None, ratio: float = 0.2, **score: Any) -> PruneConfig:
    base = build_config(preset=score_presets()[method], options={"ratio": ratio})
    data = replace(base.data, source=str(text), samples=4, sequence_length=32, seed=1)
    assert base.score is not None
    return quick(replace(base, data=data, score=replace(base.score, **score)))


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "phi", "gemma3"])
def test_a_moreau_plan_of_unequal_widths_survives_save_and_load(name: str, text: Path, tmp_path: Path) -> None:
    dense = tiny_model(name)
    folder = write_model(dense, tmp_path / "dense")
    result = prune(folder, config("moreau", text, ranking="global", normalise="size"), out=tmp_path / "out")
    widths = {layer.widths for layer in result.plan.layers}
    assert len(widths) > 1, "the plan of this test must have unequal widths"
    assert len({w[0] for w in widths}) > 1 or len({w[2] for w in widths}) > 1
    assert result.compact is not None
    assert not result.compact.stock
    assert 0.15 < result.compact.removed_share <= 0.2
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.plan == result.plan
    memory = record.provenance["report"]["decision"]["scores"]["memory"]
    assert memory["peak_bytes"] > memory["layer_bytes"] > memory["model_bytes"] == 0, "it is streamed"
    assert any("peak memory" in note for note in result.notes)
    loaded, _ = load_model(tmp_path / "out")
    batch = tiny_batch() % 200 + 3
    with torch.no_grad(), masked(dense, result.plan):
        expected = dense(batch).logits
    with torch.no_grad():
        assert_same_logits(loaded(batch).logits, expected)
        alone = loaded(batch).logits - dense(batch).logits
    assert alone.abs().max() > 1e-2, "the cut must show"


@pytest.mark.parametrize("method", SCORES)
def test_every_method_runs_from_the_command_line(method: str, text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    few = [part for setting in FEW.get(method, ()) for part in ("--set", setting)]
    arguments = [
        "prune", str(folder), "--method", method, "--ratio", "0.2", "--out", str(tmp_path / "out"),
        "--calibration", str(text), "--samples", "4", "--sequence-length", "64", *few,
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = read_pruning_json(tmp_path / "out", verify_files=True)
    assert record.provenance["method"] == method
    assert record.provenance["report"]["stages"] == []
    removed = 1 - record.provenance["parameters"] / record.provenance["dense_parameters"]
    assert 0.15 < removed <= 0.2
    reconstructed = method not in ("magnitude", "random")
    assert any("Reconstruction: " in note for note in record.provenance["report"]["notes"]) == reconstructed
    # What reads no text marks none.
    assert bool(record.provenance["training_marks"]) == (method not in ("magnitude", "random"))


@pytest.mark.parametrize("method", ["magnitude", "moreau"])
def test_uniform_gives_a_stock_architecture(method: str, text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    arguments = [
        "prune", str(folder), "--method", method, "--uniform", "--out", str(tmp_path / "out"), "--calibration",
        str(text), "--samples", "4", "--sequence-length", "32", "--set", "score.first_layer=1",
        *(part for setting in FEW.get(method, ()) for part in ("--set", setting)),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert "uniform" in result.output


def test_dry_run_prints_the_plan(tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    result = CliRunner().invoke(app, ["prune", str(folder), "--method", "magnitude", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model_type"] == "llama"
    assert "% of the parameters are removed" in result.stderr


def test_dry_run_warns_as_the_cut_would(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    arguments = ["prune", str(folder), "--method", "flap-paper", "--calibration", str(text), "--samples", "4"]
    arguments += ["--sequence-length", "64", "--set", "score.axes=[heads]", "--ratio", "0.06", "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "Warning: Only" in said
    assert "The plan holds no biases" in said
    assert json.loads(result.stdout)["model_type"] == "llama"


def test_the_cut_is_what_the_masked_model_was_and_recovery_follows(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    base = config("taylor", text, ranking="global", normalise="size")
    train = replace(base.recover.train, steps=3, batch_size=2, micro_batch_size=1, learning_rate=1e-3)
    changed = replace(
        base, verify=True, stages=replace(base.stages, after=("recover",)), recover=replace(base.recover, train=train)
    )
    result = prune(folder, changed, out=tmp_path / "out")
    assert result.verified is not None
    assert result.verified["compacted_perplexity"] == pytest.approx(result.verified["masked_perplexity"], rel=1e-4)
    assert [stage["action"] for stage in result.stages] == ["recover"]


def test_a_plan_is_found_again_from_the_same_seeds(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    plans = [prune(folder, config("moreau", text), out=tmp_path / f"out{i}").plan for i in range(2)]
    assert plans[0] == plans[1]


def test_a_method_without_a_regulariser_refuses_that_stage() -> None:
    wrong = config("magnitude", None)
    wrong = replace(wrong, stages=replace(wrong.stages, after=("regularise",)))
    with pytest.raises(ConfigError, match="regularise"):
        prune_(tiny_model("llama"), {}, wrong)


def test_the_command_line_refuses_it_too(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    result = CliRunner().invoke(
        app,
        [
            "prune",
            str(folder),
            "--method",
            "moreau",
            "--out",
            str(tmp_path / "o"),
            "--set",
            "stages.before=[regularise]",
        ],
    )
    assert result.exit_code == ERROR_CODE
    assert "regularises nothing" in result.stderr


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-tied", "qwen3", "opt", "phi", "gemma3"])
def test_flap_s_biases_come_through_the_whole_flow(name: str, text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model(name), tmp_path / "dense")
    base = replace(config("flap", text), verify=True)
    without = replace(base, cut=CutConfig())
    results = [prune(folder, c, out=tmp_path / o) for c, o in ((base, "with"), (without, "without"))]
    assert results[0].plan == results[1].plan
    assert not results[0].plan.is_uniform
    for result in results:
        assert result.verified is not None
        assert result.verified["compacted_perplexity"] == pytest.approx(result.verified["masked_perplexity"], rel=1e-4)
        assert result.compact is not None
        assert result.compact.dense_parameters == sum(p.numel() for p in tiny_model(name).parameters())
    assert results[0].verified != results[1].verified
    assert results[0].decision["compensation"]["blocks"] > 0
    models = [load_model(tmp_path / o)[0] for o in ("with", "without")]
    batch = tiny_batch() % 200 + 3
    with torch.no_grad():
        difference = (models[0](batch).logits - models[1](batch).logits).abs().max()
    assert difference > 1e-4
    exported = export(tmp_path / "with", tmp_path / "exported")
    with torch.no_grad():
        again = load_model(exported.path)[0](batch).logits
        assert_same_logits(again, models[0](batch).logits)


def test_any_plan_can_be_compensated_and_the_marks_say_that_text_was_used(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    first = config("magnitude", None, ranking="local", heads=3, ffn=20)
    prune(folder, first, out=tmp_path / "plain")
    base = config("magnitude", text)
    base = replace(base, data=replace(base.data, sequence_length=64))  # a mark needs a passage of that length
    replayed = replace(base, method="none", plan=str(tmp_path / "plain"), cut=CutConfig("bias"))
    result = prune(folder, replayed, out=tmp_path / "out")
    assert any("Bias compensation" in note for note in result.notes)
    lost = "The reconstruction of"
    assert not any(lost in warning for warning in result.warnings)
    again = replace(base, method="none", plan=str(tmp_path / "out"))
    assert any(lost in warning for warning in prune(folder, again, out=tmp_path / "again").warnings)
    record = read_pruning_json(tmp_path / "out")
    assert record.provenance["training_marks"]
    assert record.provenance["architecture"] == "LlamaForCausalLM"
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["attention_bias"] is settings["mlp_bias"] is True


def test_a_second_cut_remembers_the_text_of_the_first(text: Path, tmp_path: Path) -> None:
    """Whatever the second method reads; the weights have seen the first one's text."""
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    base = config("taylor", text)
    base = replace(base, data=replace(base.data, sequence_length=64))
    assert base.score is not None
    stock = replace(base.score, ranking="local", axes=("ffn",), ffn=30)  # equal widths, which can be cut again
    prune(folder, replace(base, score=stock), out=tmp_path / "first")
    marks = read_pruning_json(tmp_path / "first").provenance["training_marks"]
    prune(tmp_path / "first", config("magnitude", None), out=tmp_path / "silent")
    known = read_pruning_json(tmp_path / "silent").provenance
    assert known["training_marks"] == marks != ""
    assert known["before"]["method"] == "taylor"
    assert "training_marks" not in known["before"]
    again = prune(tmp_path / "first", base, out=tmp_path / "again")
    assert any("were training text of this checkpoint already" in warning for warning in again.warnings)
    assert read_pruning_json(tmp_path / "again").provenance["training_marks"] == marks


def test_stock_alone_is_refused_before_the_cut_where_no_stock_architecture_has_the_biases(
    text: Path, tmp_path: Path
) -> None:
    folder = write_model(tiny_model("qwen3"), tmp_path / "dense")
    arguments = [
        "prune", str(folder), "--method", "flap-paper", "--uniform", "--out", str(tmp_path / "out"), "--calibration",
        str(text), "--samples", "4", "--sequence-length", "32", "--set", "target=stock",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ERROR_CODE
    assert "no biases on its output projections" in result.stderr
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, [*arguments, "--set", "cut.reconstruct=none"])
    assert result.exit_code == 0, result.output


def test_a_compensation_without_effect_is_a_warning(text: Path, tmp_path: Path) -> None:
    folder = write_model(tiny_model("llama"), tmp_path / "dense")
    plan = family_for(tiny_model("llama")).plan(tiny_model("llama").config).drop_layers([1])
    (tmp_path / "plan.json").write_text(plan.to_json())
    base = config("magnitude", text)
    replayed = replace(base, method="none", plan=str(tmp_path / "plan.json"), cut=CutConfig("bias"))
    result = prune(folder, replayed, out=tmp_path / "out")
    assert any("had no effect" in warning.lower() for warning in result.warnings)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mlp_bias"] is False
