"""`pyprune fit` for real engines: limits on times are measured in them, and llama.cpp holds what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.fit.limits import Budget
from tests._support.cli import refused, run
from tests._support.llama_cpp import VOCAB, byte_level_tokenizer
from tests._support.models import tiny_model
from tests._support.text import write_text
from tests.fit.test_fit import arguments

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
}  # fmt: skip
"""Sizes that llama.cpp's blocks divide."""


def place_of(folder: Path, name: str, **sizes: Any) -> Path:
    """A folder with a dense checkpoint, whose vocabulary llama.cpp takes, and text; sizes change :data:`SIZES`."""
    model = tiny_model(name, **{**SIZES, **sizes})
    save_checkpoint(model, byte_level_tokenizer(), folder / "dense", plan=None, provenance={})
    write_text(folder / "text.txt", words=1200)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_of(tmp_path_factory.mktemp("llama"), "llama")


def _export(folder: Path, file: Path) -> str:
    """Write a checkpoint for llama.cpp; what the command says."""
    result = run("export", folder, "--format", "gguf", "--quantise", "q8_0", "--out", file)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.second
@pytest.mark.parametrize(("engine", "dtype"), [("transformers", "float32"), ("llamacpp", "q8_0")])
def test_limits_on_times_are_measured_in_the_engine(llama: Path, tmp_path: Path, engine: str, dtype: str) -> None:
    if engine == "llamacpp":
        pytest.importorskip("gguf")
        pytest.importorskip("xllamacpp")
    profile, out, figures = tmp_path / "profile.json", tmp_path / "out", tmp_path / "figures.json"
    short = ["--prefill", "32", "--generation", "2x4", "--probes", "2", "--repeats", "1"]
    taken = run("profile", llama / "dense", "--engine", engine, "--dtype", dtype, *short, "--out", profile)
    assert taken.exit_code == 0, taken.output
    # Ten times what the dense model takes: how fast this machine is decides nothing.
    budget = "prefill@32=1000%,generation@2x4=1000%,parameters=80%"
    few = ["--set", "repeats=1", "--no-recover", "--json", figures]
    result = run(*arguments(llama, out, budget, timing=True), "--profile", profile, *few)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert found["speed"]["engine"] == engine, "what was written ran as well"
    winner, times = found["winner"], {"prefill@32", "generation@2x4"}
    assert set(winner["measured"]) == set(winner["dense"]) == times
    assert all(seconds > 0 for seconds in winner["measured"].values())
    assert all(found["dense"][name] == seconds for name, seconds in winner["dense"].items()), "measured, not predicted"
    assert [bool(attempt["measured"]) for attempt in found["attempts"]].count(True) == 1, "the winner alone is timed"
    amounts = {**winner["measured"], "parameters": winner["parameters"]}
    record = read_pruning_json(out, verify_files=True).provenance["fit"]
    for limit in Budget.parse(budget).limits:
        name = str(limit.quantity)
        assert record[str(limit)] == limit.write(amounts[name], found["dense"][name])
    if engine == "llamacpp":
        assert "Wrote" in _export(out, tmp_path / "fitted.gguf")


@pytest.mark.second
def test_a_family_of_equal_sizes_becomes_a_file_of_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp has no Granite with sizes per layer: only whole layers may go."""
    pytest.importorskip("gguf")
    place, out, figures = place_of(tmp_path, "granite"), tmp_path / "out", tmp_path / "figures.json"
    given = arguments(place, out, "parameters=85%")
    result = run(*given, "--weights", "q8_0", "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    assert "granite: sizes differ between layers" in result.stderr.replace("\n", " "), "why choices were left out"
    for attempt in json.loads(figures.read_text())["attempts"]:
        assert len({tuple(widths) for widths in attempt["widths"]} - {(0, 0, 0)}) == 1
    assert "architecture granite, q8_0" in _export(out, tmp_path / "fitted.gguf")


def test_a_model_that_llama_cpp_has_no_place_for_is_refused_before_it_is_scored(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("opt"), byte_level_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    write_text(tmp_path / "text.txt", words=1200)
    message = refused(*arguments(tmp_path, tmp_path / "out", "parameters=85%"), "--weights", "q8_0").replace("\n", " ")
    assert "llama.cpp has no architecture for it" in message
    assert "Choose another format of the weights" in message
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "out").exists()
