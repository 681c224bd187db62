"""`pyprune fit` on a tiny model: budgets are kept, the best candidate wins, what was measured is used again."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pyprune.modeling  # noqa: F401  (registers the pruned architectures)
from pyprune.checkpoint.load import ModelSource
from pyprune.checkpoint.record import read_pruning_json
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cli.fit import choose_engine_and_format
from pyprune.config.data import DataConfig
from pyprune.config.train import TrainConfig
from pyprune.cut.reconstruct import reconstruct_
from pyprune.errors import BudgetError, CheckpointError, MissingDependencyError, OutputError
from pyprune.families import count_parameters, family_for
from pyprune.fit import fit as flow
from pyprune.fit import search
from pyprune.fit import time_winner as timed
from pyprune.fit.attempts import Attempt
from pyprune.fit.cost import ExactCosts
from pyprune.fit.fit import export_path, fit, report_of, shown_times, warn_of_other_exports
from pyprune.fit.limits import Budget
from pyprune.fit.measured import MeasuredCosts, features
from pyprune.fit.options import FitOptions
from pyprune.fit.profile import DENSE, Probe, Product, Profile, Timing, installed_versions, this_machine
from pyprune.fit.profiling.probes import probe_plans
from pyprune.fit.profiling.timing import ProfileOptions
from pyprune.fit.quantities import Quantity, Widths
from pyprune.fit.report import column_name, limits_table, pareto, sweep_table
from pyprune.fit.search import CANDIDATE, Fitting, SearchState
from pyprune.fit.sizes import MULTIPLES, SizeRules
from pyprune.fit.solve import Solution
from pyprune.methods import training
from pyprune.plan import PrunePlan, Sizes
from pyprune.run.prune import prune_checkpoint
from pyprune.serving.engines import EngineError
from pyprune.serving.quantise import quantising_obstacle
from pyprune.serving.widths import group_obstacle
from tests._support.cli import refused, run
from tests._support.interrupt import failing_step
from tests._support.llama_cpp import VOCAB, byte_level_tokenizer
from tests._support.models import tiny_model
from tests._support.tokenizer import tiny_tokenizer
from tests.fit._profiles import MACHINE, PLANTED, VERSIONS, fake_profile

SMALL = (
    "window=16",
    "score_samples=8",
    "value_samples=12",
    "judge_samples=8",
    "values.dtype=float32",
    "solve.solutions=3",
)
WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "as", "with", "his", "they", "this", "from", "or")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense checkpoint and text."""
    folder = tmp_path_factory.mktemp("fit")
    save_checkpoint(tiny_model("llama"), tiny_tokenizer(), folder / "dense", plan=None, provenance={"source": "tiny"})
    source = random.Random(0)
    sentences = (" ".join(source.choice(WORDS) for _ in range(30)) for _ in range(400))
    (folder / "text.txt").write_text(".\n\n".join(sentences))
    return folder


def arguments(place: Path, out: Path, *budgets: str, timing: bool = False) -> list[str | Path]:
    """A run of `pyprune fit` that takes seconds."""
    given = [part for budget in budgets for part in ("--budget", budget)]
    sets = [part for setting in SMALL for part in ("--set", setting)]
    text = ["--calibration", place / "text.txt", "--samples", "24", "--sequence-length", "16"]
    untimed = [] if timing else ["--no-timing"]
    return ["fit", place / "dense", *given, "--out", out, *text, *sets, "--cache", place / "cache", *untimed]


def options(place: Path, **changes: Any) -> FitOptions:
    """The same in Python."""
    data = DataConfig(str(place / "text.txt"), samples=24, sequence_length=16)
    base = {"data": data, "window": 16, "score_samples": 8, "value_samples": 12, "judge_samples": 8, **changes}
    return FitOptions(**base)


