"""Transformers' per_layer_config: written with every unequal cut, and refused in stock architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.heterogeneity import HeterogeneousConfigMixin

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.fit.profiling.probes import dense_config
from tests._support.models import tiny_model
from tests._support.plans import axis_plans


def test_what_is_written_is_transformers_own_notation(tmp_path: Path) -> None:
    """The same class of Transformers that reads stock configurations takes every layer's sizes from the file."""
    model = tiny_model("llama")
    compact_(model, axis_plans(family_for(model).plan(model.config))["unequal"])
    save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={})
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["per_layer_config"]
    stock = AutoConfig.for_model("mistral", num_hidden_layers=4, per_layer_config=stated)
    assert isinstance(stock, HeterogeneousConfigMixin)
    attention = model.model.layers[0].self_attn
    layer = stock.per_layer_config[0]
    assert layer.num_attention_heads * attention.head_dim == attention.q_proj.out_features
    assert layer.num_key_value_heads * attention.head_dim == attention.k_proj.out_features


def stated_in(folder: Path, stated: Any) -> Path:
    """A stock folder with sizes per layer, as another program may write it."""
    tiny_model("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "per_layer_config": stated}))
    return folder


@pytest.mark.parametrize("stated", [{"1": {"skip": ["mlp"]}}, {"1": {"intermediate_size": 16}}, {"0": [1]}, [1]])
def test_a_stock_folder_with_sizes_per_layer_is_refused(tmp_path: Path, stated: Any) -> None:
    folder = stated_in(tmp_path, stated)
    for read in (load_model, dense_config, lambda folder: ModelSource.of(folder).dtype):
        with pytest.raises(CheckpointError, match="has a per_layer_config that no stock architecture reads"):
            read(folder)


@pytest.mark.parametrize("stated", [None, {}])
def test_a_stock_folder_stays_stock(tmp_path: Path, stated: Any) -> None:
    loaded, _ = load_model(stated_in(tmp_path, stated))
    assert type(loaded) is LlamaForCausalLM
    assert type(loaded.config) is LlamaConfig
