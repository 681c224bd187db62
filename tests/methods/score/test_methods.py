"""What each score is: closed forms, the paper's algorithm written literally, and the traps on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError
from pyprune.families import named_axes
from pyprune.methods.base import own_options
from pyprune.methods.registry import get_method, method_modules, method_preset
from pyprune.methods.score import ScoreMethod, Scorer
from pyprune.methods.score._descent import Descent, Noise
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.moreau import MoreauOptions
from pyprune.run.recipe import build_config
from pyprune.train.loss import causal_loss
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import SCORES, quick, scoring_config
from tests._support.scores import decision_of, scoring_of

SAMPLES = tiny_batch(batch=3, length=11)


def scorer_of(name: str) -> Scorer:
    method = get_method(name)
    assert isinstance(method, ScoreMethod)
    return method.scorer


def options(method: str, moreau: dict[str, Any] | None = None, **score: Any) -> PruneConfig:
    config = scoring_config(method, **(moreau or {}), **score)
    return quick(config) if method == "loraprune" else config


def scored(model: Any, config: PruneConfig) -> Scoring:
    run = scoring_of(model, SAMPLES, config)
    scorer_of(config.method)(run)
    return run


def group_scores(run: Scoring) -> Tensor:
    return torch.cat([run.scores.group_scores(layer, axis) for layer, axis in run.scope.places])


def gradients_at(model: Any, weights: dict[str, Tensor], samples: Tensor = SAMPLES) -> dict[str, Tensor]:
    """Autograd on the model with these weights put in; the model comes back as it was."""
    parameters = dict(model.named_parameters())
    saved = {n: parameters[n].detach().clone() for n in weights}
    with torch.no_grad():
        for n, w in weights.items():
            parameters[n].copy_(w)
    model.zero_grad()
    causal_loss(model, samples).backward()
    grads = {n: parameters[n].grad.detach().clone() for n in weights}
    model.zero_grad()
    with torch.no_grad():
        for n, w in saved.items():
            parameters[n].copy_(w)
    return grads


def soft_threshold_rows(x: Tensor, threshold: float) -> Tensor:
    norms = x.abs() if x.dim() == 1 else x.norm(dim=1, keepdim=True)
    return x * torch.where(norms > threshold, 1 - threshold / norms, torch.zeros_like(norms))


def algorithm_1(run: Scoring) -> dict[str, Tensor]:
    """The paper's Algorithm 1, line by line, on the weights themselves."""
    config = own_options(run.request, MoreauOptions)
    noise = Noise(run.open_params, config.sigma, config.seed)
    names = {p.name: p for p in run.open_params}
    start = {n: p.parameter.detach().clone() for n, p in names.items()}
    w = dict(start)
    for t in range(config.steps):
        mean = {n: torch.zeros_like(x) for n, x in w.items()}
        for i in range(config.draws):
            noisy = {n: noise.weights(p, w[n] - start[n], t * config.draws + i) for n, p in names.items()}
            for n, grad in gradients_at(run.model, noisy).items():
                mean[n] += grad / config.draws
        w = {
            n: (1 - config.gamma / config.rho) * x - config.gamma * (mean[n] - start[n] / config.rho)
            for n, x in w.items()
        }
        if config.group_weight:
            w = {
                n: soft_threshold_rows(x - start[n], config.gamma * config.group_weight) + start[n]
                for n, x in w.items()
            }
    return {n: ((x - start[n]) / config.rho * start[n]).abs() for n, x in w.items()}


