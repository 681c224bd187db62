"""Methods that remove experts: their scores, how many go, what the report says, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pyprune.checkpoint.experts import expert_charts
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.record import read_pruning_json
from pyprune.errors import ConfigError, DataError, UnsupportedModelError
from pyprune.methods.base import PlanDecision, PlanRequest, RunOptions
from pyprune.methods.experts import RankedOptions, reap
from pyprune.methods.registry import get_method, preset
from pyprune.probe.experts import ExpertSums
from pyprune.run.prune import plan_checkpoint, prune_checkpoint
from pyprune.run.recipe import build_config
from pyprune.runtime.charts import draw_chart
from tests._support.inferred import tiny_inferred
from tests._support.models import tiny_batch, tiny_model
from tests._support.text import write_model, write_text
from tests.families.test_contract import logits

SAMPLES = tiny_batch(batch=4, length=16)
GROUPS = {"n_routed_experts": 8, "num_local_experts": 8, "n_group": 2, "topk_group": 1}
METHODS = ("reap", "expert_frequency", "expert_norm", "expert_random", "expert_obs")


def decide(
    method: str, model: PreTrainedModel, *, ratio: float = 0.3, ratio_of: Any = "experts", **options: Any
) -> PlanDecision:
    config = replace(preset(f"{method}-plain"), ratio=ratio, ratio_of=ratio_of)
    config = replace(config, options=replace(config.options, **options))
    return get_method(method).decide(model, SAMPLES, PlanRequest.of(model, config))


def scores(decision: PlanDecision) -> dict[str, list[float]]:
    return decision.details["experts"]["scores"]


def test_reap_of_a_case_that_is_computed_by_hand() -> None:
    """Gate and up give x, relu and the product x^2 for x > 0; the two experts write 2 x^2 and -x^2."""
    values = {"hidden_size": 1, "moe_intermediate_size": 1, "num_experts": 2, "num_local_experts": 2}
    experts = Qwen3MoeExperts(AutoConfig.for_model("qwen3_moe", hidden_act="relu", **values))
    with torch.no_grad():
        experts.gate_up_proj.fill_(1)
        experts.down_proj.copy_(torch.tensor([2.0, -1.0]).view(2, 1, 1))
    x = torch.tensor([[1.0], [2.0], [3.0]])
    chosen, weights = torch.tensor([[0], [1], [1]]), torch.tensor([[0.5], [0.25], [1.0]])
    sums = ExpertSums()
    sums(experts, (x, chosen, weights))
    assert sums.tokens.tolist() == [1, 2]
    assert sums.norms.tolist() == [2, 4 + 9]
    assert sums.weighted.tolist() == [0.5 * 2, 0.25 * 4 + 1.0 * 9]
    assert reap.score(sums).tolist() == [1, 5]


@torch.no_grad()
def test_scores_are_the_papers_formulas_in_float64() -> None:
    """Token by token, from the router's own choice and weights, without the library's code."""
    model = tiny_inferred("qwen3_moe")
    found = {method: scores(decide(method, model)) for method in METHODS[:3]}
    layer = model.model.layers[2].mlp
    inputs: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    logits(model, SAMPLES)
    handle.remove()
    norms: dict[int, list[float]] = {expert: [] for expert in range(7)}
    weighted: dict[int, list[float]] = {expert: [] for expert in range(7)}
    layer.double()
    for x in torch.cat(inputs).double():
        probabilities = torch.softmax(layer.gate.weight @ x, 0)
        for expert in probabilities.topk(2).indices.tolist():  # norm_topk_prob is off
            gate, up = (layer.experts.gate_up_proj[expert] @ x).chunk(2)
            out = layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            norms[expert].append(float(out.norm()))
            weighted[expert].append(float(probabilities[expert] * out.norm()))
    assert sum(map(len, norms.values())) == 2 * SAMPLES.numel()
    expected = {
        "reap": [sum(values) / max(1, len(values)) for values in weighted.values()],
        "expert_frequency": [len(values) for values in norms.values()],
        "expert_norm": [sum(values) for values in norms.values()],
    }
    for method, values in expected.items():
        assert found[method]["2"] == pytest.approx(values, rel=1e-5), method


@torch.no_grad()
def test_obs_is_the_loss_that_solved_experts_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, with the router of six experts, for each of the seven that might go."""
    monkeypatch.setattr("pyprune.methods.experts._replace.INPUTS", 7 * 44)
    model = tiny_inferred("qwen3_moe")
    found = scores(decide("expert_obs", model, ratio=0.15))["2"]
    layer = model.model.layers[2].mlp
    inputs: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    logits(model, SAMPLES)
    handle.remove()
    layer.double()
    x = torch.cat(inputs).double()
    gate, up = (x @ layer.experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up  # [experts, tokens, ffn]
    outputs = inner @ layer.experts.down_proj.transpose(1, 2)

    def weights(kept: list[int]) -> torch.Tensor:
        probabilities = torch.softmax((x @ layer.gate.weight.T)[:, kept], -1)
        best = probabilities.topk(2)
        chosen = torch.zeros_like(probabilities).scatter(1, best.indices, best.values)
        return torch.zeros(len(x), 7, dtype=torch.float64).index_copy(1, torch.tensor(kept), chosen)

    target = torch.einsum("te,eth->th", weights([*range(7)]), outputs)
    solves = torch.arange(len(x)) // SAMPLES.shape[1] % 2 == 0
    for expert in range(7):
        kept = [other for other in range(7) if other != expert]
        given = weights(kept)
        rest = target - torch.einsum("te,eth->th", given, outputs)
        features = torch.cat([given[:, other, None] * inner[other] for other in kept], 1)
        gram = features[solves].T @ features[solves]
        gram += 0.1 * gram.diagonal().mean() * torch.eye(len(gram))
        solution = torch.linalg.solve(gram, features[solves].T @ rest[solves])
        left = (rest - features @ solution)[~solves].square().sum() / target[~solves].square().sum()
        assert found[expert] == pytest.approx(float(left), rel=1e-3)


def test_obs_removes_several_experts_at_a_time_where_many_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for model, expected in ((tiny_inferred("mixtral"), 3), (tiny_inferred("glm4_moe", **GROUPS), 2)):
        monkeypatch.setattr("pyprune.methods.experts._replace.ROUNDS", 1)
        for gone in decide("expert_obs", model, ratio=0.45).details["experts"]["removed"].values():
            assert len(gone) == expected


def test_obs_needs_text_to_judge_by() -> None:
    model = tiny_inferred("mixtral")
    with pytest.raises(DataError, match="expert_obs judges experts on text that it does not solve on"):
        get_method("expert_obs").decide(model, SAMPLES[:1], PlanRequest.of(model, preset("expert_obs")))


@pytest.mark.parametrize("method", METHODS[:4])
def test_every_layer_loses_the_experts_of_the_smallest_scores(method: str) -> None:
    model = tiny_inferred("qwen3_moe")
    decision = decide(method, model, ratio=0.45)
    assert {layer: len(layer_scores) for layer, layer_scores in scores(decision).items()} == dict.fromkeys("0234", 7)
    for layer, values in scores(decision).items():
        kept = decision.plan.layers[int(layer)].units("experts")
        order = sorted(range(7), key=values.__getitem__)
        assert sorted(kept) == sorted(order[3:])
        assert decision.details["experts"]["removed"][layer] == order[:3]
    assert any("3 of 7 experts of each of 4 layers" in note for note in decision.notes)


def test_the_report_counts_the_tokens_that_experts_saw() -> None:
    decision = decide("reap", tiny_inferred("mixtral"))
    tokens = decision.details["experts"]["tokens"]
    assert [sum(counts) for counts in tokens.values()] == [2 * SAMPLES.numel()] * 5
    assert any(note.startswith("An expert saw ") for note in decision.notes)
    assert any("of 35 experts saw fewer than 64 tokens of the calibration text" in text for text in decision.warnings)
    assert not decide("expert_random", tiny_inferred("mixtral")).warnings


def test_tokens_are_counted_by_kind_of_text() -> None:
    model, config, further = tiny_inferred("mixtral"), preset("reap-plain"), tiny_batch(batch=2, length=16, seed=1)
    request = PlanRequest.of(model, config)
    run = RunOptions(further=further, kinds=("prose", "code", "prose", "code", "prose", "code"))
    by_kind = reap.METHOD.decide(model, SAMPLES, request, run).details["experts"]["tokens_by_kind"]
    assert list(by_kind) == ["prose", "code"]
    for first, kind in enumerate(by_kind):
        alone = reap.METHOD.decide(model, torch.cat((SAMPLES, further))[first::2], request)
        assert alone.details["experts"]["tokens"] == by_kind[kind]
    of_one_kind = reap.METHOD.decide(model, SAMPLES, request, RunOptions(kinds=("prose",) * 4))
    assert "tokens_by_kind" not in of_one_kind.details["experts"]


def test_a_report_shows_which_experts_each_kind_of_text_uses(tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("qwen3_moe"), tmp_path / "dense")
    texts = [write_text(tmp_path / f"{kind}.txt", seed=seed) for seed, kind in enumerate(("prose", "code"))]
    mixture = [{"source": str(text), "kind": text.stem, "share": 1} for text in texts]
    data = {"data.source": "mixture", "data.mixture": mixture, "data.samples": 4, "data.sequence_length": 16}
    prune_checkpoint(folder, build_config(preset="reap-plain", options=data), out=tmp_path / "out")
    (chart,) = expert_charts({"dense": str(folder), "out": str(tmp_path / "out")})
    plan = read_pruning_json(tmp_path / "out").plan
    assert plan is not None
    experts = plan.dense.units("experts", 0)
    mixtures = [layer for layer in plan.layers if layer.units("experts")]
    assert list(chart.groups) == [f"layer {layer.index}" for layer in mixtures]
    for layer in mixtures:
        removed = chart.marked[f"layer {layer.index}"]
        assert sorted([*removed, *layer.units("experts")]) == list(range(experts))
        assert [len(counts) for counts in chart.groups[f"layer {layer.index}"].values()] == [experts, experts]
    svg = draw_chart(chart).render()
    assert svg.count('class="second"') == 1 + 2 * sum(map(len, chart.marked.values()))


def test_more_text_is_read_until_every_expert_saw_enough() -> None:
    model, config = tiny_inferred("mixtral"), preset("reap-plain")

    def read(sequences: int) -> int:
        samples, further = tiny_batch(batch=4, length=16), tiny_batch(batch=sequences, length=16, seed=1)
        decision = reap.METHOD.decide(model, samples, PlanRequest.of(model, config), RunOptions(further=further))
        tokens = decision.details["experts"]["tokens"]["0"]
        assert (min(tokens) < 64) == bool(decision.warnings)
        assert any("sequences were read instead of 4" in note for note in decision.notes) == (sequences > 0)
        return sum(tokens) // 2 // 16

    assert read(0) == 4
    assert read(8) == 12  # all that there is
    assert 16 <= read(400) < 200


def test_a_number_of_experts_that_stay_wins_over_the_ratio() -> None:
    model = tiny_inferred("mixtral")
    assert {len(layer.units("experts")) for layer in decide("reap", model, keep=4).plan.layers} == {4}
    with pytest.raises(ConfigError, match=r"reap.keep is 7, and a layer has 7 experts; give 2 to 6"):
        decide("reap", model, keep=7)


@pytest.mark.parametrize("method", ["reap", "expert_obs"])
def test_a_global_order_takes_from_some_layers_more_than_from_others(method: str) -> None:
    """Small experts by their scores, and experts that are alike because the others replace them wholly."""
    model = tiny_inferred("mixtral")
    with torch.no_grad():
        experts = model.model.layers[3].mlp.experts
        for parameter in (experts.gate_up_proj, experts.down_proj) if method == "expert_obs" else ():
            parameter[:] = parameter[:1].clone()
        experts.down_proj[1:6].mul_(1e-3 if method == "reap" else 1)
    plan = decide(method, model, ratio=0.3, ranking="global").plan
    kept = [len(layer.units("experts")) for layer in plan.layers]
    assert sum(kept) == 5 * 5
    assert kept[3] == 2  # as many as a token reads
    assert not plan.is_uniform


@pytest.mark.parametrize("rounds", [1, 8])
def test_groups_of_experts_lose_as_many(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyprune.methods.experts._replace.ROUNDS", rounds)
    model = tiny_inferred("glm4_moe", **GROUPS)
    ways = [(name, ranking) for name in ("expert_obs", "expert_norm") for ranking in ("local", "global")]
    for method, ranking in ways:
        decision = decide(method, model, ratio=0.4, ranking=ranking)
        assert sum(map(len, decision.details["experts"]["removed"].values())) == 2 * len(decision.plan.layers[2:])
        for layer in decision.plan.layers[2:]:
            kept = layer.units("experts")
            assert sum(expert < 4 for expert in kept) == len(kept) / 2
    assert any("2 experts of a layer are removed instead of 3" in note for note in decision.notes)
    with pytest.raises(ConfigError, match=r"1 of 8 experts of layer 2 .* 2 groups. Use a ratio of at least 0.25"):
        decide("expert_norm", model, ratio=0.2)


@pytest.mark.parametrize(
    ("ratio", "ratio_of", "match"),
    [
        (
            0.8,
            "experts",
            "would keep 2 of 7 experts of layer 0, and the router .* needs 3. .* at most 0.5714",
        ),
        (0.1, "experts", "removes nothing"),
        (0.3, "parameters", r"ratio_of is 'parameters', but reap removes experts; .* number to keep \(reap.keep\)"),
    ],
)
def test_goals_that_cannot_be_reached_are_refused(ratio: float, ratio_of: str, match: str) -> None:
    model = tiny_inferred("mixtral", num_experts_per_tok=3)
    with pytest.raises(ConfigError, match=match):
        decide("reap", model, ratio=ratio, ratio_of=ratio_of)


def test_models_without_experts_and_runs_without_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="reap removes experts, of which this 'llama' model has none"):
        decide("reap", tiny_model("llama"))
    model = tiny_inferred("mixtral")
    request = PlanRequest.of(model, preset("reap-plain"))
    with pytest.raises(DataError, match="reap scores experts on calibration text"):
        get_method("reap").decide(model, SAMPLES[:0], request)


def test_experts_that_read_all_tokens_are_chosen_at_random_alone() -> None:
    model = tiny_inferred("llama4_text")
    with pytest.raises(UnsupportedModelError, match="experts cannot be scored"):
        decide("reap", model)
    plans = [decide("expert_random", model, seed=seed).plan for seed in (0, 0, 1)]
    assert plans[0] == plans[1] != plans[2]


def test_the_number_that_stays_is_an_option() -> None:
    assert build_config(preset="reap", settings=["reap.keep=4"]).options == RankedOptions(keep=4)


@pytest.mark.parametrize(("characters", "read"), [(2000, 16), (100, 4)])
def test_a_run_draws_more_text_where_its_source_has_it(characters: int, read: int, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("qwen3_moe"), tmp_path / "dense")
    text = write_text(tmp_path / "text.txt")
    text.write_text(text.read_text()[:characters])
    data = {"data.source": str(text), "data.samples": 4, "data.sequence_length": 8}
    plan = plan_checkpoint(folder, build_config(preset="reap-plain", options=data))
    assert sum(plan.details["experts"]["tokens"]["0"]) == 2 * read * 8


@pytest.mark.parametrize("method", METHODS)
def test_a_run_writes_a_stock_model_with_fewer_experts(method: str, tmp_path: Path) -> None:
    folder = write_model(tiny_inferred("qwen3_moe"), tmp_path / "dense")
    data = {"data.source": str(write_text(tmp_path / "text.txt")), "data.samples": 4, "data.sequence_length": 16}
    config = build_config(preset=f"{method}-plain", options={"ratio": 0.45, **data, "verify": True})
    result = prune_checkpoint(folder, config, out=tmp_path / "out")
    assert result.verified is not None
    assert result.verified["masked_perplexity"] == pytest.approx(result.verified["compacted_perplexity"], rel=1e-5)
    model, _ = load_model(tmp_path / "out")
    assert (model.config.model_type, model.config.num_experts) == ("qwen3_moe", 4)
    assert torch.isfinite(logits(model, tiny_batch())).all()
    assert read_pruning_json(tmp_path / "out").plan == result.plan
