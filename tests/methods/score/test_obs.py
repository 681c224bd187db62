"""Optimal Brain Surgeon: costs are those of an exact least-squares problem, and what has a stand-in goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.config.cut import ReconstructConfig
from pyprune.config.run import PruneConfig
from pyprune.cut.mask import masked
from pyprune.cut.reconstruct import reconstruct_
from pyprune.errors import ConfigError, DataError, ScoreError
from pyprune.methods.registry import preset
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.obs import ObsOptions
from pyprune.methods.score.obs import score as obs
from pyprune.train.loss import causal_loss
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.scores import decision_of, scoring_of

SAMPLES = tiny_batch(batch=6, length=24)
DAMPING = 0.01


def options(**score: Any) -> PruneConfig:
    return replace(scoring_config("obs", **score), options=ObsOptions())


def scored(model: Any, config: PruneConfig, samples: Tensor = SAMPLES) -> Scoring:
    run = scoring_of(model, samples, config)
    obs.score(run)
    return run


def random_moments(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weight, x, g = (
        torch.randn(*n, generator=draw, dtype=torch.float64) for n in ((outputs, inputs), (99, inputs), (9, outputs))
    )
    mix = torch.randn(inputs, inputs, generator=draw, dtype=torch.float64)
    return weight, (x @ mix).T @ (x @ mix) / 99, g.T @ g / 9


def exact_cost(weight: Tensor, moments: Tensor, sensitivity: Tensor, columns: list[int]) -> float:
    """1/2 tr(G dW H dW^T) at its smallest where ``columns`` of W + dW are zero, by solving for the other columns."""
    kept = [i for i in range(weight.shape[1]) if i not in columns]
    change = torch.zeros_like(weight)
    change[:, columns] = -weight[:, columns]
    # The gradient with respect to the kept columns of dW is zero.
    change[:, kept] = torch.linalg.solve(moments[kept][:, kept], moments[kept][:, columns] @ weight[:, columns].T).T
    return float((sensitivity @ change @ moments @ change.T).trace() / 2)


@pytest.mark.parametrize(("inputs", "size"), [(12, 1), (12, 3), (12, 4)])
def test_costs_are_those_of_solving_the_others(inputs: int, size: int) -> None:
    weight, moments, sensitivity = random_moments(5, inputs)
    costs = obs.removal_costs(weight, moments, sensitivity, size, damping=DAMPING)
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
    gone: list[int] = []
    before = dearest = 0.0
    left = set(range(inputs // size))
    while left:
        totals = {}
        for unit in left:
            own = list(range(unit * size, (unit + 1) * size))
            totals[unit] = exact_cost(weight, damped, sensitivity, gone + own)
        unit = min(totals, key=totals.__getitem__)
        dearest = max(dearest, totals[unit] - before)
        assert float(costs[unit]) == pytest.approx(dearest, rel=1e-6)
        before = totals[unit]
        gone += range(unit * size, (unit + 1) * size)
        left.remove(unit)


def test_wide_modules_in_float32_are_ordered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    given = random_moments(8, 40, seed=1)
    wide = obs.removal_costs(*given, 1, damping=DAMPING)
    monkeypatch.setattr(obs, "FLOAT64_INPUTS", 8)
    narrow = obs.removal_costs(*given, 1, damping=DAMPING)
    assert torch.equal(wide.argsort(), narrow.argsort())
    torch.testing.assert_close(narrow, wide, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "opt", "phi", "gemma3", "phi3"])
@pytest.mark.parametrize("layerwise", [True, False])
def test_moments_are_those_of_the_block_outputs(name: str, layerwise: bool) -> None:
    """The same costs from inputs and gradients that are gathered here, in one pass over the whole model."""
    model = tiny_model(name)
    run = scored(model, options(axes=("ffn",), layers=(2,), layerwise=layerwise, batch_size=3))
    family = run.request.family
    module = model.get_submodule(f"{family.layers_path}.2.{family.output_projection('mlp')}")
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    loss = causal_loss(model, SAMPLES)
    handle.remove()
    (grad,) = torch.autograd.grad(loss, seen[1])
    x, g = seen[0].detach().flatten(0, -2).double(), grad.flatten(0, -2).double() * 6 * 23
    expected = obs.removal_costs(module.weight.detach(), x.T @ x / len(x), g.T @ g / len(g), 1, damping=DAMPING)
    found = run.scores.group_scores(2, "ffn")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-7)


def test_bfloat16_gives_nearly_the_same_costs() -> None:
    model = tiny_model("llama")
    config = options(axes=("ffn",), layers=(1, 2))
    wide = scored(model, config)
    narrow = scored(model, replace(config, options=ObsOptions(dtype="bfloat16")))
    for layer in (1, 2):
        exact, rounded = (run.scores.group_scores(layer, "ffn") for run in (wide, narrow))
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.02 * float(exact.max()))


def test_sums_of_bfloat16_values_are_float32() -> None:
    """Products rounded to bfloat16 would give second moments that are not positive definite."""
    values = torch.randn(4, 30, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = values.flatten(0, -2).double()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.zeros(20, 20)
        obs.add_values_(found, values)
    torch.testing.assert_close(found.double(), wide.T @ wide, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def copy_channel(model: Any, layer: int, kept: int, copy: int) -> None:
    """Make an FFN channel that always equals another one; both write much."""
    mlp = model.model.layers[layer].mlp
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.weight[copy] = projection.weight[kept]
    mlp.down_proj.weight[:, kept] *= 10
    mlp.down_proj.weight[:, copy] = 2 * mlp.down_proj.weight[:, kept]


def test_of_two_equal_channels_one_goes_and_the_other_takes_over() -> None:
    model = tiny_model("llama")
    copy_channel(model, 1, 3, 7)
    goal = {"axes": ("ffn",), "ranking": "local", "ffn": 39, "layers": (1,)}
    # The damping stands for what the text does not show; it must not hide that one channel gives the other exactly.
    config = replace(options(**goal), options=ObsOptions(damping=1e-7))
    plan = decision_of(model, SAMPLES, config).plan
    assert len({3, 7} & set(plan.layers[1].ffn)) == 1
    for other in ("wanda", "magnitude", "taylor"):
        config = scoring_config(other, **goal)
        assert {3, 7} <= set(decision_of(model, SAMPLES, config).plan.layers[1].ffn)
    with torch.no_grad():
        dense = model(SAMPLES).logits
        with masked(model, plan):
            lost = model(SAMPLES).logits
        reconstruct_(model, plan, SAMPLES, options=ReconstructConfig(ridges=(1e-7,)))
        with masked(model, plan):
            solved = model(SAMPLES).logits
    assert (lost - dense).abs().max() > 0.02 * dense.abs().max()
    assert (solved - dense).abs().max() < 0.05 * (lost - dense).abs().max()


@pytest.mark.parametrize("unit", ["kv_group", "query_head"])
def test_heads_go_in_the_order_of_their_costs(unit: str) -> None:
    model = tiny_model("llama")
    run = scored(model, options(axes=("heads",), heads_unit=unit))
    values = run.scores.group_scores(1, "heads")
    dense = run.scope.dense
    assert len(values) == (dense.num_key_value_heads if unit == "kv_group" else dense.num_attention_heads)
    assert float(values.min()) > 0


def test_the_preset_takes_as_many_channels_of_every_layer_and_no_heads() -> None:
    decision = decision_of(tiny_model("llama"), SAMPLES, replace(preset("obs-plain"), ratio=0.1))
    assert len({len(layer.ffn) for layer in decision.plan.layers}) == 1
    assert len(decision.plan.layers[0].ffn) < 40
    assert not decision.plan.removed_hidden
    assert all(len(layer.query_heads) == 6 for layer in decision.plan.layers)


def test_one_order_of_all_layers_takes_most_of_one_that_writes_next_to_nothing() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1e-3)
    decision = decision_of(model, SAMPLES, replace(options(axes=("ffn",), normalise="size"), ratio=0.1))
    widths = [len(layer.ffn) for layer in decision.plan.layers]
    assert widths[2] == 1, "one channel always stays"
    assert max(widths) > 30


def test_heads_and_channels_compare_where_heads_are_opened() -> None:
    model = tiny_model("llama", num_key_value_heads=6)
    with torch.no_grad():  # a head that writes next to nothing, in one layer alone
        model.model.layers[2].self_attn.o_proj.weight[:, :4] *= 1e-3
    config = replace(options(axes=("heads", "ffn"), normalise="size"), ratio=0.1)
    decision = decision_of(model, SAMPLES, config)
    removed = decision.details["scores"]["removed_by_axis"]
    assert removed["heads"]["removed"] > 0
    assert removed["ffn"]["removed"] > 0
    assert 0 not in decision.plan.layers[2].query_heads


@pytest.mark.parametrize(
    ("score", "reason"),
    [({"axes": ("hidden",)}, "use heads and ffn"), ({"aggregation": "mean"}, "use sum")],
)
def test_what_costs_cannot_mean_is_refused(score: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        scored(tiny_model("llama"), options(**score))


def test_without_text_it_is_refused() -> None:
    with pytest.raises(DataError, match="give samples"):
        scored(tiny_model("llama"), options(), torch.zeros(0, 8, dtype=torch.int64))


def test_what_cannot_be_inverted_is_refused() -> None:
    weight, moments, sensitivity = random_moments(5, 12)
    with pytest.raises(ScoreError, match=r"moments of the channels of layer 3 cannot.*more damping than 0\.01"):
        obs.removal_costs(weight, -moments, sensitivity, 1, damping=DAMPING, name="channels of layer 3")


def test_a_model_with_nan_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    with pytest.raises(ScoreError, match="are not finite"):
        scored(model, options(layers=(0, 1)))