@pytest.mark.parametrize(
    ("method", "constants"),
    [
        ("moreau", {"steps": 4}),
        ("moreau", {"steps": 3, "draws": 2, "rho": 0.01, "gamma": 5e-3}),
        ("moreau_gs", {"steps": 4, "rho": 0.2, "gamma": 1e-2, "eta": 0.05}),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_the_scores_are_those_of_algorithm_1(name: str, method: str, constants: dict[str, Any]) -> None:
    model = tiny_model(name).double()
    config = options(method, constants, layers=(1, 2))
    run = scored(model, config)
    literal = scoring_of(model, SAMPLES, config)
    elements = algorithm_1(literal)
    for param in literal.open_params:
        literal.add_elements(param, elements[param.name])
    # Carried weights lose what is below float64's spacing at w: OPT's ReLU channels that never fire.
    torch.testing.assert_close(group_scores(run), group_scores(literal), rtol=1e-6, atol=1e-12)
    if method == "moreau_gs":
        zeros = sum(int((e == 0).sum()) for e in elements.values())
        assert zeros > 0, "eta is too small for this test to see the threshold"


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "opt", "phi", "gemma3"])
def test_one_step_without_noise_is_taylor_times_gamma_over_rho(name: str) -> None:
    model = tiny_model(name)
    one = scored(model, options("moreau", {"steps": 1, "sigma": 0.0, "rho": 0.05, "gamma": 1e-3}))
    first = scored(model, options("taylor", form="param_first"))
    torch.testing.assert_close(group_scores(one), group_scores(first) * (1e-3 / 0.05), rtol=1e-5, atol=0)


def test_vanishing_steps_are_smoothgrad_with_the_same_draws() -> None:
    model = tiny_model("llama").double()
    steps = scored(model, options("moreau", {"steps": 5, "gamma": 1e-12, "rho": 1.0}))
    mean = scored(model, options("smoothgrad", {"draws": 5}))
    torch.testing.assert_close(group_scores(steps) / 5e-12, group_scores(mean), rtol=1e-6, atol=0)


def test_the_paper_s_constants_are_nearly_smoothgrad_and_the_report_says_how_far_from_converged() -> None:
    model = tiny_model("llama")
    run = scored(model, options("moreau"))
    assert run.details["steps"] == 10
    assert len(run.details["residuals"]) == 10
    assert run.details["residuals"][-1] > 1.0, "ten steps at gamma/rho = 0.02 are far from the minimiser"
    assert run.details["losses"][0] > 0


def test_the_displacement_survives_bfloat16_where_carried_weights_do_not() -> None:
    """The trap: w_T - w0 with w stored in bfloat16 is exactly zero nearly everywhere."""
    model = tiny_model("llama").to(torch.bfloat16)
    config = options("moreau")
    run = scoring_of(model, SAMPLES, config)
    carried = algorithm_1(run)
    lost = sum(int((e == 0).sum()) for e in carried.values()) / sum(e.numel() for e in carried.values())
    assert lost > 0.85
    descent = Descent.start(run)
    for step in range(own_options(config, MoreauOptions).steps):
        descent.step(run, step)
    ours = sum(int((d != 0).sum()) for d in descent.deltas.values()) / sum(d.numel() for d in descent.deltas.values())
    assert ours > 0.98
    assert all(d.dtype == torch.float32 for d in descent.deltas.values())


def test_the_group_norm_zeroes_rows_and_more_of_them_with_a_larger_eta() -> None:
    model = tiny_model("llama")
    rows = []
    for eta in (1e-9, 0.02, 0.08):
        run = scoring_of(model, SAMPLES, options("moreau_gs", {"eta": eta, "gamma": 1e-3, "rho": 0.2}))
        descent = Descent.start(run)
        for step in range(10):
            descent.step(run, step)
        matrices = [d for d in descent.deltas.values() if d.dim() == 2]
        zero_rows = [(d == 0).all(dim=1) for d in matrices]
        rows.append(sum(int(z.sum()) for z in zero_rows))
        assert all(((d == 0).any(dim=1) == z).all() for d, z in zip(matrices, zero_rows, strict=True))
    assert rows[0] == 0
    assert 0 < rows[1] < rows[2]


@pytest.mark.parametrize(
    ("method", "constants"), [("moreau", {}), ("moreau_gs", {"rho": 0.2, "gamma": 1e-2, "eta": 0.05})]
)
def test_residuals_are_the_relative_moves_of_all_displacements(method: str, constants: dict[str, Any]) -> None:
    """Their sums come out of the op; here they are taken from copies before and after each step."""
    run = scoring_of(tiny_model("llama"), SAMPLES, options(method, constants))
    descent = Descent.start(run)
    for step in range(3):
        before = {name: delta.clone() for name, delta in descent.deltas.items()}
        descent.step(run, step)
        moved = sum(float((d - before[name]).double().square().sum()) for name, d in descent.deltas.items())
        size = sum(float(d.double().square().sum()) for d in descent.deltas.values())
        expected = descent.config.rho / descent.config.gamma * math.sqrt(moved / size)
        assert descent.residuals[-1] == pytest.approx(expected, rel=1e-12)


