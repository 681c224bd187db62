"""Every shipped recipe and preset is valid, and a recipe's first line is the command that runs it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pyprune.config.cut import CutConfig
from pyprune.config.run import StageConfig
from pyprune.config.train import DistillConfig
from pyprune.errors import ConfigError
from pyprune.methods.registry import get_method, own_methods, preset, presets, read_config
from pyprune.run.recipe import build_config, say_changed_name
from tests._support.paths import REPO

RECIPES = sorted((REPO / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(REPO / "recipes")))
def test_a_recipe_parses_and_its_first_line_runs_it(path: Path) -> None:
    config = build_config(recipe=path)
    config.validate()
    assert read_config(config.to_dict()) == config
    first = path.read_text().splitlines()[0]
    assert first.startswith("# pyprune prune ")
    words = shlex.split(first.removeprefix("# "))
    assert words[words.index("--config") + 1] == str(path.relative_to(REPO))
    assert "--out" in words
    get_method(config.method)


def test_the_recipes_cover_the_families_and_the_eight_cases() -> None:
    assert len(RECIPES) >= 15
    stages = {
        (config.stages.before, config.stages.prune, config.stages.after)
        for before, prune, after in product("nr", "np", "nr")
        for config in [build_config(recipe=REPO / f"recipes/llama/ablation/dress-{before}{prune}{after}.yaml")]
    }
    nothing, regularise = (), ("regularise",)
    assert stages == set(product((nothing, regularise), (True, False), (nothing, regularise)))


def test_the_two_elder_recipes_differ_in_the_regulariser_only() -> None:
    ours = build_config(recipe=REPO / "recipes/llama/smollm2-elder-anneal.yaml")
    papers = build_config(recipe=REPO / "recipes/llama/smollm2-elder-published.yaml")
    assert ours.options.train == papers.options.train
    assert ours.options.gates == papers.options.gates
    assert ours.data == papers.data
    assert (ours.options.schedule, papers.options.schedule) == ("anneal", "published")


@pytest.mark.parametrize("name", list(presets()))
def test_a_preset_is_valid_described_and_names_a_method(name: str) -> None:
    config = preset(name)
    config.validate()
    assert read_config(config.to_dict()) == config
    assert presets()[name].__doc__
    assert name.startswith(config.method)


def test_the_presets_carry_the_papers_constants() -> None:
    dress, opt, elder = preset("dress-paper"), preset("dress-paper-opt"), preset("elder-paper")
    assert (dress.options.penalty_weight, opt.options.penalty_weight) == (1e-3, 5e-3)
    assert (dress.data.samples, dress.recovery_data and dress.recovery_data.samples) == (750, 250)
    assert (dress.recover.rank, dress.recover.alpha) == (32, 10.0)
    assert (elder.options.gates.penalty_weight, elder.options.penalty_weight) == (5e-3, 1e-3)
    assert elder.data.samples == 128
    for training in (dress.options.train, dress.recover.train, elder.options.train):
        assert (training.learning_rate, training.batch_size) == (2e-5, 64)
        assert (training.early_stop_patience, training.early_stop_min_delta) == (5, 1e-4)
    assert preset("trsp-paper").options == elder.options
    assert preset("elder-paper-literal").options.gates.placement == "output"


def test_an_unknown_preset_suggests_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'elder-paper-literal'"):
        preset("elder-paper-litteral")


@pytest.mark.parametrize("method", list(own_methods()))
def test_a_method_named_in_three_ways_gives_one_configuration(method: str, tmp_path: Path) -> None:
    """As --method, as --preset, and as a recipe's method: one word, one meaning."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"method: {method}\n")
    found = build_config(options={"method": method})
    assert found == build_config(preset=method) == build_config(recipe=recipe) == preset(method)
    assert found.method == method


@pytest.mark.parametrize("method", list(own_methods()))
def test_a_method_has_the_papers_constants_as_a_preset_too(method: str) -> None:
    if method in ("magnitude", "modegpt", "obs", "random", "pca") or get_method(method).axis == "experts":
        assert f"{method}-paper" not in presets()
        return
    paper = preset(f"{method}-paper")
    assert paper.method == method
    assert (paper == preset(method)) == (method == "last")


