"""Adapters larger than the matrices they stand for are refused before any of them is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Never

import pytest

from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.errors import ConfigError
from pyprune.run.recipe import build_config
from pyprune.train.lora import check_rank, projection_names
from pyprune.train.recover import recover
from tests._support.models import tiny_batch, tiny_model
from tests._support.scores import decision_of

TRAIN = TrainConfig(steps=1, batch_size=2, micro_batch_size=2)


@pytest.fixture
def no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocated(*_: Any, **__: Any) -> Never:
        raise AssertionError("adapters were made")

    monkeypatch.setattr("peft.get_peft_model", allocated)


@pytest.mark.usefixtures("no_adapters")
@pytest.mark.parametrize("rank", [49, 65_536])
def test_a_rank_beyond_every_projection_is_refused_before_adapters_exist(rank: int) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=f"rank is {rank}, .* LlamaForCausalLM has 48 channels"):
        recover(model, tiny_batch(), RecoverConfig(rank=rank, train=TRAIN))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("no_adapters")
def test_loraprune_refuses_it_too() -> None:
    config = build_config(preset="loraprune")
    config = replace(config, options=replace(config.options, rank=1000, train=TRAIN))
    with pytest.raises(ConfigError, match=r"rank is 1000, .* has 48 channels"):
        decision_of(tiny_model(), tiny_batch(), config)


@pytest.mark.usefixtures("no_adapters")
@pytest.mark.parametrize("rank", [10**9, 10**30])
def test_a_rank_of_no_model_is_refused_without_one(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank is {rank}; it must be at most 65,536"):
        recover(tiny_model(), tiny_batch(), RecoverConfig(rank=rank, train=TRAIN))


def test_the_largest_rank_is_the_largest_dimension() -> None:
    model = tiny_model()
    check_rank(model, projection_names(model), 48)
    report = recover(model, tiny_batch(), RecoverConfig(rank=48, train=TRAIN))
    assert report.steps == 1
