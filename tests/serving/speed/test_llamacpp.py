"""Measuring with llama.cpp: what it is given, what it is asked, and how it fails."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyprune.errors import CheckpointError, ConfigError, MissingDependencyError, UnsupportedModelError
from pyprune.plan import PrunePlan
from pyprune.serving import engines
from pyprune.serving.checkpoints import read_checkpoint, read_gguf
from pyprune.serving.engines import Engine, EngineError, as_gguf, choose_engine
from pyprune.serving.gguf.perplexity import gguf_perplexity
from pyprune.serving.gguf.write import export_gguf
from pyprune.serving.speed.measure import measure, workload_of
from pyprune.serving.speed.results import SpeedReport
from pyprune.serving.speed.table import conditions, speed_table
from tests._support.cli import refused, run
from tests._support.llama_cpp import Case, identity
from tests._support.models import tiny_model
from tests.serving.gguf.test_gguf import CASES

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

SIZES: dict[str, Any] = {"batch_size": 3, "new_tokens": 4, "prompt_tokens": 20, "repeats": 2}
BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def skipping(plan: PrunePlan) -> PrunePlan:
    """Unequal: a layer without MLP, one with fewer channels."""
    return plan.with_layer(1, ffn=[]).with_layer(2, ffn=range(64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense/model and pruned/model are checkpoints; each has model.gguf, in float32, next to it."""
    out = tmp_path_factory.mktemp("llamacpp")
    Case("llama", identity, "llama", values=BLOCKS).write(out / "dense")
    Case("llama", skipping, "deci", values=BLOCKS).write(out / "pruned")
    return out


@pytest.fixture(scope="module")
def report(folder: Path) -> SpeedReport:
    models = {"dense": folder / "dense" / "model", "pruned": folder / "pruned" / "model"}
    return measure({**models, "file": folder / "pruned" / "model.gguf"}, engine="llamacpp", **SIZES)


def test_turns_alternate_and_tokens_are_exact(report: SpeedReport) -> None:
    turns = [(s.column, s.repeat, s.model) for s in report.samples]
    names = ("dense", "pruned", "file")
    assert turns == [(c, r, m) for c in ("generation", "prompt") for r in (0, 1) for m in names]
    assert {s.tokens for s in report.samples if s.column == "generation"} == {3 * 4}
    assert {s.tokens for s in report.samples if s.column == "prompt"} == {20}


def test_sizes_are_those_of_the_files_and_parameters_those_of_the_checkpoints(
    report: SpeedReport, folder: Path
) -> None:
    dense, pruned, file = report.models.values()
    assert (dense.architecture, pruned.architecture) == ("llama.cpp llama", "llama.cpp deci")
    assert (dense.format, pruned.format, file.format) == ("q8_0", "q8_0", "f32")
    assert dense.parameters == read_checkpoint(folder / "dense" / "model").parameters
    assert pruned.parameters == read_checkpoint(folder / "pruned" / "model").parameters
    assert file.parameters == pruned.parameters + 3 * 32 * 64 + 64, "the FFN of zeros is in the file"
    assert file.bytes == (folder / "pruned" / "model.gguf").stat().st_size
    assert pruned.bytes < dense.bytes < file.bytes
    assert pruned.path == str(folder / "pruned" / "model")


def test_loading_and_memory_are_measured(report: SpeedReport) -> None:
    for model in report.models.values():
        assert model.load_seconds is not None
        assert model.load_seconds > 0
        assert model.memory is not None
        assert model.memory > model.bytes, "the process holds the weights"
    assert "AVX" in report.environment["engine_build"] or "NEON" in report.environment["engine_build"]


def test_the_table_has_what_a_device_asks_for(report: SpeedReport) -> None:
    table = speed_table(report)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert (row["Model"], row["Format"], row["Bytes"]) == ("pruned", "q8_0", report.models["pruned"].bytes)
    assert float(str(row["Load (s)"])) > 0
    assert float(str(row["Memory (MB)"])) > 10
    assert "dtype" not in table.columns
    assert conditions(report).startswith("llama.cpp (xllamacpp 20")
    assert ", q8_0, f32, " in conditions(report)


def options(model: Path) -> dict[str, Any]:
    common = {"dtype": "bfloat16", "seed": 0, "kv_cache_bytes": 1 << 20}
    return {**common, "model": str(model), "max_length": 64, "max_sequences": 4}


def test_an_engine_answers_prompts_of_any_number_and_length(folder: Path) -> None:
    with Engine("llamacpp", options(folder / "pruned" / "model.gguf")) as engine:
        assert engine.load_seconds > 0
        assert engine.generate([[5, 6], [7]], 3)[1] == 6
        assert engine.generate([[5] * 60], 1)[1] == 1, "one prompt may be as long as max_length"
        assert engine.generate([[5] * 300] * 6, 9)[1] == 54, "longer than any before, and more than there are slots"
        assert engine.generate([[8]], 2)[1] == 2


def test_a_temporary_file_lasts_as_long_as_it_is_needed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.tempfile, "tempdir", str(tmp_path))
    with as_gguf(str(folder / "dense" / "model"), "f16"):
        assert [path.name for path in tmp_path.rglob("*.gguf")] == ["model.gguf"]
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_prompt_beyond_the_context_is_an_error(folder: Path) -> None:
    with (
        Engine("llamacpp", options(folder / "dense" / "model.gguf")) as engine,
        pytest.raises(EngineError, match="context"),
    ):
        engine.generate([[5] * 600], 1)


