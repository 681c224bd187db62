"""The invariant, for every family and every axis: compacting equals masking, also after save and load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from pyprune.cut.compact import compact_
from pyprune.cut.mask import gauge_, mask_, masked
from pyprune.cut.target import choose_target, zero_biases
from pyprune.errors import PlanError, UnsupportedModelError
from pyprune.families import (
    all_families,
    count_parameters,
    family_for,
    named_axes,
    parameter_shapes,
    parameters_after,
)
from pyprune.plan import PrunePlan
from tests._support.compare import assert_same_logits
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model
from tests._support.plans import axis_plans

AXES = (
    "identity",
    "layers",
    "hidden",
    "hidden-odd",
    "heads",
    "query-heads",
    "ffn",
    "unequal",
    "skipped",
    "everything",
)
DIVISIBLE_ONLY = "hidden-odd"
STOCK_PLANS = ("identity", "layers", "hidden", "heads", "query-heads", "ffn")


def plan_of(model: PreTrainedModel, axis: str) -> PrunePlan:
    plans = axis_plans(family_for(model).plan(model.config))
    if axis not in plans:
        pytest.skip("this configuration has one query head per KV head")
    return plans[axis]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("axis", ["hidden", "everything"])
@pytest.mark.parametrize("change", [{}, {"enable_bias": False}], ids=str)
def test_layer_norms_without_weights_are_cut_too(change: dict[str, bool], axis: str, tmp_path: Path) -> None:
    """As Galactica's OPT has them: the norms own no parameters, the sliced ones must not either."""
    model = tiny_model("opt", layer_norm_elementwise_affine=False, **change)
    plan = plan_of(model, axis)
    reference = copy.deepcopy(model)
    mask_(reference, plan)
    compact_(model, plan)
    assert not any("layer_norm" in name for name, _ in model.named_parameters())
    ids = tiny_batch()
    assert_same_logits(logits(model, ids), logits(reference, ids))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@torch.no_grad()
def cached_logits(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    """Logits of a prompt and then one token at a time through the cache, as generation computes them."""
    out = model(ids[:, :prompt], use_cache=True)
    pieces = [out.logits]
    for t in range(prompt, ids.shape[1]):
        cache = {name: value for name, value in out.items() if isinstance(value, Cache)}  # Mamba has another name
        out = model(ids[:, t : t + 1], use_cache=True, **cache)
        pieces.append(out.logits)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", TINY)
def test_compacted_equals_masked_also_after_save_and_load(name: str, axis: str, tmp_path: Path) -> None:
    dense = tiny_model(name)
    plan = plan_of(dense, axis)
    ids = tiny_batch()
    reference = copy.deepcopy(dense)
    mask_(reference, plan)
    expected = logits(reference, ids)

    shapes = parameter_shapes(dense)
    target = choose_target(family_for(dense), dense.config, plan)
    added = sum(zeros.numel() for _, zeros in zero_biases(target, plan, dtype=torch.float32))
    report = compact_(dense, plan)
    assert_same_logits(logits(dense, ids), expected)

    assert count_parameters(dense) == parameters_after(all_families()[plan.model_type], shapes, plan) + added
    assert report.parameters == count_parameters(dense)

    dense.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        on_disk = sum(stored.get_tensor(key).numel() for key in stored.keys())  # noqa: SIM118
    assert on_disk == report.parameters
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert type(reloaded) is type(dense)
    assert_same_logits(logits(reloaded.eval(), ids), expected)
    assert_same_logits(cached_logits(reloaded, ids, prompt=9), expected)


def stock_holds(dense: PreTrainedModel, plan: PrunePlan) -> bool:
    """What the family's flags and the configuration say of a plan of equal sizes, whatever the stock targets say."""
    family, config = family_for(dense), dense.config
    heads = len(plan.layers[0].query_heads)
    if family.needs_virtual_norm(config, plan):
        return False
    if not family.has_head_dim_field and heads * plan.dense.head_dim != len(plan.hidden):
        return False
    # Transformers counts the longrope factors of a stock configuration by hidden_size // heads.
    longrope = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope"
    return not longrope or len(plan.hidden) // heads == plan.dense.head_dim


@pytest.mark.parametrize("axis", STOCK_PLANS)
@pytest.mark.parametrize("name", TINY)
def test_uniform_plans_become_stock_architectures(name: str, axis: str) -> None:
    dense = tiny_model(name)
    plan = plan_of(dense, axis)
    report = compact_(copy.deepcopy(dense), plan)
    assert report.stock is stock_holds(dense, plan), report.reasons
    assert report.stock or report.reasons
    assert report.stock is not report.architecture.startswith("Pruned")


@pytest.mark.parametrize("name", one_of_each())
def test_generation_with_a_skipped_first_attention(name: str) -> None:
    """A cache whose length is read from layer 0 must still count when layer 0 has no attention."""
    model = tiny_model(name)
    plan = plan_of(model, "skipped")
    compact_(model, plan)
    model.generation_config.eos_token_id = None
    ids = tiny_batch(batch=2, length=7)
    mask = torch.ones_like(ids)
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=True)
    full = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=False)
    assert cached.shape == (2, 15)
    assert torch.equal(cached, full)


