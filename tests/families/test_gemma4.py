"""The small models of Gemma 4, with embeddings for each layer and shared keys; test_inferred.py has the large ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_, masked
from pyprune.cut.reconstruct import reconstruct_
from pyprune.errors import CheckpointError, PlanError, UnsupportedModelError
from pyprune.families import family_for, parameter_shapes, parameters_after
from pyprune.families.infer import tiny_sizes
from pyprune.fit.cost import ExactCosts
from pyprune.fit.quantities import Quantity
from pyprune.plan import PrunePlan
from pyprune.probe.streams import LayerRunner
from pyprune.run.prune import prune_checkpoint
from pyprune.run.recipe import build_config
from tests._support.compare import assert_same_logits
from tests._support.inferred import tiny_inferred
from tests._support.models import tiny_batch
from tests._support.text import write_model, write_text
from tests._support.tiny import VOCAB, random_model
from tests.families.test_contract import AXES, logits
from tests.families.test_inferred import check, plan_of

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "sliding_window": 6,
    "num_hidden_layers": 8,
    "layer_types": [FULL, FULL, SLIDING, SLIDING, SLIDING, SLIDING, FULL, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}
"""Layers 1 and 4 hold the keys and values that the last three read."""
INPUTS = {"hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": VOCAB + 5}
EXPERTS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "sliding_window": 6,
    "hidden_size": 64,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 2,
    "moe_intermediate_size": 44,
}
VARIANTS = {
    "shared": ("gemma4_unified_text", SMALL),
    "inputs": ("gemma4_text", SMALL | INPUTS),
    "experts": ("gemma4_text", EXPERTS),
}
"""Variant -> (model type, values besides those of the tiny model)."""
ROUNDING = 3e-5
"""Products with embeddings in each of eight layers gather it; in float64 the difference is 1e-14."""
DROPPED = ([5], [4, 5], [7], [6, 7], [1, 6, 7], [5, 6, 7])
"""Layers that can be removed together; without the last two a layer with a window is the last."""


def small(variant: str = "inputs", *, tied: bool = False) -> PreTrainedModel:
    model_type, own = VARIANTS[variant]
    values = tiny_sizes(model_type) | own | {"tie_word_embeddings": tied}
    return scaled(random_model(model_type, **copy.deepcopy(values)))


def scaled(model: PreTrainedModel) -> PreTrainedModel:
    """Give each layer another factor on its stream."""
    for index, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.7 + 0.1 * index)
    return model


def identity(model: PreTrainedModel) -> PrunePlan:
    return family_for(model).plan(model.config)


@pytest.mark.parametrize("variant", ["inputs", "experts"])
def test_all_that_small_models_own_is_cut_at_once(variant: str, tmp_path: Path) -> None:
    model = small(variant)
    check(model, plan_of(model, "everything"), tmp_path, ROUNDING)


@pytest.mark.second
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_axis_of_small_models(variant: str, tied: bool, axis: str, tmp_path: Path) -> None:
    model = small(variant, tied=tied)
    check(model, plan_of(model, axis), tmp_path, ROUNDING)


@pytest.mark.parametrize("layers", DROPPED, ids=str)
def test_layers_go_with_their_embeddings_and_the_rest_is_renumbered(layers: list[int], tmp_path: Path) -> None:
    model = small()
    plan = identity(model).drop_layers(layers).keep_hidden(range(3, 59))
    assert PrunePlan.from_json(plan.to_json()) == plan
    check(model, plan, tmp_path, ROUNDING)
    stored = json.loads((tmp_path / "config.json").read_text())
    kept = [i for i in range(8) if i not in layers]
    assert stored["layer_types"] == [SMALL["layer_types"][i] for i in kept]
    assert stored["num_kv_shared_layers"] == sum(i > 4 for i in kept)
    assert (stored["model_type"] == "gemma4_text") is (kept[-1] == 7 or layers == [7])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_removed_layer_costs_what_its_embeddings_do_too(variant: str) -> None:
    model = small(variant)
    family, costs, shapes = family_for(model), ExactCosts.of(model.config), parameter_shapes(model)
    for plan in (identity(model), identity(model).drop_layers([0, 3]).keep_hidden(range(32))):
        assert costs.predict(Quantity("parameters"), plan) == parameters_after(family, shapes, plan)


def test_a_stock_model_keeps_the_width_that_follows_from_a_rule() -> None:
    """The readers of others' keys have an MLP of twice the width, also after a cut of half of all widths."""
    model = small()
    plan = identity(model)
    for index in range(8):
        plan = plan.with_layer(index, ffn=range(plan.dense.units("ffn", index) // 2))
    assert compact_(model, plan).stock
    assert [layer.mlp.up_proj.out_features for layer in model.model.layers] == [23] * 5 + [46] * 3


def test_kinds_of_layers_keep_their_kv_heads_in_a_stock_model() -> None:
    model = tiny_inferred("gemma4_text")
    plan = identity(model)
    for index, kind in enumerate(plan.dense.layers):
        group = 2 if kind == SLIDING else 3
        plan = plan.with_layer(index, kv_heads=[1], query_heads=range(group, group + 2))
    assert compact_(model, plan).stock
    assert {config.num_key_value_heads for config in model.config.per_layer_config} == {1}
    assert [config.head_dim for config in model.config.per_layer_config] == [16, 20, 16, 20, 20]


def test_unequal_heads_of_one_kind_load_where_heads_of_all_kinds_are_as_wide(tmp_path: Path) -> None:
    model = random_model("gemma4_text", **tiny_sizes("gemma4_text") | {"vocab_size": VOCAB, "global_head_dim": 16})
    plan = identity(model)
    index = plan.dense.layers.index(FULL)
    check(model, plan.with_layer(index, query_heads=[0, 1, 2], kv_heads=[0]), tmp_path, ROUNDING)


def test_a_layer_whose_keys_others_read_is_kept_with_them() -> None:
    model = small()
    with pytest.raises(PlanError, match="removes layer 4, whose keys and values kept layers of the kind sliding_att"):
        compact_(model, identity(model).drop_layers([4]))
    with pytest.raises(PlanError, match="Unknown axis of layer 4 'kv_heads'"):
        identity(model).with_layer(4, kv_heads=[])
    assert family_for(model).removable_layers(identity(model).dense.layers) == (0, 2, 3, 5, 6, 7)


def test_experts_in_layers_that_share_keys_are_refused() -> None:
    config = AutoConfig.for_model("gemma4_text", enable_moe_block=True, num_kv_shared_layers=2)
    with pytest.raises(UnsupportedModelError, match="its layers have experts and share keys and values"):
        family_for(config)


def test_a_masked_layer_does_not_scale_the_stream_and_gets_its_factor_back() -> None:
    model = small()
    plan = identity(model).drop_layers([0, 6])
    factors = [float(layer.layer_scalar) for layer in model.model.layers]
    with masked(model, plan):
        assert [float(model.model.layers[i].layer_scalar) for i in (0, 6)] == [1, 1]
    assert [float(layer.layer_scalar) for layer in model.model.layers] == factors
    compact_(model, plan)
    assert [float(layer.layer_scalar) for layer in model.model.layers] == [factors[i] for i in (1, 2, 3, 4, 5, 7)]


@torch.no_grad()
@pytest.mark.parametrize("whole", [True, False], ids=["layers", "parts"])
def test_layers_and_their_parts_run_one_by_one_as_in_the_model(whole: bool) -> None:
    """Each batch has embeddings and keys of its own, and a layer scales the stream once."""
    for model in (small(), small("experts"), scaled(tiny_inferred("gemma4_text"))):
        runner, batches = LayerRunner.of(model), [tiny_batch(seed=seed) for seed in range(2)]
        streams = [runner.embed(batch) for batch in batches]
        for index, layer in enumerate(runner.layers):
            for part in (runner.whole_layer(index),) if whole else runner.parts(index):
                runner.run_(layer, part, streams)
        for stream, batch in zip(streams, batches, strict=True):
            with runner.continue_from(stream) as ended:
                found = logits(ended, batch)
            assert_same_logits(found, logits(model, batch))
    with pytest.raises(UnsupportedModelError, match="cannot run one on another stream"):
        LayerRunner.of(small()).keywords(0, streams[0].clone())


def test_writers_are_solved_in_front_of_the_factor_of_their_layer() -> None:
    model = scaled(tiny_inferred("gemma4_text"))
    plan = plan_of(model, "skipped").drop_layers([3])
    ids = tiny_batch(batch=24, length=16)
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    report = reconstruct_(after, plan, ids)
    expected = logits(model, ids)
    errors = []
    for each in (before, after):
        mask_(each, plan)
        errors.append(float((logits(each, ids) - expected).norm() / expected.norm()))
    assert report.solved
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("magnitude", {}),
        ("wanda", {"score.closed_ends": 0, "score.axes": ["heads", "ffn"]}),
        ("shortgpt", {}),
        ("sleb", {}),
        ("shortgpt", {"shortgpt.unit": "attention"}),
        ("elder", {"elder.gates.first_round_steps": 2, "elder.gates.round_steps": 1}),
    ],
    ids=str,
)
def test_methods_choose_what_small_models_can_lose(preset: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(small(), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    data = {} if preset == "magnitude" else data
    config = build_config(preset=preset, options={"ratio": 0.2, **data, **options})
    result = prune_checkpoint(folder, config, out=tmp_path / "out")
    assert any("not reconstructed" in text for text in result.warnings) is (preset != "magnitude")
    model, _ = load_model(tmp_path / "out")
    assert torch.isfinite(logits(model, tiny_batch())).all()


@pytest.mark.parametrize("preset", ["wanda", "sleb"])
def test_methods_choose_channels_of_experts_and_whole_mlps(preset: str, tmp_path: Path) -> None:
    """A reconstruction leaves an MLP silent that was removed, and its router gives its layer three values."""
    folder = write_model(small("experts"), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    own = {"sleb.unit": "mlp"} if preset == "sleb" else {"score.closed_ends": 0, "score.axes": ["heads", "ffn"]}
    result = prune_checkpoint(
        folder, build_config(preset=preset, options={"ratio": 0.2, **data, **own}), out=tmp_path / "out"
    )
    assert result.compact is not None
    assert result.compact.removed_share > 0.1
    model, _ = load_model(tmp_path / "out")
    assert torch.isfinite(logits(model, tiny_batch())).all()


def test_laco_does_not_add_up_layers_of_several_kinds(tmp_path: Path) -> None:
    folder = write_model(small(), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    with pytest.raises(UnsupportedModelError, match="laco adds up projections of neighbouring layers"):
        prune_checkpoint(folder, build_config(preset="laco", options={"ratio": 0.2, **data}), out=tmp_path / "out")


def test_sizes_by_layer_that_the_stock_class_does_not_read_are_refused(tmp_path: Path) -> None:
    folder = write_model(small(), tmp_path / "dense")
    load_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["per_layer_config"]["2"] = {"intermediate_size": 40}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="per_layer_config that no stock architecture reads"):
        load_model(folder)
