"""The right heads and channels go: planted importance, coupled structures, aggregation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyprune.config.run import PruneConfig
from pyprune.cut.mask import masked
from pyprune.errors import ScoreError
from pyprune.families import family_for, named_axes
from pyprune.methods.base import PlanRequest
from pyprune.methods.score._structures import OpenUnits
from pyprune.methods.score.base import Scoring, decide_by_scores
from pyprune.methods.score.loraprune import LoraPruneOptions
from pyprune.ops import available_isas, group_importance
from pyprune.plan import PrunePlan
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import scoring_config
from tests._support.planted import fade_ffn_channel, fade_kv_group, fade_query_head, head_sizes
from tests._support.scores import decision_of, scoring_of

FAMILIES = (
    "llama", "llama-head-dim", "llama-mha-bias", "llama3-rope", "mistral-window", "qwen2", "qwen2-tied", "qwen3", "opt",
    "phi", "phi-tied", "gemma3",
)  # fmt: skip
GROUPED = tuple(n for n in FAMILIES if n not in ("llama-mha-bias", "opt", "phi-tied"))
METHODS = ("magnitude", "wanda", "flap", "obs", "loraprune", "taylor", "moreau", "moreau_gs", "smoothgrad")


def options(method: str, moreau: dict[str, Any] | None = None, **score: Any) -> PruneConfig:
    few = {"smoothgrad": {"draws": 3}, "moreau": {"steps": 3}, "moreau_gs": {"steps": 3}}.get(method, {})
    if method == "loraprune":
        few = {"train": replace(LoraPruneOptions().train, steps=3, batch_size=4, micro_batch_size=4)}
    return scoring_config(method, **{**few, **(moreau or {})}, **score)


def decided(model: Any, config: PruneConfig) -> PrunePlan:
    return decision_of(model, tiny_batch(batch=4, length=48), config).plan


def removed(plan: PrunePlan, layer: int, axis: str) -> list[int]:
    kept = {x.index: x for x in plan.layers}[layer]
    total = {"kv_heads": plan.dense.num_key_value_heads, "query_heads": plan.dense.num_attention_heads}
    count = total.get(axis, plan.dense.intermediate_size)
    return sorted(set(range(count)) - set(getattr(kept, axis)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_planted_kv_group_goes_with_all_its_query_heads(name: str, method: str) -> None:
    model = tiny_model(name)
    heads, kv_heads, _ = head_sizes(model)
    planted = {1: kv_heads - 1, 2: 0}
    for layer, kv_head in planted.items():
        fade_kv_group(model, layer, kv_head, 1e-3)
    left = heads - heads // kv_heads
    plan = decided(model, options(method, axes=("heads",), ranking="local", heads=left, layers=(1, 2)))
    for layer, kv_head in planted.items():
        assert removed(plan, layer, "kv_heads") == [kv_head]
        size = heads // kv_heads
        assert removed(plan, layer, "query_heads") == list(range(kv_head * size, (kv_head + 1) * size))
    assert plan.layers[0].widths == (heads, kv_heads, plan.dense.intermediate_size)
    with torch.no_grad():
        before = model(tiny_batch()).logits
        with masked(model, plan):
            after = model(tiny_batch()).logits
    # What was faded to a thousandth, twice on the way from value to output, is what the plan takes away.
    assert_same_logits(after, before, tolerance=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GROUPED)
def test_the_planted_query_head_of_every_group_goes(name: str, method: str) -> None:
    model = tiny_model(name)
    heads, kv_heads, _ = head_sizes(model)
    size = heads // kv_heads
    planted = [kv * size + (kv + 1) % size for kv in range(kv_heads)]
    for head in planted:
        fade_query_head(model, 1, head, 1e-3)
    config = options(
        method, axes=("heads",), ranking="local", heads=heads - kv_heads, layers=(1,), heads_unit="query_head"
    )
    plan = decided(model, config)
    assert removed(plan, 1, "query_heads") == planted
    assert removed(plan, 1, "kv_heads") == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_planted_ffn_channels_go(name: str, method: str) -> None:
    # A ReLU channel that never fires on the samples scores exactly zero, which is less than a planted thousandth.
    model = tiny_model(name, **({"activation_function": "gelu"} if name == "opt" else {}))
    planted = {0: [1, 17, 39], 3: [0, 20, 21]}
    for layer, channels in planted.items():
        for channel in channels:
            fade_ffn_channel(model, layer, channel, 1e-3)
    plan = decided(model, options(method, axes=("ffn",), ranking="local", ffn=37, layers=(0, 3)))
    assert {layer: removed(plan, layer, "ffn") for layer in planted} == planted
    assert removed(plan, 1, "ffn") == []


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "opt", "gemma3"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "loraprune", "taylor", "moreau"])
def test_the_planted_hidden_channels_go(name: str, method: str) -> None:
    model = tiny_model(name)
    planted = torch.tensor([0, 3, 8, 9, 22, 31, 40, 47])
    with torch.no_grad():
        for param in named_axes(model):
            dim = param.axis_dim("hidden")
            if dim is not None:
                # Removing a channel of Gemma's norms makes 1 + w zero.
                offset = 1.0 if name == "gemma3" and param.row.is_norm_weight else 0.0
                faded = (param.parameter.index_select(dim, planted) + offset) * 1e-3 - offset
                param.parameter.index_copy_(dim, planted, faded)
    plan = decided(model, options(method, axes=("hidden",), hidden=40, ranking="local"))
    assert list(plan.removed_hidden) == planted.tolist()


def test_every_open_tensor_counts_once_in_its_structure() -> None:
    """The sum over all structures is the sum over all their elements, and a group is what its name says."""
    model = tiny_model("qwen2")
    run = scoring_of(model, tiny_batch(), options("magnitude", axes=("heads", "ffn"), layers=(2,)))
    for param in run.open_params:
        run.add_elements(param, run.weight(param))
    attention, mlp = model.model.layers[2].self_attn, model.model.layers[2].mlp
    width = attention.head_dim
    expected = torch.zeros(2, dtype=torch.float64)
    for kv in range(2):
        wide, narrow = slice(kv * 3 * width, (kv + 1) * 3 * width), slice(kv * width, (kv + 1) * width)
        parts = [attention.q_proj.weight[wide], attention.q_proj.bias[wide], attention.o_proj.weight[:, wide]]
        for projection in (attention.k_proj, attention.v_proj):
            parts += [projection.weight[narrow], projection.bias[narrow]]
        expected[kv] = sum(float(part.detach().double().abs().sum()) for part in parts)
    torch.testing.assert_close(run.scores.group_scores(2, "heads"), expected, rtol=1e-12, atol=0)
    with torch.no_grad():
        ffn = mlp.gate_proj.weight.abs().sum(1) + mlp.up_proj.weight.abs().sum(1) + mlp.down_proj.weight.abs().sum(0)
    torch.testing.assert_close(run.scores.group_scores(2, "ffn"), ffn.double(), rtol=1e-6, atol=0)
    assert {p.layer for p in run.open_params} == {2}


@pytest.mark.parametrize("how", ["sum", "mean", "max", "prod"])
def test_aggregation_over_the_structures_of_a_group(how: str) -> None:
    model = tiny_model("llama")
    run = scoring_of(model, tiny_batch(), options("magnitude", aggregation=how, layers=(0,)))
    q, o = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([6.0, 5, 4, 3, 2, 1])
    k = torch.tensor([10.0, 0.5])
    run.add_units(0, "heads", q, "q")
    run.add_units(0, "heads", o, "o")
    run.add_units(0, "kv_heads", k, "k")
    groups = [[1.0, 2, 3, 6, 5, 4, 10], [4.0, 5, 6, 3, 2, 1, 0.5]]
    functions = {
        "sum": lambda x: x.sum(), "mean": lambda x: x.mean(), "max": lambda x: x.max(), "prod": lambda x: x.log().sum()
    }  # fmt: skip
    expected = torch.stack([functions[how](torch.tensor(g, dtype=torch.float64)) for g in groups])
    torch.testing.assert_close(run.scores.group_scores(0, "heads"), expected)


def test_shares_of_one_module_add_up_before_aggregation() -> None:
    run = scoring_of(tiny_model("llama"), tiny_batch(), options("magnitude", aggregation="max", layers=(0,)))
    run.add_units(0, "ffn", torch.full((40,), 2.0), "up")
    run.add_units(0, "ffn", torch.full((40,), 2.5), "up")
    run.add_units(0, "ffn", torch.full((40,), 3.0), "down")
    assert run.scores.group_scores(0, "ffn").tolist() == [4.5] * 40


def test_channel_sums_are_exact_in_float32_and_signed_ones_cancel() -> None:
    elements = torch.full((3, 200_001), 0.1)
    elements[1, ::2] = -0.1
    ones = torch.ones_like(elements)
    plain = group_importance(elements, ones, 0, 1)
    exact = elements[0, 0].double() * 200_001
    torch.testing.assert_close(plain, exact.expand(3), rtol=1e-12, atol=0)
    signed = group_importance(elements, ones, 0, 1, signed=True)
    assert signed[1] == pytest.approx(0.1, rel=1e-3)
    assert signed[0] == plain[0]
    assert group_importance(torch.tensor([-1.0, 2.0]), torch.ones(2), 0, 1).tolist() == [1.0, 2.0]


class Allocations(TorchDispatchMode):
    """The sizes of the tensors that torch makes while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.sizes.append(result.numel())
        return result


