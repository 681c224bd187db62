"""Probes: each kind of cut by itself, in legal sizes, runnable; and a whole profile of a tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from pyprune.checkpoint.load import load_model
from pyprune.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    UnsupportedModelError,
)  # fmt: skip
from pyprune.families import count_parameters, family_for
from pyprune.fit.cost import ExactCosts
from pyprune.fit.measured import MeasuredCosts
from pyprune.fit.profile import DENSE, Profile
from pyprune.fit.profiling import timing, turns
from pyprune.fit.profiling.probes import (
    dense_config,
    engine_obstacle,
    probe_plans,
    write_probe,
    write_served,
)
from pyprune.fit.profiling.timing import ProfileOptions, take_profile, time_products
from pyprune.fit.quantities import Quantity
from pyprune.fit.sizes import MULTIPLES, SizeRules, slow_sizes
from pyprune.plan import PrunePlan, Sizes
from pyprune.serving.gguf.layout import open_model
from pyprune.serving.speed.results import SHORT_PROMPT_TOKENS
from tests._support.cli import refused, run
from tests._support.models import tiny_batch, tiny_model
from tests._support.served import SIZES
from tests.fit._profiles import fake_profile

SMOLLM2 = PrunePlan.identity("llama", Sizes.decoder(30, 576, 9, 3, 64, 1536, 49152))
QUICK = {
    "engine": "transformers",
    "dtype": "float32",
    "prefill": (8, 16),
    "generation": ((2, 3),),
    "repeats": 2,
    "resident": 4,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights: they are not needed."""
    folder = tmp_path_factory.mktemp("dense")
    tiny_model("llama-head-dim").config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def taken(source: Path) -> Profile:
    options = {**QUICK, "generation": ((2, 3), (2, 3, 8))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "QUICK_S", math.inf)  # also on a busy machine
        return take_profile(source, ProfileOptions(**options, probes=3))  # type: ignore[arg-type]


def test_each_kind_of_cut_has_a_probe_of_its_own() -> None:
    plans = probe_plans(SMOLLM2)
    assert next(iter(plans)) == DENSE
    assert len(plans) == 13
    assert len({(len(p.hidden), *(layer.widths for layer in p.layers)) for p in plans.values()}) == len(plans)
    unequal = plans.pop("unequal layers")
    assert len({layer.widths for layer in unequal.layers}) == 3
    for name, plan in plans.items():
        plan.validate()
        alone = [
            len(plan.layers) < 30,
            len(plan.hidden) < 576,
            any(layer.widths[:2] != (9, 3) for layer in plan.layers),
            any(layer.widths[2] != 1536 for layer in plan.layers),
        ]
        assert sum(alone) == (name != DENSE), name
        assert slow_sizes(plan, SizeRules()) == []


@pytest.mark.parametrize("dtype", ["q4_k", "q6_k", "q8_0", "bfloat16"])
def test_probes_have_the_multiples_of_their_format(dtype: str) -> None:
    """Matrices of other widths would be in another format than those of any candidate."""
    for name, plan in probe_plans(SMOLLM2, dtype).items():
        assert slow_sizes(plan, SizeRules.of(dtype)) == [], name


@pytest.mark.parametrize("sizes", [Sizes.decoder(1, 48, 6, 6, 8, 40, 64), Sizes.decoder(2, 48, 4, 1, 8, 3, 64)])
def test_small_models_have_fewer_probes_and_none_is_the_dense_model_again(sizes: Sizes) -> None:
    plans = probe_plans(PrunePlan.identity("llama", sizes))
    assert 4 <= len(plans) < 13
    assert sum(plan.is_identity for plan in plans.values()) == 1


