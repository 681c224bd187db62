"""Losses of single blocks: planted cases, the interpolation between anchors, and the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.cut.mask import masked
from pyprune.errors import BudgetError, DataError
from pyprune.families import family_for
from pyprune.fit.choices import DROPPED, ChoiceOptions, LayerScores, LayerSpace, Space, UnitScores
from pyprune.fit.limits import Budget
from pyprune.fit.quantities import CostModel, Quantity, Widths
from pyprune.fit.solve import SolveOptions, solve
from pyprune.fit.trials import measure_losses, recommended_scores, score_units, weights_digest
from pyprune.fit.values import BlockLoss, BlockLosses, ValueOptions, anchors_of, monotone, search_of
from tests._support.models import one_of_each, tiny_model

DENSE = Widths(6, 2, 40)
CHOICES = ChoiceOptions(ffn_multiple=8, ffn_shares=(0.8, 0.4))
PLAIN = ValueOptions(stride=2, reconstruct=False)
SOLVED = ValueOptions(stride=2)


def _text(count: int = 12, length: int = 32) -> Tensor:
    return torch.randint(3, 384, (count, length), generator=torch.Generator().manual_seed(1))


def _space(model: PreTrainedModel, options: ChoiceOptions = CHOICES) -> Space:
    return Space.of(family_for(model).plan(model.config), options)


def _only(space: Space, *layers: int) -> Space:
    """The same where only these layers may change."""
    whole = LayerSpace(space.layers[0].heads[:1], space.layers[0].ffn[:1], False)
    return replace(space, layers=tuple(x if i in layers else whole for i, x in enumerate(space.layers)))


def _flat(space: Space) -> UnitScores:
    sizes = space.identity.dense
    layer = LayerScores(
        (1.0,) * sizes.num_key_value_heads, (1.0,) * sizes.num_attention_heads, (1.0,) * sizes.intermediate_size
    )
    return UnitScores((layer,) * sizes.num_layers, tuple(float(i) for i in range(sizes.hidden_size)))


def _by_place(losses: BlockLosses) -> dict[tuple[int | None, Widths], float]:
    return {(entry.layer, entry.widths): entry.kl for entry in losses.entries}


@pytest.mark.parametrize("name", one_of_each())
def test_every_family_is_measured_and_comes_back_as_it_was(name: str) -> None:
    model = tiny_model(name)
    space = _only(_space(model), 0, 3)
    before = weights_digest(model)
    losses = measure_losses(model, space, _flat(space), _text(), SOLVED)
    assert weights_digest(model) == before
    assert len(losses.entries) == sum(len(anchors_of(layer, SOLVED)) for layer in space.layers)
    assert all(entry.kl > 0 for entry in losses.entries)
    assert search_of(losses, _flat(space), space).layers[1][0].loss == 0


@pytest.mark.parametrize("name", ["llama", "phi", "gemma3"])
def test_without_reconstruction_the_loss_is_that_of_the_masked_model(name: str) -> None:
    model = tiny_model(name)
    space = _only(_space(model), 1)
    scores = _flat(space)
    found = measure_losses(model, space, scores, _text(), replace(PLAIN, stride=1, judged=0.9))
    judged = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    for entry in found.entries:
        plan = scores.plan(space.identity, {1: entry.widths})
        with torch.no_grad():
            dense = model(_text()[judged]).logits[:, :-1].log_softmax(-1)
            with masked(model, plan):
                own = model(_text()[judged]).logits[:, :-1].log_softmax(-1)
        each = (dense.exp() * (dense - own)).sum(-1).mean(1)
        # The judged rows are all but one or two of these.
        assert each.min() <= entry.kl <= each.max()
        assert entry.kl == pytest.approx(float(each.mean()), rel=0.1)


def test_a_block_that_writes_nothing_costs_nothing_and_goes_first() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
    space = _space(model, replace(CHOICES, skips=("mlp",), ffn_shares=(), head_counts=1))
    losses = measure_losses(model, space, _flat(space), _text(), PLAIN)
    found = _by_place(losses)
    assert found[2, Widths(6, 2, 0)] == 0.0
    assert all(kl > 0.01 for (layer, _), kl in found.items() if layer != 2)

    class Costs(CostModel):
        def base(self, quantity: Quantity, hidden_size: int) -> float:
            return 0.0

        def layer(self, quantity: Quantity, hidden_size: int, widths: Widths) -> float:
            return 1.0 + widths.ffn

        def head_pair(self, quantity: Quantity) -> float:
            return 0.0

    (best,) = solve(search_of(losses, _flat(space), space), Budget.parse("parameters=90%"), Costs(), SolveOptions(1))
    assert [layer for layer, widths in enumerate(best.widths) if widths != DENSE] == [2]


def test_reconstruction_repairs_what_another_writer_can_do() -> None:
    """FFN channels 0-19 and 20-39 are the same, so that the writer of the half that stays can do all of the work."""
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[20:] = mlp.gate_proj.weight[:20]
        mlp.up_proj.weight[20:] = mlp.up_proj.weight[:20]
    space = _only(_space(model, ChoiceOptions(ffn_multiple=20, ffn_shares=(0.5,), skips=(), head_counts=1)), 1)
    scores = _flat(space)  # of equal scores the first channels go
    wide = _text(40)
    options = replace(SOLVED, ridges=(1e-6,))
    (plain,) = measure_losses(model, space, scores, wide, PLAIN).entries
    (solved,) = measure_losses(model, space, scores, wide, options).entries
    assert plain.widths == solved.widths == Widths(6, 2, 20)
    assert plain.kl > 0.02
    assert solved.kl < 1e-4


def test_a_smaller_hidden_size_is_measured_as_a_whole() -> None:
    model = tiny_model("llama")
    space = _only(_space(model, replace(CHOICES, hidden=(40, 8))), 0)
    before = weights_digest(model)
    losses = measure_losses(model, space, _flat(space), _text(), SOLVED)
    hidden = {entry.hidden_size: entry.kl for entry in losses.entries if entry.layer is None}
    assert weights_digest(model) == before
    assert 0 < hidden[40] < hidden[8]
    assert search_of(losses, _flat(space), space).hidden == {48: 0.0, **hidden}
    without = replace(losses, entries=tuple(entry for entry in losses.entries if entry.layer is not None))
    with pytest.raises(BudgetError, match=r"hidden sizes \[40, 8\]"):
        search_of(without, _flat(space), space)


def test_the_file_is_used_and_continued(tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "losses.jsonl"
    space = _only(_space(model), 1)
    first = measure_losses(model, space, _flat(space), _text(), SOLVED, path=path)
    assert first.reused == 0
    again = measure_losses(model, space, _flat(space), _text(), SOLVED, path=path)
    assert (again.entries, again.reused) == (first.entries, len(first.entries))
    # A killed run: the last lines are gone, one is torn.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:20])
    continued = measure_losses(model, space, _flat(space), _text(), SOLVED, path=path)
    assert continued.entries == first.entries
    assert continued.reused == len(first.entries) - 2
    # More anchors reuse what is there.
    wider = _only(_space(model), 1, 2)
    assert measure_losses(model, wider, _flat(wider), _text(), SOLVED, path=path).reused == len(first.entries)


def test_losses_of_layers_stay_known_when_hidden_sizes_are_tried(tmp_path: Path) -> None:
    """Those of a hidden size are of the channels that its scores keep."""
    model, path = tiny_model("llama"), tmp_path / "losses.jsonl"
    space = _only(_space(model), 1)
    flat = _flat(space)
    first = measure_losses(model, space, replace(flat, hidden=()), _text(), SOLVED, path=path)
    narrower = _only(_space(model, replace(CHOICES, hidden=(40,))), 1)
    second = measure_losses(model, narrower, flat, _text(), SOLVED, path=path)
    assert second.entries[:-1] == first.entries
    assert second.reused == len(first.entries)
    assert measure_losses(model, narrower, flat, _text(), SOLVED, path=path).reused == len(second.entries)
    others = replace(flat, hidden=flat.hidden[::-1])
    third = measure_losses(model, narrower, others, _text(), SOLVED, path=path)
    assert third.reused == len(first.entries)
    assert third.entries[-1].kl != second.entries[-1].kl


@pytest.mark.parametrize("change", ["model", "text", "scores", "options"])
def test_the_file_of_another_identity_is_not_used_and_that_is_said(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "losses.jsonl"
    model = tiny_model("llama")
    space = _only(_space(model), 1)
    measure_losses(model, space, _flat(space), _text(), SOLVED, path=path)
    capsys.readouterr()
    scores = replace(_flat(space), method="another") if change == "scores" else _flat(space)
    text = _text(13) if change == "text" else _text()
    options = PLAIN if change == "options" else SOLVED
    other = tiny_model("llama", seed=1) if change == "model" else model
    found = measure_losses(other, space, scores, text, options, path=path)
    assert found.reused == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "losses of another" in said
    assert change in said


def test_text_that_cannot_be_used() -> None:
    model = tiny_model("llama")
    space = _only(_space(model), 1)
    padded = _text()
    padded[0, -4:] = -100
    for text, message in ((padded, "padding"), (_text(1), "three of a kind|two sequences"), (_text(9, 3), "need")):
        with pytest.raises(DataError, match=message):
            measure_losses(model, space, _flat(space), text, SOLVED)


# --- scores ------------------------------------------------------------------------------------


def test_scores_of_all_units_come_from_one_pass() -> None:
    model = tiny_model("llama")
    before = weights_digest(model)
    scores = score_units(model, _text(), hidden=True)
    assert weights_digest(model) == before
    layer = scores.layers[0]
    assert (len(scores.layers), len(layer.kv_groups), len(layer.query_heads), len(layer.ffn)) == (4, 2, 6, 40)
    assert len(scores.hidden) == 48
    # A group's score is that of its query heads and of its keys and values.
    assert layer.kv_groups[0] > sum(layer.query_heads[:3]) > 0
    assert scores.method == recommended_scores().method == "taylor"
    assert not score_units(model, _text()).hidden


# --- between anchors ---------------------------------------------------------------------------

LAYER = LayerSpace(((4, 4), (3, 3), (2, 2), (1, 1), (0, 0)), (8, 6, 4, 2, 0), True)
SCORES = LayerScores((1.0, 2.0, 3.0, 4.0), (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0))
TOY = Space(_space(tiny_model("llama")).identity, (LAYER,), (48,))


def _losses(**kl: float) -> BlockLosses:
    places = {
        "a2": Widths(2, 2, 8),
        "a1": Widths(1, 1, 8),
        "a0": Widths(0, 0, 8),
        "m6": Widths(4, 4, 6),
        "m4": Widths(4, 4, 4),
        "m2": Widths(4, 4, 2),
        "m0": Widths(4, 4, 0),
        "gone": DROPPED,
    }
    entries = tuple(BlockLoss(0, places[name], 48, value) for name, value in kl.items())
    return BlockLosses(entries)


def test_losses_follow_the_scores_between_anchors_and_add_up() -> None:
    found = _losses(a2=0.3, a1=0.9, a0=1.0, m4=0.4, m2=1.4, m0=2.0, gone=1.7)
    search = search_of(found, UnitScores((SCORES,)), TOY)
    loss = {choice.widths: choice.loss for choice in search.layers[0]}
    assert list(loss) == list(LAYER.widths)
    assert loss[Widths(4, 4, 8)] == 0
    assert loss[Widths(2, 2, 8)] == pytest.approx(0.3)
    assert loss[Widths(3, 3, 8)] == pytest.approx(0.1)  # removed scores: 1 of the anchor's 1 + 2
    assert loss[Widths(4, 4, 6)] == pytest.approx(0.2)  # 2 of the anchor's 4
    assert loss[Widths(3, 3, 2)] == pytest.approx(0.1 + 1.4)
    assert loss[Widths(0, 0, 4)] == pytest.approx(1.0 + 0.4)
    assert loss[DROPPED] == 1.7  # measured, not 1.0 + 2.0


def test_planted_additive_losses_are_recovered() -> None:
    planted = {w: 0.1 * SCORES.attention_removed(w.query_heads, w.kv_heads) + 0.05 * SCORES.ffn_removed(w.ffn)
               for w in LAYER.widths}  # fmt: skip
    anchors = anchors_of(LAYER, ValueOptions(head_anchors=2, ffn_anchors=(0.5,)))
    assert len(anchors) == 2 + 1 + 2 + 1 + 1
    entries = tuple(BlockLoss(0, widths, 48, planted[widths]) for widths in anchors)
    search = search_of(BlockLosses(entries), UnitScores((SCORES,)), TOY)
    for choice in search.layers[0]:
        assert choice.loss == pytest.approx(planted[choice.widths], abs=1e-6)


def test_losses_of_fewer_experts_add_to_those_of_narrower_ones() -> None:
    layer = replace(LAYER, kind="mixture", experts=(8, 6, 4, 2), drop=False)
    scores = replace(SCORES, experts=(1.0,) * 4 + (3.0,) * 4)
    planted = {
        widths: 0.1 * scores.attention_removed(*widths[:2])
        + 0.05 * scores.ffn_removed(widths.ffn)
        + (0.2 * scores.experts_removed(widths.experts) if widths.ffn else 0.0)
        for widths in layer.widths
    }
    anchors = anchors_of(layer, ValueOptions(head_anchors=2, ffn_anchors=(0.75, 0.5)))
    assert [widths.experts for widths in anchors if widths[:3] == layer.dense[:3]] == [6, 4, 2]
    entries = tuple(BlockLoss(0, widths, 48, planted[widths]) for widths in anchors)
    space = replace(TOY, layers=(layer,))
    for choice in search_of(BlockLosses(entries), UnitScores((scores,)), space).layers[0]:
        assert choice.loss == pytest.approx(planted[choice.widths], abs=1e-6)
    few = tuple(entry for entry in entries if entry.widths.experts in (0, 8))
    with pytest.raises(BudgetError, match="experts of layer 0"):
        search_of(BlockLosses(few), UnitScores((scores,)), space)


def test_noise_between_anchors_does_not_make_less_better() -> None:
    found = _losses(a2=0.3, a1=0.2, a0=0.9, m4=0.0, m2=1.4, m0=0.6, gone=1.7)
    search = search_of(found, UnitScores((SCORES,)), TOY)
    loss = {choice.widths: choice.loss for choice in search.layers[0]}
    assert loss[Widths(2, 2, 8)] == loss[Widths(1, 1, 8)] == pytest.approx(0.25)
    assert loss[Widths(4, 4, 0)] == 0.6  # skipping is another change than narrowing, and keeps its measurement


@pytest.mark.parametrize(("missing", "message"), [("a0", "attention"), ("m0", "MLP"), ("gone", "as a whole")])
def test_a_loss_that_was_not_measured_is_named(missing: str, message: str) -> None:
    every = {"a2": 0.3, "a1": 0.9, "a0": 1.0, "m4": 0.4, "m2": 1.4, "m0": 2.0, "gone": 1.7}
    del every[missing]
    with pytest.raises(BudgetError, match=message):
        search_of(_losses(**every), UnitScores((SCORES,)), TOY)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], []), ([1, 2, 3], [1, 2, 3]), ([3, 1, 2], [2, 2, 2]), ([1, 3, 2, 4], [1, 2.5, 2.5, 4]), ([-1, 1], [0, 1])],
)
def test_monotone(values: list[float], expected: list[float]) -> None:
    assert monotone(values) == expected