@pytest.mark.skipif(not available_isas(), reason="the extension is not built")
@pytest.mark.parametrize("signed", [False, True])
def test_the_products_of_a_matrix_are_never_stored(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = scoring_of(tiny_model("llama"), tiny_batch(), options("taylor", axes=("heads", "ffn", "hidden")))
    matrices = [p for p in run.open_params if p.parameter.dim() == 2]
    assert len(matrices) > 8
    largest = {}
    for backend in ("cpp", "python"):
        monkeypatch.setenv("PYPRUNE_BACKEND", backend)
        largest[backend] = 0.0
        for param in matrices:
            factor = torch.ones_like(param.parameter, requires_grad=False)
            with Allocations() as made:
                run.add(param, factor, signed=signed)
            largest[backend] = max(largest[backend], max(made.sizes) / param.parameter.numel())
    assert largest["cpp"] <= 1 / 16, "something of the size of the matrix was made"
    assert largest["python"] >= 1, "the definition makes the product: this test would see it"


def test_scores_that_are_no_numbers_or_of_the_wrong_size_are_refused() -> None:
    run = scoring_of(tiny_model("llama"), tiny_batch(), options("magnitude"))
    bad = torch.ones(40)
    bad[3] = float("nan")
    with pytest.raises(ScoreError, match="not finite"):
        run.add_units(0, "ffn", bad)
    with pytest.raises(ScoreError, match="ffn has 40"):
        run.add_units(0, "ffn", torch.ones(41))
    with pytest.raises(ScoreError, match="no score for ffn in layer 1"):
        run.scores.group_scores(1, "ffn")


def test_a_scorer_that_says_nothing_is_reported() -> None:
    def flat(run: Scoring) -> None:
        for param in run.open_params:
            run.add(param, torch.zeros_like(param.parameter))

    model = tiny_model("llama")
    decision = decide_by_scores(flat, model, tiny_batch(), PlanRequest.of(model, options("magnitude")))
    assert any("scores rank nothing" in w for w in decision.warnings)


def test_the_scope_lists_the_open_parameters() -> None:
    model = tiny_model("qwen3")
    dense = family_for(model).sizes(model.config)
    scope = OpenUnits.of(dense, options("magnitude", first_layer=1, last_layer=-2).score)
    assert scope.layers == (1, 2)
    names = {p.name for p in scope.open_params(model)}
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert not any("norm" in n or "embed" in n or "layers.0." in n for n in names)
    query_only = OpenUnits.of(dense, options("magnitude", heads_unit="query_head", axes=("heads",)).score)
    kinds = {p.name.split("self_attn.")[1] for p in query_only.open_params(model)}
    assert kinds == {"q_proj.weight", "o_proj.weight"}
    hidden = OpenUnits.of(dense, options("magnitude", axes=("hidden",)).score)
    sliced = {n for n, p in model.named_parameters() if not n.endswith(("q_norm.weight", "k_norm.weight"))}
    assert {p.name for p in hidden.open_params(model)} == sliced
    assert family_for(model).model_type == "qwen3"