@pytest.mark.parametrize("name", ["llama-head-dim", "qwen3", "opt", "gemma3", "phi"])
def test_probes_are_models_of_the_sizes_that_are_recorded(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    config = model.config
    costs = ExactCosts.of(config)
    plans = probe_plans(family_for(config).plan(config))
    for label in ("unequal layers", "three quarters of the hidden size", "no MLP in every second layer"):
        folder, values = write_served(config, plans[label], tmp_path / label, "transformers", "float32")
        probe, _ = load_model(folder)
        assert count_parameters(probe) == costs.predict(Quantity("parameters"), plans[label])
        assert values["num_hidden_layers"] == len(plans[label].layers)
        with torch.no_grad():
            assert torch.isfinite(probe(tiny_batch()).logits).all()


def test_the_random_state_is_left_alone(source: Path, tmp_path: Path) -> None:
    config = dense_config(source)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    write_served(config, family_for(config).plan(config), tmp_path / "p", "transformers", "float32")
    assert torch.equal(torch.rand(3), wanted)


def test_what_vllm_cannot_serve_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_model("llama").config
    family = family_for(config)
    plans = probe_plans(family.plan(config))
    assert engine_obstacle(config, "vllm")(plans["unequal layers"]) is None
    # As a family of another package that brings no layer for vLLM.
    monkeypatch.setattr(
        import_module("pyprune.fit.profiling.probes"), "family_for", lambda _: replace(family, vllm_layer="")
    )
    assert "serves no sizes per layer for llama" in engine_obstacle(config, "vllm")(plans["unequal layers"])
    assert engine_obstacle(config, "vllm")(plans["half of the layers"]) is None
    assert engine_obstacle(config, "transformers")(plans["unequal layers"]) is None


@pytest.mark.parametrize(
    "name", ["llama", "llama3-rope", "qwen2-tied", "qwen3", "qwen3-tied", "phi", "gemma3", "granite", "opt"]
)
def test_what_llama_cpp_cannot_hold_is_known_before_a_file_is_written(name: str, tmp_path: Path) -> None:
    config = tiny_model(name).config
    whole = family_for(config).plan(config)
    plans = probe_plans(whole) | {"no attention in layer 0": whole.with_layer(0, query_heads=[], kv_heads=[])}
    obstacle = engine_obstacle(config, "llamacpp")
    found = {}
    for label in (DENSE, "half of the layers", "unequal layers", "no MLP in every second layer",
                  "three quarters of the hidden size", "no attention in layer 0"):  # fmt: skip
        folder = write_probe(config, plans[label], tmp_path / label.replace(" ", "-"), "float32")
        try:
            open_model(folder)
            found[label] = ""
        except UnsupportedModelError as error:
            found[label] = str(error)
        assert bool(obstacle(plans[label])) == bool(found[label]), (label, obstacle(plans[label]), found[label])
    assert any(found.values())
    assert name == "opt" or not all(found.values())


def test_positions_that_llama_cpp_does_not_have_are_known_too() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = tiny_model("llama", rope_parameters=dynamic).config
    assert "type 'dynamic'" in engine_obstacle(config, "llamacpp")(family_for(config).plan(config))


@pytest.mark.second
def test_every_turn_is_kept_and_lies_between_dense_ones(taken: Profile) -> None:
    names = [probe.name for probe in taken.probes]
    assert names[0] == DENSE
    assert len(names) == 4
    for quantity in taken.quantities:
        own = [t for t in taken.timings if t.quantity == quantity]
        assert [t.probe for t in own] == names * (2 * turns.QUICK_TURNS) + [DENSE]
        assert [t.start for t in own] == sorted(t.start for t in own)
        assert all(t.seconds > 0 for t in own)
    prompts = Quantity("prefill", 8), Quantity("prefill", 16)
    assert taken.quantities == (*prompts, Quantity("generation", 3, 2), Quantity("generation", 3, 2, 8))


@pytest.mark.second
def test_long_turns_are_not_multiplied(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "QUICK_S", 0.0)
    profile = take_profile(source, ProfileOptions(**{**QUICK, "generation": ()}, probes=2))  # type: ignore[arg-type]
    names = [probe.name for probe in profile.probes]
    assert [t.probe for t in profile.timings if t.quantity.tokens == 8] == [*names, *names, DENSE]


@pytest.mark.second
def test_a_profile_says_what_it_is_of_and_can_be_fitted(taken: Profile) -> None:
    config = tiny_model("llama-head-dim").config
    assert taken.dense == family_for(config).sizes(config)
    assert taken.config["rms_norm_eps"] == config.rms_norm_eps
    assert taken.versions["transformers"]
    taken.check(family_for(config).plan(config))
    assert {product.multiple for product in taken.products} == set(MULTIPLES)
    costs = MeasuredCosts(taken)
    assert costs.predict(Quantity("prefill", 12), family_for(config).plan(config)) > 0


def test_probes_are_removed_from_the_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_products", lambda *of: [])
    monkeypatch.setattr(timing, "EngineGroup", _Broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="this engine is broken"):
        take_profile(source, ProfileOptions(**QUICK))  # type: ignore[arg-type]
    assert not any(tmp_path.glob("pyprune-profile-*"))


@pytest.mark.second
@pytest.mark.parametrize("engine_on_it", [False, True])
def test_products_are_timed_on_the_device_that_the_engine_ran_on(
    source: Path, monkeypatch: pytest.MonkeyPatch, engine_on_it: bool
) -> None:
    placed: list[torch.device] = []
    used = None if engine_on_it else "unused"  # None is what the engine here says that it ran on
    monkeypatch.setattr(timing, "accelerators", lambda: [used])
    monkeypatch.setattr(timing, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(timing, "time_products", lambda config, dtype, place: placed.append(place) or [])
    options = ProfileOptions(**{**QUICK, "repeats": 1, "generation": ()}, probes=2)  # type: ignore[arg-type]
    take_profile(source, options)
    assert placed == [torch.device("cuda" if engine_on_it else "cpu")]


class _Broken(turns.EngineGroup):
    def load(self, models: Any) -> None:
        raise RuntimeError("this engine is broken")


@pytest.mark.second
def test_engines_that_do_not_fit_side_by_side_are_loaded_one_by_one(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "room_for", lambda *sizes: 1)
    monkeypatch.setattr(timing, "EngineGroup", _counting(loaded := []))
    options = ProfileOptions(**{**QUICK, "repeats": 1, "generation": (), "resident": None}, probes=2)  # type: ignore[arg-type]
    profile = take_profile(source, options)
    assert loaded == [[DENSE], ["half of the layers"], [DENSE], ["half of the FFN"]]
    said = capsys.readouterr().err
    beside = "in turns with the dense model in transformers"
    assert f"Timing half of the layers {beside} (1 of 2)." in said
    assert re.search(rf"Timing half of the FFN {beside} \(2 of 2, [^)]* left\)\.", said)
    assert set(MeasuredCosts(profile).fits) == {Quantity("prefill", 8), Quantity("prefill", 16)}


def _counting(loaded: list[list[str]]) -> Callable[..., Any]:
    class Counting(turns.EngineGroup):
        def load(self, models: Any) -> None:
            loaded.append(list(models))
            super().load(models)

    return Counting


def test_products_differ_in_the_multiple_and_hardly_in_the_width() -> None:
    products = time_products(tiny_model(intermediate_size=1000).config, "float32", torch.device("cpu"))
    widths = {(product.multiple, product.width) for product in products}
    assert len(widths) == 2 * len(MULTIPLES)
    for multiple, width in widths:
        assert width % multiple == 0
        assert width % (2 * multiple), "a multiple of nothing larger"
    order = [product.width for product in products]
    assert order[:10] == order[10:20]
    assert order[0] != order[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"seed": -1}, "seed is '-1'; it must be between 0 and 4294967295"),
        ({"resident": 0}, "resident is 0"),
        ({"probes": 1}, "probes is 1"),
        ({"prefill": (), "generation": ()}, "Neither prefill nor generation"),
        ({"prefill": (0,)}, "prefill@0 is no workload"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:99"}, "This machine has . CUDA devices"),
        ({"prefill": (600,)}, "reads at most 512 tokens, and the workloads need 601"),
        ({"dtype": "bfloat61"}, "Did you mean 'bfloat16'"),
        ({"dtype": "q8_0"}, "Times of q8_0 weights in transformers are not measured"),
        ({"engine": "transformer"}, "Did you mean 'transformers'"),
    ],
)
def test_bad_options_are_refused_before_any_work(source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take_profile(source, ProfileOptions(**{**QUICK, **options}))


def test_models_that_have_no_family_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        dense_config(tmp_path / "gone")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 3}')
    with pytest.raises((UnsupportedModelError, CheckpointError), match="bert"):
        dense_config(tmp_path)
    config = {**tiny_model().config.to_dict(), "model_type": "pruned_llama"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UnsupportedModelError, match="it was cut already"):
        dense_config(tmp_path)


