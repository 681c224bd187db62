"""Fused projections: a Phi-3 is a LLaMA whose q, k and v, gate and up lie in one matrix, and all must agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.run import PruneConfig
from pyprune.cut.compact import compact_, tensor_cut
from pyprune.cut.compensate import compensate_
from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, Row, StockClasses, family_for, parameter_shapes, parameters_after
from pyprune.families.base import kept_positions
from pyprune.methods.registry import get_method, own_methods
from pyprune.methods.score import ScoreMethod
from pyprune.methods.score._structures import projections
from pyprune.plan import PrunePlan, Sizes
from pyprune.probe.effects import weight_sums
from pyprune.run.recipe import build_config
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import quick, scoring_config
from tests._support.plans import axis_plans
from tests._support.scores import scoring_of

SAMPLES = tiny_batch(batch=4, length=24)
QKV = Row(
    "model.layers.{i}.self_attn.qkv_proj.weight", (("heads", "kv_heads", "kv_heads"), "hidden"), "reader", "attention"
)


def twins(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(Phi-3, LLaMA) of the same weights."""
    fused = tiny_model("phi3").to(dtype)
    same = {name: getattr(fused.config, name) for name in ("num_key_value_heads", "rms_norm_eps", "rope_parameters")}
    separate = tiny_model("llama", seed=1, **same).to(dtype)
    state: dict[str, Tensor] = {}
    for name, tensor in fused.state_dict().items():
        if "qkv_proj" in name:
            parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split([48, 16, 16]), strict=True)
            state |= {name.replace("qkv_proj", own): part for own, part in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate_proj", "up_proj"), tensor.split([40, 40]), strict=True)
            state |= {name.replace("gate_up_proj", own): part for own, part in parts}
        else:
            state[name] = tensor
    separate.load_state_dict(state)
    return fused, separate


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(SAMPLES, use_cache=False).logits


def group_scores(model: PreTrainedModel, config: PruneConfig) -> dict[Any, Tensor]:
    run = scoring_of(model, SAMPLES, config)
    method = get_method(config.method)
    assert isinstance(method, ScoreMethod)
    method.scorer(run)
    return {place: run.scores.group_scores(*place) for place in run.scope.places}


def test_the_twins_are_one_function() -> None:
    fused, separate = twins()
    assert_same_logits(logits(fused), logits(separate))


@pytest.mark.parametrize("axis", list(axis_plans(family_for(tiny_model("llama")).plan(tiny_model("llama").config))))
def test_a_plan_does_the_same_to_both(axis: str) -> None:
    fused, separate = twins()
    reports = []
    for model in (fused, separate):
        family, shapes = family_for(model), parameter_shapes(model)
        plan = axis_plans(family.plan(model.config))[axis]
        reports.append(compact_(model, plan))
        assert reports[-1].parameters == parameters_after(family, shapes, plan)
    assert reports[0].parameters == reports[1].parameters
    assert reports[0].dense_parameters == reports[1].dense_parameters
    assert_same_logits(logits(fused), logits(separate))


@pytest.mark.parametrize("axis", ["heads", "ffn", "unequal"])
def test_compensation_is_the_same(axis: str) -> None:
    fused, separate = twins()
    for model in (fused, separate):
        plan = axis_plans(family_for(model).plan(model.config))[axis]
        compensate_(model, plan, SAMPLES)
        compact_(model, plan)
    assert_same_logits(logits(fused), logits(separate))


OWN = ("random", "loraprune")
"""The first reads no weights; the second trains one pair of LoRA factors for a whole fused module."""
SCORED = [name for name in own_methods() if isinstance(get_method(name), ScoreMethod) and name not in OWN]


def noiseless(method: str, **score: Any) -> PruneConfig:
    """Few steps without noise, which is numbered by a weight's place in the model."""
    config = scoring_config(method, **score)
    few = {"sigma": 0.0, "steps": 3, "draws": 1}
    known = {name: value for name, value in few.items() if hasattr(config.options, name)}
    return scoring_config(method, **known, **score)


@pytest.mark.parametrize(
    "score",
    [
        {},
        {"aggregation": "prod"},
        {"aggregation": "max", "heads_unit": "query_head"},
        {"axes": ("hidden",), "aggregation": "max"},
    ],
    ids=lambda s: "-".join(s) or "default",
)
@pytest.mark.parametrize("method", SCORED)
def test_every_score_is_the_same(method: str, score: dict[str, Any]) -> None:
    """Fused projections count as modules of their own, so every aggregation sees the same structures."""
    if method == "flap" and ("axes" in score or score.get("aggregation") == "prod"):
        pytest.skip("FLAP refuses these")
    if method == "modegpt" and "axes" in score:
        pytest.skip("modegpt refuses other axes than ffn")
    if method == "obs" and ("axes" in score or "aggregation" in score):
        pytest.skip("obs refuses these")
    if method in ("moreau", "moreau_gs") and "heads_unit" in score:
        pytest.skip("a fused parameter moves as a whole: keys and values too, where only query heads are open")
    config = noiseless(method, **score)
    fused, separate = (group_scores(model, config) for model in twins(torch.float64))
    assert fused.keys() == separate.keys()
    for place, values in fused.items():
        torch.testing.assert_close(values, separate[place], rtol=1e-6, atol=1e-12)
        assert values.unique().numel() > 1, place


@pytest.mark.parametrize("method", OWN)
def test_the_other_scores_rank_the_units_of_a_fused_model(method: str) -> None:
    model = tiny_model("phi3")
    with torch.no_grad():
        layer = model.model.layers[1]
        for rows in (slice(24, 48), slice(56, 64), slice(72, 80)):  # of KV head 1: its queries, key and value
            layer.self_attn.qkv_proj.weight[rows] *= 1e-3
        layer.self_attn.o_proj.weight[:, 24:48] *= 1e-3
        for rows in ([3, 7], [43, 47]):  # of FFN channels 3 and 7: gate and up
            layer.mlp.gate_up_proj.weight[rows] *= 1e-3
        layer.mlp.down_proj.weight[:, [3, 7]] *= 1e-3
    found = group_scores(model, quick(scoring_config(method), steps=4))
    assert all(values.unique().numel() > 1 for values in found.values())
    if method == "loraprune":
        assert found[1, "heads"].argmin() == 1
        assert sorted(found[1, "ffn"].argsort()[:2].tolist()) == [3, 7]


@pytest.mark.parametrize("method", ["elder", "dress"])
def test_regularising_does_the_same(method: str) -> None:
    """Layers and hidden channels are no fused axes, so that a step changes the same numbers wherever they lie."""
    few = {"steps": 6, "batch_size": 2, "micro_batch_size": 2, "dtype": "float32"}
    train = {f"{method}.train.{name}": value for name, value in few.items()}
    stages = {"stages.before": ["regularise"]}
    config = build_config(options={"method": method, "data.sequence_length": 24, **stages, **train})
    dense = logits(twins(torch.float64)[0])
    results = []
    for model in twins(torch.float64):
        plan = family_for(model).plan(model.config)
        plan = plan.drop_layers([1]) if method == "elder" else plan.keep_hidden(range(36))
        before = weight_sums(model, plan)
        regularise = get_method(method).regularise
        assert regularise is not None
        regularise(model, SAMPLES, plan, config.options)
        after = weight_sums(model, plan)
        if method == "dress":
            assert sum(sums.removed for sums in before.values()) > 0
            assert sum(sums.removed for sums in after.values()) == 0
        results.append(logits(model))
    assert (results[0] - dense).abs().max() > 1e-2 * dense.abs().max()
    assert_same_logits(*results, tolerance=1e-12)


def test_positions_of_a_fused_dimension_follow_one_another() -> None:
    model = tiny_model("phi3")
    plan = family_for(model).plan(model.config)
    assert kept_positions(QKV, plan.layers[0], plan) == [None, None]
    plan = plan.with_layer(0, query_heads=[1, 3], kv_heads=[0, 1]).keep_hidden([0, 5])
    # Two of six query heads of 8 channels; all keys after 48 rows, all values after 64.
    expected = (*range(8, 16), *range(24, 32), *range(48, 64), *range(64, 80))
    assert kept_positions(QKV, plan.layers[0], plan) == [expected, (0, 5)]


GROUPED = replace(QKV, by_group=True)
DENSE = PrunePlan.identity("any", Sizes.decoder(1, 7, 6, 3, 2, 5, 11))
"""Three KV groups: two queries, a key and a value of two channels each, one after another in a fused projection."""


def grouped(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Lay [heads, KV heads, KV heads, with their channels] out group by group."""
    groups = [part.unflatten(0, (3, -1)) for part in (queries, keys, values)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def test_positions_of_a_dimension_by_group_are_those_of_its_groups() -> None:
    layout = grouped(torch.arange(12), torch.arange(12, 18), torch.arange(18, 24)).tolist()
    plan = DENSE.with_layer(0, query_heads=[1, 4], kv_heads=[0, 2])
    in_a_row, _ = kept_positions(QKV, plan.layers[0], plan)
    by_group, hidden = kept_positions(GROUPED, plan.layers[0], plan)
    assert in_a_row is not None
    assert by_group is not None
    assert hidden is None
    expected = [2, 3, 12, 13, 18, 19, 8, 9, 16, 17, 22, 23]  # of group 0, then of group 2
    assert [layout[i] for i in by_group] == expected
    assert sorted(expected) == list(in_a_row)
    assert kept_positions(GROUPED, DENSE.layers[0], DENSE) == [None, None]


@pytest.mark.parametrize("row", [QKV, GROUPED], ids=["in a row", "by group"])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_projection_is_found_in_its_layout(row: Row, dim: int) -> None:
    parts = [torch.rand(n, 7) for n in (12, 6, 6)]
    fused = grouped(*parts) if row.by_group else torch.cat(parts)
    row = row if dim == 0 else replace(row, axes=row.axes[::-1])
    found = projections(row, DENSE.dense, 0)
    assert [projection.axes[dim] for projection in found] == ["heads", "kv_heads", "kv_heads"]
    for projection, part in zip(found, parts, strict=True):
        expected = part if dim == 0 else part.T
        assert torch.equal(projection.of(fused if dim == 0 else fused.T), expected)


def test_a_transposed_matrix_is_cut_like_the_other() -> None:
    """As in GPT-2, whose weights are [in, out]."""
    plan = DENSE.with_layer(0, query_heads=[1, 4], kv_heads=[0, 2], ffn=[0, 3]).keep_hidden([0, 2, 6])
    for row in (GROUPED, replace(QKV, axes=("hidden", "ffn"), role="writer", block="mlp")):
        turned = replace(row, axes=row.axes[::-1])
        first, second = (replace(tiny_family(), rows=(each,)) for each in (row, turned))
        name = QKV.pattern.replace("{i}", "0")
        dense = torch.rand(24 if row is GROUPED else 7, 7 if row is GROUPED else 5)
        cuts = [tensor_cut(name, family, plan, tied=False) for family in (first, second)]
        assert cuts[0] is not None
        assert cuts[1] is not None
        assert torch.equal(cuts[0].of(dense), cuts[1].of(dense.T.contiguous()).T)


def tiny_family() -> Family:
    return Family("any", StockClasses.locate("llama", "Llama"), (), ())


@pytest.mark.parametrize(
    ("axes", "width_norm", "words"),
    [
        ((("heads", "hidden"), "hidden"), "", "fuses the axis 'hidden' with others; only axes of its block can be"),
        ((("ffn", "ffn"), ("heads", "kv_heads")), "", "has 2 fused dimensions"),
        ((("heads", "kv_heads"), "hidden"), "input", "normalised over its whole width"),
    ],
)
def test_a_row_that_cannot_be_cut_is_refused(axes: Any, width_norm: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        Row("model.layers.{i}.odd.weight", axes, "reader", "attention", width_norm=width_norm)


@pytest.mark.parametrize("axes", [("heads", "hidden"), (("heads", "ffn"), "hidden")], ids=str)
def test_a_row_without_groups_is_not_by_group(axes: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="is by_group, but fuses no heads"):
        Row("model.layers.{i}.odd.weight", axes, "reader", "attention", by_group=True)
