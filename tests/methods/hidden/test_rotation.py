"""The rotation of the residual stream: nothing changes by it, and models for which that does not hold are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import pyprune.families
from pyprune.cut.compact import compact_
from pyprune.cut.mask import mask_
from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, StockClasses, all_families, family_for, named_axes
from pyprune.families.common import decoder_rows
from pyprune.methods.hidden.pca.rotation import rotate_, rotation_obstacle
from tests._support.compare import assert_same_logits
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.tiny import randomise_

IDS = tiny_batch(5)
ROTATABLE = {"llama", "mistral", "qwen2", "qwen3", "granite", "phi3"}
NAMES = [name for name, (model_type, _) in TINY.items() if model_type in ROTATABLE]


def untied(name: str) -> PreTrainedModel:
    return tiny_model(name, tie_word_embeddings=False)


def any_rotation(size: int = 48) -> Tensor:
    values = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return torch.linalg.qr(values).Q


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS, use_cache=False).logits


def test_the_families_that_can_be_rotated() -> None:
    models = {model_type: untied(name) for name, (model_type, _) in TINY.items()}
    rotatable = {kind for kind, model in models.items() if rotation_obstacle(family_for(model), model.config) is None}
    assert rotatable == ROTATABLE


@pytest.mark.parametrize("name", NAMES)
def test_a_rotated_model_computes_the_same(name: str) -> None:
    model = untied(name)
    expected = logits(model)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    rotate_(model, any_rotation())
    assert_same_logits(logits(model), expected, tolerance=3e-5)
    for param in named_axes(model):
        if param.row.is_norm_weight:
            assert torch.equal(param.parameter, torch.ones(48))
        changed = not torch.allclose(param.parameter, before[param.name], atol=1e-3)
        assert changed == ("hidden" in param.row.axes), param.name


@pytest.mark.parametrize("name", ["llama-mha-bias", "granite-tied-bias", "phi3"])
def test_what_is_left_is_rounding(name: str) -> None:
    """Norms compute in float32 whatever the weights are, so that float64 is not reached, but more than float32 is."""
    model = untied(name).double()
    expected = logits(model)
    rotate_(model, any_rotation())
    assert_same_logits(logits(model), expected, tolerance=2e-6)


def test_weights_keep_their_dtype_and_are_rounded_once() -> None:
    model = untied("llama").to(torch.bfloat16)
    rotation = any_rotation()
    layer = model.model.layers[1]
    weight, gain = layer.mlp.up_proj.weight.detach().double(), layer.post_attention_layernorm.weight.detach().double()
    rotate_(model, rotation)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(layer.mlp.up_proj.weight, (weight @ (gain[:, None] * rotation)).to(torch.bfloat16))


def test_large_weights_are_rotated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = untied("llama-mha-bias"), untied("llama-mha-bias")
    rotate_(whole, any_rotation())
    monkeypatch.setattr("pyprune.methods.hidden.pca.rotation.AT_ONCE", 100)
    rotate_(pieces, any_rotation())
    for found, expected in zip(pieces.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_masked_equals_compacted_behind_a_rotation(name: str) -> None:
    model = untied(name)
    rotate_(model, any_rotation())
    plan = family_for(model).plan(model.config).keep_hidden(range(36))
    reference = copy.deepcopy(model)
    mask_(reference, plan)
    compact_(model, plan)
    assert_same_logits(logits(model), logits(reference), tolerance=3e-5)


def test_norms_that_multiply_by_one_more_than_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Gemma: no norm behind its blocks, and an embedding times a number, which no rotation minds."""
    gemma = Family(
        model_type="gemma",
        classes=StockClasses.locate("gemma", "Gemma"),
        rows=decoder_rows(),
        stock_targets=(),
        unit_offset_norm=True,
        scaled_embedding=True,
    )
    known = {**all_families(), "gemma": gemma}
    monkeypatch.setattr(pyprune.families, "all_families", lambda: known)
    config = AutoConfig.for_model("gemma", vocab_size=384, hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
                                  num_key_value_heads=2, head_dim=8, intermediate_size=40, tie_word_embeddings=False,
                                  pad_token_id=0)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise_(model, 0)
    expected = logits(model)
    rotate_(model, any_rotation())
    assert_same_logits(logits(model), expected, tolerance=3e-5)
    assert torch.equal(model.model.norm.weight, torch.zeros(48))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("opt-untied", "its LayerNorm subtracts the mean"),
        ("phi", "its LayerNorm subtracts the mean"),
        ("starcoder2", "its LayerNorm subtracts the mean"),
        ("gemma3-untied", "a norm with a weight for each channel stands between its blocks and the stream"),
        ("olmo2", "a norm with a weight for each channel stands between its blocks and the stream"),
        ("llama-head-dim", "its head is tied to the embedding"),
        ("phi3-longrope", "its head is tied to the embedding"),
    ],
)
def test_models_that_cannot_be_rotated_are_refused_and_stay_as_they_are(name: str, reason: str) -> None:
    model = tiny_model(name)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedModelError, match=f"cannot be rotated: {reason}"):
        rotate_(model, any_rotation())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