def test_an_engine_that_is_not_installed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.serving.engines.vllm_installed", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'pyprune\[vllm\]'"):
        take_profile(source, ProfileOptions(engine="vllm"))


def test_too_few_probes_that_an_engine_can_run(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_dense(config: Any, plan: PrunePlan, *given: Any) -> Any:
        if not plan.is_identity:
            raise UnsupportedModelError("no place for it")
        return write_served(config, plan, *given)

    monkeypatch.setattr(timing, "write_served", only_dense)
    with pytest.raises(BudgetError, match="Only 0 probes could be run, at least 2 are needed: half of the layers"):
        take_profile(source, ProfileOptions(**{**QUICK, "repeats": 1}))  # type: ignore[arg-type]


def test_default_workloads_are_those_that_the_model_reads() -> None:
    every = [str(quantity) for quantity in ProfileOptions().within(None).quantities]
    assert every == ["prefill@512", "prefill@2048", "generation@64x128", "generation@1x128", "generation@4x64+1024"]
    short = [str(quantity) for quantity in ProfileOptions().within(600).quantities]
    assert short == ["prefill@512", "generation@64x128", "generation@1x128"]
    asked = ProfileOptions(prefill=(2048,)).within(600).quantities
    assert Quantity("prefill", 2048) in asked, "what was asked for is refused, not left out"


@pytest.mark.parametrize(
    ("device", "before", "seen"),
    [("cpu", "2,3", ""), ("cuda:1", "2,3", "3"), ("cuda:1", None, "1"), ("cuda", "2,3", "2,3"), ("auto", None, None)],
)
def test_engines_see_the_device_that_was_asked_for(
    device: str, before: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with turns.visible(device):
        assert os.environ.get(name) == seen
    assert os.environ.get(name) == before


@pytest.mark.process
@pytest.mark.second
def test_a_profile_of_the_cpu_is_used_on_the_cpu(taken: Profile) -> None:
    """Also on a machine with a GPU, where engines would run otherwise."""
    assert taken.used_device == "cpu"
    assert replace(taken, machine={**taken.machine, "device": "a GPU"}).used_device == "auto"


def test_a_profile_of_the_cpu_beside_an_accelerator_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name it would take the place of the accelerator's, and engines would run on the CPU for it."""
    monkeypatch.setattr(import_module("pyprune.fit.profile"), "accelerators", lambda: ["A Card"])
    said = " ".join(refused("profile", "nosuch", "--device", "cpu").split())
    assert "engines choose, A Card here; name a file with --out" in said


@pytest.mark.second
@pytest.mark.process
def test_a_profile_of_one_of_two_accelerators_is_used_on_that_one(
    taken: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("pyprune.fit.profile"), "accelerators", lambda: ["small", "large"])
    assert replace(taken, machine={**taken.machine, "device": "large"}).used_device == "cuda:1"


def test_long_prompts_are_as_many_and_as_long_as_asked() -> None:
    group = turns.EngineGroup("transformers", "float32", [], vocab_size=500)
    prompts = group.prompts(Quantity("generation", 3, 4, 20), 0)
    assert [len(prompt) for prompt in prompts] == [20] * 4
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert max(len(prompt) for prompt in group.prompts(Quantity("generation", 3, 4), 0)) <= SHORT_PROMPT_TOKENS


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.process
def test_commands_measure_by_name_and_predict(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: Profile
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "take_profile", lambda model, options: taken)
    result = run("profile", source, "--engine", "transformers", "--dtype", "float32", "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    assert f"Stored as {taken.name}" in result.stdout.replace("\n", " ")
    figures = json.loads((tmp_path / "f.json").read_text())
    assert set(figures["fits"]) == {"prefill@8", "prefill@16", "generation@2x3", "generation@2x3+8"}
    probes = [probe.name for probe in taken.probes[1:]]
    shown = [run("predict", "--profile", taken.name).stdout, result.stdout]
    assert all("Times as fast as the dense model" in text and all(probe in text for probe in probes) for text in shown)
    plan = family_for(dense_config(source)).plan(dense_config(source)).drop_layers([1, 2])
    (tmp_path / "plan.json").write_text(plan.to_json())
    said = run("predict", tmp_path / "plan.json", "--profile", taken.name, "--weights", "float32,q4_0", "--json", "-")
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)["predicted"]
    assert rows["parameters"]["plan"] < rows["parameters"]["dense"]
    costs = MeasuredCosts(Profile.load(taken.name))  # a file keeps microseconds
    assert rows["generation@2x3 (tokens/s)"]["plan"] == pytest.approx(
        6 / costs.predict(Quantity("generation", 3, 2), plan)
    )
    memory = ExactCosts.of(dense_config(source), "q4_0")
    wanted = memory.predict(Quantity("memory", 2048), plan) / 1e6
    assert rows["weights in q4_0 + memory@2048 (MB)"]["plan"] == pytest.approx(wanted)


@pytest.mark.process
def test_one_kind_of_workload_can_be_left_out(source: Path, monkeypatch: pytest.MonkeyPatch, taken: Profile) -> None:
    asked: list[ProfileOptions] = []
    monkeypatch.setattr(timing, "take_profile", lambda model, options: asked.append(options) or taken)
    for given in (("--prefill", "8", "--generation", "none"), ("--prefill", "none", "--generation", "2x3,2x3+8")):
        assert run("profile", source, *given).exit_code == 0
    assert [[str(quantity) for quantity in options.quantities] for options in asked] == [
        ["prefill@8"],
        ["generation@2x3", "generation@2x3+8"],
    ]


@pytest.mark.process
def test_predict_counts_the_groups_that_the_export_takes(tmp_path: Path) -> None:
    """An FFN of 96 of 128 channels is no multiple of 64: scales are of groups of 32 there."""
    config = tiny_model(**SIZES, intermediate_size=128).config
    config.save_pretrained(tmp_path / "dense")
    whole = family_for(config).plan(config)
    plan = whole.with_layer(0, ffn=range(96))
    grouped = ExactCosts.of(config, "w4a16", plan=plan)
    assert (grouped.weights.group, ExactCosts.of(config, "w4a16").weights.group) == (32, 128)
    profile = replace(fake_profile(), dense=whole.dense, config=json.loads(config.to_json_string()))
    profile.save(tmp_path / "p.json")
    (tmp_path / "plan.json").write_text(plan.to_json())
    given = ["--profile", tmp_path / "p.json", "--weights", "w4a16", "--allow-mismatch", "--json", "-"]
    said = run("predict", tmp_path / "plan.json", *given)
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)["predicted"]["weights in w4a16 (MB)"]["plan"]
    assert found == pytest.approx(grouped.predict(Quantity("memory", 0), plan) / 1e6)


def test_the_groups_of_a_plan_follow_from_its_own_widths() -> None:
    """The dense widths, which it no longer has, divide by 64 alone."""
    config = tiny_model(hidden_size=192, num_attention_heads=3, num_key_value_heads=3, intermediate_size=128).config
    plan = family_for(config).plan(config).keep_hidden(range(128))
    for layer in plan.kept_layers:
        plan = plan.with_layer(layer, query_heads=[0, 1], kv_heads=[0, 1])
    assert ExactCosts.of(config, "w4a16", plan=plan).weights.group == 128
    assert ExactCosts.of(config, "w4a16").weights.group == 64


@pytest.mark.process
def test_predict_takes_a_checkpoint_folder_and_the_dense_model(source: Path, tmp_path: Path, taken: Profile) -> None:
    path = taken.save(tmp_path / "p.json")
    config = dense_config(source)
    plan = probe_plans(family_for(config).plan(config))["unequal layers"]
    folder, _ = write_served(config, plan, tmp_path / "probe", "transformers", "float32")
    for target, shown in ((folder, plan.summary()), (source, family_for(config).plan(config).summary())):
        result = run("predict", target, "--profile", path)
        assert result.exit_code == 0, result.output
        assert shown.split(",")[2] in result.stdout


@pytest.mark.process
def test_predict_refuses_what_the_profile_is_not_of(source: Path, tmp_path: Path, taken: Profile) -> None:
    path = taken.save(tmp_path / "p.json")
    other = tiny_model("llama-head-dim", num_hidden_layers=3).config
    other.save_pretrained(tmp_path / "other")
    said = refused("predict", tmp_path / "other", "--profile", path)
    assert "dense.kinds.decoder.layers was '0-3', now '0-2'" in said.replace("\n", " ")
    allowed = run("predict", tmp_path / "other", "--profile", path, "--allow-mismatch")
    assert allowed.exit_code == 0
    assert "dense.kinds.decoder.layers was '0-3'" in allowed.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill", "many"), "'many' in 'many' is not a whole number"),
        (("--prefill", ""), "'' in '' is not a whole number"),
        (("--prefill", "none", "--generation", "none"), "Neither prefill nor generation"),
        (("--generation", "64"), "'64' is not of the form BxN"),
        (("--generation", "0x8"), "'0' in '0x8'"),
        (("--repeats", "0"), "repeats is 0"),
        (("--out", "/nowhere/at/all.json"), "there is no folder"),
    ],
)
def test_bad_options_of_the_command(source: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("profile", source, *arguments).replace("\n", " ")


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "q9"), "Unknown format of the weights 'q9'"),
        (("--context", "1x"), "'' in '1x'"),
        (("--context", ""), "'' in '' is not a whole number"),
        (("--profile", "gone.json"), "There is no profile 'gone.json'"),
    ],
)
def test_bad_options_of_predict(
    source: Path, tmp_path: Path, taken: Profile, arguments: tuple[str, ...], message: str
) -> None:
    path = taken.save(tmp_path / "p.json")
    given = arguments if "--profile" in arguments else ("--profile", str(path), *arguments)
    assert message in refused("predict", source, *given).replace("\n", " ")


