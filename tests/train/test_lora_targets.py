"""Which modules get an adapter: all projections, or those that PEFT chooses by itself for an architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
from transformers import PreTrainedModel

from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.cut.compact import compact_
from pyprune.errors import CheckpointError, ConfigError, UnsupportedModelError
from pyprune.families import family_for
from pyprune.methods.registry import preset
from pyprune.train.loop import train as run_training
from pyprune.train.lora import projection_names
from pyprune.train.recover import recover
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model

TRAIN = TrainConfig(steps=2, batch_size=2, micro_batch_size=2, learning_rate=1e-2)
BY_DEFAULT = RecoverConfig(rank=2, targets="default", train=TRAIN)
KNOWN = [name for name in one_of_each() if TINY[name][0] in DEFAULTS]


def cut_unequal(family: str) -> PreTrainedModel:
    """A model of the pruned architecture: one layer less, another one narrower."""
    model = tiny_model(family)
    plan = family_for(model).plan(model.config).drop_layers([1]).with_layer(2, ffn=range(10))
    compact_(model, plan)
    assert model.config.model_type == f"pruned_{TINY[family][0]}"
    return model


def adapted_and_changed(
    model: PreTrainedModel, config: RecoverConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], set[str]]:
    """Names of the modules that carried an adapter in training, and of those whose weights are others afterwards."""
    seen: set[str] = set()

    def spying(adapted: Any, *args: Any, **kwargs: Any) -> Any:
        seen.update(n.removeprefix("base_model.model.") for n, m in adapted.named_modules() if isinstance(m, LoraLayer))
        return run_training(adapted, *args, **kwargs)

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr("pyprune.train.recover.train", spying)
        recover(model, tiny_batch(), config)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert not any(isinstance(m, LoraLayer) for m in model.modules())
    assert all(n.endswith(".weight") for n in changed)
    return seen, {n.removesuffix(".weight") for n in changed}


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("cut", [False, True])
def test_the_default_adapts_what_peft_chooses_and_nothing_else(
    family: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cut_unequal(family) if cut else tiny_model(family)
    layers = model.config.num_hidden_layers
    expected = {n for n in projection_names(model) if n.split(".")[-1] in DEFAULTS[TINY[family][0]]}
    assert len(expected) == layers * len(DEFAULTS[TINY[family][0]]) < len(projection_names(model))
    adapted, changed = adapted_and_changed(model, BY_DEFAULT, monkeypatch)
    assert adapted == changed == expected


def test_llama_has_queries_and_values_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, _ = adapted_and_changed(tiny_model("llama"), BY_DEFAULT, monkeypatch)
    assert adapted == {f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qv"}


@pytest.mark.parametrize("family", one_of_each())
def test_all_projections_are_adapted_where_nothing_is_said(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    every = set(projection_names(model))
    assert adapted_and_changed(model, RecoverConfig(rank=2, train=TRAIN), monkeypatch) == (every, every)


@pytest.mark.parametrize("family", sorted(set(one_of_each()) - set(KNOWN)))
def test_an_architecture_that_peft_does_not_know_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=rf"no default modules for model type '{TINY[family][0]}'; set .* all-linear"):
        recover(tiny_model(family), tiny_batch(), BY_DEFAULT)


def test_a_model_without_these_modules_is_refused() -> None:
    model = tiny_model("llama")
    plan = family_for(model).plan(model.config)
    for layer in range(4):
        plan = plan.with_layer(layer, query_heads=(), kv_heads=())
    compact_(model, plan)
    with pytest.raises(UnsupportedModelError, match=r"none of PEFT's modules .*q_proj, v_proj.* all-linear"):
        recover(model, tiny_batch(), BY_DEFAULT)


def test_a_run_does_not_continue_adapters_of_other_modules(tmp_path: Path) -> None:
    longer = replace(BY_DEFAULT, train=replace(TRAIN, checkpoint_interval=1))
    recover(tiny_model(), tiny_batch(), longer, checkpoint_dir=tmp_path)
    other = replace(longer, targets="all-linear")
    with pytest.raises(CheckpointError, match=r"targets was 'default', now 'all-linear'"):
        recover(tiny_model(), tiny_batch(), other, checkpoint_dir=tmp_path, resume=True)


def test_only_dress_as_published_takes_pefts_default() -> None:
    def targets(name: str) -> str:
        return preset(name).recover.targets

    assert targets("dress-paper") == targets("dress-paper-opt") == "default"
    assert targets("dress") == targets("elder-paper") == "all-linear"
