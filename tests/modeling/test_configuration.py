"""The configuration that the modules of a pruned model hold."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pyprune.cut.compact import compact_
from pyprune.families import family_for
from pyprune.modeling import pruned_config_class
from tests._support.models import tiny_batch, tiny_model
from tests._support.plans import axis_plans


def unequal(name: str) -> PreTrainedModel:
    """Layer 0 has fewer heads, layer 3 has all of them."""
    model = tiny_model(name)
    compact_(model, axis_plans(family_for(model).plan(model.config))["unequal"])
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(tiny_batch(), use_cache=False).logits


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_layer_sees_its_own_sizes_and_a_later_change_of_the_shared_configuration(name: str) -> None:
    model = unequal(name)
    first, last = (model.model.layers[i].self_attn.config for i in (0, 3))
    assert last is model.config
    assert (first.num_attention_heads, model.config.num_attention_heads) == (3, 6)
    assert first.hidden_size == model.config.hidden_size
    before = logits(model)
    model.set_attn_implementation("eager")
    assert first._attn_implementation == "eager"
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)
    with pytest.raises(AttributeError, match="no_such_option"):
        _ = first.no_such_option


def test_a_copied_and_a_pickled_model_have_configurations_of_their_own() -> None:
    model = unequal("phi3")
    expected = logits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        view = twin.model.layers[0].self_attn.config
        assert view.num_attention_heads == 3
        assert view.shared is twin.config
        assert twin.config is not model.config
        assert torch.equal(logits(twin), expected)


def test_longrope_is_checked_against_the_channels_of_a_head(tmp_path: Path) -> None:
    """Stock Phi-3 derives them from the hidden size, which is cut here; wrong numbers of factors are still refused."""
    model = tiny_model("phi3-longrope")
    compact_(model, axis_plans(family_for(model).plan(model.config))["hidden"])
    assert type(model).__name__ == "PrunedPhi3ForCausalLM"
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(model))
    values = model.config.to_dict()
    values["rope_parameters"] = {**values["rope_parameters"], "short_factor": [1.0, 1.0]}
    del values["model_type"]
    with pytest.raises(StrictDataclassClassValidationError, match="must have length 3, got 2"):
        pruned_config_class("phi3")(**values)
