"""Wanda: the norms of the inputs are those of the whole text, and the scores are the paper's equation 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError, DataError
from pyprune.methods.registry import read_config
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.wanda import score as wanda
from pyprune.probe.activations import Moments, gather_moments
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.scores import decision_of, scoring_of

SAMPLES = tiny_batch(batch=5, length=13)


def options(**score: Any) -> PruneConfig:
    return scoring_config("wanda", **score)


def scored(model: Any, config: PruneConfig, samples: Tensor = SAMPLES) -> Scoring:
    run = scoring_of(model, samples, config)
    wanda.score(run)
    return run


def inputs_of(model: Any, name: str) -> Tensor:
    """Everything that one module reads, [tokens, channels], float64."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(SAMPLES)
    handle.remove()
    return seen[0].flatten(0, -2).double()


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5])
def test_moments_do_not_depend_on_how_the_text_is_cut(batch_size: int | None) -> None:
    model = tiny_model("opt")
    name = "model.decoder.layers.2.fc2"
    x = inputs_of(model, name)
    found = gather_moments(model, SAMPLES, inputs=[name], batch_size=batch_size)[name]
    assert found.count == 65
    torch.testing.assert_close(found.mean, x.mean(0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.variance, x.var(0), rtol=1e-5, atol=1e-10)
    torch.testing.assert_close(found.norm(), x.norm(dim=0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.norm(x[0]), (x - x[0]).norm(dim=0), rtol=1e-5, atol=1e-7)


def test_moments_far_from_zero_keep_their_variance() -> None:
    x = torch.randn(400, 3, dtype=torch.float64) + 1e6
    moments = Moments()
    for part in x.split(7):
        moments.add(part)
    torch.testing.assert_close(moments.variance, x.var(0), rtol=1e-8, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_scores_are_equation_1_summed_over_the_coupled_structure(name: str) -> None:
    model = tiny_model(name)
    run = scored(model, options(layers=(1,)))
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    width = attention.head_dim

    def elements(where: str) -> Tensor:
        module = model.get_submodule(f"model.layers.1.{where}")
        return module.weight.detach().double().abs() * inputs_of(model, f"model.layers.1.{where}").norm(dim=0)

    ffn = elements("mlp.gate_proj").sum(1) + elements("mlp.up_proj").sum(1) + elements("mlp.down_proj").sum(0)
    torch.testing.assert_close(run.scores.group_scores(1, "ffn"), ffn, rtol=1e-5, atol=0)
    heads = elements("self_attn.q_proj").sum(1) + elements("self_attn.o_proj").sum(0)
    kv_heads = elements("self_attn.k_proj").sum(1) + elements("self_attn.v_proj").sum(1)
    if attention.q_proj.bias is not None:
        tokens = SAMPLES.numel() ** 0.5
        heads += attention.q_proj.bias.detach().abs() * tokens
        kv_heads += (attention.k_proj.bias.detach().abs() + attention.v_proj.bias.detach().abs()) * tokens
    expected = heads.view(2, -1).sum(1) + kv_heads.view(2, width).sum(1)
    torch.testing.assert_close(run.scores.group_scores(1, "heads"), expected, rtol=1e-5, atol=0)
    assert mlp.down_proj.weight.shape[1] == len(ffn)


def test_the_output_form_counts_the_output_projections_alone() -> None:
    model = tiny_model("llama")
    run = scored(model, options(layers=(0,), matrices="output"))
    assert set(run.scores.sums[0, "ffn"]) == {"model.layers.0.mlp.down_proj"}
    assert set(run.scores.sums[0, "heads"]) == {"model.layers.0.self_attn.o_proj"}
    x = inputs_of(model, "model.layers.0.mlp.down_proj").norm(dim=0)
    expected = model.model.layers[0].mlp.down_proj.weight.detach().double().abs().sum(0) * x
    torch.testing.assert_close(run.scores.group_scores(0, "ffn"), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "opt", "phi", "gemma3"])
def test_norms_and_embeddings_count_what_they_write(name: str) -> None:
    model = tiny_model(name)
    run = scored(model, options(axes=("hidden",)))
    decoder = model.model.decoder if name == "opt" else model.model
    norm = next(m for m in decoder.children() if "norm" in type(m).__name__.lower())
    key = next(n for n, m in model.named_modules() if m is norm)
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda _, args, result: seen.append(result.detach()))
    model(SAMPLES)
    written = seen[0].flatten(0, 1).double()
    bias = getattr(norm, "bias", None)
    expected = written.norm(dim=0) if bias is None else (written - bias.detach().double()).norm(dim=0)
    if bias is not None:
        expected = expected + bias.detach().double().abs() * len(written) ** 0.5
    torch.testing.assert_close(run.scores.sums[None, "hidden"][key], expected, rtol=1e-5, atol=1e-9)
    assert any("embed" in module for module in run.scores.sums[None, "hidden"])
    assert ("lm_head" in run.scores.sums[None, "hidden"]) == (not model.config.tie_word_embeddings)


def test_an_untied_head_counts_its_weights_times_the_norms_of_their_inputs() -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    run = scored(model, options(axes=("hidden",)))
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(SAMPLES)
    norms = seen[0].flatten(0, 1).double().norm(dim=0)
    expected = model.lm_head.weight.detach().double().abs().sum(0) * norms
    torch.testing.assert_close(run.scores.sums[None, "hidden"]["lm_head"], expected, rtol=1e-5, atol=1e-9)


def test_a_large_input_saves_channels_that_small_weights_would_lose() -> None:
    """What magnitude cannot see: channel 5 has the smallest weights and by far the largest activations."""
    model = tiny_model("opt", activation_function="gelu")
    block = model.model.decoder.layers[1]
    with torch.no_grad():
        block.fc1.weight[5] *= 1e-3
        block.fc1.bias[5] = 1000.0
        block.fc2.weight[:, 5] *= 0.01
    config = {"axes": ("ffn",), "layers": (1,), "ranking": "local", "ffn": 39}
    assert 5 in decision_of(model, SAMPLES, options(**config, matrices="output")).plan.layers[1].ffn
    by_size = scoring_config("magnitude", **config)
    block.fc1.bias.data[5] = 0.0
    assert 5 not in decision_of(model, SAMPLES, by_size).plan.layers[1].ffn


def test_nothing_stays_attached_and_the_mode_comes_back() -> None:
    model = tiny_model("llama").train()
    scored(model, options(axes=("hidden",)))
    assert model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    broken = model.model.layers[3].mlp
    broken.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        scored(model, options())
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_later_rounds_score_the_masked_model() -> None:
    model = tiny_model("llama")
    config = options(ranking="local", axes=("ffn",), ffn=20)
    plans = [
        decision_of(model, SAMPLES, replace(config, score=replace(config.score, iterations=rounds))).plan
        for rounds in (1, 4, 4)
    ]
    assert plans[0] != plans[1] == plans[2]
    assert {len(layer.ffn) for layer in plans[1].layers} == {20}


def test_no_text_and_unknown_forms_are_refused() -> None:
    with pytest.raises(DataError, match="give samples"):
        scored(tiny_model("llama"), options(), torch.empty(0, 0, dtype=torch.int64))
    with pytest.raises(ConfigError, match="Did you mean 'output'"):
        read_config({"method": "wanda", "stages": {"before": []}, "wanda": {"matrices": "outputs"}})


def test_norms_of_queries_and_keys_count_with_their_heads() -> None:
    """OLMo 2 has a weight for every query and key channel; what it multiplies is normalised, as 1 is for a bias."""
    model = tiny_model("olmo2")
    config = options(axes=("heads", "ffn"))
    with torch.no_grad():
        before = scored(model, config).scores.group_scores(0, "heads").clone()
        norm = dict(model.named_parameters())["model.layers.0.self_attn.q_norm.weight"]
        norm[:8] += 100.0
        after = scored(model, config).scores.group_scores(0, "heads")
    assert after[0] > before[0] + 1000, "the first query head's group"
    assert decision_of(model, SAMPLES, config).plan.removed_layers == ()
