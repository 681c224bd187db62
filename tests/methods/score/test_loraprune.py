"""LoRAPrune: the guided gradient, the element score of a step, the moving average, and nothing left behind."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.config.run import PruneConfig
from pyprune.config.train import RecoverConfig
from pyprune.cut.mask import masked
from pyprune.errors import ConfigError, DataError, MissingDependencyError, TrainingError
from pyprune.families import named_axes
from pyprune.methods.registry import read_config
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.loraprune import LoraPruneOptions
from pyprune.methods.score.loraprune import score as loraprune
from pyprune.train.lora import adapters
from pyprune.train.loss import causal_loss
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.scores import decision_of, scoring_of

SAMPLES = tiny_batch(batch=4, length=13)


def options(lora: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **score: Any) -> PruneConfig:
    steps = {"steps": 2, "batch_size": 4, "micro_batch_size": 4, **(train or {})}
    train_options = replace(LoraPruneOptions().train, **steps)
    return scoring_config("loraprune", **{"dropout": 0.0, "train": train_options, **(lora or {})}, **score)


def scored(model: Any, config: PruneConfig, samples: Tensor = SAMPLES) -> Scoring:
    run = scoring_of(model, samples, config)
    loraprune.score(run)
    return run


def group_scores(run: Scoring) -> Tensor:
    return torch.cat([run.scores.group_scores(layer, axis) for layer, axis in run.scope.places])


def test_the_guided_gradient_is_the_change_of_the_product() -> None:
    torch.manual_seed(0)
    a, b, ga, gb = (torch.randn(*s, dtype=torch.float64) for s in ((3, 7), (5, 3), (3, 7), (5, 3)))
    found = loraprune.guided_gradient(a, b, ga, gb)
    torch.testing.assert_close(found, b @ a - (b - gb) @ (a - ga))
    torch.testing.assert_close(found, gb @ a + b @ ga - gb @ ga)


def weight_gradients(model: Any, names: list[str]) -> dict[str, Tensor]:
    """The gradients that LoRAPrune does without."""
    model.zero_grad()
    causal_loss(model, SAMPLES).backward()
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if n in names}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
def test_the_first_step_is_the_squared_taylor_score_seen_through_a(name: str) -> None:
    """At B = 0 the guided gradient is scale G A^T A."""
    model = tiny_model(name)
    config = options({"momentum": 0.0}, {"steps": 1}, layers=(1,))
    run = scored(model, config)
    expected = scoring_of(model, SAMPLES, config)
    params = {p.name: p for p in expected.open_params if p.parameter.dim() == 2}
    grads = weight_gradients(model, list(params))
    targets = [n.removesuffix(".weight") for n in params]
    lora = RecoverConfig(rank=8, alpha=16.0, train=config.options.train)
    with adapters(model, targets, lora) as adapted:
        factors = {n: model.get_submodule(n.removesuffix(".weight")).lora_A["default"].weight.clone() for n in params}
        adapted.unload()
    for n, param in params.items():
        a = factors[n].detach()
        expected.add_elements(param, (param.parameter.detach() * (2.0 * grads[n] @ a.T @ a)).square())
    torch.testing.assert_close(group_scores(run), group_scores(expected), rtol=1e-3, atol=1e-12)


def test_scores_of_steps_are_joined_by_a_moving_average() -> None:
    """Steps too small to move anything give the same score I each: after n of them (1 - momentum^n) I."""
    model = tiny_model("llama").double()
    still = {"learning_rate": 1e-13}
    last = group_scores(scored(model, options({"momentum": 0.0}, {"steps": 1, **still})))
    for steps in (1, 3):
        found = group_scores(scored(model, options({"momentum": 0.9}, {"steps": steps, **still})))
        share = 0.1 * sum(0.9**i for i in range(steps))
        torch.testing.assert_close(found, last * share, rtol=1e-4, atol=0)


def test_training_moves_b_and_with_it_the_scores() -> None:
    model = tiny_model("llama")
    first = group_scores(scored(model, options({"momentum": 0.0}, {"steps": 1})))
    later = scored(model, options({"momentum": 0.0}, {"steps": 12, "learning_rate": 1e-2}))
    assert later.details["losses"][-1] < later.details["losses"][0] - 0.1
    order = [torch.argsort(x) for x in (first, group_scores(later))]
    assert not torch.equal(*order)


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw"])
def test_the_gradients_are_the_clipped_ones(optimizer: str) -> None:
    """Whether the loop clips them or the optimizer does: at B = 0 a score is quadratic in the gradient."""
    one_step: dict[str, Any] = {"steps": 1, "optimizer": optimizer}
    model = tiny_model("llama")
    whole, clipped = (
        scored(model, options({"momentum": 0.0}, {**one_step, "max_grad_norm": limit})) for limit in (None, 1e-4)
    )
    norm = sum(float(g.square().sum()) for g in _first_gradients(model).values()) ** 0.5
    assert norm > 1e-3
    torch.testing.assert_close(group_scores(clipped), group_scores(whole) * (1e-4 / norm) ** 2, rtol=2e-2, atol=0)


def _first_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of the factors before the first step."""
    config = options({}, {"steps": 1})
    targets = [n.removesuffix(".weight") for n in (p.name for p in scoring_of(model, SAMPLES, config).open_params)]
    lora = RecoverConfig(rank=8, alpha=16.0, train=config.options.train)
    with adapters(model, targets, lora) as adapted:
        causal_loss(adapted, SAMPLES).backward()
        found = {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}
        adapted.unload()
    return found


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_left_behind(training: bool) -> None:
    model = tiny_model("qwen3-tied").train(training)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    modules = {n: id(m) for n, m in model.named_modules()}
    before = {p.name: p.parameter.detach().clone() for p in named_axes(model)}
    stream = torch.random.get_rng_state()
    decision_of(model, SAMPLES, options(iterations=2))
    assert {n: id(m) for n, m in model.named_modules()} == modules
    assert all(torch.equal(p.parameter, before[p.name]) for p in named_axes(model))
    assert not hasattr(model, "peft_config")
    assert model.training == training
    assert all(p.grad is None for p in model.parameters())
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(torch.random.get_rng_state(), stream)