def test_a_converged_run_is_at_the_proximal_point() -> None:
    """At the minimiser of the envelope delta = -rho grad f(w0 + delta)."""
    model = tiny_model("llama").double()
    constants = {"sigma": 0.0, "rho": 0.01, "gamma": 2e-3, "steps": 300, "tolerance": 1e-6, "redraw": False}
    config = options("moreau", constants, layers=(1,))
    run = scoring_of(model, SAMPLES, config)
    descent = Descent.start(run)
    while not descent.has_converged:
        descent.step(run, len(descent.residuals))
        assert len(descent.residuals) < 300
    moved = {p.name: p.parameter.detach() + descent.deltas[p.name] for p in run.open_params}
    for name, grad in gradients_at(model, moved).items():
        delta = descent.deltas[name]
        assert float((delta + 0.01 * grad).norm()) <= 1e-4 * float(delta.norm()) + 1e-9, name
    report = scored(model, config)
    assert report.details["steps"] < 300
    assert report.warnings == []


def test_a_run_that_does_not_converge_says_so() -> None:
    run = scored(tiny_model("llama"), options("moreau", {"steps": 2, "tolerance": 1e-3}))
    assert len(run.warnings) == 1
    assert "did not converge" in run.warnings[0]
    assert "redraw to false" in run.warnings[0]


SETTLING = {"sigma": 0.0, "redraw": False, "tolerance": 0.01}


