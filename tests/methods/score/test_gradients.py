"""Gradients one layer at a time: equal to an ordinary backward pass, and only one layer is held."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyprune.config.run import PruneConfig
from pyprune.errors import DataError
from pyprune.families import NamedParam
from pyprune.methods.score._descent import Noise
from pyprune.methods.score._gradients import GradientSum, take_gradients
from pyprune.methods.score.base import Scoring
from pyprune.train.loss import causal_loss
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.scores import scoring_of

SAMPLES = tiny_batch(batch=3, length=11)
FLOAT32_LOSS = 1e-6
"""causal_loss works in float32 even for a float64 model, so that scaling it differently rounds differently."""


def options(**score: Any) -> PruneConfig:
    return scoring_config("moreau", **score)


def run_for(name: str, dtype: torch.dtype = torch.float64, **score: Any) -> Scoring:
    return scoring_of(tiny_model(name).to(dtype), SAMPLES, options(**score))


def layerwise_gradients(run: Scoring, noise: Noise, draws: int = 1, per_sample: bool = False) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    report = take_gradients(
        run,
        lambda param, draw: noise.weights(param, None, draw),
        GradientSum(lambda param, grad: found.update({param.name: grad.clone()})),
        draws=draws,
        per_sample=per_sample,
    )
    assert report.layerwise == run.score.layerwise
    return found


def ordinary_gradients(run: Scoring, noise: Noise, draws: int = 1) -> dict[str, Tensor]:
    """A copy of the whole model at the noisy weights, differentiated by autograd alone."""
    total: dict[str, Tensor] = {}
    for draw in range(draws):
        changed = copy.deepcopy(run.model)
        parameters = dict(changed.named_parameters())
        with torch.no_grad():
            for param in run.open_params:
                parameters[param.name].copy_(noise.weights(param, None, draw))
        causal_loss(changed, run.samples).backward()
        for param in run.open_params:
            grad = parameters[param.name].grad
            assert grad is not None
            total[param.name] = total.get(param.name, torch.zeros_like(grad)) + grad / draws
    return total


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        assert float((actual[name] - grad).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("axes", [("heads", "ffn"), ("hidden",), ("heads",)])
@pytest.mark.parametrize("name", list(TINY))
def test_layerwise_gradients_equal_an_ordinary_backward_pass(name: str, axes: Sequence[Any]) -> None:
    run = run_for(name, axes=tuple(axes), first_layer=1, last_layer=2)
    noise = Noise(run.open_params, 0.05, seed=3)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    actual = layerwise_gradients(run, noise)
    assert_same(actual, ordinary_gradients(run, noise), 1e-13)
    for n, p in run.model.named_parameters():
        assert p.requires_grad
        assert p.grad is None
        assert torch.equal(p, before[n])
    assert all("forward" not in layer.__dict__ for layer in run.model.modules())


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"batch_size": 1}, {"layerwise": False}])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("axes", [("heads", "ffn"), ("hidden",)])
def test_batches_samples_and_draws_sum_to_the_mean_gradient(
    change: dict[str, Any], per_sample: bool, axes: Sequence[Any]
) -> None:
    run = run_for("llama", axes=tuple(axes), **change)
    noise = Noise(run.open_params, 0.05, seed=3)
    assert_same(layerwise_gradients(run, noise, 3, per_sample), ordinary_gradients(run, noise, 3), FLOAT32_LOSS)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "opt"])
def test_parts_per_sample_are_the_gradients_of_single_samples(name: str) -> None:
    run = run_for(name, first_layer=1)
    parts: dict[str, list[Tensor]] = {}
    lasts: dict[str, list[bool]] = {}

    def consume(param: NamedParam, part: Tensor, last: bool) -> None:
        parts.setdefault(param.name, []).append(part.clone())
        lasts.setdefault(param.name, []).append(last)

    take_gradients(run, lambda param, draw: param.parameter.detach(), consume, per_sample=True)
    for i in range(len(SAMPLES)):
        run.model.zero_grad()
        causal_loss(run.model, SAMPLES[i : i + 1]).backward()
        for param in run.open_params:
            expected = param.parameter.grad
            assert expected is not None
            difference = (parts[param.name][i] * len(SAMPLES) - expected).abs().max()
            assert difference <= FLOAT32_LOSS * max(1e-2, float(expected.abs().max()))
    assert all(flags == [False, False, True] for flags in lasts.values())


@pytest.mark.parametrize("axes", [("heads", "ffn"), ("hidden",)])
def test_only_one_layer_of_changed_weights_exists_at_a_time(axes: Sequence[Any]) -> None:
    run = run_for("llama", torch.float32, axes=tuple(axes))
    alive: set[int] = set()
    most = {"layers": 0}
    owners: dict[int, int | None] = {}

    def weights(param: NamedParam, draw: int) -> Tensor:
        tensor = param.parameter.detach().clone()
        key = tensor.untyped_storage().data_ptr()
        alive.add(key)
        owners[key] = param.layer
        weakref.finalize(tensor.untyped_storage(), alive.discard, key)
        layers = {owners[k] for k in alive if owners[k] is not None}
        most["layers"] = max(most["layers"], len(layers))
        return tensor

    asked: list[str] = []
    take_gradients(run, weights, lambda param, part, last: asked.append(param.name))
    assert len(asked) == len(run.open_params)
    assert most["layers"] == 1


def test_gradients_come_last_layer_first_and_stop_at_the_first_open_layer() -> None:
    run = run_for("llama", torch.float32, first_layer=1, last_layer=2)
    order: list[int | None] = []
    take_gradients(
        run, lambda param, draw: param.parameter.detach(), lambda param, part, last: order.append(param.layer)
    )
    assert list(dict.fromkeys(order)) == [2, 1]


def test_dropout_is_off_and_comes_back() -> None:
    run = scoring_of(tiny_model("opt", dropout=0.5).train(), SAMPLES, options())
    noise = Noise(run.open_params, 0.0, seed=0)
    first, second = layerwise_gradients(run, noise), layerwise_gradients(run, noise)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert run.model.training


class TupleLayer(nn.Module):
    """A layer as older code writes them: it returns a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = inner.self_attn, inner.mlp
        self.input_layernorm, self.post_attention_layernorm = inner.input_layernorm, inner.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


def test_a_layer_that_is_no_plain_function_falls_back_to_the_whole_model() -> None:
    run = run_for("llama", first_layer=1)
    expected = layerwise_gradients(run, Noise(run.open_params, 0.0, seed=0))
    layers = run.model.model.layers
    for i, layer in enumerate(layers):
        wrapped = TupleLayer(layer)
        layers[i] = wrapped
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: output[0] if isinstance(output, tuple) else output)
    found: dict[str, Tensor] = {}
    report = take_gradients(
        run,
        lambda param, draw: param.parameter.detach(),
        GradientSum(lambda param, grad: found.update({param.name: grad})),
    )
    assert not report.layerwise
    assert_same(found, expected, 1e-13)


def test_no_samples_are_refused() -> None:
    run = scoring_of(tiny_model("llama"), torch.empty(0, 0, dtype=torch.int64), options())
    with pytest.raises(DataError, match="calibration text"):
        take_gradients(run, lambda p, d: p.parameter.detach(), lambda p, g, last: None)
