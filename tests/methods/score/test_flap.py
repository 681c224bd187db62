"""FLAP's score: the paper's fluctuation, standardised per module; a channel that a bias can replace goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.config.run import PruneConfig
from pyprune.cut.compensate import compensate_
from pyprune.cut.mask import masked
from pyprune.errors import ConfigError, DataError
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.flap import score as flap
from pyprune.plan import PrunePlan
from pyprune.probe.activations import gather_moments
from pyprune.run.recipe import build_config
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.scores import decision_of, scoring_of

SAMPLES = tiny_batch(batch=5, length=13)


def options(**score: Any) -> PruneConfig:
    return scoring_config("flap", **score)


def scored(model: Any, config: PruneConfig) -> Scoring:
    run = scoring_of(model, SAMPLES, config)
    flap.score(run)
    return run


def decided(model: Any, **score: Any) -> PrunePlan:
    return decision_of(model, SAMPLES, options(**score)).plan


def fluctuation(model: Any, name: str) -> Tensor:
    """Variance times the squared column norm, standardised, written out."""
    seen: list[Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double().flatten(0, -2)))
    with torch.no_grad():
        model(SAMPLES)
    handle.remove()
    raw = seen[0].var(0) * module.weight.detach().double().norm(dim=0).square()
    return (raw - raw.mean()) / raw.std()


@pytest.mark.parametrize(
    ("name", "output", "down"),
    [
        ("llama", "model.layers.2.self_attn.o_proj", "model.layers.2.mlp.down_proj"),
        ("qwen3", "model.layers.2.self_attn.o_proj", "model.layers.2.mlp.down_proj"),
        ("gemma3", "model.layers.2.self_attn.o_proj", "model.layers.2.mlp.down_proj"),
        ("opt", "model.decoder.layers.2.self_attn.out_proj", "model.decoder.layers.2.fc2"),
        ("phi", "model.layers.2.self_attn.dense", "model.layers.2.mlp.fc2"),
    ],
)
def test_scores_are_the_standardised_weighted_variance(name: str, output: str, down: str) -> None:
    model = tiny_model(name)
    run = scored(model, options(layers=(2,), heads_unit="query_head"))
    torch.testing.assert_close(run.scores.group_scores(2, "ffn"), fluctuation(model, down), rtol=1e-4, atol=1e-5)
    heads = fluctuation(model, output).view(6, -1).mean(1)
    torch.testing.assert_close(run.scores.group_scores(2, "heads"), heads, rtol=1e-4, atol=1e-5)
    grouped = scored(model, options(layers=(2,)))
    kv_heads = run.scope.dense.num_key_value_heads
    expected = heads.view(kv_heads, -1).mean(1)
    torch.testing.assert_close(grouped.scores.group_scores(2, "heads"), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def constant_channel(model: Any, layer: int, channel: int) -> None:
    """A channel of OPT's MLP that is always 30, read with large weights: what magnitude and Wanda would keep."""
    block = model.model.decoder.layers[layer]
    block.fc1.weight[channel] = 0
    block.fc1.bias[channel] = 30.0
    block.fc2.weight[:, channel] *= 3


def test_a_constant_channel_goes_first_and_a_bias_stands_for_it() -> None:
    model = tiny_model("opt", activation_function="gelu")  # a ReLU channel that never fires is constant as well
    constant_channel(model, 1, 7)
    with torch.no_grad():
        before = model(SAMPLES).logits
    goal = {"axes": ("ffn",), "ranking": "local", "ffn": 39, "layers": (1,)}
    plan = decided(model, **goal)
    assert 7 not in plan.layers[1].ffn
    for other in ("wanda", "magnitude"):
        config = replace(build_config(options={"method": other}), score=options(**goal).score)
        assert 7 in decision_of(model, SAMPLES, config).plan.layers[1].ffn
    with torch.no_grad():
        with masked(model, plan):
            lost = model(SAMPLES).logits
        compensate_(model, plan, SAMPLES)
        with masked(model, plan):
            kept = model(SAMPLES).logits
    assert (lost - before).abs().max() > 0.1 * before.abs().max()
    assert_same_logits(kept, before)


def test_standardising_makes_layers_comparable() -> None:
    """One layer writes a thousand times as much; unstandardised scores would never touch it."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight *= 1000
    config = options(axes=("ffn",))
    widths = [len(layer.ffn) for layer in decision_of(model, SAMPLES, config).plan.layers]
    assert widths[3] < 40
    assert min(widths[:3]) < 40


def test_rounds_leave_removed_channels_out_of_the_scale() -> None:
    variance = torch.tensor([4.0, 1.0, 2.0, 9.0], dtype=torch.float64)
    weight = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    raw = torch.tensor([4.0, 2.0, 9.0], dtype=torch.float64)
    expected = (raw - raw.mean()) / raw.std()
    found = flap.standardised_fluctuation(variance, weight, masked=True)
    torch.testing.assert_close(found[[0, 2, 3]], expected)
    assert found[1] == 0
    assert flap.standardised_fluctuation(variance, torch.zeros(1, 4)).tolist() == [0, 0, 0, 0]
    model = tiny_model("qwen2")
    goal = {"ranking": "local", "axes": ("ffn",), "ffn": 24}
    once, twice, again = (decided(model, **goal, iterations=rounds) for rounds in (1, 4, 4))
    assert once != twice
    assert twice == again
    assert {len(layer.ffn) for layer in twice.layers} == {24}


def test_a_global_plan_is_found_again_and_reaches_its_goal() -> None:
    model = tiny_model("llama")
    plans = [decision_of(model, SAMPLES, options()) for _ in range(2)]
    assert plans[0].plan == plans[1].plan
    assert not plans[0].plan.is_uniform
    assert any("are kept; asked for 20.00%" in note for note in plans[0].notes)
    assert all(not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("score", "words"),
    [
        ({"axes": ("hidden",)}, "use heads and ffn"),
        ({"aggregation": "prod"}, "negative too"),
        ({"normalise": "size"}, "standardises its scores itself"),
    ],
)
def test_options_that_do_not_fit_are_refused(score: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scored(tiny_model("llama"), options(**score))


def test_no_text_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(DataError, match="give samples"):
        gather_moments(model, torch.empty(0, 0, dtype=torch.int64), inputs=["lm_head"])
