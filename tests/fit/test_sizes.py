"""Widths that run well: defaults, what a profile teaches, and that every layer is looked at."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from pyprune.errors import ConfigError
from pyprune.fit.formats import WEIGHT_FORMATS
from pyprune.fit.profile import Product
from pyprune.fit.sizes import FFN_MULTIPLES, FITTED_RULES, SizeRules, fast_multiple, slow_sizes
from pyprune.plan import PrunePlan, Sizes
from tests.fit._profiles import fake_profile

DENSE = Sizes.decoder(6, 512, 8, 4, 64, 1500, 1000)
PLAN = PrunePlan.identity("llama", DENSE)


@pytest.mark.parametrize(
    ("target", "multiple"), [("bfloat16", 64), ("fp8", 128), ("w4a16", 32), ("q8_0", 32), ("q4_k", 256)]
)
def test_defaults_by_target(target: str, multiple: int) -> None:
    assert SizeRules.of(target).ffn_multiple == multiple
    of_each = 128 if target == "w4a16" else multiple  # whole groups of inputs that share a scale
    assert SizeRules.of(target, tensor_parallel=2).ffn_multiple == 2 * of_each
    assert SizeRules.of(target, tensor_parallel=2).kv_heads_multiple == 2


def test_every_format_of_weights_has_defaults() -> None:
    assert set(WEIGHT_FORMATS) == set(FFN_MULTIPLES)


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        SizeRules.of("bfloat")
    with pytest.raises(ConfigError, match="tensor_parallel is 0"):
        SizeRules.of(tensor_parallel=0)
    with pytest.raises(ConfigError, match="ffn_multiple is 0"):
        SizeRules(ffn_multiple=0)
    with pytest.raises(ConfigError, match="hidden_multiple is -8"):
        SizeRules(hidden_multiple=-8)


def test_each_layer_is_named_and_not_the_global_width() -> None:
    plan = PLAN.with_layer(1, ffn=range(1001)).with_layer(3, ffn=range(1001)).with_layer(4, ffn=range(1024))
    assert slow_sizes(plan.drop_layers([0]), SizeRules()) == ["layers 1,3: 1001 FFN channels are not a multiple of 64."]
    assert slow_sizes(PLAN, SizeRules()) == []


def test_heads_pairs_and_hidden_are_held_against_the_rules() -> None:
    plan = PLAN.with_layer(2, query_heads=range(6), kv_heads=range(3)).keep_hidden(range(500))
    found = slow_sizes(plan, replace(SizeRules.of(tensor_parallel=2), max_head_pairs=1))
    assert found == [
        "hidden size 500 is not a multiple of 64.",
        "layer 2: 3 KV heads are not a multiple of 2.",
        "2 different pairs of query and KV heads; at most 1 run well.",
    ]
    assert slow_sizes(plan, SizeRules(hidden_multiple=4)) == []


def test_skipped_blocks_have_no_width() -> None:
    plan = PLAN.with_layer(2, query_heads=[], kv_heads=[]).with_layer(3, ffn=[])
    assert slow_sizes(plan, replace(SizeRules(), max_head_pairs=1)) == []


def test_config_json_is_read_layer_by_layer() -> None:
    config: dict[str, Any] = {
        "model_type": "pruned_llama",
        "num_hidden_layers": 3,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
        "per_layer_config": {"1": {"intermediate_size": 777}, "2": {"skip": ["attention"], "intermediate_size": 640}},
    }
    assert slow_sizes(config, SizeRules()) == ["layer 1: 777 FFN channels are not a multiple of 64."]


def _products(seconds: dict[int, float]) -> tuple[Product, ...]:
    return tuple(Product(m, 1000 + m, per_column * (1000 + m)) for m, per_column in seconds.items() for _ in range(3))


def test_the_smallest_multiple_that_is_fast_enough_is_learnt() -> None:
    assert fast_multiple(_products({1: 1.5, 8: 1.1, 16: 1.015, 32: 1.0, 64: 1.0})) == 16
    assert fast_multiple(_products({1: 1.0, 64: 1.0})) == 1
    assert fast_multiple(()) is None
    profile = fake_profile()
    learnt = SizeRules.learn(replace(profile, products=_products({1: 2.0, 8: 1.2, 16: 1.0, 64: 1.0})))
    assert learnt.ffn_multiple == 16
    assert SizeRules.learn(replace(profile, products=())).ffn_multiple == 64


def test_blocks_of_the_format_stay_whatever_torch_is_fast_at() -> None:
    profile = replace(fake_profile(), engine="llamacpp", dtype="q8_0", products=_products({1: 1.0, 64: 1.0}))
    assert SizeRules.learn(profile).ffn_multiple == 32


def test_rules_of_a_search_hold_in_its_format_and_where_they_are_whole() -> None:
    fit = {"weights": "bfloat16", FITTED_RULES: {**asdict(SizeRules(ffn_multiple=8)), "of a later release": 1}}
    rules = SizeRules.read(fit, "bfloat16")
    assert rules is not None
    assert rules.ffn_multiple == 8
    assert SizeRules.read(fit, "q8_0") == SizeRules.of("q8_0")
    assert SizeRules.read(fit, "of no target") is None
    for damaged in (None, [8], {"ffn_multiple": "8"}, {"ffn_multiple": 0}):
        assert SizeRules.read({**fit, FITTED_RULES: damaged}, "bfloat16") == SizeRules.of("bfloat16")