def test_llama_cpp_by_name_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        engines.importlib.util, "find_spec", lambda name, *a: None if name == "xllamacpp" else real(name, *a)
    )
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyprune\[gguf\]'"):
        choose_engine("llamacpp")
    assert choose_engine("transformers") == ("transformers", None)


# --- bad input -----------------------------------------------------------------------------------


def test_a_truncated_file_is_refused_before_anything_runs(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "dense" / "model.gguf").read_bytes()
    for length in (0, 300, len(whole) // 2, len(whole) - 64):
        (tmp_path / "part.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"part\.gguf could not be read as GGUF"):
            measure({"part": tmp_path / "part.gguf"}, engine="llamacpp", **SIZES)
    with pytest.raises(CheckpointError, match="truncated or damaged"), as_gguf(str(tmp_path / "part.gguf"), "f16"):
        pass
    message = refused("bench", tmp_path / "part.gguf", "--against", folder / "dense" / "model", "--engine", "llamacpp")
    assert "could not be read as GGUF" in message


def test_an_absent_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf.*No such file"):
        measure({"absent": tmp_path / "absent.gguf"}, engine="llamacpp", **SIZES)


def test_an_architecture_that_llama_cpp_does_not_know_is_said(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "dense" / "model.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(whole.replace(b"llama", b"lemma"))
    assert read_gguf(tmp_path / "other.gguf").architecture == "llama.cpp lemma"
    with pytest.raises(EngineError, match="unknown model architecture: 'lemma'"):
        measure({"other": tmp_path / "other.gguf"}, engine="llamacpp", **SIZES)


def test_a_file_without_a_decoder_is_refused(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "picture.gguf", "clip")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.patch.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="does not describe a language model"):
        measure({"picture": tmp_path / "picture.gguf"}, engine="llamacpp", **SIZES)


def test_other_engines_say_what_a_gguf_file_needs(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="--engine llamacpp"):
        measure({"file": folder / "dense" / "model.gguf"}, engine="transformers", **SIZES)


def test_a_model_that_llama_cpp_cannot_hold_is_refused(tmp_path: Path) -> None:
    from pyprune.checkpoint.save import save_checkpoint
    from tests._support.llama_cpp import byte_level_tokenizer

    save_checkpoint(tiny_model("opt"), byte_level_tokenizer(), tmp_path / "opt", plan=None, provenance={})
    with pytest.raises(UnsupportedModelError, match="no architecture for it"):
        measure({"opt": tmp_path / "opt"}, engine="llamacpp", **SIZES)


def test_the_length_is_the_one_that_the_file_will_state(tmp_path: Path) -> None:
    """Found out before files are written: llama.cpp has no windows, and its file says so."""
    CASES["window"].write(tmp_path)
    with pytest.raises(ConfigError, match="windowed reads at most 40 tokens, the workload needs 61"):
        workload_of({"windowed": tmp_path / "model"}, engine="llamacpp", prompt_tokens=60, new_tokens=4)
    short = workload_of({"windowed": tmp_path / "model"}, engine="llamacpp", new_tokens=4)
    assert short.prompt_tokens == 39


def test_options_of_another_engine_are_refused(folder: Path) -> None:
    models = {"dense": folder / "dense" / "model"}
    with pytest.raises(ConfigError, match=r"dtype is float32, but llama\.cpp takes formats"):
        measure(models, engine="llamacpp", dtype="float32", **SIZES)
    with pytest.raises(ConfigError, match="belongs to the engine llamacpp"):
        measure(models, engine="transformers", quantise="q8_0", **SIZES)
    with pytest.raises(ConfigError, match="Unknown GGUF format 'q8'"):
        workload_of(models, engine="llamacpp", quantise="q8", **SIZES)
    files = [folder / name / "model.gguf" for name in ("pruned", "dense")]
    said = refused("bench", files[0], "--against", files[1], "--engine", "llamacpp", "--quantise", "q4_0")
    assert "--quantise q4_0 is the format for folders" in " ".join(said.split())


def test_the_command(folder: Path, tmp_path: Path) -> None:
    sizes = ("--batch-size", 2, "--new-tokens", 3, "--prompt-tokens", 9, "--repeats", 1, "--json", tmp_path / "a.json")
    result = run(
        "bench", folder / "pruned" / "model", "--against", folder / "dense" / "model", "--engine", "llamacpp",
        "--quantise", "q4_0", *sizes,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| q4_0 |" in result.output
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.second
def test_the_command_s_perplexity_is_llama_cpp_s(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the thing in the garden, " * 40, encoding="utf-8")
    sizes = ("--batch-size", 1, "--new-tokens", 2, "--prompt-tokens", 9, "--repeats", 1, "--json", tmp_path / "a.json")
    file = folder / "pruned" / "model.gguf"
    written: list[str] = []

    def noting(source: str, *given: Any, **options: Any) -> Any:
        written.append(source)
        return export_gguf(source, *given, **options)

    monkeypatch.setattr("pyprune.serving.gguf.write.export_gguf", noting)
    dense = folder / "dense" / "model"
    result = run(
        "bench", file, "--against", dense, "--engine", "llamacpp", "--quantise", "f32",
        "--ppl", text, "--protocol", "ppl-128", *sizes,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert written == [str(dense)], "once, for the perplexity and the speed"
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["models"]["dense"]["parameters"] == read_checkpoint(dense).parameters
    assert figures["models"]["dense"]["path"] == str(dense)
    found = figures["perplexity"]
    assert found["pruned"] == pytest.approx(gguf_perplexity(file, str(text), "ppl-128").perplexity, rel=1e-3)
    assert abs(found["dense"] / found["pruned"] - 1) > 1e-3
