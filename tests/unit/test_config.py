from __future__ import annotations

import pytest

from pyprune.config import PruneConfig, TrainConfig
from pyprune.errors import ConfigError


def test_options_round_trip() -> None:
    config = PruneConfig.from_dict({"method": "dress", "ratio": 0.3, "dress": {"norm": "l1", "channels": []}})
    assert config.dress.norm == "l1"
    assert PruneConfig.from_dict(config.to_dict()) == config


def test_every_problem_is_reported_at_once_with_suggestions() -> None:
    with pytest.raises(ConfigError) as caught:
        PruneConfig.from_dict({"methd": "x", "ratio": "lots", "dress": {"norm": "l3"}, "seed": 1.5})
    text = str(caught.value)
    assert "Did you mean 'method'" in text
    assert "ratio is 'lots'" in text
    assert "value of dress.norm 'l3'" in text
    assert "seed is 1.5; expected int" in text


def test_values_are_checked_after_types() -> None:
    with pytest.raises(ConfigError) as caught:
        PruneConfig.from_dict({"ratio": 1.0, "finetune": {"steps": 0, "micro_batch_size": 5}})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("finetune", "validation_interval", 0),
        ("finetune", "checkpoint_interval", 0),
        ("finetune", "early_stop_patience", 0),
        ("finetune", "early_stop_min_delta", -1.0),
        ("finetune", "max_grad_norm", -1.0),
        ("finetune", "weight_decay", -0.1),
        ("dress", "prox_step", 0.0),
        ("recover", "dropout", 1.0),
    ],
)
def test_values_that_would_fail_or_do_nothing_in_training(section: str, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        PruneConfig.from_dict({section: {name: value}})


def test_a_method_must_exist_and_be_able_to_do_its_stages() -> None:
    """Before a model is loaded, not hours later."""
    with pytest.raises(ConfigError, match="Did you mean 'dress'"):
        PruneConfig.from_dict({"method": "dres"})
    with pytest.raises(ConfigError) as caught:
        PruneConfig.from_dict({"method": "none"})
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="nothing to regularise with"):
        PruneConfig.from_dict({"method": "none", "plan": "plan.json"})
    PruneConfig.from_dict({"method": "none", "plan": "plan.json", "stages": {"before": ["finetune"]}})


def test_yaml_style_numbers_are_numbers() -> None:
    assert TrainConfig.from_dict({"learning_rate": "1e-3"}).learning_rate == 1e-3
    assert TrainConfig.from_dict({"max_grad_norm": None}).max_grad_norm is None
    assert TrainConfig.from_dict({"max_grad_norm": 2}).max_grad_norm == 2.0


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads version 1"):
        PruneConfig.from_dict({"version": 9})


def test_verifying_a_cut_that_is_not_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages\.prune is off"):
        PruneConfig.from_dict({"verify": True, "stages": {"prune": False}})
