from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyprune.errors import PlanError, UnsupportedModelError
from pyprune.plan import BlockSizes, PrunePlan, Sizes, attention_and_mlp, format_ranges, parse_ranges

SIZES = Sizes.decoder(3, 8, 4, 2, 4, 6, 10)
IDENTITY = PrunePlan.identity("llama", SIZES)
VERSION_1 = """{
  "version": 1,
  "model_type": "llama",
  "dense": {
    "num_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 6,
    "vocab_size": 10
  },
  "hidden": "0-2,5",
  "layers": [
    {"index": 0, "query_heads": "", "kv_heads": "", "ffn": "0-5"},
    {"index": 2, "query_heads": "2-3", "kv_heads": "1", "ffn": "0-1,4"}
  ]
}"""
"""A plan as checkpoints of pyprune 0.1 hold it."""
KINDS = {
    "mixer": {"mamba": BlockSizes(), "mlp": BlockSizes({"ffn": 6})},
    "attention": attention_and_mlp(4, 2, 4, 5),
    "bare": {"mamba": BlockSizes({"mamba_heads": 3}, head_dim=2)},
}
HYBRID = PrunePlan.identity("hybrid", Sizes(8, 10, KINDS, ("mixer", "attention", "mixer", "bare")))


@given(st.sets(st.integers(0, 300)))
def test_ranges_round_trip(indices: set[int]) -> None:
    ordered = tuple(sorted(indices))
    assert parse_ranges(format_ranges(ordered)) == ordered


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-2", "1--3", "0-99999999999", "1.5", "3,1", "1,1", "0-4,4"])
def test_damaged_ranges_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_ranges(text)


def test_plans_round_trip_and_can_be_read_by_people() -> None:
    plan = IDENTITY.drop_layers([1]).keep_hidden([0, 1, 2, 5]).with_layer(2, ffn=[0, 1, 4])
    text = plan.to_json()
    assert '"hidden": "0-2,5"' in text
    assert PrunePlan.from_json(text) == plan
    assert plan.removed_layers == (1,)
    assert plan.removed_hidden == (3, 4, 6, 7)
    assert plan.kept_layers == (0, 2)
    assert not plan.is_uniform
    assert not plan.is_identity
    assert IDENTITY.is_identity
    assert "2 of 3 layers" in plan.summary()
    assert "FFN 3-6 of 6" in plan.summary()


def test_uneven_query_heads_name_the_layer() -> None:
    plan = IDENTITY.with_layer(1, query_heads=[0, 1, 2])
    with pytest.raises(PlanError, match=r"layer 1: every kept KV head needs equally many query heads"):
        plan.validate()


def test_a_query_head_without_its_kv_head_is_refused() -> None:
    with pytest.raises(PlanError, match="query head 2 reads KV head 1, which is removed"):
        IDENTITY.with_layer(0, query_heads=[0, 2], kv_heads=[0]).validate()


def test_a_kv_head_without_query_heads_is_refused() -> None:
    with pytest.raises(PlanError, match="KV head 1: 0"):
        IDENTITY.with_layer(0, query_heads=[0, 1], kv_heads=[0, 1]).validate()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (IDENTITY.keep_hidden([]), "no hidden channel is left"),
        (IDENTITY.keep_hidden([0, 8]), "are outside 0..7"),
        (IDENTITY.drop_layers([0, 1, 2]), "no layer is left"),
        (IDENTITY.with_layer(0, query_heads=[], kv_heads=[], ffn=[]), "drop the layer instead"),
        (HYBRID.with_layer(3, mamba_heads=[]), "drop the layer instead"),
        (IDENTITY.with_layer(0, ffn=[3, 3]), "ascending and unique"),
    ],
)
def test_what_leaves_nothing_or_leaves_the_model_is_refused(plan: PrunePlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.validate()


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"\[7\] are not in the plan"):
        IDENTITY.drop_layers([7])
    with pytest.raises(PlanError, match="Layer 7"):
        IDENTITY.with_layer(7, ffn=[0])


