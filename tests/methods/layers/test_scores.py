"""Which layers or blocks go: every score against its definition written out, and on a layer known to be idle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune import prune_
from pyprune.config.cut import CutConfig
from pyprune.config.run import PruneConfig
from pyprune.config.train import TrainConfig
from pyprune.cut.mask import mask_, masked
from pyprune.errors import ConfigError, DataError, ScoreError
from pyprune.families import family_for
from pyprune.methods.base import PlanDecision, PlanRequest
from pyprune.methods.layers._units import losses_without
from pyprune.methods.layers.shortened_llama.score import taylor_scores
from pyprune.methods.layers.shortgpt.score import block_influence
from pyprune.methods.ratio import Unit, drop_units
from pyprune.methods.registry import get_method, preset
from pyprune.probe.streams import LayerRunner
from pyprune.train.loop import train
from pyprune.train.loss import causal_loss
from tests._support.compare import assert_same_logits
from tests._support.models import one_of_each, tiny_batch, tiny_model
from tests._support.planted import layer_of

UNITS: tuple[Unit, ...] = ("layer", "attention", "mlp")
LAYERS = 6
ALL_OPEN = {"keep_first": 0, "keep_last": 0}


def samples() -> Tensor:
    return tiny_batch(1, 8, 12)


def config(method: str, ratio: float = 0.5, ratio_of: str = "layers", **own: Any) -> PruneConfig:
    base = preset(method)
    return replace(base, cut=CutConfig(), ratio=ratio, ratio_of=ratio_of, options=replace(base.options, **own))


def decided(model: PreTrainedModel, chosen: PruneConfig, text: Tensor | None = None) -> PlanDecision:
    return get_method(chosen.method).decide(model, samples() if text is None else text, PlanRequest.of(model, chosen))


def removed(decision: PlanDecision) -> list[int]:
    """The layers whose unit goes, in the order in which they were chosen."""
    found: list[int] = decision.details["layers"]["removed"]
    return found


@torch.no_grad()
def loss(model: PreTrainedModel, gone: Iterable[int], unit: Unit = "layer") -> float:
    """The loss without some units, by zeroing what they write."""
    with masked(model, drop_units(family_for(model).plan(model.config), gone, unit)):
        return float(causal_loss(model, samples()))


# --- ShortGPT ------------------------------------------------------------------------------------


def influence(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """1 - mean cosine over all tokens of (before, after) [B, T, H], one token at a time."""
    cosines = []
    for before, after in pairs:
        for x, y in zip(before.flatten(0, 1).double(), after.flatten(0, 1).double(), strict=True):
            cosines.append(float(x @ y) / (math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))))
    return 1 - sum(cosines) / len(cosines)


@torch.no_grad()
def streams(model: PreTrainedModel, index: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What stands in front of and behind a layer and its blocks, from what its own modules read and wrote."""
    layer = layer_of(model, index)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen[f"{name} in"] = args[0] if args else kwargs["hidden_states"]
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    modules = {"layer": layer, "attention": layer.self_attn, "mlp": layer.mlp}
    handles = [module.register_forward_hook(keep(name), with_kwargs=True) for name, module in modules.items()]
    model(input_ids=samples(), use_cache=False)
    for handle in handles:
        handle.remove()
    before, after = seen["layer in"], seen["layer"]
    if model.config.model_type == "phi":
        return {
            "layer": (before, after),
            "attention": (before, before + seen["attention"]),
            "mlp": (before, before + seen["mlp"]),
        }
    middle = before + seen["attention"]
    return {"layer": (before, after), "attention": (before, middle), "mlp": (middle, middle + seen["mlp"])}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_block_influence_is_its_definition(family: str, unit: Unit) -> None:
    model = tiny_model(family)
    found = block_influence(LayerRunner(model, family_for(model)), samples().split(2), unit)
    assert found == pytest.approx([influence([streams(model, i)[unit]]) for i in range(4)], rel=1e-5)
    assert max(found) > 1.5 * min(found)


def test_shortgpt_removes_the_smallest_influence() -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    decision = decided(model, config("shortgpt"))
    found = block_influence(LayerRunner(model, family_for(model)), (samples(),))
    assert removed(decision) == sorted(range(LAYERS), key=found.__getitem__)[:3]
    shown = decision.details["layers"]["block_influence"]
    assert [shown[str(i)] for i in range(LAYERS)] == pytest.approx(found)


