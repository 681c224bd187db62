"""Widths of every layer out of config.json, and the warnings that an export makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.serving.export import export, serving_warnings
from pyprune.serving.widths import layer_widths, named_layers, off_multiples
from tests._support.cli import run
from tests._support.models import tiny_model
from tests._support.plans import keep_kv_groups


@pytest.mark.parametrize(("name", "field"), [("llama-head-dim", "intermediate_size"), ("opt", "ffn_dim")])
def test_export_warns_of_every_layer_whose_width_is_off(name: str, field: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    plan = family_for(model).plan(model.config)
    plan = (
        plan.with_layer(1, ffn=range(14)).with_layer(2, ffn=[]).with_layer(3, ffn=range(14)).with_layer(0, ffn=range(7))
    )
    compact_(model, plan)
    report = export(model, tmp_path / "out", plan=plan)
    slow = [warning for warning in report.warnings if field in warning]
    assert slow == [
        f"{field} of layer 0 is 7, not a multiple of 8: matrix products run slower than they could.",
        f"{field} of layers 1,3 is 14, not a multiple of 8: matrix products run slower than they could.",
    ]
    assert f"{field} of layers 1,3 is 14" in run("export", tmp_path / "out", "--out", tmp_path / "again").stderr


def test_a_width_of_all_layers_is_warned_of_too() -> None:
    config = tiny_model(intermediate_size=44).config.to_dict()
    assert any("intermediate_size of layers 0-3 is 44" in warning for warning in serving_warnings(config))
    assert not any("intermediate_size" in w for w in serving_warnings(tiny_model().config.to_dict()))


def test_widths_are_those_of_the_plan(tmp_path: Path) -> None:
    model = tiny_model("llama-head-dim")
    plan = keep_kv_groups(family_for(model).plan(model.config), 0, [1]).with_layer(1, ffn=range(9))
    plan = plan.with_layer(2, query_heads=[], kv_heads=[]).with_layer(3, ffn=[])
    compact_(model, plan)
    assert layer_widths(model.config.to_dict()) == [layer.widths for layer in plan.layers]
    assert layer_widths(tiny_model("opt").config.to_dict()) == [(6, 6, 40)] * 4


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "many"}, {"hidden_size": 3, "num_attention_heads": None}])
def test_a_file_without_sizes_has_no_widths(config: dict[str, Any]) -> None:
    assert layer_widths(config) == []


def test_layers_are_named_in_ranges() -> None:
    assert named_layers([3]) == "layer 3"
    assert named_layers([0, 1, 2, 7]) == "layers 0-2,7"
    assert off_multiples([0, 8, 9, 12, 9], 8, dense=12) == {9: [2, 4]}