def changed_sizes(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """The dense sizes with one value changed, by its path below the only kind of layers."""
    sizes = IDENTITY.to_dict()["dense"]
    place = sizes["kinds"]["decoder"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return sizes


def changed_layer(**change: object) -> list[dict[str, Any]]:
    first, *rest = IDENTITY.to_dict()["layers"]
    return [first | change, *rest]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"version": 3},
        {"hidden": [0, 1]},
        {"hidden": "0-9"},
        {"dense": {}},
        {"dense": {"num_layers": "3"}},
        {"layers": [{"index": 0}]},
        {"layers": None},
        {"model_type": 3},
        {"model_type": "x" * 1000},
        {"dense": []},
        {"layers": {}},
        {"layers": [3]},
        {"hidden": "²"},
        {"hidden": "9" * 5000},
        {"dense": changed_sizes(("layers",), f"0-{10**30}")},
        {"dense": changed_sizes(("layers",), "1-3")},
        {"dense": changed_sizes(("layers",), "")},
        {"dense": changed_sizes(("blocks", "attention", "kv_heads"), 0)},
        {"dense": changed_sizes(("blocks", "attention", "kv_heads"), 3)},
        {"dense": changed_sizes(("blocks", "attention", "head_dim"), True)},
        {"dense": changed_sizes(("blocks", "attention"), {"query_heads": 4, "kv_heads": 2})},
        {"dense": changed_sizes(("blocks", "attention"), [])},
        {"dense": changed_sizes(("blocks", "other"), {"ffn": 3})},
        {"dense": {**IDENTITY.to_dict()["dense"], "kinds": {}}},
        {"layers": changed_layer(kind="other")},
        {"layers": changed_layer(kind=3)},
        {"layers": changed_layer(blocks=[])},
        {"layers": changed_layer(blocks={})},
        {"layers": changed_layer(blocks={"attention": {"query_heads": "0-3", "kv_heads": ""}})},
        {"layers": changed_layer(blocks={"mlp": {}})},
        {"layers": changed_layer(blocks={"mlp": []})},
        {"layers": IDENTITY.to_dict()["layers"][::-1]},
        {"layers": IDENTITY.to_dict()["layers"] * 2},
    ],
    ids=lambda change: str(change)[:60],
)
def test_damaged_plans_are_refused(change: dict[str, object]) -> None:
    data = IDENTITY.to_dict() | change
    with pytest.raises(PlanError) as caught:
        PrunePlan.from_json(json.dumps(data))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (["hiden"], "Did you mean 'hidden'"),
        (["dense", "hidden_sizes"], "Did you mean 'hidden_size'"),
        (["layers", 1, "block"], "Did you mean 'blocks'"),
        (["layers", 1, "blocks", "mpl"], "Did you mean 'mlp'"),
        (["layers", 1, "blocks", "mlp", "ffm"], "Did you mean 'ffn'"),
        (["x" * 100_000], "Unknown entry of the plan"),
    ],
    ids=["plan", "dense", "layer", "block", "axis", "long"],
)
def test_unknown_entries_are_refused_with_the_nearest_name(path: list[str | int], hint: str) -> None:
    data = json.loads(IDENTITY.to_json())
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "0-1"
    with pytest.raises(PlanError, match=hint) as caught:
        PrunePlan.from_dict(data)
    assert len(str(caught.value)) < 500


WIDE = {"num_layers": 500, "hidden_size": 10_000_000, "num_attention_heads": 10_000_000, "num_key_value_heads": 1,
        "head_dim": 1, "intermediate_size": 10_000_000, "vocab_size": 1}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dense", [WIDE, {**WIDE, "num_layers": 1}, json.loads(VERSION_1)["dense"]], ids=str)
@pytest.mark.parametrize("text", [",".join(["0-9999999"] * 500), "0-9999999"], ids=["500 ranges", "one range"])
def test_ranges_are_bounded_before_they_are_expanded(dense: dict[str, int], text: str, version: int) -> None:
    blocks = {"attention": {"query_heads": text, "kv_heads": text}, "mlp": {"ffn": text}}
    layers: list[dict[str, Any]] = [{"index": i} for i in range(dense["num_layers"])]
    for layer in layers:
        layer |= blocks["attention"] | blocks["mlp"] if version == 1 else {"kind": "decoder", "blocks": blocks}
    plan = {"version": version, "model_type": "llama", "dense": dense, "hidden": text, "layers": layers}
    tracemalloc.start()
    try:
        with pytest.raises(PlanError):
            PrunePlan.from_dict(plan)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_plan_of_version_1_is_read() -> None:
    plan = PrunePlan.from_json(VERSION_1)
    expected = IDENTITY.drop_layers([1]).keep_hidden([0, 1, 2, 5]).with_layer(0, query_heads=[], kv_heads=[])
    assert plan == expected.with_layer(2, query_heads=[2, 3], kv_heads=[1], ffn=[0, 1, 4])
    assert plan.to_dict()["version"] == 2
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert Sizes.from_dict(json.loads(VERSION_1)["dense"]) == SIZES == Sizes.from_dict(SIZES.to_dict())


