"""Widths of every layer out of config.json, and the warnings that an export makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.serving.export import export
from pyprune.serving.vllm.limits import serving_warnings
from pyprune.serving.widths import (
    LayerSizes,
    draft_obstacle,
    group_obstacle,
    head_channels,
    inputs_together,
    layer_widths,
    named_layers,
    off_multiples,
    split_obstacle,
    stage_obstacle,
    token_bytes,
)
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


def test_layers_of_a_deep_model_are_read_by_their_numbers(tmp_path: Path) -> None:
    """Transformers writes "00" where a layer beyond the tenth has sizes of its own."""
    model = tiny_model("llama", num_hidden_layers=12)
    plan = keep_kv_groups(family_for(model).plan(model.config), 0, [1]).with_layer(3, query_heads=[], kv_heads=[])
    plan = plan.with_layer(7, ffn=[]).with_layer(11, ffn=range(16))
    compact_(model, plan)
    export(model, tmp_path / "out", plan=plan)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "00" in written["per_layer_config"]
    for config in (written, model.config.to_dict()):
        assert layer_widths(config) == [layer.widths for layer in plan.layers]
    assert draft_obstacle(layer_widths(written))
    assert token_bytes({**written, "kv_lora_rank": 8}, "bfloat16") == 0
    assert token_bytes(written, "bfloat16") == 4 * plan.dense.head_dim * sum(len(x.kv_heads) for x in plan.layers)


def test_layers_without_attention_name_as_many_heads_as_the_widest_layer() -> None:
    """vLLM divides the largest number of heads of all layers among its ranks, whether a layer has attention or not."""
    model = tiny_model("llama")
    dense = family_for(model).plan(model.config)
    plan = dense.with_layer(1, query_heads=[], kv_heads=[])
    for layer in (0, 2, 3):
        plan = keep_kv_groups(plan, layer, [0])
    compact_(model, plan)
    stated = model.config.to_dict()["per_layer_config"]
    heads = len(plan.layers[0].query_heads)
    assert heads < dense.dense.num_attention_heads
    assert {own["num_attention_heads"] for own in stated.values()} == {heads}
    assert layer_widths(model.config.to_dict())[1][:2] == (0, 0)


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "many"}, {"hidden_size": 3, "num_attention_heads": None}])
def test_a_file_without_sizes_has_no_widths(config: dict[str, Any]) -> None:
    assert layer_widths(config) == []


def test_layers_are_named_in_ranges() -> None:
    assert named_layers([3]) == "layer 3"
    assert named_layers([0, 1, 2, 7]) == "layers 0-2,7"
    assert off_multiples([0, 8, 9, 12, 9], 8, dense=12) == {9: [2, 4]}


@pytest.mark.parametrize(
    ("widths", "ranks", "said"),
    [
        ([(4, 2, 40), (3, 1, 40)], 2, "layer 1 has 3 query heads, which 2 tensor parallel ranks cannot share equally"),
        ([(12, 2, 24), (12, 3, 24), (12, 3, 24)], 4, "layers 1-2 have 3 KV heads"),
        ([(4, 2, 40), (4, 2, 25)], 2, "layer 1 has 25 FFN channels"),
        ([(6, 3, 42)], 4, "(allowed: a multiple of 4). Serve it with --tensor-parallel-size 1 or 3, or prune"),
        ([(4, 3, 42)], 2, "(allowed: a multiple or a divisor of 2). Serve it with --tensor-parallel-size 1, or prune"),
        ([(4, 2, 40), (8, 1, 24), (0, 0, 40), (4, 2, 0)], 4, ""),
        ([(6, 3, 42)], 6, ""),
        ([(3, 1, 25)], 1, ""),
        ([(3, 1, 25)], 0, ""),
        ([(9, 3, 1536)] * 30, 32, "(allowed: a multiple of 32). Serve it with --tensor-parallel-size 1 or 3, or prune"),
        ([(9, 3, 1536)], 10**9, "Serve it with --tensor-parallel-size 1 or 3, or prune"),
        ([], 2, ""),
    ],
)
def test_layers_that_ranks_cannot_share_equally_are_named(widths: list[LayerSizes], ranks: int, said: str) -> None:
    message = split_obstacle(widths, ranks)
    assert said in message if said else message is None


@pytest.mark.parametrize(
    ("widths", "group", "ranks", "said"),
    [
        ([(32, 8, 12544)], 128, 4, "layer 0 has 12544 FFN channels: each of 4 tensor parallel"),
        ([(32, 8, 12288), (32, 8, 8960)], 128, 4, "layer 1 has 8960 FFN channels"),
        ([(14, 2, 4864)], 128, 2, "layer 0 has 14 query heads: each of 2 tensor parallel"),
        ([(14, 2, 4864)], 64, 2, ""),
        ([(32, 8, 12288), (0, 0, 512), (32, 8, 0)], 128, 4, ""),
        ([(14, 2, 4864)], 0, 2, ""),
        ([(14, 2, 4864)], 128, 1, ""),
        (
            [(4, 2, 1100)],
            4,
            2,
            "layer 0 has 1100 FFN channels: each of 2 tensor parallel",
        ),
        ([(4, 2, 1096)], 4, 2, ""),
    ],
)
def test_ranks_need_whole_groups_of_inputs_that_share_a_scale(
    widths: list[LayerSizes], group: int, ranks: int, said: str
) -> None:
    message = group_obstacle(widths, 64, group, ranks)
    assert said in message if said else message is None


def test_the_group_of_scales_is_read_from_the_configuration() -> None:
    grouped = {"quantization_config": {"config_groups": {"group_0": {"weights": {"group_size": 64}}}}}
    rows = {"quantization_config": {"config_groups": {"group_0": {"weights": {"group_size": None}}}}}
    assert [inputs_together(config) for config in (grouped, rows, {}, {"quantization_config": {"bits": 4}})] == [
        64,
        0,
        0,
        0,
    ]
    packed = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
    assert inputs_together({"quantization_config": packed}) == 4
    assert inputs_together({"quantization_config": {**packed, "format": "int-quantized"}}) == 0
    assert [head_channels(c) for c in ({"head_dim": 80}, {"hidden_size": 64, "num_attention_heads": 4})] == [80, 16]


def test_a_rank_of_a_pipeline_needs_attention() -> None:
    widths = [(0, 0, 40), (4, 2, 40), (4, 2, 0), (0, 0, 40), (0, 0, 40)]
    assert stage_obstacle(widths, []) is None
    assert stage_obstacle(widths, [(0, 2), (2, 5)]) is None
    assert "rank 1 would hold only layers 3-4, and" in stage_obstacle(widths, [(0, 3), (3, 5)])
    assert "rank 2 would hold no layer, and" in stage_obstacle(widths, [(0, 2), (2, 5), (5, 5)])
    assert "divided 1,4; attention is in 1-2." in stage_obstacle(widths, [(0, 1), (1, 5)])


def test_a_draft_needs_the_same_heads_in_all_layers_with_attention() -> None:
    assert draft_obstacle([(4, 2, 40), (0, 0, 24), (4, 2, 0)]) is None
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert draft_obstacle([(4, 2, 40), (0, 0, 24), (4, 2, 0)], kinds) is None, "what it skips does not count"
    assert "has full_attention and sliding_attention" in draft_obstacle([(4, 2, 40)] * 3, kinds)
    assert draft_obstacle([(4, 2, 40)] * 3, kinds, hybrid=False) is None
    assert "layer 0 has 4 query and 2 KV heads, layer 2 has 4 and 1." in draft_obstacle(
        [(4, 2, 40), (4, 2, 24), (4, 1, 40)]
    )
