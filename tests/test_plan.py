from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyprune.errors import PlanError
from pyprune.plan import PrunePlan, Sizes, format_ranges, parse_ranges

SIZES = Sizes(3, 8, 4, 2, 4, 6, 10)
IDENTITY = PrunePlan.identity("llama", SIZES)


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
        (IDENTITY.keep_hidden([0, 8]), "lie outside 0..7"),
        (IDENTITY.drop_layers([0, 1, 2]), "no layer is left"),
        (IDENTITY.with_layer(0, query_heads=[], kv_heads=[], ffn=[]), "drop the layer instead"),
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


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
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
        {"dense": {**IDENTITY.to_dict()["dense"], "num_layers": 10**30}},
        {"dense": {**IDENTITY.to_dict()["dense"], "num_key_value_heads": 0}},
        {"dense": {**IDENTITY.to_dict()["dense"], "head_dim": True}},
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
        (["layers", 1, "ffm"], "Did you mean 'ffn'"),
        (["x" * 100_000], "Unknown entry of the plan"),
    ],
    ids=["plan", "dense", "layer", "long"],
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


@pytest.mark.parametrize("dense", [WIDE, {**WIDE, "num_layers": 1}, IDENTITY.to_dict()["dense"]], ids=str)
@pytest.mark.parametrize("text", [",".join(["0-9999999"] * 500), "0-9999999"], ids=["500 ranges", "one range"])
def test_ranges_are_bounded_before_they_are_expanded(dense: dict[str, int], text: str) -> None:
    layers = [{"index": i, "query_heads": text, "kv_heads": text, "ffn": text} for i in range(dense["num_layers"])]
    plan = {"version": 1, "model_type": "llama", "dense": dense, "hidden": text, "layers": layers}
    tracemalloc.start()
    try:
        with pytest.raises(PlanError):
            PrunePlan.from_dict(plan)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.second
def test_a_plan_of_400_billion_parameters_is_read() -> None:
    plan = PrunePlan.identity("llama", Sizes(126, 16384, 128, 8, 128, 53248, 128256))
    assert PrunePlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}', "[" * 200_000, '{"version": ' + "9" * 9000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        PrunePlan.from_json(text)
