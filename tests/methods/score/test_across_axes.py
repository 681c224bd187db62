"""Heads and channels in one order: what each normalisation compares, and what is said of an axis that loses nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pyprune.families import parameter_shapes
from pyprune.methods.score.base import make_ranking
from tests._support.models import tiny_model
from tests._support.scores import NO_SAMPLES, Scores, decision_of, injected, options, scoring_of, widths


def test_normalise_size_ranks_by_score_per_parameter() -> None:
    model = tiny_model("llama")
    # A KV group has 3,072 parameters and a channel 144: 21 times fewer.
    scores: Scores = {
        (0, "heads"): [1.0, 1, 1, 900, 900, 900],
        (0, "ffn"): [1.0] * 40,
    }
    plain = injected(model, options(ratio=0.05), scores).plan
    assert widths(plain)[0][:2] == (3, 1) or len(plain.layers[0].ffn) < 40
    assert plain.layers[0].ffn == tuple(range(len(range(40)) - len(plain.layers[0].ffn), 40))
    sized = injected(model, options(ratio=0.05, normalise="size"), scores).plan
    assert sized.layers[0].kv_heads == (1,)
    assert plain.layers[0].kv_heads == (0, 1)


def test_normalise_size_divides_each_bundle_by_its_own_parameters() -> None:
    model = tiny_model("llama")
    # 40 channels in bundles of 8, 16 and 16; a KV group is worth just more per parameter than any of them.
    scores: Scores = {(i, "ffn"): [144.0] * 40 for i in range(4)}
    scores |= {(i, "heads"): [3072 / 3 * 1.01] * 6 for i in range(4)}
    plan = injected(model, options(ratio=0.1, normalise="size", ffn_multiple=16), scores).plan
    assert all(layer.widths[0] == 6 for layer in plan.layers)
    assert {layer.widths[2] for layer in plan.layers} <= {40, 32, 16}
    assert any(layer.widths[2] == 16 for layer in plan.layers), "a whole bundle is worth no more than the short one"


def rising(low: float, units: int) -> list[float]:
    return [low * (1 + i) for i in range(units)]


def test_normalise_axis_does_not_see_the_scale_of_an_axis() -> None:
    """Heads a million times the channels: raw sums never remove one, shares of the axis's mean remove the same."""
    model = tiny_model("llama")
    scores: Scores = {(i, "ffn"): rising(i + 1.0, 40) for i in range(4)}
    heads = {(i, "heads"): [1.0 + i] * 3 + [9.0] * 3 for i in range(4)}
    larger = {place: [1e6 * value for value in values] for place, values in heads.items()}
    one, other = (injected(model, options(ratio=0.2, normalise="axis"), scores | h).plan for h in (heads, larger))
    assert one == other
    assert 0 < sum(2 - len(layer.kv_heads) for layer in one.layers) < 4
    raw = injected(model, options(ratio=0.1), scores | larger).plan
    assert all(len(layer.kv_heads) == 2 for layer in raw.layers)


def test_normalise_axis_divides_by_the_mean_over_all_open_layers() -> None:
    """Layer 1 is closed and does not count."""
    model = tiny_model("llama")
    scores: Scores = {(i, "ffn"): [value] * 40 for i, value in ((0, 1.0), (2, 2.0), (3, 3.0))}
    scores |= {(i, "heads"): [value] * 6 for i, value in ((0, 45.0), (2, 10.0), (3, 5.0))}
    run = scoring_of(model, NO_SAMPLES, options(normalise="axis", layers=(0, 2, 3)))
    for (layer, axis), values in scores.items():
        run.add_units(layer, axis, torch.tensor(values))
    ranking = make_ranking(model, run.request)
    orders = [ranking._order(run.scores, ranking.identity, *place) for place in run.scope.places]
    compared = dict(zip(((o.layer, o.axis) for o in orders), ranking._normalise(orders), strict=True))
    # A KV group sums three query heads; the means are 60 for groups and 2 for channels.
    assert compared[0, "heads"] == pytest.approx([135 / 60] * 2)
    assert compared[0, "ffn"] == pytest.approx([1 / 2] * 40)
    assert compared[2, "heads"] == pytest.approx([30 / 60] * 2)
    assert compared[3, "ffn"] == pytest.approx([3 / 2] * 40)


