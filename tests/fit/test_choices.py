"""What layers may become, and which units stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyprune.errors import BudgetError, ConfigError
from pyprune.fit.choices import DROPPED, ChoiceOptions, LayerScores, Routers, Space, UnitScores
from pyprune.fit.quantities import Widths
from pyprune.fit.sizes import SizeRules
from pyprune.plan import BlockSizes, PrunePlan, Sizes, attention_and_mlp

DENSE = Sizes.decoder(3, 32, 6, 3, 8, 96, 64)
IDENTITY = PrunePlan.identity("llama", DENSE)


def _scores(hidden: tuple[float, ...] = ()) -> UnitScores:
    layer = LayerScores((3.0, 1.0, 2.0), (1.0, 2.0, 0.2, 0.8, 1.5, 0.5), tuple(float(i % 7) for i in range(96)))
    return UnitScores((layer,) * 3, hidden, "planted")


def test_choices_are_legal_and_the_dense_one_is_first() -> None:
    layer = Space.of(IDENTITY, ChoiceOptions(ffn_multiple=32, ffn_shares=(0.75, 0.5, 0.1))).layers[0]
    assert layer.heads == ((6, 3), (4, 2), (2, 1), (0, 0))
    assert layer.ffn == (96, 64, 32, 0)
    assert layer.widths[0] == Widths(6, 3, 96)
    assert layer.widths[-1] == DROPPED
    assert len(layer.widths) == len(set(layer.widths)) == 4 * 4  # nothing at all is the dropped layer, once


def test_query_heads_skips_and_kept_layers() -> None:
    options = ChoiceOptions(query_heads=True, skips=("mlp",), keep_first=1, keep_last=1, ffn_shares=())
    first, opened, last = Space.of(IDENTITY, options).layers
    assert first.widths == last.widths == (Widths(6, 3, 96),)
    assert opened.heads == ((6, 3), (4, 2), (3, 3), (2, 2), (2, 1), (1, 1))
    assert opened.ffn == (96, 0)
    assert not opened.drop


BLOCKS = {**attention_and_mlp(6, 3, 8, 96), "mlp": BlockSizes({"ffn": 96, "experts": 8})}
MIXTURE = Sizes(32, 64, {"mixture": BLOCKS}, ("mixture",) * 2)


def test_mixtures_keep_as_many_experts_as_their_routers_need() -> None:
    identity = PrunePlan.identity("mixtral", MIXTURE)
    options = ChoiceOptions(ffn_shares=(0.5,), ffn_multiple=8, expert_shares=(0.8, 0.5, 0.1))
    layer = Space.of(identity, options, Routers(1, 2)).layers[0]
    assert layer.experts == (8, 6, 4, 2)
    assert layer.dense == Widths(6, 3, 96, "mixture", 8)
    assert layer.mixtures[1:] == layer.alone[-3:] == tuple(Widths(6, 3, 96, "mixture", n) for n in (6, 4, 2))
    skipped = [widths for widths in layer.widths if not widths.ffn]
    assert {widths.experts for widths in skipped} == {0}, "a skipped MLP has no experts"
    assert len(layer.widths) == len({*layer.widths}) == 4 * (2 * 4 + 1)  # as above, with DROPPED for nothing at all
    assert Space.of(identity, options, Routers(4, 4)).layers[0].experts == (8, 4)
    assert Space.of(identity, replace(options, keep_first=1)).layers[0].experts == (8,)


def test_experts_that_an_engine_cannot_hold_are_left_out() -> None:
    routers, identity = Routers(2, 2), PrunePlan.identity("mixtral", MIXTURE)

    def obstacle(plan: PrunePlan) -> str | None:
        kept = plan.layers[0].units("experts")
        assert sum(expert < 4 for expert in kept) * 2 == len(kept), "as many of each group"
        return "fewer than six" if len(kept) < 6 and plan.layers[0].ffn else None

    space = Space.of(identity, ChoiceOptions(skips=()), routers).drop_impossible(obstacle)
    assert [layer.experts for layer in space.layers] == [(8, 6), (8, 6, 4, 2)]


def test_the_experts_of_the_lowest_scores_go_first_in_each_group() -> None:
    one = LayerScores((1.0,) * 3, (1.0,) * 6, (1.0,) * 96, (5.0, 1.0, 2.0, 4.0, 8.0, 9.0, 6.0, 7.0))
    assert one.kept_experts(3) == (4, 5, 7)
    assert one.experts_removed(6) == 1.0 + 2.0
    two = replace(one, groups=2)
    assert two.kept_experts(4) == (0, 3, 4, 5)
    assert two.experts_removed(0) == sum(one.experts)
    scores = UnitScores((two, two))
    assert UnitScores.from_dict(scores.to_dict(), MIXTURE) == scores
    plan = scores.plan(PrunePlan.identity("mixtral", MIXTURE), {1: Widths(6, 3, 96, "mixture", 4)})
    assert plan.layers[1].units("experts") == (0, 3, 4, 5)
    with pytest.raises(BudgetError, match="other sizes"):
        UnitScores.from_dict(UnitScores((replace(one, experts=()),) * 2).to_dict(), MIXTURE)


def test_rules_of_the_target_are_kept() -> None:
    rules = SizeRules(ffn_multiple=64, query_heads_multiple=4, kv_heads_multiple=2)
    options = ChoiceOptions(ffn_shares=(0.75, 0.4)).with_rules(rules)
    layer = Space.of(IDENTITY, options).layers[0]
    assert layer.heads == ((6, 3), (4, 2), (0, 0))
    assert layer.ffn == (96, 64, 0)


def test_few_head_counts_are_spread() -> None:
    wide = PrunePlan.identity("llama", Sizes.decoder(1, 32, 32, 32, 8, 96, 64))
    heads = Space.of(wide, ChoiceOptions(head_counts=4)).layers[0].heads
    assert [kv for _, kv in heads] == [32, 22, 11, 1, 0]


def test_what_an_engine_cannot_hold_is_left_out() -> None:
    def obstacle(plan: PrunePlan) -> str:
        skipped = [layer.index for layer in plan.layers if not layer.query_heads]
        return "no attention in the first layer" if 0 in skipped or 0 in plan.removed_layers else ""

    space = Space.of(IDENTITY).drop_impossible(obstacle)
    assert (0, 0) not in space.layers[0].heads
    assert not space.layers[0].drop
    assert (0, 0) in space.layers[1].heads
    assert space.layers[1].drop


def test_a_layer_stays_that_the_next_one_s_choices_need() -> None:
    def obstacle(plan: PrunePlan) -> str:
        return "" if plan.layers[0].query_heads else "no attention in the first layer"

    space = Space.of(IDENTITY).drop_impossible(obstacle)
    assert [layer.drop for layer in space.layers] == [False, True, True]
    assert [(0, 0) in layer.heads for layer in space.layers] == [False, True, True]
    whole = Space.of(IDENTITY, ChoiceOptions(skips=("mlp", "layer"))).drop_impossible(obstacle)
    assert all(layer.drop for layer in whole.layers), "where no attention is skipped, layer 0 may go"


def test_hidden_sizes_that_cannot_be_held_are_left_out() -> None:
    options = ChoiceOptions(hidden=(24, 20, 16))
    space = Space.of(IDENTITY, options).drop_impossible(lambda plan: "odd" if len(plan.hidden) % 8 else None)
    assert space.hidden == (32, 24, 16)


def test_hidden_sizes_that_run_slowly_are_refused_with_the_next_ones() -> None:
    rules = SizeRules.of("bfloat16")
    assert ChoiceOptions(hidden=(512, 448)).with_rules(rules).hidden == (512, 448)
    with pytest.raises(ConfigError, match="names 500, where multiples of 64 run well; use 448, 512, or keep_"):
        ChoiceOptions(hidden=(512, 500)).with_rules(rules)


@pytest.mark.parametrize("options", [ChoiceOptions(keep_first=2, keep_last=2), ChoiceOptions(hidden=(64,))])
def test_choices_that_the_model_does_not_have(options: ChoiceOptions) -> None:
    with pytest.raises(ConfigError, match=r"more than the model's|which is the largest"):
        Space.of(IDENTITY, options)


def test_the_lowest_scores_go_first() -> None:
    plan = _scores().plan(IDENTITY, {0: Widths(2, 2, 3), 1: DROPPED})
    assert plan.kept_layers == (0, 2)
    kept = plan.layers[0]
    assert kept.kv_heads == (0, 2)  # 1 has the lowest score
    assert kept.query_heads == (1, 4)  # the better one of each kept pair
    assert kept.ffn == (83, 90, 76)[:0] + tuple(sorted((83, 90, 76)))  # of equal scores the smaller index goes first
    assert plan.layers[1] == IDENTITY.layers[2]
    plan.validate()


def test_what_goes_is_summed() -> None:
    layer = _scores().layers[0]
    assert layer.attention_removed(6, 3) == 0
    assert layer.attention_removed(4, 2) == 1.0
    assert layer.attention_removed(2, 2) == pytest.approx(1.0 + 1.0 + 0.5)
    assert layer.attention_removed(0, 0) == 6.0
    assert layer.ffn_removed(96) == 0
    assert layer.ffn_removed(0) == pytest.approx(sum(layer.ffn))


def test_hidden_channels() -> None:
    plan = _scores(tuple(float(32 - i) for i in range(32))).plan(IDENTITY, {}, 8)
    assert plan.hidden == tuple(range(8))
    with pytest.raises(BudgetError, match="hidden size 8"):
        _scores().plan(IDENTITY, {}, 8)


def test_scores_are_read_back_and_those_of_other_sizes_refused() -> None:
    scores = _scores()
    assert UnitScores.from_dict(scores.to_dict(), DENSE) == scores
    with pytest.raises(BudgetError, match="other sizes"):
        UnitScores.from_dict(scores.to_dict(), Sizes.decoder(3, 32, 6, 3, 8, 100, 64))
    with pytest.raises(BudgetError, match="damaged"):
        UnitScores.from_dict({"layers": [{}]}, DENSE)