@pytest.mark.parametrize(("rho", "gamma"), [(5.0, 2.0), (5.0, 0.5), (2.0, 1.0), (0.5, 0.3)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_that_are_too_long_are_told(family: str, rho: float, gamma: float) -> None:
    # They go round without end, and where they are at the end differs from one CPU to another.
    constants = {**SETTLING, "rho": rho, "gamma": gamma, "steps": 40}
    run = scored(tiny_model(family), options("moreau", constants, layers=(1,)))
    assert "use a smaller moreau.gamma" in run.warnings[0]


@pytest.mark.parametrize(("rho", "gamma"), [(0.01, 1e-5), (0.05, 0.001), (0.2, 0.01)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_too_few_steps_are_told(family: str, rho: float, gamma: float) -> None:
    constants = {**SETTLING, "rho": rho, "gamma": gamma, "steps": 25}
    run = scored(tiny_model(family), options("moreau", constants, layers=(1,)))
    assert "larger moreau.gamma" in run.warnings[0]


def test_the_memory_of_a_masked_round_counts_the_saved_weights() -> None:
    model = tiny_model("llama")
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    once, twice = (decision_of(model, SAMPLES, options("magnitude", iterations=rounds)) for rounds in (1, 2))
    assert once.details["scores"]["memory"]["state_bytes"] == 0
    assert twice.details["scores"]["memory"]["state_bytes"] == model_bytes


def test_noise_is_a_function_of_the_seed_and_disjoint_between_parameters_and_draws() -> None:
    model = tiny_model("llama")
    run = scoring_of(model, SAMPLES, options("moreau"))
    noise = Noise(run.open_params, 0.05, 7)
    gate, up = (
        p for p in run.open_params if p.name.endswith(("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"))
    )

    def z(param: Any, draw: int, source: Noise = noise) -> Tensor:
        w = param.parameter.detach()
        return (source.weights(param, None, draw) - w) / (0.05 * w.abs())

    assert torch.equal(z(gate, 0), z(gate, 0))
    pairs = [
        (z(gate, 0), z(up, 0)),
        (z(gate, 0), z(gate, 1)),
        (z(gate, 0), z(gate, 0, Noise(run.open_params, 0.05, 8))),
    ]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.1
    assert float(z(gate, 0).std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("method", "eta", "words"), [("moreau", 1e-6, "eta"), ("moreau_gs", 0.0, "eta is 0.0; it must be > 0")]
)
def test_eta_belongs_to_the_group_sparse_form_alone(method: str, eta: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config(options={"method": method, f"{method}.eta": eta})


def per_sample(model: Any, names: list[str]) -> dict[str, Tensor]:
    """[N, ...] gradients of single samples."""
    parameters = dict(model.named_parameters())
    weights = {n: parameters[n].detach().clone() for n in names}
    rows = [gradients_at(model, weights, SAMPLES[i : i + 1]) for i in range(len(SAMPLES))]
    return {n: torch.stack([row[n] for row in rows]) for n in names}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("variant", ["vectorize", "param_first", "param_second", "param_mix"])
@pytest.mark.parametrize("axes", [("ffn",), ("hidden",)])
def test_taylor_scores_are_their_definitions(variant: str, batch_size: int | None, axes: Any) -> None:
    model = tiny_model("llama").double()
    run = scored(model, options("taylor", form=variant, batch_size=batch_size, axes=axes))
    expected = scoring_of(model, SAMPLES, options("taylor", axes=axes))
    grads = per_sample(model, [p.name for p in expected.open_params])
    for param in expected.open_params:
        w, g = param.parameter.detach(), grads[param.name]
        first, second = w * g.mean(0), w * g.square().mean(0) * w
        elements = {"param_second": second, "param_mix": first - second / 2}.get(variant, first)
        expected.add_elements(param, elements, signed=variant == "vectorize")
    torch.testing.assert_close(group_scores(run), group_scores(expected), rtol=2e-5, atol=1e-12)


def test_magnitudes() -> None:
    model = tiny_model("opt")
    mlp = model.model.decoder.layers[1]
    with torch.no_grad():
        parts = [torch.cat([mlp.fc1.weight, mlp.fc1.bias[:, None]], 1), mlp.fc2.weight.T]
        l1 = sum(p.abs().sum(1) for p in parts)
        l2 = sum(p.square().sum(1) for p in parts)
    for norm, expected in (("l1", l1), ("l2", l2)):
        run = scored(model, options("magnitude", norm=norm))
        torch.testing.assert_close(run.scores.group_scores(1, "ffn"), expected.double(), rtol=1e-5, atol=0)


def test_gemma_norms_count_as_one_plus_w() -> None:
    model = tiny_model("gemma3")
    run = scored(model, options("magnitude", axes=("hidden",)))
    norm = model.model.norm.weight.detach()
    torch.testing.assert_close(run.scores.sums[None, "hidden"]["model.norm"], (1 + norm).abs().double())


def test_random_scores_are_seeded_and_know_nothing_of_the_weights() -> None:
    model = tiny_model("llama")
    first = scored(model, options("random"))
    assert torch.equal(group_scores(first), group_scores(scored(tiny_model("llama", seed=5), options("random"))))
    assert not torch.equal(group_scores(first), group_scores(scored(model, options("random", seed=1))))
    fewer = scored(model, options("random", first_layer=2, axes=("ffn",)))
    assert torch.equal(fewer.scores.group_scores(3, "ffn"), first.scores.group_scores(3, "ffn"))
    groups = first.scores.group_scores(3, "heads")
    assert ((groups >= 0) & (groups < 1)).all()


def test_every_scoring_method_has_its_default_preset_and_a_summary() -> None:
    names = [name for name, module in method_modules().items() if module.startswith("pyprune.methods.score.")]
    assert set(names) == set(SCORES)
    for name in names:
        method = get_method(name)
        assert (method.name, method.axis, method.regularise) == (name, "structures", None)
        assert method.summary.endswith(".")
        assert method_preset(name).method == name


@pytest.mark.parametrize("method", SCORES)
def test_a_scorer_leaves_the_model_as_it_was(method: str) -> None:
    model = tiny_model("qwen3-tied")
    before = {p.name: p.parameter.detach().clone() for p in named_axes(model)}
    decision_of(model, SAMPLES, quick(options(method, iterations=2)))
    assert all(torch.equal(p.parameter, before[p.name]) for p in named_axes(model))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