def test_a_budget_becomes_a_checkpoint_that_keeps_it(place: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    result = run(*arguments(place, out, "parameters=70%,memory@64<=80%"), "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    dense = AutoModelForCausalLM.from_pretrained(place / "dense")
    assert count_parameters(model) <= 0.7 * count_parameters(dense)
    record = read_pruning_json(out, verify_files=True)
    assert record.provenance["fit"]["budget"] == "parameters<=70%, memory@64<=80%"
    assert record.provenance["report"]["reconstruction"]["parts"], "the winner is reconstructed"
    found = json.loads(figures.read_text())
    assert len({json.dumps(attempt["widths"]) for attempt in found["attempts"]}) == 3, "candidates differ"
    assert found["winner"] == found["attempts"][0], "nothing was timed, so that the best candidate wins"
    assert found["winner"]["parameters"] == count_parameters(model)
    assert "counted" in result.stdout
    # Memory is of the weights that were written, in the format of the budget.
    stored = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    cache = found["winner"]["measured"]["memory@64"] - stored
    assert cache == 2 * 64 * sum(len(layer.kv_heads) for layer in record.plan.layers) * record.plan.dense.head_dim * 2
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_a_model_of_one_layer_keeps_it(place: Path, tmp_path: Path) -> None:
    """A draft model, for one: its only layer cannot go, which is no reason of an engine's."""
    one = tmp_path / "one"
    one.mkdir()
    (one / "text.txt").symlink_to(place / "text.txt")
    model = tiny_model("llama", num_hidden_layers=1)
    save_checkpoint(model, tiny_tokenizer(), one / "dense", plan=None, provenance={"source": "tiny"})
    result = run(*arguments(one, tmp_path / "out", "parameters<=95%"), "--no-recover")
    assert result.exit_code == 0, result.output
    plan = read_pruning_json(tmp_path / "out").plan
    assert plan.kept_layers == (0,)
    dense = plan.dense
    assert plan.layers[0].widths != (dense.num_attention_heads, dense.num_key_value_heads, dense.intermediate_size)


def test_candidates_are_compared_on_some_of_the_text_and_the_winner_is_written_on_all(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []

    def counted(*given: Any, **options: Any) -> Any:
        report = reconstruct_(*given, **options)
        tokens.append(report.tokens)
        return report

    monkeypatch.setattr(import_module("pyprune.fit.attempts"), "reconstruct_", counted)
    out, cache = tmp_path / "out", ["--cache", tmp_path / "cache", "--set", "try_samples=6", "--no-recover"]
    assert (result := run(*arguments(place, out, "parameters=70%"), *cache)).exit_code == 0, result.output
    assert tokens == [6 * 16] * 3
    assert read_pruning_json(out).provenance["report"]["reconstruction"]["tokens"] == 24 * 16
    assert "6 of 24 x 16 tokens to be compared" in (report_of(out) / "report.md").read_text()


@pytest.mark.second
@pytest.mark.parametrize("weights", ["q8_0", "w8a8-int8"])
def test_the_winner_is_exported_in_the_format_of_the_budget(place: Path, tmp_path: Path, weights: str) -> None:
    pytest.importorskip("gguf" if weights == "q8_0" else "compressed_tensors")
    folder = place
    if weights == "q8_0":
        folder = tmp_path / "place"
        llama = tiny_model("llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=4)
        save_checkpoint(llama, byte_level_tokenizer(), folder / "dense", plan=None, provenance={})
        (folder / "text.txt").write_text((place / "text.txt").read_text())
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    given = arguments(folder, out, "memory@64=80%", timing=weights == "q8_0")
    given += ["--weights", weights, "--no-recover", "--json", figures]
    result = run(*given)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert (found["speed"] is not None) == (weights == "q8_0")
    if found["speed"]:
        check_speed(found["speed"], out, folder / "dense")
    exported = Path(found["exported"])
    assert exported == export_path(out, weights)
    assert exported.is_file() == (weights == "q8_0")
    measured, predicted = found["winner"]["measured"]["memory@64"], found["winner"]["predicted"]["memory@64"]
    assert measured == pytest.approx(predicted, rel=1e-3), "what was counted was written"
    assert str(exported) in result.output.replace("\n", "")
    facts = [read_pruning_json(folder).provenance["fit"] for folder in (out, exported) if folder.is_dir()]
    assert len(facts) == (1 if weights == "q8_0" else 2)
    assert all(fact["weights"] == weights for fact in facts)
    shutil.rmtree(out)
    shutil.rmtree(report_of(out))
    assert str(exported) in refused(*given).replace("\n", ""), "what is there is not replaced"


def check_speed(speed: dict[str, Any], out: Path, dense: Path) -> None:
    """What was written ran beside the dense model, in llama.cpp and q8_0, and record and report say so."""
    assert speed["engine"] == "llamacpp"
    assert speed["models"]["dense"]["path"] == str(dense)
    assert all(speed["models"][name]["format"].startswith("q8_0") for name in ("fitted", "dense"))
    assert speed["models"]["fitted"]["bytes"] < speed["models"]["dense"]["bytes"]
    assert read_pruning_json(out).provenance["speed"]["prompt speedup"] > 0
    page = (report_of(out) / "report.html").read_text()
    assert all(text in page for text in ("<svg", "Candidates", "Budget", "Tokens/s"))


def test_the_report_holds_every_candidate_and_what_was_limited(place: Path, tmp_path: Path) -> None:
    given = arguments(place, tmp_path / "out", "parameters=70%,memory@64<=80%")
    assert run(*given, "--no-recover").exit_code == 0
    folder = report_of(tmp_path / "out")
    text, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    assert "parameters<=70%" in text
    assert "Perplexity against memory@64" in page
    assert all(f"candidate {number}" in page for number in (2, 3)), "the first of three won"
    assert json.loads((folder / "metrics.json").read_text())["speed"] is None
    shutil.rmtree(tmp_path / "out")
    assert "out.report" in refused(*given, "--no-recover").replace("\n", ""), "an earlier report is not replaced"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MissingDependencyError("vllm", "vllm", "Timing"), "Timing needs the package"),
        (CheckpointError("No such file."), "No such file."),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_what_cannot_be_timed_here_is_written_all_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    reports: list[str] = []

    def none_here(engine: str) -> None:
        reports.extend([engine, (report_of(tmp_path / "out") / "report.md").read_text()])
        raise error

    monkeypatch.setattr(timed, "choose_engine", none_here)
    given = arguments(place, tmp_path / "out", "parameters=70%", timing=True)
    result = run(*given, "--no-recover", "--engine", "transformers")
    assert result.exit_code == 0, result.output
    assert reports[0] == "transformers"
    assert "ended before it was timed" in reports[1], "what is known is written before engines run"
    assert f"was not timed. {error}" in result.stderr.replace("\n", " ")
    assert says in (report_of(tmp_path / "out") / "report.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize("trust", [False, True])
def test_a_dense_model_that_an_engine_cannot_read_by_itself_runs_with_random_weights(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
) -> None:
    given: dict[str, Any] = {}

    def measure(models: dict[str, Path], **options: Any) -> None:
        parameters = {name: count_parameters(AutoModelForCausalLM.from_pretrained(p)) for name, p in models.items()}
        given.update(models=models, parameters=parameters, **options)
        raise EngineError("not today")

    monkeypatch.setattr(timed, "measure", measure)
    shared: dict[str, Any] = {"options": options(place), "cache": place / "cache", "trust_remote_code": trust}
    found = fit(place / "dense", "parameters=70%", out=tmp_path / "out", recover=False, **shared)
    assert found.not_run == "not today"
    assert (str(given["models"]["dense"]) == str(place / "dense")) == (not trust)
    assert given["parameters"]["fitted"] == found.winner.parameters < given["parameters"]["dense"]
    assert (given["dtype"], given["quantise"], given["prompt_tokens"], given["new_tokens"]) == (
        "bfloat16",
        None,
        511,
        128,
    )


def test_a_named_engine_says_the_format_and_a_format_of_files_the_engine(place: Path, tmp_path: Path) -> None:
    assert choose_engine_and_format("llamacpp", None, named=False) == ("llamacpp", "q8_0")
    assert choose_engine_and_format("auto", "q4_0", named=False) == ("llamacpp", "q4_0")
    assert choose_engine_and_format("auto", None, named=False) == ("auto", None)
    assert choose_engine_and_format("vllm", None, named=True) == ("vllm", None)
    message = refused(*arguments(place, tmp_path / "out", "memory=80%"), "--engine", "vllm", "--weights", "q8_0")
    assert "--engine vllm does not run" in message
    if find_spec("vllm") is not None:
        timed = refused(*arguments(place, tmp_path / "out", "speedup@64=1.1"), "--engine", "vllm", "--weights", "fp8")
        assert "Times of fp8 weights in vllm are not measured" in timed


def test_times_of_another_format_than_the_profile_ran_are_refused(place: Path, tmp_path: Path) -> None:
    profile = profile_of_dense()
    shared: dict[str, Any] = {"options": options(place), "profile": profile, "weights": "w8a8-int8"}
    for weights, advice in (
        ("w8a8-int8", "Times of w8a8-int8 are not measured. Give --allow-mismatch"),
        ("q8_0", "Measure one of q8_0 with `pyprune profile MODEL --engine llamacpp --dtype q8_0`, or give"),
        ("bfloat16", "`pyprune profile MODEL --engine transformers --dtype bfloat16`, or give"),
    ):
        with pytest.raises(BudgetError, match=f"limited for {weights} weights.*{re.escape(advice)}"):
            fit(place / "dense", "prefill@64=90%", out=tmp_path / "out", **{**shared, "weights": weights})
    assert not (tmp_path / "out").exists()


def test_a_profile_of_an_engine_that_does_not_run_the_format_is_refused(place: Path, tmp_path: Path) -> None:
    profile = replace(profile_of_dense(), engine="llamacpp", dtype="q8_0").save(tmp_path / "profile.json")
    given = [*arguments(place, tmp_path / "out", "memory=70%"), "--profile", profile, "--allow-mismatch"]
    for weights in ("w8a8-int8", "bfloat16"):
        assert f"--weights is '{weights}', which llamacpp does not run" in refused(*given, "--weights", weights)


def test_text_that_is_too_little_for_the_training_of_the_winner_is_refused_before_the_search(
    place: Path, tmp_path: Path
) -> None:
    """The reconstruction and the training read as much each, and are disjoint."""
    short = tmp_path / "text.txt"
    text = (place / "text.txt").read_text()
    short.write_text(text[:1050])  # 36 + 8 + 12 sequences of 16 bytes for the search, 36 + 36 for the winner
    given = arguments(place, tmp_path / "out", "parameters=70%")
    given[given.index(place / "text.txt")] = short
    given[given.index("--samples") + 1] = "36"
    said = refused(*given, "--cache", tmp_path / "cache")
    assert "The winner is reconstructed on 36 sequences and trained on 36 others" in said
    assert not (tmp_path / "cache").exists(), "nothing was scored"
    result = run(*given, "--cache", tmp_path / "cache", "--no-recover")
    assert result.exit_code == 0, result.output


@pytest.mark.second
def test_the_model_of_the_search_takes_no_memory_while_the_winner_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    devices: list[str] = []

    load = ModelSource.load

    def loaded(*given: Any, **more: Any) -> Any:
        model, tokenizer = load(*given, **more)
        models.append(model)
        return model, tokenizer

    def written(*given: Any, **more: Any) -> Any:
        devices.append(models[0].device.type)
        return prune_checkpoint(*given, **more)

    monkeypatch.setattr(ModelSource, "load", loaded)
    monkeypatch.setattr(import_module("pyprune.fit.fit"), "prune_checkpoint", written)
    result = run(*arguments(place, tmp_path / "out", "parameters=70%", timing=True), "--no-recover")
    assert result.exit_code == 0, result.output
    assert devices == ["meta"]


@pytest.mark.parametrize(("weights", "package"), [("q8_0", "gguf"), ("w8a8-int8", "compressed-tensors")])
def test_a_format_that_cannot_be_written_is_refused_before_the_search(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("pyprune.serving.quantise.find_spec", lambda _: None)
    out = tmp_path / "out"
    said = refused(*arguments(place, out, "parameters=70%"), "--weights", weights, "--cache", tmp_path / "cache")
    assert package in said
    assert not (tmp_path / "cache").exists(), "nothing was scored"


def test_a_vocabulary_that_a_gguf_file_has_no_place_for_is_refused_before_the_search(
    place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    said = refused(*arguments(place, tmp_path / "out", "parameters=70%"), "--weights", "q8_0")
    assert "tokenizer" in said
    assert not (tmp_path / "out").exists()


def test_widths_that_a_scheme_does_not_take_are_not_chosen() -> None:
    phi = PrunePlan.identity("phi", Sizes.decoder(2, 2560, 32, 32, 80, 10240, 51200))
    assert quantising_obstacle(phi, "w4a16") is None
    odd = phi.with_layer(1, query_heads=range(23), kv_heads=range(23))
    assert "Layer 1 has 1840 attention channels; w4a16 needs a multiple of 32" in quantising_obstacle(odd, "w4a16")
    assert quantising_obstacle(odd, "w8a8-int8") is None


def test_an_engine_is_known_and_is_the_profiles(place: Path, tmp_path: Path) -> None:
    given = arguments(place, tmp_path / "out", "parameters=70%")
    assert "Did you mean 'llamacpp'" in refused(*given, "--engine", "llama.cpp")
    saved = profile_of_dense().save(tmp_path / "p.json")
    said = " ".join(refused(*given, "--engine", "vllm", "--profile", saved).split())
    assert "--engine or the format of --weights asks for vllm, and the profile" in said
    assert "is of transformers" in said


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["choices.ffn_multiple=16"], "choices.ffn_multiple would do nothing"),
        (["values.reconstruct=false", "values.ridges=[0.5]"], "ridges would do nothing"),
        (["keep_multiples=true", "tensor_parallel=2"], "tensor_parallel is 2 and keep_multiples is on"),
        (["tensor_parallel=3"], "tensor_parallel is 3, and layers may remain unchanged"),
    ],
)
def test_options_of_widths_that_would_do_nothing_are_refused(
    place: Path, tmp_path: Path, settings: list[str], says: str
) -> None:
    sets = [part for setting in settings for part in ("--set", setting)]
    assert says in " ".join(refused(*arguments(place, tmp_path / "out", "parameters=70%"), *sets).split())


@pytest.mark.parametrize(
    ("budget", "more", "says"),
    [
        ("parameters=70%", ["--set", "rounds=2"], "rounds does nothing here: no budget limits a time"),
        ("parameters=70%", ["--sweep", "--set", "repeats=9"], "repeats does nothing here: a sweep writes no model"),
        ("parameters=70%", ["--allow-mismatch"], "--allow-mismatch does nothing here: no profile is read"),
        ("memory=70%", ["--set", "slack=0", "--set", "spare=1"], "slack, spare do nothing here: no budget limits a"),
        ("prefill@64=90%", ["--no-timing", "--set", "rounds=2"], "rounds does nothing here: with --no-timing"),
    ],
)
def test_options_of_timed_searches_that_would_do_nothing_are_refused(
    place: Path, tmp_path: Path, budget: str, more: list[str], says: str
) -> None:
    assert says in " ".join(refused(*arguments(place, tmp_path / "out", budget), *more).split())


def test_exports_of_an_earlier_model_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    warn_of_other_exports(out, "bfloat16")
    (tmp_path / "out.q8_0.gguf").touch()
    (tmp_path / "out-w8a8-int8").mkdir()
    warn_of_other_exports(out, "q8_0")
    said = capsys.readouterr().err
    assert said.count("older than this call") == 1
    assert "out-w8a8-int8" in said
    assert "q8_0.gguf" not in said
    warn_of_other_exports(out, "float32")
    both = "".join(capsys.readouterr().err.split())
    assert "out-w8a8-int8" in both
    assert "out.q8_0.gguf" in both


@pytest.mark.second
def test_a_training_that_does_not_fit_names_the_commands_that_do(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyprune.run.memory.device_capacity", lambda _: 1000)
    out = tmp_path / "out"
    said = " ".join(refused(*arguments(place, out, "parameters=70%")).split())
    assert "would hold" in said
    assert "write the winner without training (--no-recover), then pyprune recover" in said
    assert not out.exists()


def test_a_speed_up_on_more_tokens_than_the_model_reads_names_the_most(place: Path, tmp_path: Path) -> None:
    said = " ".join(refused(*arguments(place, tmp_path / "out", "speedup>=1.2")).split())
    assert "prefill@2048 makes sequences of 2049 tokens, and the model reads 512" in said
    assert "speedup@511" in said


def test_every_width_can_be_shared_by_the_wanted_devices(place: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    given = arguments(place, tmp_path / "out", "parameters=70%")
    result = run(*given, "--tensor-parallel", "2", "--no-recover", "--json", figures)
    assert result.exit_code == 0, result.output
    plan = read_pruning_json(tmp_path / "out").plan
    assert plan is not None
    assert not plan.is_identity
    for layer in plan.layers:
        assert not any(len(kept) % 2 for kept in (layer.query_heads, layer.kv_heads, layer.ffn))


@pytest.mark.parametrize(
    ("budget", "more", "said"),
    [
        ("speedup@64>=1.2", [], "Times are measured on one device, and 2 are to share the layers (tensor_parallel)."),
        ("parameters=70%", ["--engine", "llamacpp"], "llama.cpp does not share layers among devices"),
        ("parameters=70%", ["--weights", "q8_0"], "llama.cpp does not share layers among devices"),
    ],
)
def test_what_runs_on_one_device_is_not_said_of_several(
    place: Path, tmp_path: Path, budget: str, more: list[str], said: str
) -> None:
    given = arguments(place, tmp_path / "out", budget)
    assert said in " ".join(refused(*given, "--tensor-parallel", "2", *more).split())


def test_widths_in_four_bits_leave_every_device_whole_groups() -> None:
    rules = SizeRules.of("w4a16", tensor_parallel=4)
    assert rules.ffn_multiple == 4 * 128
    assert not group_obstacle([(32, 8, rules.ffn_multiple * n) for n in range(1, 9)], 128, 128, 4)
    assert SizeRules.of("w4a16").ffn_multiple == 32


def test_what_nothing_keeps_is_refused_before_anything_is_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("scored or measured")

    monkeypatch.setattr(search, "score_units", measured)
    monkeypatch.setattr(search, "measure_losses", measured)
    given = arguments(place, tmp_path / "out", "parameters=80%", "parameters=1k")
    assert "cannot be kept" in refused(*given, "--sweep", "--cache", tmp_path / "cache")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_training_of_the_winner_is_resumed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = TrainConfig(
        steps=3, batch_size=2, micro_batch_size=2, warmup_steps=0, learning_rate=1e-3, checkpoint_interval=1
    )
    monkeypatch.setattr(training, "short_training", lambda: short)
    given = arguments(place, tmp_path / "out", "parameters=70%")
    whole = run(*arguments(place, tmp_path / "whole", "parameters=70%"))
    assert whole.exit_code == 0, whole.output
    with failing_step(3, KeyboardInterrupt()):
        interrupted = run(*given)
    assert "--resume continues" in interrupted.output
    assert "--resume" in refused(*given)
    resumed = run(*given, "--resume")
    assert resumed.exit_code == 0, resumed.output
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_by_default_the_winner_is_trained(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half on the text, half on the dense model's logits, as the defaults of the methods do."""
    short = TrainConfig(steps=2, batch_size=2, micro_batch_size=2, warmup_steps=0, learning_rate=1e-3)
    monkeypatch.setattr(training, "short_training", lambda: short)
    plain, trained = tmp_path / "plain", tmp_path / "trained"
    shared: dict[str, Any] = {"options": options(place), "cache": tmp_path / "cache", "timed": False}
    untouched = fit(place / "dense", "parameters=70%", out=plain, recover=False, **shared).result
    result = fit(place / "dense", "parameters=70%", out=trained, **shared).result
    assert untouched is not None
    assert untouched.stages == []
    assert result is not None
    (stage,) = result.stages
    assert stage["action"] == "recover"
    assert all(step["parts"]["kl"] > 0 for step in stage["history"]), "the dense model was listened to"
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (plain, trained))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_what_was_measured_once_is_used_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = Fitting.of(place / "dense", cache=cache, options=options(place)).fit(Budget.parse("parameters=70%"))

    def again(*_: object, **__: object) -> None:
        raise AssertionError("scored, measured or reconstructed again")

    def none_wanted(_: object, wanted: Any) -> Any:
        assert not wanted, "measured again"
        return ()

    monkeypatch.setattr(search, "score_units", again)
    monkeypatch.setattr(import_module("pyprune.fit.trials").BlockTrials, "blocks", none_wanted)
    monkeypatch.setattr(import_module("pyprune.fit.attempts"), "reconstruct_", again)
    second = Fitting.of(place / "dense", cache=cache, options=options(place)).fit(Budget.parse("parameters=70%"))
    assert second.winner == first.winner
    assert second.attempts == first.attempts


def test_the_candidate_with_the_smallest_loss_on_other_text_wins(place: Path, tmp_path: Path) -> None:
    fitting = Fitting.of(place / "dense", cache=tmp_path, options=options(place))
    before = {name: value.clone() for name, value in fitting.model.state_dict().items()}
    found = fitting.fit(Budget.parse("parameters=60%"))
    assert all(torch.equal(before[name], value) for name, value in fitting.model.state_dict().items())
    assert found.winner.loss == min(attempt.loss for attempt in found.attempts)
    judged = fitting.text["judged"].ids
    for use in ("data", "valued"):
        alike = (fitting.text[use].ids[:, None] == judged[None]).all(-1)
        assert not alike.any(), f"no window of {use} is judged on"
    model = fitting.tries.model(found.winner.plan)
    assert fitting.tries.perplexities(model) == pytest.approx(dict(found.winner.perplexities))


def test_units_are_measured_and_judged_on_windows_of_their_own_length(place: Path, tmp_path: Path) -> None:
    fitting = Fitting.of(place / "dense", cache=tmp_path, options=options(place, window=48, value_samples=6))
    shapes = {use: tuple(samples.ids.shape) for use, samples in fitting.text.items()}
    assert shapes == {"judged": (8, 48), "data": (24, 16), "valued": (8, 48)}
    limit = fitting.model.config.max_position_embeddings
    longest = options(place, window=10 * limit).texts(limit)
    assert longest["judged"].sequence_length == longest["valued"].sequence_length == limit
    assert options(place, window=10 * limit).texts(None)["valued"].sequence_length == 10 * limit


def profile_of_dense() -> Profile:
    """A profile of the tiny model in which every probe took what a planted rule says."""
    model = tiny_model("llama")
    identity = family_for(model).plan(model.config)
    probes = tuple(Probe.of(name, plan) for name, plan in probe_plans(identity).items())
    timings = []
    for place, probe in enumerate(probes):
        seconds = sum(PLANTED[name] * value for name, value in features(identity.dense, probe).items())
        timings += [Timing(probe.name, Quantity("prefill", 64), 0, float(100 * i + place), seconds) for i in range(3)]
    facts = ("transformers", "float32", MACHINE, VERSIONS, "llama", identity.dense, {})
    return Profile(*facts, probes, tuple(timings), made="today")


@pytest.fixture
def taking(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Fitting, list[Any]]]:
    """(shares of the predictions that candidates take one after another, options) -> a fitting, plans as they come.

    The more parameters stay, the better a candidate is judged.
    """

    def of(*shares: float, **changes: Any) -> tuple[Fitting, list[Any]]:
        fitting = Fitting.of(place / "dense", cache=tmp_path, options=options(place, **changes))
        fitting.profile = profile_of_dense()
        taken: list[Any] = []

        def time_plans(_profile: Any, _config: Any, plans: Any, quantities: Any, *_: Any) -> Any:
            taken.append(plans[CANDIDATE])
            took = {DENSE: 1.0, CANDIDATE: shares[min(len(taken), len(shares)) - 1]}
            predict = fitting.costs.predict
            return {name: {q: took[name] * predict(q, plan) for q in quantities} for name, plan in plans.items()}

        def judge(plan: PrunePlan) -> tuple[dict[str, float], int]:
            parameters = int(fitting.costs.predict(Quantity("parameters"), plan))
            return {"text": 1e6 / parameters}, parameters

        monkeypatch.setattr(search, "time_plans", time_plans)
        monkeypatch.setattr(fitting.tries, "judge", judge)
        return fitting, taken

    return of


def test_a_winner_that_is_slower_than_predicted_sends_the_search_back(taking: Any) -> None:
    fitting, taken = taking(1.15, rounds=6, spare=1)
    (quantity,) = fitting.profile.quantities
    bound = 0.9 * fitting.costs.predict(quantity, fitting.identity)
    found = fitting.fit(Budget.parse(f"{quantity}<={bound:.9f}s"))
    assert found.searches == len(taken)
    assert found.searches > 1, "the first candidate used up the budget, and was 15 % slower"
    assert found.winner.measured[quantity] <= bound * (1 + fitting.options.slack)
    assert found.winner.plan == taken[-1]
    most = fitting.options.solve.solutions + found.searches - 1
    assert len(found.attempts) <= most, "a further search tries one candidate, of the kind that won"


def test_a_search_that_goes_on_takes_what_it_had_timed(taking: Any) -> None:
    """Another measurement might let another candidate win, whose training is not the one that was interrupted."""
    budget = Budget.parse("prefill@64<=90%")
    first, taken = taking(0.8, rounds=6)
    found = first.fit(budget)
    assert len(taken) > 1
    again, taken = taking(1.0, rounds=6)
    again.continued = True
    assert again.fit(budget).winner.measured == found.winner.measured
    assert taken == []
    new, taken = taking(1.0, rounds=6)
    assert new.fit(budget).winner.plan == taken[-1], "a run that is not continued measures"


def test_predictions_are_told_beside_the_predicted_dense_model(taking: Any) -> None:
    """The machine was half as fast as in the profile, for the dense model and the candidate alike."""
    fitting, _ = taking(2.0)
    quantity = fitting.profile.quantities[0]
    dense = fitting.costs.predict(quantity, fitting.identity)
    taken = {quantity: 2 * dense}
    found = fitting.fit(Budget.parse(f"{quantity}<=90%"), timed=False)
    share = found.winner.solution.predicted[quantity] / dense
    measured = replace(found.winner, measured={quantity: 2.0 * share * dense}, dense=taken)
    (row,) = limits_table(replace(found, winner=measured, dense=taken)).rows
    assert row[2] == row[3] == f"{100 * share:.2f} %"
    assert row[4] == "+0.0%"
    rate = Budget.parse(f"speedup@64>={1 / 0.9:.6f}")
    (row,) = limits_table(replace(found, budget=rate, winner=measured, dense=taken)).rows
    assert row[2] == row[3]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--engine", "llamacpp", "--weights", "w8a8-int8"], "--engine llamacpp does not run; use --engine vllm"),
        (["--engine", "llamacpp", "--weights", "bfloat16"], "use --engine vllm or transformers"),
        (["--engine", "vllm", "--weights", "q8_0"], "--engine vllm does not run; use --engine llamacpp"),
        (["--sweep", "--resume"], "--sweep trains and writes no model: leave out --resume"),
        (["--sweep", "--no-recover"], "leave out --resume and --no-recover"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    place: Path, tmp_path: Path, given: list[str], says: str
) -> None:
    assert says in " ".join(refused(*arguments(place, tmp_path / "out", "parameters=70%"), *given).split())


def test_a_cache_in_what_is_to_be_created_is_refused(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for cache in (out, out / "cache" / "deeper"):
        for more in ((), ("--sweep",)):
            said = refused(*arguments(place, out, "parameters=70%"), "--cache", cache, *more)
            assert "which is to be created. Name a folder outside of it." in " ".join(said.split())
    assert not out.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--set", "dtype=bf16"], "Unknown value of dtype 'bf16'"),
        (["--set", "device=cuda:9"], "device is 'cuda:9'"),
        (["--sequence-length", "100000"], "The sequence length is 100000 tokens"),
    ],
)
def test_options_that_cannot_be_met_are_refused_before_times_are_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-profiles"))
    monkeypatch.setattr(timed, "take_profile", lambda *_, **__: pytest.fail("times were measured"))
    given = [*arguments(place, tmp_path / "out", "prefill@16=90%"), "--engine", "transformers", "--weights", "float32"]
    assert says in " ".join(refused(*given, *settings).split())


def test_a_budget_that_the_dense_model_keeps_is_refused(place: Path, tmp_path: Path) -> None:
    said = " ".join(refused(*arguments(place, tmp_path / "out", "memory@64=1GB,parameters=100%")).split())
    assert "The dense model already keeps memory@64<=1GB, parameters<=100%" in said
    assert said.endswith("Give a tighter budget.")
    rounded = refused(*arguments(place, tmp_path / "out", "memory@64=1GB"), "--weights", "w8a8-int8")
    assert "or write it in w8a8-int8 with `pyprune export`" in " ".join(rounded.split())
    assert not (tmp_path / "out").exists()
    swept = run(*arguments(place, tmp_path / "out", "parameters=100%", "parameters=70%"), "--sweep")
    assert swept.exit_code == 0, swept.output
    assert "The dense model already keeps parameters<=100%" in " ".join(swept.stderr.split())


def test_a_share_of_the_memory_is_of_the_dense_model_as_it_is_exported(tmp_path: Path, place: Path) -> None:
    """w4a16 keeps a scale for 32 inputs where widths ask for that, and for 128 in the dense model."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    save_checkpoint(tiny_model("llama", **sizes), tiny_tokenizer(), tmp_path / "dense", plan=None, provenance={})
    fitting = Fitting.of(tmp_path / "dense", cache=tmp_path, options=options(place), weights="w4a16")
    memory = Quantity("memory", 64)
    (own,) = fitting.dense_amounts([memory]).values()
    counted = fitting.costs.predict(memory, fitting.identity)
    assert own < counted, "more scales"
    assert own == ExactCosts.of(fitting.model.config, "w4a16").base(memory, 256) + 4 * ExactCosts.of(
        fitting.model.config, "w4a16"
    ).layer(memory, 256, Widths(*fitting.identity.layers[0].widths))
    assert fitting.search_budget(Budget.parse("memory@64=60%")).bounds({memory: counted}) == {memory: 0.6 * own}
    assert fitting.search_budget(Budget.parse("parameters=60%")) == Budget.parse("parameters=60%")


def test_an_export_that_fails_leaves_the_checkpoint_and_says_how_to_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OutputError("No space left on device.")

    monkeypatch.setattr(flow, "export", full)
    with pytest.raises(OutputError, match="No space left"):
        fit(
            place / "dense", "parameters=70%", out=tmp_path / "out", options=options(place), cache=place / "cache",
            weights="w8a8-int8", recover=False, timed=False,
        )  # fmt: skip
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'out'} is complete, but its export failed." in said
    assert "--dtype bfloat16 --quantise w8a8-int8" in said


def test_a_winner_that_is_faster_than_predicted_makes_room_for_a_larger_one(taking: Any) -> None:
    budget = Budget.parse("prefill@64<=90%")
    fitting, taken = taking(0.8, rounds=6, spare=1)
    content = fitting.fit(budget)
    assert len(taken) == 1

    fitting, taken = taking(0.8, rounds=6)
    found = fitting.fit(budget)
    assert taken[0] == content.winner.plan
    assert len(taken) > 1, "the first candidate left a fifth of the budget unused"
    assert found.winner.plan == taken[-1]
    assert found.winner.loss < content.winner.loss
    assert found.winner.parameters > content.winner.parameters
    assert not budget.broken(found.winner.amounts, found.dense)


def test_between_one_that_breaks_the_budget_and_one_that_leaves_much_of_it_is_searched(taking: Any) -> None:
    fitting, taken = taking(1.15, 0.9, 1.0)
    found = fitting.fit(Budget.parse("prefill@64<=90%"))
    assert found.searches == len(taken) == 3
    assert found.winner.plan == taken[2]
    first, second, third = (fitting.costs.predict(Quantity("parameters"), plan) for plan in taken)
    assert second < third < first, "the first one broke the budget, the second one left a fifth of it"


def test_a_larger_one_that_breaks_the_budget_leaves_the_one_that_keeps_it(taking: Any, capsys: Any) -> None:
    budget = Budget.parse("prefill@64<=90%")
    fitting, taken = taking(0.8, 1.2, rounds=2)
    found = fitting.fit(budget)
    assert len(taken) == 2
    assert found.winner.plan == taken[0]
    assert found.winner.measured
    broken = [attempt for attempt in found.attempts if attempt.plan == taken[1]]
    assert budget.broken(broken[0].amounts, broken[0].dense)
    said = " ".join(capsys.readouterr().err.split())
    assert "of the tightest limit unused" in said
    assert "breaks prefill@64<=90%" in said
    assert said.count("Searching again") == 1


def test_a_further_search_that_fails_leaves_the_one_that_keeps_the_budget(
    taking: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fitting, taken = taking(0.8, rounds=3)
    solutions = fitting.solutions

    def once(budget: Budget, factors: Any) -> Any:
        if taken:
            raise BudgetError("nothing larger can be run")
        return solutions(budget, factors)

    monkeypatch.setattr(fitting, "solutions", once)
    found = fitting.fit(Budget.parse("prefill@64<=90%"))
    assert found.winner.plan == taken[0]
    assert "nothing larger can be run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scale", "shares", "turns"),
    [
        (20, [0.8, 0.802, 0.8], 2),
        (20, [0.8, 0.84, 0.8], 3),
        (3, [0.8, 0.8, 0.8], 3),
    ],
    ids=["long-and-alike", "long-and-not-alike", "short"],
)
def test_long_turns_that_agree_are_not_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch, scale: float, shares: list[float], turns: int
) -> None:
    found, taken = timed_turns(place, monkeypatch, [scale] * 4, [scale * share for share in shares])
    quantity = Quantity("prefill", 64)
    assert taken == {DENSE: turns + 1, CANDIDATE: turns}
    assert found[CANDIDATE][quantity] == pytest.approx(scale * sorted(shares[:turns])[turns // 2], rel=2e-3)


def test_engines_that_do_not_fit_side_by_side_are_timed_one_after_another(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "room_for", lambda *_: 1)
    found, taken = timed_turns(place, monkeypatch, [1, 1, 1], [0.8, 0.8, 0.8])
    quantity = Quantity("prefill", 64)
    assert found[CANDIDATE][quantity] / found[DENSE][quantity] == pytest.approx(0.8)
    assert taken == {DENSE: 3, CANDIDATE: 3}, "none lies between two others"


def test_a_machine_that_slows_down_slows_both(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = timed_turns(place, monkeypatch, [1, 1, 2, 2], [0.8, 0.8, 1.6])
    quantity = Quantity("prefill", 64)
    assert found[CANDIDATE][quantity] / found[DENSE][quantity] == pytest.approx(0.8, rel=1e-6)


def timed_turns(
    place: Path, monkeypatch: pytest.MonkeyPatch, dense: Sequence[float], candidate: Sequence[float]
) -> tuple[dict[str, dict[Quantity, float]], dict[str, int]]:
    """What is found of turns that take these seconds, and how many turns of each there were after the warm-up."""
    script = {DENSE: dense, CANDIDATE: candidate}
    taken = dict.fromkeys(script, -1)  # the first is the warm-up

    class Scripted:
        device = None

        def __init__(self, _: str, options: dict[str, Any]) -> None:
            self.name = Path(options["model"]).name

        def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
            taken[self.name] += 1
            return script[self.name][max(0, taken[self.name] - 1)], len(prompts) * new_tokens

        def close(self) -> None:
            pass

    monkeypatch.setattr(import_module("pyprune.fit.profiling.turns"), "Engine", Scripted)
    monkeypatch.setattr(import_module("pyprune.fit.profiling.turns"), "QUICK_S", 0.0)
    profile = profile_of_dense()
    config = AutoModelForCausalLM.from_pretrained(place / "dense").config
    whole = PrunePlan.identity("llama", profile.dense)
    plans = {DENSE: whole, CANDIDATE: whole.drop_layers([1])}
    return timed.time_plans(profile, config, plans, [Quantity("prefill", 64)], 3, tiny_tokenizer()), taken


def test_a_machine_that_is_always_too_slow_is_said(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = Fitting.of(place / "dense", cache=tmp_path, options=options(place, rounds=2))
    fitting.profile = profile_of_dense()
    bound = 0.9 * fitting.costs.predict(Quantity("prefill", 64), fitting.identity)

    def time_plans(_profile: Any, _config: Any, plans: Any, quantities: Any, *_: Any) -> Any:
        return {name: dict.fromkeys(quantities, 100 * bound) for name in plans}

    monkeypatch.setattr(search, "time_plans", time_plans)
    with pytest.raises(BudgetError, match="prefill@64"):
        fitting.fit(Budget.parse(f"prefill@64<={bound:.9f}s"))


def test_candidates_are_judged_with_what_their_head_pairs_cost(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = Fitting.of(place / "dense", cache=tmp_path, options=options(place))
    fitting.profile = profile_of_dense()
    monkeypatch.setattr(MeasuredCosts, "head_pair", lambda *_: 1.0)
    quantity, whole = Quantity("prefill", 64), fitting.identity
    unequal = whole.with_layer(0, query_heads=range(3), kv_heads=[0])
    before, after = (fitting.costs.layer(quantity, 48, Widths(*plan.layers[0].widths)) for plan in (whole, unequal))
    assert after < before, "its layers alone would keep the limit"
    budget, dense = Budget.parse(f"{quantity}=100%"), {quantity: fitting.costs.predict(quantity, whole)}
    state = SearchState(budget, dense, budget, dense)
    for plan, perplexity in ((unequal, 2.0), (whole, 3.0)):
        solution = Solution(48, tuple(Widths(*layer.widths) for layer in plan.layers), 0.0, {}, "best")
        state.keep(Attempt(solution, plan, 0, {"text": perplexity}))
    assert fitting.best_attempt(state).plan == whole
    monkeypatch.setattr(MeasuredCosts, "head_pair", lambda *_: 0.0)
    assert fitting.best_attempt(state).plan == unequal


@pytest.mark.process
def test_a_mismatch_that_is_allowed_is_said_once(place: Path, tmp_path: Path) -> None:
    profile = profile_of_dense().save(tmp_path / "profile.json")
    given = [*arguments(place, tmp_path / "out", "prefill@64=90%"), "--profile", profile]
    assert "made under other conditions" in refused(*given).replace("\n", " ")
    result = run(*given, "--allow-mismatch", "--no-recover")
    assert result.exit_code == 0, result.output
    assert result.stderr.replace("\n", " ").count("made under other conditions") == 1


def test_a_sweep_writes_plans_and_a_report(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    result = run(*arguments(place, out, "parameters=80%", "parameters=60%,memory=70%"), "--sweep")
    assert result.exit_code == 0, result.output
    names = {path.name for path in out.iterdir()}
    assert names == {"plan-1.json", "plan-2.json", "report.md", "report.html", "metrics.json"}
    points = json.loads((out / "metrics.json").read_text())["points"]
    assert [point["budget"] for point in points] == ["parameters<=80%", "parameters<=60%, memory@2048<=70%"]
    assert points[0]["winner"]["parameters"] > points[1]["winner"]["parameters"]
    assert "<svg" in (out / "report.html").read_text()
    again = run("prune", place / "dense", "--plan", out / "plan-2.json", "--out", tmp_path / "cut")
    assert again.exit_code == 0, again.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert count_parameters(model) == points[1]["winner"]["parameters"]
    replaced = run(*arguments(place, out, "parameters=80%"), "--sweep", "--overwrite")
    assert replaced.exit_code == 0, replaced.output
    assert not (out / "plan-2.json").exists()


def test_a_budget_of_a_sweep_that_nothing_keeps_leaves_the_others(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Fitting.fit

    def fails(self: Fitting, budget: Budget, **more: Any) -> Any:
        if "70%" in str(budget):
            raise BudgetError("Nothing was fast enough.")
        return find(self, budget, **more)

    monkeypatch.setattr(Fitting, "fit", fails)
    out = tmp_path / "sweep"
    result = run(*arguments(place, out, "parameters=70%", "parameters=60%"), "--sweep")
    assert result.exit_code == 0, result.output
    assert "parameters<=70%: Nothing was fast enough." in " ".join(result.stderr.split())
    assert {path.name for path in out.glob("plan-*")} == {"plan-2.json"}
    found = json.loads((out / "metrics.json").read_text())
    assert [point["budget"] for point in found["points"]] == ["parameters<=60%"]
    assert "Nothing was fast enough." in (out / "report.md").read_text()
    alone = refused(*arguments(place, tmp_path / "other", "parameters=70%"), "--sweep")
    assert "Nothing was fast enough." in alone
    assert not (tmp_path / "other").exists()


@pytest.mark.process
def test_a_sweep_with_a_profile_tells_the_times_of_points_that_no_time_limits(place: Path, tmp_path: Path) -> None:
    profile, prefill = profile_of_dense(), Quantity("prefill", 64)
    saved, out = profile.save(tmp_path / "profile.json"), tmp_path / "sweep"
    given = arguments(place, out, "parameters=80%", "parameters=60%")
    result = run(*given, "--sweep", "--profile", saved, "--allow-mismatch", "--cache", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    points = json.loads((out / "metrics.json").read_text())["points"]
    seconds = [point["winner"]["predicted"]["prefill@64"] for point in points]
    assert seconds[1] < seconds[0] < points[0]["dense"]["prefill@64"]
    assert column_name(prefill) in (out / "report.md").read_text()
    assert f"Perplexity against {prefill}" in (out / "report.html").read_text()


@pytest.mark.process
def test_a_sweep_in_another_format_than_the_profiles_tells_no_times(place: Path, tmp_path: Path) -> None:
    saved, out = profile_of_dense().save(tmp_path / "profile.json"), tmp_path / "sweep"
    other = {"float32": "bfloat16"}.get(profile_of_dense().dtype, "float32")
    given = [*arguments(place, out, "parameters=80%"), "--weights", other]
    result = run(*given, "--sweep", "--profile", saved, "--allow-mismatch", "--cache", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    (point,) = json.loads((out / "metrics.json").read_text())["points"]
    assert not [name for name in point["winner"]["predicted"] if name.startswith(("prefill", "generation"))]


@pytest.mark.process
def test_a_stored_profile_that_holds_here_tells_times_where_none_is_limited(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured for it; one of another machine is not used, and that is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "pyprune" / "profiles"
    folder.mkdir(parents=True)
    profile = replace(profile_of_dense(), dtype="float32")
    given = ["--sweep", "--engine", profile.engine, "--weights", "float32", "--cache", tmp_path / "cache"]

    def predicted(name: str, **conditions: Any) -> tuple[set[str], str]:
        replace(profile, **conditions).save(folder / f"{profile.name}.json")
        result = run(*arguments(place, tmp_path / name, "parameters=60%"), *given)
        assert result.exit_code == 0, result.output
        (point,) = json.loads((tmp_path / name / "metrics.json").read_text())["points"]
        return set(point["winner"]["predicted"]), " ".join(result.stderr.split())

    times, said = predicted("other")
    assert not any(name.startswith("prefill") for name in times)
    assert "made under other conditions" in said
    assert "No times are reported." in said
    times, said = predicted("here", machine=this_machine(), versions=installed_versions(profile.engine))
    assert "prefill@64" in times
    assert f"Using the profile {profile.name}, of {this_machine()['device']}." in said
    assert f"--cache {tmp_path / 'cache'} --profile {profile.name}, which has its candidates" in said
    # The run that resumes the training of a single model must not depend on what was stored meanwhile.
    single = run(*arguments(place, tmp_path / "single", "parameters=60%"), *given[1:], "--no-recover")
    assert single.exit_code == 0, single.output
    assert "profile" not in single.stderr
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError("no home"))))
    homeless = run(*arguments(place, tmp_path / "homeless", "parameters=60%"), *given)
    assert homeless.exit_code == 0, homeless.output


@pytest.mark.process
def test_an_export_is_measured_by_the_rules_of_its_search(place: Path, tmp_path: Path) -> None:
    """Here every width is as fast as another; in a format that was not measured the defaults hold."""
    alike = tuple(Product(multiple, 65 * multiple, 65e-6 * multiple) for multiple in MULTIPLES)
    profile = replace(profile_of_dense(), products=alike).save(tmp_path / "profile.json")
    out, cache = tmp_path / "out", ["--cache", tmp_path / "cache"]
    given = [*arguments(place, out, "parameters=70%"), "--profile", profile, "--allow-mismatch", *cache]
    result = run(*given, "--no-recover", "--set", "choices.skips=[]")
    assert result.exit_code == 0, result.output
    plan = read_pruning_json(out).plan
    assert plan is not None
    assert any(len(layer.ffn) % 64 for layer in plan.layers if len(layer.ffn) < plan.dense.intermediate_size)
    assert "slower than they could be" not in run("export", out, "--out", tmp_path / "same").stderr
    other = run("export", out, "--out", tmp_path / "other", "--dtype", "bfloat16").stderr
    assert "slower than they could be in bfloat16" in " ".join(other.split())


def test_a_sweep_tells_one_time_of_each_kind() -> None:
    lengths = [Quantity("prefill", 512), Quantity("prefill", 2048)]
    batches = [Quantity("generation", 128, 64), Quantity("generation", 64, 4, 1024), Quantity("generation", 128)]
    assert shown_times(fake_profile(quantities=[*lengths, *batches])) == (lengths[1], batches[0])
    assert shown_times(fake_profile(quantities=lengths)) == (lengths[1],)
    assert shown_times(None) == ()


def test_the_front_holds_what_nothing_beats(place: Path) -> None:
    fitting = Fitting.of(place / "dense", cache=place / "cache-of-front", options=options(place))
    budgets = [Budget.parse(f"parameters={share}%") for share in (90, 60)]
    points = [fitting.fit(budget, also=[Quantity("parameters")]) for budget in budgets]
    front = pareto(points)
    assert points[1] in front, "nothing is smaller"
    assert (points[0] in front) == (points[0].winner.loss < points[1].winner.loss)


def test_candidates_that_were_not_run_are_predicted_at_the_pace_of_today(place: Path) -> None:
    """A profile is of another day: the dense model took 10 % longer than it says."""
    prompt, parameters = Quantity("prefill", 2048), Quantity("parameters")
    fitting = Fitting.of(place / "dense", cache=place / "cache-of-front", options=options(place))
    found = fitting.fit(Budget.parse("parameters=60%"), also=[parameters])
    winner = found.winner
    predicted = replace(winner, solution=replace(winner.solution, predicted={prompt: 0.8, parameters: 7}))
    run = replace(predicted, measured={prompt: 0.85}, dense={prompt: 1.1})
    whole = {prompt: 1.1, parameters: 10}
    found = replace(found, winner=run, dense=whole, predicted_dense={prompt: 1.0})
    assert found.amounts_of(predicted) == pytest.approx({prompt: 0.88, parameters: 7})
    assert found.amounts_of(run) == {prompt: 0.85, parameters: 7}
    untimed = replace(found, winner=predicted, dense={**whole, prompt: 1.0}, predicted_dense={prompt: 1.0})
    for points in ([found, untimed], [untimed, found]):
        assert pareto(points) == [found], "0.88 seconds beside 0.85"
        told = sorted(tuple(row[-2:]) for row in sweep_table(points).rows)
        assert [milliseconds for milliseconds, _ in told] == pytest.approx([850, 880, 1100])
        assert [parameters for _, parameters in told] == [7, 7, 10]


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("parameters=1k", "parameters"),
        ("memory=1PB", "unit"),
        ("speeedup=2", "speedup"),
        ("parameters=50%,parameters=60%", "same quantity"),
        ("parameters>=100", "limited from above"),
    ],
)
def test_bad_budgets_are_refused_and_nothing_is_written(place: Path, tmp_path: Path, budget: str, says: str) -> None:
    assert says in refused(*arguments(place, tmp_path / "out", budget))
    assert not (tmp_path / "out").exists()


def test_limits_on_times_need_a_profile(place: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="needs a profile of this machine"):
        fit(place / "dense", "speedup=1.2", out=tmp_path / "out", options=options(place))
    assert "nosuch" in refused(*arguments(place, tmp_path / "out", "speedup=1.2"), "--profile", "nosuch")
    assert not (tmp_path / "out").exists()


def test_an_engine_that_is_not_installed_is_found_out_before_the_search(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a profile from another machine, whose engine would be asked for after hours."""
    saved = profile_of_dense().save(tmp_path / "profile.json")

    def missing(_: str) -> None:
        raise MissingDependencyError("vllm", "vllm", "Timing")

    monkeypatch.setattr(flow, "choose_engine", missing)
    monkeypatch.setattr(flow.Fitting, "of", lambda *_, **__: pytest.fail("it began"))
    given = [*arguments(place, tmp_path / "out", "prefill@64=90%", timing=True), "--profile", saved, "--allow-mismatch"]
    assert "pip install" in refused(*given)
    assert "pip install" in refused(*given, "--sweep")


def test_workloads_that_only_another_model_of_the_same_sizes_can_read_are_not_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles are named by sizes, which do not tell how many positions a model has."""
    asked: list[ProfileOptions] = []

    def take_profile(_model: Any, profile: ProfileOptions, **_: Any) -> Profile:
        asked.append(profile)
        raise BudgetError("Nothing is measured here.")

    known = SimpleNamespace(quantities=[Quantity("prefill", 4096), Quantity("prefill", 32)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(timed, "load_stored", lambda *_, **__: known)
    monkeypatch.setattr(timed, "predicts", lambda *_: False)
    monkeypatch.setattr(timed, "take_profile", take_profile)
    with pytest.raises(BudgetError, match="Nothing is measured here"):
        timed.profile_of(place / "dense", engine="transformers", dtype="float32", quantities=[Quantity("prefill", 16)])
    assert asked[0].prefill == (32, 16)


@pytest.mark.parametrize(("counted", "measures"), [("parameters=1k", False), ("memory@64=99%", True)])
def test_what_nothing_keeps_is_refused_before_times_are_measured(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: str, measures: bool
) -> None:
    asked: list[ProfileOptions] = []

    def take_profile(_model: Any, profile: ProfileOptions, **_: Any) -> Profile:
        asked.append(profile)
        raise BudgetError("Nothing is measured here.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-profiles"))
    monkeypatch.setattr(timed, "take_profile", take_profile)
    budget = f"{counted},prefill@16=90%"
    said = refused(*arguments(place, tmp_path / "out", budget), "--engine", "transformers", "--weights", "float32")
    assert bool(asked) == measures, said
    assert ("Nothing is measured here" in said) == measures
    assert ("parameters<=1k cannot be kept" in " ".join(said.split())) != measures


def test_written_weights_that_are_larger_than_counted_are_said(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flow, "stored_bytes", lambda _: 10**9)
    found = fit(
        place / "dense", "memory@64=80%", out=tmp_path / "out", options=options(place), cache=place / "cache",
        recover=False, timed=False,
    )  # fmt: skip
    assert found.winner.amounts[Quantity("memory", 64)] > 10**9
    said = " ".join(capsys.readouterr().err.split())
    assert "The written model breaks memory@64<=80%" in said
    assert "more than was counted" in said