@pytest.mark.process
def test_a_mismatch_is_of_a_plan(tmp_path: Path, taken: Profile) -> None:
    said = refused("predict", "--profile", taken.save(tmp_path / "p.json"), "--allow-mismatch")
    assert "--allow-mismatch does nothing without PLAN" in said


@pytest.mark.process
def test_the_fit_of_a_profile_uses_all_its_repeats(taken: Profile) -> None:
    fit = MeasuredCosts(taken).fits[Quantity("prefill", 16)]
    assert set(fit.seconds) == {probe.name for probe in taken.probes}
    assert set(fit.left_out) == set(fit.seconds) - {DENSE}


def test_probes_are_shown_as_times_as_fast_as_the_dense_model(tmp_path: Path) -> None:
    path = fake_profile(lambda probe, _: 3.0 if probe.name == DENSE else 1.5).save(tmp_path / "p.json")
    result = run("predict", "--profile", path)
    assert result.exit_code == 0, result.output
    table = result.stdout.partition("Times as fast")[2]
    probes = Profile.load(path).probes[1:]
    assert probes
    assert table.count("2.00") == 2 * len(probes), "of both workloads"
    for more in (("--weights", "q8_0"), ("--context", "64")):
        assert "name a plan or a checkpoint" in " ".join(refused("predict", "--profile", path, *more).split())
