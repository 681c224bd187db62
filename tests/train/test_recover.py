"""LoRA recovery: trains through the one loop, merges, and leaves an ordinary model whatever happens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.quality.steps import kept_share
from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.cut.compact import compact_
from pyprune.errors import ConfigError, MissingDependencyError, OutputError, TrainingError
from pyprune.families import family_for
from pyprune.train.lora import projection_names
from pyprune.train.loss import causal_loss
from pyprune.train.recover import finetune, recover
from tests._support.models import tiny_batch, tiny_model

TRAIN = TrainConfig(steps=6, batch_size=4, micro_batch_size=2, learning_rate=1e-2)
CONFIG = RecoverConfig(rank=4, alpha=8.0, train=TRAIN)


def samples() -> Tensor:
    return tiny_batch(1, 8, 12)


def pruned_model(family: str, *, uniform: bool = True) -> PreTrainedModel:
    model = tiny_model(family)
    plan = family_for(model).plan(model.config).drop_layers([1])
    if not uniform:
        plan = plan.with_layer(2, ffn=range(10))
    compact_(model, plan)
    return model


@pytest.mark.parametrize("family", ["llama-head-dim", "opt", "phi", "gemma3"])
@pytest.mark.parametrize("uniform", [True, False])
def test_recovery_learns_and_leaves_an_ordinary_model(family: str, uniform: bool) -> None:
    model = pruned_model(family, uniform=uniform)
    kind, names = type(model), [n for n, _ in model.named_parameters()]
    config = model.config.to_dict()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = recover(model, samples(), CONFIG)
    assert report.objective == "lora"
    assert report.losses[-1] < report.losses[0]
    assert type(model) is kind
    assert [n for n, _ in model.named_parameters()] == names
    assert model.config.to_dict() == config
    assert all(p.requires_grad for p in model.parameters())
    assert not any("lora" in type(m).__module__ for m in model.modules())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {f"{n}.weight" for n in projection_names(model)}
    assert causal_loss(model, samples()).item() < report.losses[0]


def test_a_small_recovery_of_bfloat16_weights_is_not_rounded_away() -> None:
    """A change of a weight of 0.02 by less than 6e-5 is no other bfloat16 number."""
    config = replace(CONFIG, train=replace(TRAIN, steps=2, learning_rate=1e-4))
    wide, half = (pruned_model("llama").to(torch.bfloat16) for _ in range(2))
    wide.float()
    before = {name: weight.detach().clone() for name, weight in wide.named_parameters()}
    for model in (wide, half):
        recover(model, samples(), config)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    after = {name: weight.detach() for name, weight in wide.named_parameters()}
    parts = {
        "stayed": half.state_dict(),
        "to nearest": {n: p.bfloat16() for n, p in wide.state_dict().items()},
    }
    for name, weights in parts.items():
        share = kept_share(before, after, weights)
        assert (0.5 < share < 1.5) if name == "stayed" else share < 0.3, (name, share)


def test_recovery_with_gradient_checkpointing_is_the_same() -> None:
    plain, checkpointed = tiny_model(), tiny_model()
    recover(plain, samples(), CONFIG)
    recover(checkpointed, samples(), replace(CONFIG, train=replace(TRAIN, gradient_checkpointing=True)))
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_an_interrupted_recovery_drops_the_adapters_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = tiny_model(), tiny_model()
    original = {n: p.detach().clone() for n, p in part.named_parameters()}
    recover(whole, samples(), CONFIG)
    calls = 0

    def interrupted(model: torch.nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return causal_loss(model, batch)

    monkeypatch.setattr("pyprune.train.objective.causal_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recover(part, samples(), CONFIG, checkpoint_dir=tmp_path)
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, original[name])
    report = recover(part, samples(), CONFIG, checkpoint_dir=tmp_path, resume=True)
    assert report.resumed_from == 3
    for a, b in zip(whole.parameters(), part.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_failed_recovery_merges_the_last_good_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny_model(), tiny_model()
    recover(reference, samples(), replace(CONFIG, train=replace(TRAIN, steps=2)))
    calls = 0

    def poisoned(model: torch.nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return causal_loss(model, batch) * (float("nan") if calls == 8 else 1.0)

    monkeypatch.setattr("pyprune.train.objective.causal_loss", poisoned)
    config = replace(CONFIG, train=replace(TRAIN, last_good_interval=1))
    with pytest.raises(TrainingError, match="step 4"):
        recover(model, samples(), config, adapter_out=tmp_path / "adapter")
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert list(tmp_path.iterdir()) == []


def test_adapters_that_cannot_be_written_are_refused_before_the_training(tmp_path: Path) -> None:
    model, untrained = tiny_model(), tiny_model()
    with pytest.raises(ConfigError, match="there is no adapter to write"):
        recover(model, samples(), replace(CONFIG, adapters="none"), adapter_out=tmp_path / "adapter")
    with pytest.raises(OutputError, match="exists already"):
        recover(model, samples(), CONFIG, adapter_out=tmp_path)
    for a, b in zip(untrained.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_half_precision_base_is_fine() -> None:
    model = tiny_model().to(torch.bfloat16)
    report = recover(model, samples(), replace(CONFIG, train=replace(TRAIN, dtype="bfloat16")))
    assert report.losses[-1] < report.losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"pyprune\[recover\]"):
        recover(tiny_model(), samples(), CONFIG)


def test_finetune_is_the_plain_control() -> None:
    model = tiny_model()
    report = finetune(model, samples(), TRAIN)
    assert report.objective == "finetune"
    assert report.losses[-1] < report.losses[0]
