"""Reconstruction where a norm follows the writer: the writer and the norm's gain are solved in turns."""

from __future__ import annotations

import copy

import pytest
import torch

from pyprune.config.cut import ReconstructConfig
from pyprune.cut.compact import compact_
from pyprune.cut.reconstruct import reconstruct_, reconstruct_compacted_
from pyprune.families import family_for
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans
from tests.cut.test_reconstruct import duplicate_ffn_channel, logits, weights

SAMPLES = tiny_batch(batch=64, length=32)
NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
NAMES = ("gemma3", "olmo2")


@pytest.mark.parametrize(
    ("name", "axis", "earlier"),
    [("gemma3", "ffn", 0.593), ("gemma3", "hidden", 0.792), ("olmo2", "ffn", 0.637), ("olmo2", "hidden", 0.807)],
)
def test_the_stream_follows_closer_than_with_writers_solved_in_front_of_the_norm(
    name: str, axis: str, earlier: float
) -> None:
    """``earlier`` is the error after the last layer of writers solved alone, for the dense model's divisors."""
    dense = tiny_model(name)
    plan = axis_plans(family_for(dense).plan(dense.config))[axis]
    plain, solved = copy.deepcopy(dense), copy.deepcopy(dense)
    report = reconstruct_(solved, plan, SAMPLES)
    last = [part for part in report.parts if part.role == "writers"][-1]
    assert last.after < 0.96 * earlier
    changed = {n for n, p in dense.named_parameters() if not torch.equal(p, solved.get_parameter(n))}
    taken = [part for part in report.parts if part.rounds is not None]
    assert sum(n.endswith(NORMS) for n in changed) == len(taken) > 0
    compact_(plain, plan)
    compact_(solved, plan)
    lost, left = (torch.dist(logits(model), logits(dense)) for model in (plain, solved))
    assert left < 0.92 * lost


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_copy_of_an_ffn_channel_is_nearly_taken_over(name: str) -> None:
    model = tiny_model(name)
    duplicate_ffn_channel(model, 1, 3, 8)
    expected = logits(model)
    plan = family_for(model).plan(model.config).with_layer(1, ffn=[i for i in range(40) if i != 8])
    report = reconstruct_(model, plan, SAMPLES, options=ReconstructConfig(ridges=(1e-9,)))
    compact_(model, plan)
    assert_same_logits(logits(model), expected, tolerance=0.03)
    assert report.parts[0].after < 0.1 * report.parts[0].before


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_changed_gain_is_found_again(name: str) -> None:
    dense = tiny_model(name)
    plan = family_for(dense).plan(dense.config).drop_layers([3])
    cut = copy.deepcopy(dense)
    compact_(cut, plan)
    offset = 1.0 if name == "gemma3" else 0.0
    changed = cut.model.layers[1].post_attention_layernorm.weight
    changed.copy_((changed + offset) * torch.linspace(0.5, 2, len(changed)) - offset)
    options = ReconstructConfig(ridges=(1e9,))
    report = reconstruct_compacted_(cut, plan, dense, SAMPLES, options=options)
    first = report.parts[0]
    assert (first.layer, first.blocks) == (1, ("attention",))
    assert first.rounds is not None
    assert first.after < 0.02 * first.before
    expected = dense.model.layers[1].post_attention_layernorm.weight
    torch.testing.assert_close(changed, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_system_keeps_its_bits_and_its_gain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    before = weights(model)
    monkeypatch.setattr("pyprune.cut.projections.mean_change", lambda *_: None)
    plan = axis_plans(family_for(model).plan(model.config))["everything"]
    report = reconstruct_(model, plan, SAMPLES[:16], options=ReconstructConfig(readers=False))
    assert report.solved == 0
    assert {part.rounds for part in report.parts} == {None}
    assert all(part.after == part.before for part in report.parts)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_of_removed_channels_the_gain_stays() -> None:
    model = tiny_model("gemma3")
    before = weights(model)
    plan = axis_plans(family_for(model).plan(model.config))["hidden"]
    report = reconstruct_(model, plan, SAMPLES)
    removed = sorted(set(range(plan.dense.hidden_size)) - set(plan.hidden))
    for part in report.parts:
        if part.rounds is not None:
            norm = NORMS[part.blocks == ("mlp",)]
            name = f"model.layers.{part.layer}.{norm}"
            change = model.get_parameter(name).detach() != before[name]
            assert not change[removed].any()
            assert change.sum() > 0.9 * len(plan.hidden)