# --- SLEB and Shortened LLaMA, by perplexity -----------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("family", one_of_each())
def test_losses_without_a_unit_are_those_of_the_masked_model(family: str, unit: Unit) -> None:
    model = tiny_model(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = losses_without(LayerRunner(model, family_for(model)), samples().split(4), unit, (1,), [0, 2, 3], "losses")
    assert list(found) == [0, 2, 3]
    assert found == pytest.approx({i: loss(model, {1, i}, unit) for i in found}, rel=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("unit", UNITS)
def test_sleb_is_greedy_by_brute_force(unit: Unit) -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    expected: list[int] = []
    losses = []
    for _ in range(3):
        rest = [i for i in range(LAYERS) if i not in expected]
        found = {i: loss(model, {*expected, i}, unit) for i in rest}
        expected.append(min(found, key=found.__getitem__))
        losses.append(found)
    decision = decided(model, config("sleb", unit=unit, **ALL_OPEN))
    assert removed(decision) == expected
    for shown, found in zip(decision.details["layers"]["rounds"], losses, strict=True):
        assert {int(i): value for i, value in shown["losses"].items()} == pytest.approx(found, rel=1e-4)
    assert decision == decided(model, config("sleb", unit=unit, **ALL_OPEN))


def test_sleb_keeps_the_first_and_the_last_layer() -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    for idle in (0, LAYERS - 1):
        mask_(model, family_for(model).plan(model.config).drop_layers([idle]))
    assert set(removed(decided(model, config("sleb", 0.5)))) <= {1, 2, 3, 4}
    assert not set(removed(decided(model, config("sleb", 0.5, **ALL_OPEN)))) <= {1, 2, 3, 4}


def test_what_stands_before_a_removed_layer_is_computed_once() -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    runs = []
    for index in range(LAYERS):
        layer_of(model, index).self_attn.register_forward_hook(lambda *_: runs.append(1))
    losses_without(LayerRunner(model, family_for(model)), (samples(),), "layer", (), range(LAYERS), "losses")
    behind = LAYERS * (LAYERS - 1) // 2
    assert len(runs) == LAYERS + behind < LAYERS * (LAYERS - 1)


@pytest.mark.parametrize("unit", UNITS)
def test_shortened_llama_removes_the_smallest_perplexity_at_once(unit: Unit) -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    found = {i: loss(model, {i}, unit) for i in range(LAYERS)}
    decision = decided(model, config("shortened_llama", unit=unit))
    assert removed(decision) == sorted(found, key=found.__getitem__)[:3]
    shown = decision.details["layers"]["scores"]
    assert {int(i): value for i, value in shown.items()} == pytest.approx(found, rel=1e-4)


# --- Taylor+ -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("family", ["llama", "phi3", "opt"])
def test_taylor_is_the_sum_of_absolute_products_over_the_matrices(family: str, unit: Unit) -> None:
    model = tiny_model(family)
    expected = dict.fromkeys(range(4), 0.0)
    causal_loss(model, samples()).backward()
    for i in expected:
        for name, parameter in layer_of(model, i).named_parameters():
            inside = "attention" if "self_attn" in name else "mlp"
            if parameter.dim() == 2 and unit in ("layer", inside):
                assert parameter.grad is not None
                expected[i] += float((parameter.grad * parameter.detach()).abs().sum())
    model.zero_grad()
    for batch_size in (None, 2):
        request = PlanRequest.of(model, config("shortened_llama"))
        found = taylor_scores(model, samples(), request, unit, batch_size=batch_size)
        assert found == pytest.approx(expected, rel=1e-3)


def test_taylor_plus_keeps_the_first_four_and_the_last_two_layers() -> None:
    model = tiny_model(num_hidden_layers=9)
    found = taylor_scores(model, samples(), PlanRequest.of(model, config("shortened_llama")))
    decision = decided(model, config("shortened_llama", 0.23, form="taylor_plus"))
    assert removed(decision) == sorted((4, 5, 6), key=found.__getitem__)[:2]
    free = decided(model, config("shortened_llama", 0.23, form="taylor_plus", **ALL_OPEN))
    assert removed(free) == sorted(found, key=found.__getitem__)[:2]
    assert not set(removed(free)) <= {4, 5, 6}


# --- all of them ---------------------------------------------------------------------------------

SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "shortgpt": ("shortgpt", {}),
    "sleb": ("sleb", ALL_OPEN),
    "ppl": ("shortened_llama", {}),
    "taylor_plus": ("shortened_llama", {"form": "taylor_plus", **ALL_OPEN}),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("planted", [0, 2])
@pytest.mark.parametrize("score", SCORES)
def test_a_unit_that_does_nothing_goes_first(score: str, planted: int, unit: Unit) -> None:
    model = fitted_with_an_idle_unit(planted, unit)
    method, own = SCORES[score]
    assert removed(decided(model, config(method, 0.5, unit=unit, **own)))[0] == planted


def fitted_with_an_idle_unit(planted: int, unit: Unit) -> PreTrainedModel:
    """A model that has half learned the samples, one unit of which writes nothing to the stream."""
    model = tiny_model()
    mask_(model, drop_units(family_for(model).plan(model.config), [planted], unit))
    for parameter in layer_of(model, planted).parameters():
        parameter.requires_grad_(False)
    train(model, samples(), TrainConfig(steps=10, batch_size=8, micro_batch_size=8, learning_rate=5e-3))
    return model.requires_grad_(True)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", ["shortgpt", "sleb", "shortened_llama"])
def test_only_the_unit_goes(method: str, unit: Unit) -> None:
    dense, model = tiny_model(), tiny_model()
    result = prune_(model, {"data": samples()}, config(method, unit=unit))
    plan = result.plan
    gone = set(result.decision["layers"]["removed"])
    assert len(gone) == 2
    if unit == "layer":
        assert set(plan.removed_layers) == gone
        assert plan.is_uniform
    else:
        assert plan.removed_layers == ()
        assert {layer.index for layer in plan.layers if not layer.query_heads} == (
            gone if unit == "attention" else set()
        )
        assert {layer.index for layer in plan.layers if not layer.ffn} == (gone if unit == "mlp" else set())
    assert result.compact is not None
    assert result.compact.removed_share == pytest.approx(result.decision["layers"]["share_removed"])
    batch = tiny_batch(5)
    with torch.no_grad(), masked(dense, plan):
        assert_same_logits(model(input_ids=batch).logits, dense(input_ids=batch).logits)


def test_last_removes_from_the_end_and_keeps_the_very_last() -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    nothing = torch.empty(0, 0, dtype=torch.int64)
    assert removed(decided(model, config("last"), nothing)) == [4, 3, 2]
    assert removed(decided(model, config("last", keep_last=0), nothing)) == [5, 4, 3]
    assert removed(decided(model, config("last", 0.2, keep_last=3), nothing)) == [2]


@pytest.mark.parametrize("unit", ["attention", "mlp"])
def test_last_removes_blocks_alone(unit: Unit) -> None:
    nothing = torch.empty(0, 0, dtype=torch.int64)
    decision = decided(tiny_model(num_hidden_layers=LAYERS), config("last", unit=unit), nothing)
    assert removed(decision) == [4, 3, 2]
    blocks = [layer.query_heads if unit == "attention" else layer.ffn for layer in decision.plan.layers]
    assert [bool(block) for block in blocks] == [True, True, False, False, False, True]
    assert decision.plan.removed_layers == ()


@pytest.mark.parametrize("unit", UNITS)
def test_a_share_of_parameters_is_not_exceeded(unit: Unit) -> None:
    model = tiny_model(num_hidden_layers=LAYERS)
    decision = decided(model, config("shortgpt", 0.2, "parameters", unit=unit))
    share = decision.details["layers"]["share_removed"]
    one = share / len(removed(decision))
    assert share <= 0.2 < share + one
    assert "asked for 20.00%" in decision.notes[0]


# --- refusals ------------------------------------------------------------------------------------


def test_more_than_may_go_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"removes 3 of 4 layers, but only 2 may be removed: the first 1 "):
        decided(tiny_model(), config("sleb", 0.75))
    with pytest.raises(ConfigError, match=r"only 0 may be removed: the first 4 and the last 2 layers are kept"):
        decided(tiny_model(), config("shortened_llama", form="taylor_plus"))
    with pytest.raises(ConfigError, match=r"removes 2 of 4 MLP blocks, but only 1 may be removed"):
        decided(tiny_model(), config("shortgpt", unit="mlp", keep_first=3))
    with pytest.raises(ConfigError, match="4 attention blocks removes nothing"):
        decided(tiny_model(), config("shortgpt", 0.1, unit="attention"))


@pytest.mark.parametrize("method", ["shortgpt", "sleb", "shortened_llama", "laco"])
def test_what_cannot_be_measured_is_refused(method: str) -> None:
    with pytest.raises(DataError, match=f"{method} measures layers on calibration text"):
        decided(tiny_model(), config(method), torch.empty(0, 0, dtype=torch.int64))
    with pytest.raises(ConfigError, match="removes layers; use layers or parameters"):
        decided(tiny_model(), config(method, 0.5, "hidden"))


@pytest.mark.parametrize("score", SCORES)
def test_weights_that_are_not_numbers_are_refused(score: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        for broken in (0, 1):
            layer_of(model, broken).mlp.down_proj.weight[0, 0] = float("nan")
    method, own = SCORES[score]
    with pytest.raises(ScoreError, match=r"scores of layers .* are not finite"):
        decided(model, config(method, 0.75, **own))
