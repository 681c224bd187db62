"""How options, settings, recipes and presets are put together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pyprune.config.recoveries import RECOVERIES
from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError
from pyprune.methods.registry import complete_config, preset
from pyprune.run.recipe import build_config, merge, parse_setting


def test_settings_win_over_options_recipe_and_preset(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: elder-paper\nratio: 0.3\nelder: {penalty_weight: 0.5, gates: {batch_size: 7}}\n")
    config = build_config(recipe=path, options={"ratio": 0.4, "method": None}, settings=["elder.penalty_weight=2e-3"])
    assert (config.ratio, config.options.penalty_weight, config.options.gates.batch_size) == (0.4, 2e-3, 7)
    assert config.options.train == preset("elder-paper").options.train


@pytest.mark.parametrize("stages", ["", "stages: {before: [], after: []}\n"])
@pytest.mark.parametrize("named", ["", "recovery: alpaca-lora-distill\n"])
def test_a_recovery_in_addition_to_a_recipe_is_done(tmp_path: Path, stages: str, named: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{named}{stages}recover: {{adapters: none, train: {{steps: 3}}}}\n")
    config = build_config(recipe=path, recovery="alpaca-lora")
    wanted = RECOVERIES["alpaca-lora"]()
    assert config.stages.after == ("recover",)
    assert (config.recover, config.recovery_data) == (wanted.recover, wanted.data)


def test_a_preset_of_another_method_than_the_recipes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("method: elder\nratio: 0.3\n")
    with pytest.raises(ConfigError, match="preset 'taylor' is of the method 'taylor', but method is 'elder'"):
        build_config(recipe=path, preset="taylor")
    assert build_config(recipe=path, preset="taylor", options={"method": "taylor"}).method == "taylor"
    assert build_config(recipe=path, preset="elder").ratio == 0.3


def test_without_anything_the_recommended_preset_is_used() -> None:
    assert build_config() == preset("elder")
    assert build_config(options={"method": "dress"}) == preset("dress")


def test_a_plan_alone_is_applied_without_training() -> None:
    config = build_config(options={"plan": "plan.json"})
    assert (config.method, config.stages.before, config.plan) == ("none", (), "plan.json")
    assert build_config(options={"plan": "plan.json", "method": "trsp-trained"}).stages.after == ("recover",)


def test_a_recipe_is_complete_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    complete = complete_config(PruneConfig(ratio=0.5))
    path.write_text(json.dumps(complete.to_dict()))
    assert build_config(recipe=path) == complete
    path.write_text("")
    assert build_config(recipe=path) == preset("elder")


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("- a\n- b", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("preset: 3", "preset is 3"),
        ("ratoi: 1", "ratio"),
    ],
)
def test_damaged_recipes(tmp_path: Path, content: str, phrase: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(phrase)):
        build_config(recipe=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_config(recipe=tmp_path / "none.yaml")


@pytest.mark.parametrize("setting", ["ratio", "=1", ".a=1", "a..b=1", "a=[1"])
def test_damaged_settings(setting: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_setting(setting)


def test_settings_are_yaml_and_merge_deeply() -> None:
    assert parse_setting("elder.layers=[1, 2]") == {"elder": {"layers": [1, 2]}}
    assert parse_setting("data.field=null") == {"data": {"field": None}}
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}