def test_normalise_layer_divides_by_the_mean_of_each_layer_and_axis() -> None:
    """Whatever the layers' scales, the weaker half of every layer's channels goes before the stronger one of any."""
    model = tiny_model("llama")
    scores: Scores = {(i, "ffn"): [10.0**i] * 20 + [3 * 10.0**i] * 20 for i in range(4)}
    scores |= {(i, "heads"): [10.0**i] * 3 + [1.5 * 10.0**i] * 3 for i in range(4)}
    total = sum(math.prod(s) for s in parameter_shapes(model).values())
    half, group = 4 * 20 * 144 / total, 3072 / total
    plan = injected(model, options(ratio=half, normalise="layer"), scores).plan
    assert widths(plan) == [(6, 2, 20)] * 4
    assert all(layer.ffn == tuple(range(20, 40)) for layer in plan.layers)
    more = injected(model, options(ratio=half + 1.01 * group, normalise="layer"), scores).plan
    assert [kv_heads for _, kv_heads, _ in widths(more)].count(1) == 1, (
        "a KV group at 0.8 of its layer's mean comes next"
    )


def test_normalise_axis_of_scores_that_are_all_zero_leaves_them() -> None:
    model = tiny_model("llama")
    scores: Scores = {(i, "heads"): [0.0] * 6 for i in range(4)}
    plan = injected(model, options(ratio=0.05, normalise="axis"), scores).plan
    assert widths(plan)[0] == (3, 1, 40)


def test_what_each_axis_loses_is_in_the_notes_and_the_record() -> None:
    model = tiny_model("llama")
    scores: Scores = {(1, "heads"): [1.0] * 6, (1, "ffn"): [2.0] * 20 + [9.0] * 20}
    decision = injected(model, options(ratio=0.1, layers=(1, 2)), scores)
    total = sum(math.prod(s) for s in parameter_shapes(model).values())
    lost = decision.details["scores"]["removed_by_axis"]
    channels = sum(40 - len(layer.ffn) for layer in decision.plan.layers)
    assert lost["heads"] == {
        "removed": 3, "open": 12, "share": pytest.approx(3072 / total), "removed_kv_groups": 1, "open_kv_groups": 4,
    }  # fmt: skip
    assert lost["ffn"] == {"removed": channels, "open": 80, "share": pytest.approx(channels * 144 / total)}
    assert sum(axis["share"] for axis in lost.values()) == pytest.approx(decision.details["scores"]["share_removed"])
    assert "3 of 12 query heads (1 of 4 KV groups)" in decision.notes[1]
    assert f"{channels} of 80 FFN channels" in decision.notes[1]
    assert not any("loses nothing" in text for text in decision.warnings)


@pytest.mark.parametrize(
    ("score", "weak", "axis", "words"),
    [
        ({}, "ffn", "heads", "score.normalise=layer; score.normalise=axis"),
        ({"normalise": "axis"}, "ffn", "heads", "score.normalise=layer; score.ranking=local"),
        ({}, "heads", "ffn", "score.axes=[heads]"),
        ({"aggregation": "prod"}, "ffn", "heads", "score.ranking=local"),
        ({"ranking": "local"}, "ffn", "heads", "one unit in every open layer"),
    ],
    ids=str,
)
def test_an_open_axis_that_loses_nothing_is_warned_of(score: dict[str, Any], weak: str, axis: str, words: str) -> None:
    model = tiny_model("llama")
    ratio = 0.02 if weak == "ffn" else 0.06
    values = {"heads": [1.0] * 6, "ffn": [0.01 + 2 * i for i in range(40)] if weak == "ffn" else [500.0] * 40}
    scores: Scores = {
        (i, name): values[name] if name == weak else [100.0] * len(values[name])
        for i in range(4)
        for name in ("heads", "ffn")
    }
    decision = injected(model, options(ratio=ratio, **score), scores)
    (text,) = (text for text in decision.warnings if "loses nothing" in text)
    assert text.startswith(f"The axis {axis} is open and loses nothing")
    assert words in text
    assert decision.details["scores"]["removed_by_axis"][axis]["removed"] == 0


def test_counts_that_keep_an_axis_are_no_reason_to_warn() -> None:
    decision = injected(tiny_model("llama"), options(ranking="local", heads=6, ffn=30), {})
    assert not any("loses nothing" in text for text in decision.warnings)


def test_the_one_kv_head_that_has_to_stay_is_why_no_head_goes() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, intermediate_size=64,
                        vocab_size=64, num_hidden_layers=2)
        )  # fmt: skip
    decided = decision_of(model, NO_SAMPLES, options("random", 0.1))
    (text,) = (text for text in decided.warnings if "loses nothing" in text)
    assert "each layer has one KV head, which is kept" in text
    assert "score.heads_unit=query_head; score.allow_empty=true" in text