@pytest.mark.parametrize("change", ['"kv_heads": "1", "ffn"', '"ffn"'], ids=["a KV head alone", "a missing axis"])
def test_a_damaged_plan_of_version_1_is_refused(change: str) -> None:
    text = VERSION_1.replace('"query_heads": "2-3", "kv_heads": "1", "ffn"', change)
    with pytest.raises(PlanError):
        PrunePlan.from_json(text)


def test_layers_of_different_kinds_have_their_own_sizes() -> None:
    dense = HYBRID.dense
    assert [list(dense.blocks(i)) for i in range(4)] == [
        ["mamba", "mlp"],
        ["attention", "mlp"],
        ["mamba", "mlp"],
        ["mamba"],
    ]
    assert [dense.units("ffn", i) for i in range(4)] == [6, 5, 6, 0]
    assert [dense.units("kv_heads", i) for i in range(4)] == [0, 2, 0, 0]
    assert (dense.num_attention_heads, dense.num_key_value_heads, dense.head_dim, dense.group_size) == (4, 2, 4, 2)
    with pytest.raises(UnsupportedModelError, match=r"different ffn \(5, 6\)"):
        _ = dense.intermediate_size
    assert HYBRID.summary() == (
        "4 of 4 layers, hidden 8 of 8, FFN 5-6 of 5-6, query heads 4 of 4, KV heads 2 of 2, mamba_heads 3 of 3"
    )
    assert str(dense).startswith("2 layers of mamba and mlp (ffn 6); 1 layers of attention (query_heads 4,")


def test_plans_of_different_kinds_of_layers_round_trip() -> None:
    plan = (
        HYBRID.with_layer(0, ffn=[1, 3])
        .with_layer(3, mamba_heads=[2])
        .with_layer(1, query_heads=[0, 2])
        .drop_layers([2])
    )
    plan.validate()
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert plan.layers[0].widths == (0, 0, 2)
    assert plan.layers[1].is_whole("mlp", plan.dense)
    assert not plan.layers[1].is_whole("attention", plan.dense)
    assert HYBRID.is_uniform
    assert HYBRID.drop_layers([0, 3]).is_uniform
    assert not plan.with_layer(0, ffn=[]).is_uniform


def test_a_closed_block_is_kept_without_units_and_removed_only_with_its_layer() -> None:
    plan = HYBRID.with_layer(0, ffn=[])
    plan.validate()
    assert plan.layers[0].blocks == {"mamba": {}}
    assert not plan.layers[0].keeps("mlp")
    assert HYBRID.layers[0].is_whole("mamba", HYBRID.dense)
    data = HYBRID.to_dict()
    del data["layers"][0]["blocks"]["mamba"]
    with pytest.raises(PlanError, match="layer 0: mamba has no axis; it is removed only with its whole layer"):
        PrunePlan.from_dict(data)
    HYBRID.drop_layers([0, 2]).validate()


def test_an_axis_without_units_removes_its_block_and_units_bring_it_back() -> None:
    without = IDENTITY.with_layer(1, query_heads=[])
    assert without.layers[1].blocks.keys() == {"mlp"}
    assert without == IDENTITY.with_layer(1, query_heads=[], kv_heads=[])
    assert without.with_layer(1, query_heads=range(4), kv_heads=range(2)) == IDENTITY
    assert list(without.with_layer(1, query_heads=range(4), kv_heads=range(2)).layers[1].blocks) == ["attention", "mlp"]
    with pytest.raises(PlanError, match="attention has query_heads, kv_heads; the plan names query_heads"):
        without.with_layer(1, query_heads=range(4)).validate()


@pytest.mark.parametrize(("plan", "axis"), [(IDENTITY, "ffm"), (HYBRID, "query_heads")], ids=["typo", "other kind"])
def test_an_axis_that_a_layer_does_not_have_is_refused(plan: PrunePlan, axis: str) -> None:
    with pytest.raises(PlanError, match=f"Unknown axis of layer 0 '{axis}'"):
        plan.with_layer(0, **{axis: [0]})


@pytest.mark.second
def test_a_plan_of_400_billion_parameters_is_read() -> None:
    plan = PrunePlan.identity("llama", Sizes.decoder(126, 16384, 128, 8, 128, 53248, 128256))
    assert PrunePlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}', "[" * 200_000, '{"version": ' + "9" * 9000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        PrunePlan.from_json(text)
