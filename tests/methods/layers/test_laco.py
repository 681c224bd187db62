"""LaCo: its merge is the formula, its search is the algorithm, and what is written is the merged model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pyprune import make_plan, prune_
from pyprune.checkpoint.save import save_checkpoint
from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.errors import ConfigError, ScoreError
from pyprune.families import family_for
from pyprune.methods.layers.laco.collapse import Collapsed, merge_, merge_at
from pyprune.methods.registry import preset
from pyprune.probe.streams import LayerRunner
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.planted import layer_of
from tests._support.scores import decision_of
from tests._support.tokenizer import tiny_tokenizer

LAYERS = 8


def samples() -> Tensor:
    return tiny_batch(1, 5, 12)


def config(ratio: float = 0.5, **own: Any) -> PruneConfig:
    base = preset("laco")
    return replace(base, ratio=ratio, options=replace(base.options, **{"form": "paper", "merge": 3, **own}))


def dense_layers(count: int) -> Collapsed:
    return tuple((i, ((i, 1),)) for i in range(count))


def projections(layer: nn.Module) -> list[str]:
    return [name for name, p in layer.named_parameters() if "norm" not in name]


@torch.no_grad()
def merged_literally(layers: nn.ModuleList, position: int, count: int, form: str = "paper") -> None:
    """Equation 1, one layer after the other, and the layers behind are gone; in the code what is subtracted moves."""
    first = layers[position]
    own = {name: first.get_parameter(name).clone() for name in projections(first)}
    for behind in range(position + 1, position + 1 + count):
        for name, before in own.items():
            parameter = first.get_parameter(name)
            subtracted = before if form == "paper" else parameter.clone()
            parameter.add_(layers[behind].get_parameter(name) - subtracted)
    del layers[position + 1 : position + 1 + count]


@torch.no_grad()
def output(model: PreTrainedModel) -> Tensor:
    return model.model(input_ids=samples(), use_cache=False).last_hidden_state.flatten(1).double()


def collapsed_literally(
    dense: PreTrainedModel, count: int, threshold: float, merge: int, interval: int, lowest: int, form: str = "paper"
) -> tuple[PreTrainedModel, list[int]]:
    """Algorithm 1 on copies of the model: what is left, and its layers' indices.

    A sum in another order moves a similarity by its last digits, and the threshold is one of them.
    """
    model, left = copy.deepcopy(dense), list(range(LAYERS))
    position = max(lowest, LAYERS - 1 - merge)
    while position >= lowest and LAYERS - len(left) < count:
        taken = min(merge - 1, len(left) - position - 1, count - LAYERS + len(left))
        trial = copy.deepcopy(model)
        merged_literally(trial.model.layers, position, taken, form)
        if functional.cosine_similarity(output(trial), output(dense)).mean() >= threshold - 1e-5:
            model, left = trial, left[: position + 1] + left[position + 1 + taken :]
            position -= interval
        else:
            position -= 1
    return model, left


def test_one_merge_is_the_formula_and_leaves_the_norms() -> None:
    model, dense = tiny_model("llama-mha-bias"), tiny_model("llama-mha-bias")
    ((_, own),) = [entry for entry in merge_at(dense_layers(4), 1, 2) if entry[0] == 1]
    merge_(LayerRunner(model, family_for(model)), 1, own)
    layer = layer_of(model, 1)
    assert "self_attn.q_proj.bias" in projections(layer)
    for name, parameter in layer.named_parameters():
        theta = [layer_of(dense, i).get_parameter(name) for i in range(4)]
        expected = theta[1] + (theta[2] - theta[1]) + (theta[3] - theta[1]) if "norm" not in name else theta[1]
        torch.testing.assert_close(parameter, expected)
        assert "norm" in name or not torch.allclose(parameter, theta[1])
    for other in (0, 2, 3):
        assert all(
            torch.equal(p, layer_of(dense, other).get_parameter(n))
            for n, p in layer_of(model, other).named_parameters()
        )


def test_merges_of_merged_layers_add_up() -> None:
    theta = [torch.randn(3, 4, dtype=torch.float64) for _ in range(6)]
    left = {i: t.clone() for i, t in enumerate(theta)}
    collapsed = dense_layers(6)
    for position, count in ((3, 2), (1, 1), (0, 2)):
        indices = [index for index, _ in collapsed]
        own = left[indices[position]]
        taken = indices[position + 1 : position + 1 + count]
        left[indices[position]] = own + sum(left.pop(i) - own for i in taken)
        collapsed = merge_at(collapsed, position, count)
    assert [index for index, _ in collapsed] == list(left) == [0]
    for index, own_multiples in collapsed:
        torch.testing.assert_close(sum(theta[i] * times for i, times in own_multiples), left[index])


@pytest.mark.parametrize(
    ("ratio", "own"),
    [
        (0.25, {}),
        (0.5, {}),
        (0.5, {"merge": 2}),
        (0.4, {"interval": 2}),
        (0.25, {"lowest": 3}),
        (0.5, {"form": "code"}),
    ],
)
def test_the_search_is_the_algorithm_at_the_largest_threshold_that_reaches_the_ratio(
    ratio: float, own: dict[str, Any]
) -> None:
    dense = tiny_model(num_hidden_layers=LAYERS)
    before = {name: p.clone() for name, p in dense.named_parameters()}
    chosen = config(ratio, **own)
    decision = decision_of(dense, samples(), chosen)
    assert all(torch.equal(p, before[name]) for name, p in dense.named_parameters())
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in dense.modules())
    found = decision.details["layers"]
    constants = (chosen.options.merge, chosen.options.interval, chosen.options.lowest, chosen.options.form)
    count = int(ratio * LAYERS)
    expected, left = collapsed_literally(dense, count, found["threshold"], *constants)
    assert list(decision.plan.kept_layers) == left
    assert len(left) == LAYERS - count
    assert len(collapsed_literally(dense, count, found["threshold"] + 1e-4, *constants)[1]) > LAYERS - count
    similarity = functional.cosine_similarity(output(expected), output(dense)).mean()
    assert found["similarity"] == pytest.approx(float(similarity), rel=1e-6)
    assert min(map(int, found["merges"])) >= constants[2]


def test_the_cut_model_is_the_merged_one_and_not_the_plain_cut() -> None:
    dense = tiny_model(num_hidden_layers=LAYERS)
    model, plain = copy.deepcopy(dense), copy.deepcopy(dense)
    result = prune_(model, {"data": samples()}, config())
    expected, _ = collapsed_literally(dense, 4, result.decision["layers"]["threshold"], 3, 1, 0)
    batch = tiny_batch(5)
    with torch.no_grad():
        found = model(input_ids=batch).logits
        assert_same_logits(found, expected(input_ids=batch).logits)
    assert any(note.startswith("LaCo merged layers") for note in result.notes)
    again = copy.deepcopy(dense)
    assert make_plan(again, samples(), config()) == result.plan
    prune_(again, {"data": samples()}, config())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    prune_(plain, {"data": samples()}, replace(preset("last"), ratio=0.5))
    with torch.no_grad():
        assert not torch.allclose(plain(input_ids=batch).logits, found, atol=1e-3)


def test_a_replayed_plan_is_cut_without_the_merge_and_says_so(tmp_path: Path) -> None:
    dense = tiny_model(num_hidden_layers=LAYERS)
    plan = make_plan(dense, samples(), config())
    (tmp_path / "plan.json").write_text(plan.to_json())
    model = copy.deepcopy(dense)
    result = prune_(model, {"data": samples()}, replace(config(), plan=str(tmp_path / "plan.json")))
    assert any("replayed without what laco does to the weights" in warning for warning in result.warnings)
    kept = [layer_of(dense, i) for i in plan.kept_layers]
    for layer, source in zip(model.model.layers, kept, strict=True):
        assert all(torch.equal(p, source.get_parameter(name)) for name, p in layer.named_parameters())


def test_refusals() -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    reconstructed = replace(config(), cut=CutConfig(reconstruct="least_squares"))
    with pytest.raises(ConfigError, match=r"cut\.reconstruct is 'least_squares', but laco merges layers"):
        decision_of(model, samples(), reconstructed)
    with pytest.raises(ConfigError, match=r"laco removes at most 2 of 8 layers with merge 3, interval 5"):
        decision_of(model, samples(), config(0.5, interval=5))
    with pytest.raises(ConfigError, match=r"removes 4 of 8 layers, but only 2 may be removed: the first 6"):
        decision_of(model, samples(), config(0.5, lowest=5))
    with torch.no_grad():
        layer_of(model, 0).mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ScoreError, match="not finite"):
        decision_of(model, samples(), config())


def test_a_replayed_checkpoint_says_that_its_merges_are_not(tmp_path: Path) -> None:
    dense = tiny_model(num_hidden_layers=LAYERS)
    model = copy.deepcopy(dense)
    result = prune_(model, {"data": samples()}, config())
    facts = {"method": "laco", "report": result.to_dict()}
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "merged", plan=result.plan, provenance=facts)
    replayed = PruneConfig(method="none", plan=str(tmp_path / "merged"), stages=StageConfig(before=()))
    warnings = prune_(dense, {}, replayed).warnings
    assert any("were merged before the cut, which is not replayed" in warning for warning in warnings)