@pytest.mark.parametrize("method", sorted(own_methods().keys() - {"random", "magnitude", "last", "laco"}))
def test_forms_mean_the_same_for_every_method(method: str) -> None:
    """NAME chooses, cuts and reconstructs; -plain does not reconstruct, -trained trains on text and logits as well."""
    best, plain, trained = (preset(f"{method}{form}") for form in ("", "-plain", "-trained"))
    assert (best.cut.reconstruct, best.stages) == ("least_squares", StageConfig(before=(), after=()))
    assert plain == replace(best, cut=CutConfig())
    assert (trained.cut, trained.stages) == (best.cut, StageConfig(before=(), after=("recover",)))
    assert (trained.recover.adapters, trained.recover.distill) == ("none", DistillConfig(alpha=0.5))
    assert (trained.options, trained.score) == (best.options, best.score)


@pytest.mark.parametrize("method", ["random", "magnitude", "last", "laco"])
def test_controls_that_read_nothing_neither_reconstruct_nor_train(method: str) -> None:
    assert (preset(method).cut.reconstruct, preset(method).stages.after) == ("none", ())
    assert {f"{method}-plain", f"{method}-trained"}.isdisjoint(presets())


def test_a_form_may_be_named_as_the_method(tmp_path: Path) -> None:
    trained = preset("taylor-trained")
    assert build_config(options={"method": "taylor-trained"}) == trained
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: taylor-trained\n")
    assert build_config(recipe=recipe) == trained
    assert build_config(recipe=recipe, options={"method": "elder"}) == preset("elder"), "the command line wins"
    assert build_config(recipe=recipe, options={"method": "wanda-plain"}) == preset("wanda-plain")
    assert build_config(preset="best", options={"method": "best"}) == preset("obs")


def test_two_forms_at_once_are_refused() -> None:
    """The preset must not win in silence over a form that stands in --method."""
    with pytest.raises(ConfigError, match="'taylor-plain' and the preset 'taylor' are two sets of options"):
        build_config(preset="taylor", options={"method": "taylor-plain"})


def test_an_old_name_works_and_says_what_it_is_now(capsys: pytest.CaptureFixture[str]) -> None:
    say_changed_name.cache_clear()
    assert build_config(preset="taylor-recovered") == preset("taylor-trained")
    build_config(preset="elder")
    build_config(preset="wanda")
    said = capsys.readouterr().err
    assert "taylor-recovered is taylor-trained in this release." in said
    assert "elder-trained also trains, as elder did in earlier releases." in said
    assert "wanda" not in said


def test_the_recommended_name_is_the_method_that_it_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    say_changed_name.cache_clear()
    found = build_config(options={"method": "best", "ratio": 0.3})
    assert found == replace(preset("obs"), ratio=0.3)
    assert found.cut.reconstruct == "least_squares"
    assert build_config(options={"method": "best-trained"}) == preset("obs-trained")
    assert build_config(preset="best-plain") == preset("obs-plain")
    assert "best is obs in this release." in capsys.readouterr().err
    with pytest.raises(ConfigError, match="best"):
        build_config(options={"method": "bset"})


def test_a_recipe_starts_from_the_method_that_will_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("ratio: 0.3\n")
    assert build_config(recipe=recipe) == replace(preset("elder"), ratio=0.3)
    assert build_config(recipe=recipe, options={"method": "dress"}) == replace(preset("dress"), ratio=0.3)
    recipe.write_text("plan: plan.json\n")
    assert build_config(recipe=recipe) == build_config(options={"plan": "plan.json"})
    recipe.write_text("method: 3\n")
    with pytest.raises(ConfigError, match="method is 3"):
        build_config(recipe=recipe)
    recipe.write_text("method: dres\n")
    with pytest.raises(ConfigError, match=r"Unknown method 'dres'\. Did you mean 'dress'"):
        build_config(recipe=recipe, options={"method": "elder"})


@pytest.mark.process
def test_presets_load_without_torch() -> None:
    code = "import sys; from pyprune.methods.registry import preset; preset('elder'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
