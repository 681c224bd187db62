"""From scores to a plan: exact counts, ties, local and global ranking, goals, and models without weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from pyprune import make_plan
from pyprune.errors import ConfigError
from pyprune.families import check_plan, family_for, parameter_shapes, parameters_after
from pyprune.methods.base import PlanDecision, PlanRequest
from pyprune.methods.registry import get_method, read_config
from pyprune.methods.score.base import Scoring, decide_by_scores, make_ranking
from pyprune.methods.score.random import RandomOptions
from pyprune.run.recipe import build_config
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.paths import REPO
from tests._support.scores import NO_SAMPLES, decision_of, injected, options, scoring_of, share, widths


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize(
    "score",
    [
        {},
        {"ranking": "local"},
        {"uniform": True},
        {"heads_unit": "query_head"},
        {"normalise": "size"},
        {"normalise": "axis", "ffn_multiple": 4},
        {"normalise": "layer", "ffn_multiple": 4, "iterations": 2},
        {"iterations": 3, "normalise": "size"},
        {"ranking": "local", "axes": ("ffn", "hidden")},
    ],
    ids=lambda s: "-".join(s) or "default",
)
def test_every_plan_is_valid_and_within_the_ratio(name: str, score: dict[str, Any]) -> None:
    model = tiny_model(name)
    # OPT's heads cannot go where a stock architecture is wanted, and its FFN holds 13 % only.
    ratio = 0.1 if score.get("uniform") else 0.15
    decided = decision_of(model, NO_SAMPLES, options("random", ratio, **score))
    plan = decided.plan
    check_plan(plan, family_for(model), model.config)
    removed = share(model, plan)
    assert 0 < removed <= ratio + 1e-12
    if score.get("uniform") or score == {"ranking": "local"}:
        # One more channel in every layer would be beyond the goal, whatever the heads' steps are.
        one_channel = family_for(model).plan(model.config)
        for layer in one_channel.layers:
            one_channel = one_channel.with_layer(layer.index, ffn=layer.ffn[1:])
        assert removed > ratio - share(model, one_channel)
    if score.get("uniform"):
        assert plan.is_uniform
        assert not any("No stock architecture fits although" in w for w in decided.warnings)
    if score.get("ffn_multiple"):
        assert all(layer.widths[2] % 4 == 0 for layer in plan.layers)


def test_global_ranking_removes_as_much_as_fits_and_nothing_more() -> None:
    model = tiny_model("llama")
    config = options("random", 0.13, axes=("ffn",))
    plan = make_plan(model, NO_SAMPLES, config)
    one_channel = 3 * 48 / sum(math.prod(s) for s in parameter_shapes(model).values())
    assert 0.13 - one_channel < share(model, plan) <= 0.13


def test_the_count_in_the_notes_is_the_compacted_models() -> None:
    model = tiny_model("qwen2")
    decision = injected(model, options(ratio=0.2, normalise="size"), {(0, "heads"): [1.0] * 6})
    left = parameters_after(family_for(model), parameter_shapes(model), decision.plan)
    assert f"{left:,} are kept" in decision.notes[0]
    assert decision.details["scores"]["share_removed"] == pytest.approx(share(model, decision.plan))


def test_ties_go_to_the_smaller_layer_then_heads_then_the_smaller_index() -> None:
    model = tiny_model("llama")
    group = 2 * 24 * 48 + 2 * 8 * 48
    total = sum(math.prod(s) for s in parameter_shapes(model).values())
    same: dict[tuple[int | None, str], list[float]] = {(i, "heads"): [1.0] * 6 for i in range(4)}
    same |= {(i, "ffn"): [3.0] * 40 for i in range(4)}
    one = injected(model, options(ratio=(group + 2 * 144 + 10) / total), same)
    assert one.plan.layers[0].kv_heads == (1,)
    assert one.plan.layers[0].ffn == tuple(range(2, 40))
    assert widths(one.plan)[1:] == [(6, 2, 40)] * 3
    assert injected(model, options(ratio=(group + 2 * 144 + 10) / total), same).plan == one.plan


def test_local_ranking_takes_the_same_count_from_each_layers_own_weakest() -> None:
    model = tiny_model("llama")
    ffn = {(i, "ffn"): [float((c + 10 * i) % 40) for c in range(40)] for i in range(4)}
    plan = injected(model, options(ratio=0.1, ranking="local", axes=("ffn",)), ffn).plan
    counts = {len(layer.ffn) for layer in plan.layers}
    assert len(counts) == 1
    gone = 40 - counts.pop()
    for i, layer in enumerate(plan.layers):
        assert set(range(40)) - set(layer.ffn) == {(c - 10 * i) % 40 for c in range(gone)}
    per_layer = 4 * 3 * 48
    assert share(model, plan) + per_layer / sum(math.prod(s) for s in parameter_shapes(model).values()) > 0.1


def test_global_ranking_compares_layers() -> None:
    model = tiny_model("llama")
    ffn = {(1, "ffn"): [1.0] * 40, (2, "ffn"): [2.0] * 40}
    plan = injected(model, options(ratio=0.1, axes=("ffn",)), ffn).plan
    assert [len(layer.ffn) for layer in plan.layers][0::3] == [40, 40]
    assert len(plan.layers[1].ffn) == 1, "one channel stays"
    assert 1 < len(plan.layers[2].ffn) < 40


def test_counts_are_exact_and_win_over_the_ratio() -> None:
    model = tiny_model("llama")
    decision = injected(model, options(ranking="local", heads=3, ffn=17, first_layer=1, last_layer=-2), {})
    assert widths(decision.plan) == [(6, 2, 40), (3, 1, 17), (3, 1, 17), (6, 2, 40)]
    assert "the ratio was not used" in decision.notes[0]


def test_uniform_opens_every_layer_and_says_so() -> None:
    decision = injected(tiny_model("llama"), options(first_layer=2, uniform=True), {})
    assert decision.plan.is_uniform
    assert not decision.plan.is_identity
    assert any("uniform" in note for note in decision.notes)


@pytest.mark.second
def test_uniform_takes_only_as_many_heads_as_a_stock_architecture_holds() -> None:
    """Qwen2-7B: 3584 is no multiple of 24 or 21 heads, so that a step of one KV group has no stock model."""
    model = meta_qwen2(hidden_size=3584, intermediate_size=18944)
    for ratio in (0.25, 0.6):
        decision = decision_of(model, NO_SAMPLES, options("random", ratio, uniform=True))
        heads = decision.plan.layers[0].widths[0]
        assert heads in (28, 14, 7)
        assert share(model, decision.plan) == pytest.approx(ratio, abs=1e-3)
        assert not any("No stock architecture fits although" in warning for warning in decision.warnings)
        unused = [warning for warning in decision.warnings if "axis heads is open and loses nothing" in warning]
        assert len(unused) == (heads == 28)
        assert all("fits no stock architecture" in warning for warning in unused)


def test_uniform_without_a_stock_architecture_warns() -> None:
    config = options("random", uniform=True, heads=21, ffn=30)
    decision = decision_of(meta_qwen2(hidden_size=56, intermediate_size=40), NO_SAMPLES, config)
    assert any("No stock architecture fits" in warning for warning in decision.warnings)


def test_every_round_s_warnings_are_kept_and_zeros_are_counted_among_what_is_left() -> None:
    model = tiny_model("llama")

    def scorer(run: Scoring) -> None:
        for layer in run.scope.layers:
            values = torch.arange(40.0)
            values[: 25 if not run.masked else 10] = 0.0
            run.add_units(layer, "ffn", values)
        run.warn("first" if not run.masked else "later")

    config = options(axes=("ffn",), ranking="local", ffn=20, iterations=2)
    decision = decide_by_scores(scorer, model, tiny_batch(), PlanRequest.of(model, config))
    texts = list(decision.warnings)
    assert [t for t in texts if "first" in t or "later" in t] == ["Round 1: first", "Round 2: later"]
    assert [t for t in texts if "exactly zero" in t] == [
        "Round 1: 62.5% of the ffn scores are exactly zero; their order is only the tie-break."
    ]


def test_a_product_of_zero_leaves_the_record_valid_json() -> None:
    model = tiny_model("llama")
    scores: dict[tuple[int | None, str], list[float]] = {(0, "ffn"): [0.0] * 5 + [1.0] * 35}
    decision = injected(model, options(ratio=0.1, axes=("ffn",), aggregation="prod"), scores)
    assert decision.details["scores"]["group_scores"]["ffn"]["smallest"] is None
    json.dumps(decision.details, allow_nan=False)


def test_a_single_kv_head_that_must_stay_is_named() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, intermediate_size=64,
                        vocab_size=64, num_hidden_layers=2)
        )  # fmt: skip
    with pytest.raises(ConfigError, match="heads_unit=query_head"):
        make_plan(model, NO_SAMPLES, options("random", 0.2, axes=("heads",)))


def test_the_last_unit_stays_unless_an_empty_block_is_allowed() -> None:
    model = tiny_model("llama")
    weak: dict[tuple[int | None, str], list[float]] = {(2, "heads"): [1.0] * 6, (2, "ffn"): [0.001] * 40}
    kept = injected(model, options(ratio=0.2, normalise="size"), weak).plan
    assert {layer.index: layer for layer in kept.layers}[2].widths == (3, 1, 1)
    skipped = injected(model, options(ratio=0.12, normalise="size", allow_empty=True), weak).plan
    assert {layer.index: layer for layer in skipped.layers}[2].ffn == ()
    whole = injected(model, options(ratio=0.2, normalise="size", allow_empty=True), weak).plan
    assert 2 not in whole.kept_layers
    check_plan(whole, family_for(model), model.config)


def test_an_iterative_run_keeps_what_earlier_rounds_removed() -> None:
    model = tiny_model("llama")
    rounds: list[PlanDecision] = []
    seen: list[float] = []

    def scorer(run: Scoring) -> None:
        weight = run.model.model.layers[0].mlp.up_proj.weight.detach()
        seen.append(float((weight == 0).all(1).sum()))
        # The second round likes what the first removed: it must stay removed all the same.
        values = torch.arange(40.0) if not run.masked else torch.arange(40.0).flip(0)
        for layer in run.scope.layers:
            run.add_units(layer, "ffn", values)

    config = options(axes=("ffn",), ranking="local", ffn=30, iterations=2)
    rounds.append(decide_by_scores(scorer, model, tiny_batch(), PlanRequest.of(model, config)))
    assert seen == [0.0, 5.0]
    assert rounds[0].plan.layers[0].ffn == tuple(range(5, 35))


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gemma3"])
@pytest.mark.parametrize("score", [{"ranking": "local"}, {"uniform": True}, {"aggregation": "prod"}, {}], ids=str)
def test_nothing_that_a_round_removed_comes_back(name: str, score: dict[str, Any]) -> None:
    """Whatever the later scores say, and also where a KV head is affordable in a late round only."""
    model = tiny_model(name)
    for ratio in (0.15, 0.22, 0.29):
        config = options("random", ratio, **score)
        ranking = make_ranking(model, PlanRequest.of(model, config))
        plan, one_shot = ranking.identity, decision_of(model, NO_SAMPLES, config).plan
        for number in range(1, 6):
            run = scoring_of(model, NO_SAMPLES, config, masked=number > 1)
            run.request = replace(run.request, options=RandomOptions(seed=number))
            get_method("random").scorer(run)
            after = ranking.plan(run.scores, plan, Fraction(number, 5))
            kept = {layer.index: layer for layer in plan.layers}
            for layer in after.layers:
                assert set(layer.ffn) <= set(kept[layer.index].ffn)
                assert set(layer.query_heads) <= set(kept[layer.index].query_heads)
            plan = after
        if ranking.score.is_local:
            assert widths(plan) == widths(one_shot)


def test_a_zero_product_does_not_bring_back_what_went_before() -> None:
    """Both score minus infinity."""
    model = tiny_model("llama")
    config = options(ratio=0.1, axes=("ffn",), aggregation="prod", layers=(0, 1))
    ranking = make_ranking(model, PlanRequest.of(model, config))
    before = ranking.identity
    for number, zeros in enumerate((range(30, 40), range(20)), start=1):
        run = scoring_of(model, NO_SAMPLES, config)
        values = torch.ones(40)
        values[list(zeros)] = 0.0
        for layer in (0, 1):
            run.add_units(layer, "ffn", values)
        after = ranking.plan(run.scores, before, Fraction(number, 2))
        assert all(set(new.ffn) < set(old.ffn) for new, old in zip(after.layers[:1], before.layers, strict=False))
        before = after


def test_standardised_scores_of_a_bundle_are_averaged() -> None:
    """Eight weak channels together are no weaker than each: a head of score -2 goes before them."""
    model = tiny_model("llama")
    heads, channels = [-2.0, -2.0, -2.0, 3, 3, 3], [-1.0] * 16 + [1.0] * 24

    def scorer(run: Scoring) -> None:
        run.scores.standardised = True
        for layer in run.scope.layers:
            run.add_units(layer, "heads", torch.tensor(heads))
            run.add_units(layer, "ffn", torch.tensor(channels))

    config = options(ratio=0.1, ffn_multiple=8, aggregation="mean")
    plan = decide_by_scores(scorer, model, tiny_batch(), PlanRequest.of(model, config)).plan
    assert [len(layer.query_heads) for layer in plan.layers].count(3) >= 2
    assert [len(layer.ffn) for layer in plan.layers] == [40] * len(plan.layers)


@pytest.mark.parametrize("score", [{"uniform": True}, {"ranking": "local"}], ids=str)
def test_a_kv_head_goes_where_the_channels_alone_cannot_reach_the_goal(score: dict[str, Any]) -> None:
    model = tiny_model("qwen3")
    decided = decision_of(model, NO_SAMPLES, options("random", 0.3, **score))
    assert share(model, decided.plan) > 0.29
    assert decided.plan.layers[0].widths[1] == 1
    assert not any("WERE ASKED FOR" in text.upper() for text in decided.warnings)


def test_a_plan_far_below_the_goal_is_warned_of() -> None:
    decided = decision_of(
        tiny_model("llama"), NO_SAMPLES, options("random", 0.1, axes=("ffn",), ranking="local", ffn_multiple=16)
    )
    assert any("every further step is larger" in text for text in decided.warnings)


def test_the_warning_of_a_global_order_says_what_ended_it() -> None:
    """Channels would fit; the KV group that comes next does not, and the order is not left."""
    model = tiny_model("llama")
    scores: dict[tuple[int | None, str], list[float]] = {(i, "heads"): [1.0] * 6 for i in range(4)}
    warnings = injected(model, options(ratio=0.06), scores).warnings
    (text,) = (text for text in warnings if text.startswith("Only"))
    assert "the next unit in the order of the scores is larger" in text
    assert "score.heads_unit=query_head" in text
    assert "the ranking 'local'" in text


@pytest.mark.parametrize(
    ("changes", "score", "words"),
    [
        ({"ratio": 0.9}, {}, "cannot be reached"),
        ({"ratio": 0.9}, {"ranking": "local"}, "cannot be reached"),
        ({"ratio_of": "layers"}, {}, "use parameters, or give counts"),
        ({}, {"ranking": "local", "heads": 6, "ffn": 4000}, "score.ffn is 4000"),
    ],
)
def test_a_goal_that_no_scores_can_reach_is_refused_before_scoring(
    changes: dict[str, Any], score: dict[str, Any], words: str
) -> None:
    def scorer(run: Scoring) -> None:
        pytest.fail("scored")

    config, model = replace(options(**score), **changes), tiny_model("llama")
    with pytest.raises(ConfigError, match=words):
        decide_by_scores(scorer, model, tiny_batch(), PlanRequest.of(model, config))


@pytest.mark.parametrize("score", [{"layers": (1,)}, {"first_layer": 1}, {"last_layer": 2}], ids=str)
def test_the_hidden_axis_has_no_open_layers(score: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which all layers share"):
        make_plan(tiny_model("llama"), NO_SAMPLES, options("random", axes=("hidden",), **score))


def test_query_heads_of_a_group_go_in_equal_numbers() -> None:
    model = tiny_model("llama")
    scores: dict[tuple[int | None, str], list[float]] = {(0, "heads"): [5.0, 1, 9, 8, 8, 0]}
    config = options(axes=("heads",), heads_unit="query_head", ranking="local", heads=4, layers=(0,))
    assert injected(model, config, scores).plan.layers[0].query_heads == (0, 2, 3, 4)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ({"ranking": "local", "heads": 4, "ffn": 30}, "score.heads is 4; this model allows 6, 3"),
        ({"ranking": "local", "heads": 6, "ffn": 40}, "keep everything"),
        ({"ranking": "local", "ffn": 37, "ffn_multiple": 8, "axes": ("ffn",)}, "this model allows 40, 32, 24, 16, 8"),
        ({"first_layer": 3, "last_layer": 1}, "no range"),
        ({"layers": (1, 9)}, "names \\[9\\]"),
        ({"axes": ("ffn",), "layers": (1,)}, "cannot be reached"),
    ],
)
def test_goals_that_do_not_fit_are_refused(score: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        injected(tiny_model("llama"), options(**score), {})


def test_a_ratio_too_small_for_one_unit_names_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"removes nothing; the smallest step is 0\.00"):
        injected(tiny_model("llama"), options(ratio=0.0005), {})


def test_other_units_of_the_ratio_are_refused() -> None:
    config = replace(options(), ratio_of="layers")
    with pytest.raises(ConfigError, match="use parameters"):
        injected(tiny_model("llama"), config, {})


def test_the_hidden_axis_takes_its_own_unit_of_the_ratio() -> None:
    model = tiny_model("llama")
    config = replace(options(axes=("hidden",), ratio=0.25), ratio_of="hidden")
    decision = injected(model, config, {(None, "hidden"): [float(c) for c in range(48)]})
    assert decision.plan.removed_hidden == tuple(range(8)), "12 channels, rounded to a multiple of 8 that stays"
    assert "rounded from 36 up to 40, a multiple of 8: 8 channels are removed instead of 12." in decision.notes[0]
    assert "asked for 25.00% of the hidden channels" in decision.notes[1]


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ({"axes": []}, "axes is empty"),
        ({"heads": 3}, "counts are given for"),
        ({"heads": 3, "ffn": 4}, "set ranking to local"),
        ({"axes": ["ffn", "hidden"]}, "cannot compare hidden"),
        ({"ranking": "local", "normalise": "size"}, "only a global ranking"),
        ({"aggregation": "prod", "normalise": "size"}, "kept as its logarithm"),
        ({"aggregation": "prod", "normalise": "axis"}, "kept as its logarithm"),
        ({"layers": [1], "first_layer": 1}, "one way of naming"),
        ({"iterations": 0}, "iterations is 0"),
        ({"axes": ["head"]}, "Did you mean 'heads'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(score: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({"method": "random", "stages": {"before": []}, "score": score})


@pytest.mark.parametrize(
    ("change", "words"),
    [({"gamma": 0.1}, "gamma must not exceed rho"), ({"draws": 0}, "draws is 0"), ({"tolerance": 2.0}, "tolerance is")],
)
def test_moreau_constants_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({"method": "moreau", "stages": {"before": []}, "moreau": change})


def test_a_scoring_method_with_a_regularise_stage_is_refused() -> None:
    for stages in ({"before": ["regularise"]}, {"before": [], "after": ["regularise"]}):
        with pytest.raises(ConfigError, match="regularises nothing"):
            read_config({"method": "moreau", "stages": stages})


# --- models without weights in memory ---


def meta_qwen2(**sizes: int) -> PreTrainedModel:
    config = Qwen2Config(num_attention_heads=28, num_key_value_heads=4, num_hidden_layers=4, vocab_size=64, **sizes)  # type: ignore[arg-type]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def meta_model(**sizes: int) -> PreTrainedModel:
    config = LlamaConfig(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, **sizes)  # type: ignore[arg-type]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


MODELS = {
    "llama-7b-moreau": ({"vocab_size": 32000, "intermediate_size": 11008}, 6_738_415_616, 5_422_977_024, 8256, 24),
    "llama3-8b-moreau-gs": (
        {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
        8_030_261_248,
        6_612_586_496,
        10752,
        6,
    ),
}


@pytest.mark.second
@pytest.mark.parametrize("recipe", list(MODELS))
def test_the_recipes_leave_exactly_the_papers_parameters(recipe: str) -> None:
    sizes, dense, left, ffn, kv_heads = MODELS[recipe]
    model = meta_model(**sizes)
    config = build_config(recipe=REPO / f"recipes/llama/{recipe}.yaml")
    assert config.recovery_data is not None
    assert (config.recovery_data.layout, config.recovery_data.mask_prompt) == ("instructions", True)
    assert config.recovery_data.samples == 49_000
    # No weights, no scores: random ones stand in; the rest of the way is the recipe's own.
    plan = make_plan(model, NO_SAMPLES, replace(config, method="random", options=RandomOptions()))
    shapes = parameter_shapes(model)
    assert sum(math.prod(s) for s in shapes.values()) == dense
    assert parameters_after(family_for(model), shapes, plan) == left
    untouched = (32, sizes.get("num_key_value_heads", 32), sizes["intermediate_size"])
    assert [w == untouched for w in widths(plan)] == [i < 4 or i > 29 for i in range(32)]
    assert set(widths(plan)[4:30]) == {(24, kv_heads, ffn)}


@pytest.mark.second
def test_a_global_ranking_of_a_model_without_weights_is_exact_too() -> None:
    model = meta_model(vocab_size=32000, intermediate_size=11008)
    config = options("random", 0.2, first_layer=4, last_layer=29, normalise="size")
    plan = make_plan(model, NO_SAMPLES, config)
    removed = share(model, plan)
    assert 0.2 - 3 * 4096 / 6_738_415_616 - 4 * 128 * 4096 / 6_738_415_616 < removed <= 0.2
    assert not plan.is_uniform
