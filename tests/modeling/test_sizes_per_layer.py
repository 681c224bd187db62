"""Transformers' per_layer_config: written with every unequal cut, and read from folders that carry nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedModel
from transformers.integrations.heterogeneity import HeterogeneousConfigMixin

from pyprune.checkpoint.load import ModelSource, load_model
from pyprune.checkpoint.save import save_checkpoint
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, UnsupportedModelError
from pyprune.families import all_families, family_for
from pyprune.fit.profiling.probes import dense_config
from pyprune.serving.export import export
from pyprune.serving.vllm.command import serve_command
from tests._support.models import one_of_each, tiny_batch, tiny_model
from tests._support.plans import axis_plans
from tests._support.tokenizer import tiny_tokenizer


def unequal(name: str) -> PreTrainedModel:
    model = tiny_model(name)
    compact_(model, axis_plans(family_for(model).plan(model.config))["unequal"])
    return model


def change(folder: Path, **values: Any) -> dict[str, Any]:
    """Rewrite config.json; None removes an entry."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    config = {name: value for name, value in config.items() if value is not None}
    path.write_text(json.dumps(config))
    return config


def from_elsewhere(model: PreTrainedModel, folder: Path, **values: Any) -> None:
    """The folder as another program writes it: a stock model type and class, sizes per layer, no record."""
    model.save_pretrained(folder)
    stock = str(model.config.model_type).removeprefix("pruned_")
    name = all_families()[stock].classes.model.rpartition(":")[2]
    change(folder, model_type=stock, architectures=[name], **values)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(tiny_batch(), use_cache=False).logits


@pytest.mark.parametrize("name", one_of_each())
def test_a_stock_folder_with_sizes_per_layer_is_read(name: str, tmp_path: Path) -> None:
    model = unequal(name)
    from_elsewhere(model, tmp_path)
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))


def test_what_is_written_is_transformers_own_notation(tmp_path: Path) -> None:
    """The same class of Transformers that reads stock configurations takes every layer's sizes from the file."""
    model = unequal("llama")
    save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={})
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["per_layer_config"]
    stock = AutoConfig.for_model("mistral", num_hidden_layers=4, per_layer_config=stated)
    assert isinstance(stock, HeterogeneousConfigMixin)
    attention = model.model.layers[0].self_attn
    layer = stock.per_layer_config[0]
    assert layer.num_attention_heads * attention.head_dim == attention.q_proj.out_features
    assert layer.num_key_value_heads * attention.head_dim == attention.k_proj.out_features


def test_layers_wider_than_the_global_sizes_are_read(tmp_path: Path) -> None:
    """The global values are one layer's: others are named whether they are smaller or larger."""
    model = unequal("llama-head-dim")
    stated = {
        str(i): {
            "num_attention_heads": layer.self_attn.q_proj.out_features // 16,
            "num_key_value_heads": layer.self_attn.k_proj.out_features // 16,
            "intermediate_size": layer.mlp.up_proj.out_features,
        }
        for i, layer in enumerate(model.model.layers)
    }
    smallest = {name: min(own[name] for own in stated.values()) for name in stated["0"]}
    assert smallest["intermediate_size"] < model.config.intermediate_size
    from_elsewhere(model, tmp_path, per_layer_config=stated, **smallest)
    loaded, _ = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.intermediate_size == max(own["intermediate_size"] for own in stated.values())


def test_global_sizes_that_every_layer_names_may_be_missing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    compact_(model, family_for(model).plan(model.config).with_layer(0, ffn=range(24)))
    stated = {str(i): {"intermediate_size": width} for i, width in enumerate((24, 40, 40, 40))}
    from_elsewhere(model, tmp_path, per_layer_config=stated, intermediate_size=None)
    assert torch.equal(logits(load_model(tmp_path)[0]), logits(model))


def test_such_a_folder_is_exported_for_vllm_and_not_cut_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unequal("mistral")
    from_elsewhere(model, tmp_path / "a")
    tiny_tokenizer().save_pretrained(tmp_path / "a")
    assert ModelSource.of(tmp_path / "a").dtype == "float32"
    assert len(ModelSource.of(tmp_path / "a").version) == 64
    report = export(tmp_path / "a", tmp_path / "b")
    assert report.architecture == "PrunedMistralForCausalLM"
    assert torch.equal(logits(load_model(tmp_path / "b")[0]), logits(model))
    monkeypatch.setattr("pyprune.serving.vllm.command.vllm_installed", lambda: True)
    assert str(tmp_path / "b") in serve_command(tmp_path / "b")
    with pytest.raises(CheckpointError, match="no stock architecture reads"):
        serve_command(tmp_path / "a")
    with pytest.raises(UnsupportedModelError, match="it was cut already"):
        family_for(load_model(tmp_path / "a")[0])


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"0": {"head_dim": 8}}, "gives layer 0 a separate head_dim; read are num_attention_heads"),
        ({"9": {"intermediate_size": 8}}, "names layer '9'; there are 4"),
        ({"-1": {"intermediate_size": 8}}, "names layer '-1'; there are 4"),
        ({"0": {"intermediate_size": "8"}}, "the intermediate_size '8', no whole number"),
        ({"0": {"num_attention_heads": 5}}, "layer 0: 5 query heads do not divide into 2 KV heads"),
        ({"0": {"skip": ["head"]}}, r"layer 0: skip names \['head'\]; allowed: attention, mlp"),
        ({"0": [1]}, "not a mapping from layers"),
        ([1], "not a mapping from layers"),
    ],
)
def test_bad_sizes_per_layer_are_refused(tmp_path: Path, stated: Any, said: str) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    change(tmp_path, per_layer_config=stated)
    with pytest.raises(CheckpointError, match=said):
        load_model(tmp_path)


@pytest.mark.parametrize("stated", [None, {}])
def test_a_stock_folder_stays_stock(tmp_path: Path, stated: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    change(tmp_path, per_layer_config=stated)
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is type(model)
    assert type(loaded.config) is LlamaConfig


def test_predictions_do_not_take_such_a_folder_for_the_dense_model(tmp_path: Path) -> None:
    layers: tuple[dict[str, Any], ...] = ({"skip": ["mlp"]}, {"intermediate_size": 16}, {"num_attention_heads": 2})
    for number, own in enumerate(layers):
        folder = tmp_path / str(number)
        tiny_model("llama").save_pretrained(folder)
        change(folder, per_layer_config={"1": own})
        with pytest.raises(UnsupportedModelError, match="pruned_llama"):
            dense_config(folder)