def test_every_file_of_the_folder_has_a_tiny_model() -> None:
    assert {model_type for model_type, _ in TINY.values()} == set(all_families())


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_has_a_row_and_its_shape(name: str) -> None:
    model = tiny_model(name)
    sizes = family_for(model).sizes(model.config)
    width = {
        "vocab": sizes.vocab_size,
        "hidden": sizes.hidden_size,
        "heads": sizes.num_attention_heads * sizes.head_dim,
        "kv_heads": sizes.num_key_value_heads * sizes.head_dim,
        "ffn": sizes.intermediate_size,
        "head_dim": sizes.head_dim,
    }
    params = named_axes(model)
    assert sum(p.parameter.numel() for p in params) == count_parameters(model)
    for p in params:
        for axes, size in zip(p.row.dimensions, p.parameter.shape, strict=True):
            assert axes == ("positions",) or sum(width[axis] for axis in axes) == size, p.name


def test_an_unknown_parameter_is_an_error_naming_it() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.router = torch.nn.Linear(4, 4)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.router\.weight"):
        named_axes(model)


def test_the_350m_layout_of_opt_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="word_embed_proj_dim 24 differs from hidden_size 48"):
        family_for(tiny_model("opt", word_embed_proj_dim=24))
    with pytest.raises(UnsupportedModelError, match="post-norm"):
        family_for(tiny_model("opt", do_layer_norm_before=False))


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    from transformers import BertConfig

    with pytest.raises(UnsupportedModelError, match=r"Available: gemma3_text, .*llama, mistral"):
        family_for(BertConfig())


@pytest.mark.parametrize("name", TINY)
def test_a_pruned_model_differs_from_the_dense_one(name: str) -> None:
    """Masking must change something, or the invariant would hold for a plan that does nothing."""
    dense = tiny_model(name)
    ids = tiny_batch()
    before = logits(dense, ids)
    for axis in ("layers", "hidden", "heads", "ffn", "skipped"):
        with masked(dense, plan_of(dense, axis)):
            changed = (logits(dense, ids) - before).abs().max() / before.abs().max()
        assert changed > 1e-3, axis
    assert torch.equal(logits(dense, ids), before)


def test_the_gauge_leaves_the_dense_model_alone_and_centres_the_kept_channels() -> None:
    model = tiny_model("phi")
    ids = tiny_batch()
    before = logits(model, ids)
    weights = model.model.embed_tokens.weight.detach().clone()
    gauge_(model, range(30))
    assert_same_logits(logits(model, ids), before)
    after = model.model.embed_tokens.weight
    assert not torch.allclose(after, weights)
    assert after[:, :30].mean(1).abs().max() < 1e-6
    with pytest.raises(UnsupportedModelError, match="no LayerNorm gauge"):
        gauge_(tiny_model("phi-tied"), range(30))


def test_compaction_keeps_identity_dtype_mode_and_weights_order() -> None:
    model = tiny_model("llama").to(torch.bfloat16).train()
    reference = model
    kept = model.model.layers[3].mlp.up_proj.weight.detach().clone()
    compact_(model, family_for(model).plan(model.config).drop_layers([1]))
    assert reference is model
    assert model.training
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, kept)
    assert model.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]


@pytest.mark.parametrize("axis", ["hidden", "heads", "everything"])
@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.5}, {"attention_bias": True}], ids=str)
def test_norms_over_the_whole_projection_are_cut_whatever_their_epsilon(change: dict[str, Any], axis: str) -> None:
    model = tiny_model("olmo2", **change)
    plan = plan_of(model, axis)
    reference = copy.deepcopy(model)
    mask_(reference, plan)
    compact_(model, plan)
    assert_same_logits(logits(model, tiny_batch()), logits(reference, tiny_batch()))


def test_the_factors_of_granite_keep_their_dense_values() -> None:
    model = tiny_model("granite")
    names = [name for name in model.config.to_dict() if name.endswith(("_multiplier", "logits_scaling"))]
    before = {name: getattr(model.config, name) for name in names}
    assert len(set(before.values()) - {1.0}) == 4
    compact_(model, plan_of(model, "everything"))
    assert {name: getattr(model.config, name) for name in names} == before
    assert model.model.layers[1].self_attn.scaling == before["attention_multiplier"]


def test_a_plan_of_another_model_is_refused() -> None:
    model = tiny_model("llama")
    other = family_for(tiny_model("qwen2")).plan(tiny_model("qwen2").config)
    with pytest.raises(PlanError, match="for model type 'qwen2'"):
        compact_(model, other)
    wider = tiny_model("llama", intermediate_size=44)
    with pytest.raises(PlanError, match=r"mlp \(ffn 44\)"):
        compact_(model, family_for(wider).plan(wider.config))


def test_a_compacted_model_cannot_be_cut_as_if_it_were_dense() -> None:
    model = tiny_model("llama")
    compact_(model, plan_of(model, "unequal"))
    with pytest.raises(UnsupportedModelError, match="already"):
        family_for(model)


@pytest.mark.parametrize("name", TINY)
def test_meta_models_are_counted_without_weights(name: str) -> None:
    model = tiny_model(name)
    plan = plan_of(model, "everything")
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    assert all(p.is_meta for p in empty.parameters())
    family = family_for(model)
    expected = parameters_after(family, parameter_shapes(model), plan)
    assert parameters_after(family, parameter_shapes(empty), plan) == expected


@pytest.mark.parametrize("name", TINY)
def test_the_pruned_architecture_without_per_layer_sizes_equals_the_stock_one(name: str) -> None:
    from pyprune.modeling import PRUNED_MODELS, pruned_config_class

    dense = tiny_model(name)
    values = dense.config.to_dict() | {"head_dim": family_for(dense).sizes(dense.config).head_dim}
    model_type = values.pop("model_type")
    pruned = PRUNED_MODELS[model_type](pruned_config_class(model_type)(**values)).eval()
    pruned.load_state_dict(dense.state_dict())
    assert_same_logits(logits(pruned, tiny_batch()), logits(dense, tiny_batch()))
