"""Bias compensation: what it adds, that it helps, and that it survives masking, compaction, saving and loading."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.cut.compensate import compensate_, compensated_config, target_of
from pyprune.cut.mask import mask_, masked
from pyprune.errors import ConfigError, DataError, UnsupportedModelError
from pyprune.families import count_parameters, family_for, named_axes
from pyprune.methods.registry import presets, read_config
from pyprune.plan import PrunePlan
from pyprune.run.recipe import build_config
from pyprune.serving.export import export
from tests._support.compare import assert_same_logits
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model
from tests._support.plans import axis_plans

SAMPLES = tiny_batch(batch=4, length=24)


def plan_of(model: PreTrainedModel, axis: str) -> PrunePlan:
    return axis_plans(family_for(model).plan(model.config))[axis]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor = SAMPLES) -> Tensor:
    return model(ids, use_cache=False).logits


def output_biases(model: PreTrainedModel, writers: list[str]) -> int:
    """Parameters in the biases of projections that write the stream, by the names of their weights."""
    parameters = dict(model.named_parameters())
    biases = (parameters.get(f"{name.removesuffix('.weight')}.bias") for name in writers)
    return sum(bias.numel() for bias in biases if bias is not None)


@torch.no_grad()
def plant_means(model: PreTrainedModel) -> None:
    """Give the inputs of the output projections a mean: values that all tokens share, FFN channels that stay on."""
    for name, p in model.named_parameters():
        if name.endswith(("v_proj.bias", "fc1.bias")):
            p.add_(1.0)
    # A shared part of all embeddings reaches every projection as a mean.
    model.get_input_embeddings().weight.add_(torch.linspace(-2, 2, model.config.hidden_size))


@pytest.mark.parametrize("axis", ["heads", "ffn", "unequal", "everything"])
@pytest.mark.parametrize("name", TINY)
def test_masked_and_compensated_equals_compacted_also_after_save_and_load(name: str, axis: str, tmp_path: Path) -> None:
    dense = tiny_model(name)
    plan = plan_of(dense, axis)
    plain = copy.deepcopy(dense)
    compact_(plain, plan)
    writers = [p.name for p in named_axes(dense) if p.row.role == "writer" and not p.row.is_bias]
    lacking = [name for name in writers if not output_biases(dense, [name])]
    report = compensate_(dense, plan, SAMPLES)
    assert report.blocks > 0
    reference = copy.deepcopy(dense)
    mask_(reference, plan)
    expected = logits(reference)
    compact_(dense, plan)
    assert report.added_parameters == output_biases(dense, lacking)
    assert_same_logits(logits(dense), expected)
    assert (logits(plain) - expected).abs().max() > 1e-4 * expected.abs().max(), "the compensation must show"
    save_checkpoint(dense, None, tmp_path / "out", plan=plan, provenance={})
    loaded, _ = load_model(tmp_path / "out")
    assert type(loaded) is type(dense)
    assert_same_logits(logits(loaded), expected)
    assert count_parameters(loaded) == count_parameters(dense)


@pytest.mark.parametrize("name", TINY)
def test_a_compensated_model_is_closer_to_the_dense_one(name: str) -> None:
    model = tiny_model(name)
    plant_means(model)
    before = logits(model)
    plan = family_for(model).plan(model.config)
    last = plan.layers[-1]
    plan = plan.with_layer(last.index, ffn=range(0, 40, 2))
    errors = []
    for compensated in (False, True):
        trial = copy.deepcopy(model)
        if compensated:
            compensate_(trial, plan, SAMPLES)
        with masked(trial, plan):
            errors.append(float((logits(trial) - before).square().mean()))
    assert errors[1] < errors[0]


def test_the_bias_is_the_weights_of_what_goes_times_its_mean() -> None:
    model = tiny_model("llama")
    plan = plan_of(model, "unequal")
    seen: dict[str, Tensor] = {}
    layer = model.model.layers
    for name, module in (("o", layer[0].self_attn.o_proj), ("down", layer[1].mlp.down_proj)):
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
    logits(model)
    means = {name: x.double().flatten(0, 1).mean(0) for name, x in seen.items()}
    report = compensate_(model, plan, SAMPLES, batch_size=1)
    assert (report.blocks, report.skipped, report.tokens) == (3, 0, SAMPLES.numel())
    assert report.added_parameters == 4 * 2 * 48
    gone = [i for i in range(40) if i % 3]
    down = layer[1].mlp.down_proj
    expected = down.weight.detach().double()[:, gone] @ means["down"][gone]
    torch.testing.assert_close(down.bias.detach().double(), expected, rtol=1e-5, atol=1e-6)
    o_proj = layer[0].self_attn.o_proj
    lost = slice(0, 24)
    expected = o_proj.weight.detach().double()[:, lost] @ means["o"][lost]
    torch.testing.assert_close(o_proj.bias.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(layer[3].mlp.down_proj.bias) == 0
    assert layer[3].mlp.gate_proj.bias is None


BECOMES = {
    "llama": "LlamaForCausalLM",
    "llama-mha-bias": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "LlamaForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "starcoder2-no-bias": "Starcoder2ForCausalLM",
    "olmo2": "PrunedOlmo2ForCausalLM",
    "qwen3": "PrunedQwen3ForCausalLM",
    "gemma3": "PrunedGemma3ForCausalLM",
    "mistral-window": "PrunedMistralForCausalLM",
}
"""What must not change: compensated models of equal sizes become these."""


@pytest.mark.parametrize("name", dict.fromkeys([*BECOMES, *one_of_each()]))
def test_equal_widths_become_stock_where_a_stock_architecture_has_the_biases(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    plan = plan_of(model, "ffn")
    compensate_(model, plan, SAMPLES)
    with masked(model, plan):
        expected = logits(model)
    report = compact_(model, plan)
    assert report.architecture == BECOMES.get(name, report.architecture)
    assert report.stock == (not report.architecture.startswith("Pruned"))
    if not report.stock:
        assert any("no biases" in r or "sliding window" in r for r in report.reasons)
    written = export(model, tmp_path / "out", plan=plan)
    assert (written.architecture, written.stock) == (report.architecture, report.stock)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(logits(loaded.eval()), expected)
    if report.stock:
        assert not hasattr(loaded.config, "output_bias")


def test_generation_through_the_cache_sees_the_biases() -> None:
    model = tiny_model("qwen3")
    plan = plan_of(model, "skipped").with_layer(1, ffn=range(9))
    report = compensate_(model, plan, SAMPLES)
    assert report.skipped == 3
    assert "with the place for a bias" in report.notes()[1]
    compact_(model, plan)
    model.generation_config.eos_token_id = None
    ids = SAMPLES[:2, :7]
    made = [
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*made)


def test_half_precision_rounds_the_bias_once() -> None:
    wide, narrow = (tiny_model("qwen2").to(dtype) for dtype in (torch.float32, torch.bfloat16))
    plan = plan_of(wide, "ffn")
    wide.load_state_dict(narrow.state_dict())
    for model in (wide, narrow):
        compensate_(model, plan, SAMPLES)
    a, b = (m.model.layers[0].mlp.down_proj.bias.detach() for m in (wide, narrow))
    assert b.dtype == torch.bfloat16
    assert float((a - b.float()).norm()) < 0.05 * float(a.norm())


def test_what_cannot_carry_a_bias_is_refused_before_anything_changes() -> None:
    model = tiny_model("opt", enable_bias=False)
    plan = plan_of(model, "ffn")
    with pytest.raises(UnsupportedModelError, match=r"cut\.reconstruct to none"):
        compensate_(model, plan, SAMPLES)
    with pytest.raises(UnsupportedModelError, match=r"cut\.reconstruct to none"):
        compensated_config(model, family_for(model))
    assert not hasattr(model.config, "output_bias")
    with pytest.raises(DataError, match="give samples"):
        compensate_(tiny_model("llama"), plan_of(tiny_model("llama"), "ffn"), SAMPLES[:0])


def test_layers_that_go_count_as_not_compensated_and_need_no_biases() -> None:
    model = tiny_model("qwen3")
    plan = family_for(model).plan(model.config).drop_layers([1])
    assert target_of(model, plan, biases=True).stock is not None, "no block loses channels, so no bias comes"
    narrow = plan.with_layer(0, ffn=range(8))
    found = compensate_(model, narrow, SAMPLES)
    assert (found.blocks, found.skipped) == (1, 2)


def test_a_plan_that_takes_no_channels_says_so_and_changes_nothing() -> None:
    model = tiny_model("llama")
    report = compensate_(model, plan_of(model, "layers"), SAMPLES)
    assert report.blocks == report.added_parameters == 0
    assert "no effect" in report.notes()[0]
    assert model.model.layers[0].mlp.down_proj.bias is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cut": {"reconstruct": "bias"}, "score": {"axes": ["hidden"]}}, "a bias can replace only heads and FFN"),
        ({"cut": {"reconstruct": "bias"}, "stages": {"before": [], "prune": False}}, "stages.prune is off"),
    ],
)
def test_options_that_contradict_each_other_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({"method": "wanda", "stages": {"before": []}, **change})


def test_flap_compensates_as_in_its_paper_and_nothing_else_does() -> None:
    compensating = [name for name in presets() if build_config(preset=name).adds_biases]
    assert compensating == ["flap-paper"]
    assert not build_config(preset="flap-paper", options={"cut.reconstruct": "none"}).adds_biases