def test_nothing_is_left_behind_after_a_failure() -> None:
    model = tiny_model("llama")
    modules = {n: id(m) for n, m in model.named_modules()}
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="loss is nan"):
        scored(model, options())
    assert {n: id(m) for n, m in model.named_modules()} == modules
    assert all(p.requires_grad for p in model.parameters())


def test_the_seed_decides_the_scores() -> None:
    model = tiny_model("llama")
    with_dropout = {"dropout": 0.1}
    runs = [group_scores(scored(model, options(with_dropout, {"seed": seed}))) for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_what_earlier_rounds_removed_stays_removed_while_factors_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    config = options({}, {"steps": 3, "learning_rate": 1e-2}, axes=("ffn",))
    plan = decision_of(model, SAMPLES, options(axes=("ffn",), ranking="local", ffn=30)).plan
    gone = sorted(set(range(40)) - set(plan.layers[2].ffn))
    products: dict[str, Tensor] = {}
    unload = loraprune.GuidedTraining.after_optimizer_step

    def watched(self: Any, *args: Any) -> None:
        unload(self, *args)
        for name in self.projections:
            a, b, _ = self._factors(name)
            products[name] = (b @ a).detach().clone()

    monkeypatch.setattr(loraprune.GuidedTraining, "after_optimizer_step", watched)
    with masked(model, plan):
        loraprune.score(scoring_of(model, SAMPLES, config, masked=True))
    assert products["model.layers.2.mlp.down_proj"][:, gone].abs().max() == 0
    assert products["model.layers.2.mlp.up_proj"][gone].abs().max() == 0
    kept = list(plan.layers[2].ffn)
    assert products["model.layers.2.mlp.up_proj"][kept].abs().min(1).values.max() > 0


def test_only_open_projections_get_factors() -> None:
    run = scored(tiny_model("phi"), options(layers=(1, 2)))
    assert run.details["projections"] == 2 * 6
    assert all(".layers.1." in m or ".layers.2." in m for held in run.scores.sums.values() for m in held)
    hidden = scored(tiny_model("llama"), options(axes=("hidden",)))
    assert hidden.details["projections"] == 4 * 7
    memory = hidden.details["memory"]
    assert 0 < memory["state_bytes"] < 16 * memory["model_bytes"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"alpha": 0}, "alpha is 0"),
        ({"dropout": 1.0}, "dropout is 1"),
        ({"momentum": 1.0}, "momentum is 1"),
        ({"train": {"early_stop_patience": 2}}, "early_stop_patience is set"),
        ({"momentun": 0.5}, "Did you mean 'momentum'"),
    ],
)
def test_options_are_checked(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({"method": "loraprune", "stages": {"before": []}, "loraprune": change})


def test_no_text_and_no_peft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="give samples"):
        scored(tiny_model("llama"), options(), torch.empty(0, 0, dtype=torch.int64))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match="recover"):
        scored(tiny_model("llama"), options())
