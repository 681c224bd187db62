"""The memory that a training is said to hold, compared with what it held."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from bench._timing import extra_peak
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig
from pyprune.methods.regularise.dress import DressOptions
from pyprune.methods.regularise.dress.training import DressObjective
from pyprune.methods.regularise.elder import ElderOptions
from pyprune.methods.regularise.elder.penalty import ElderObjective
from pyprune.train.loop import train
from pyprune.train.lora import adapters, target_names
from pyprune.train.memory import TrainingMemory, training_memory
from pyprune.train.objective import Objective
from pyprune.train.recover import recover, recovery_objective
from tests._support.models import TINY, tiny_model
from tests._support.products import without_instructions

CPU = torch.device("cpu")
LENGTH = 192
SHAPES = LlamaConfig(
    vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
MIXTURE = Qwen3MoeConfig(
    vocab_size=4096, hidden_size=384, moe_intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=True,
)  # fmt: skip
BASE = TrainConfig(steps=2, batch_size=4, micro_batch_size=4, dtype="bfloat16", memory="full", optimizer="fused_adamw")
LEAN = replace(BASE, memory="lean")
ALL_WEIGHTS = RecoverConfig(adapters="none", distill=DistillConfig(alpha=0.5, hidden=0.1), train=BASE)
Make = Callable[[], Objective]

TRAININGS: dict[str, tuple[TrainConfig, Make]] = {
    "full": (BASE, Objective),
    "full, float32, four passes": (replace(BASE, dtype="float32", optimizer="adamw", micro_batch_size=1), Objective),
    "full, ELDeR's penalty, checkpointing": (
        replace(BASE, gradient_checkpointing=True),
        lambda: ElderObjective([1, 2], ElderOptions()),
    ),
    "lean, DReSS's penalty": (LEAN, lambda: DressObjective(range(300, 384), DressOptions())),
    "lean, two passes, checkpointing": (replace(LEAN, micro_batch_size=2, gradient_checkpointing=True), Objective),
}
RECOVERIES: dict[str, RecoverConfig] = {
    "all weights, a teacher": ALL_WEIGHTS,
    "all weights, lean, a teacher": replace(ALL_WEIGHTS, train=LEAN),
    "adapters": RecoverConfig(rank=8, train=BASE),
}


def shapes(dtype: torch.dtype, config: PreTrainedConfig = SHAPES) -> PreTrainedModel:
    with torch.device("meta"):
        return real(dtype, config)


def real(dtype: torch.dtype, config: PreTrainedConfig = SHAPES) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # type: ignore[no-any-return]


def samples() -> Tensor:
    return torch.randint(SHAPES.vocab_size, (8, LENGTH), generator=torch.Generator().manual_seed(0))


def weights_of(config: TrainConfig) -> torch.dtype:
    return torch.bfloat16 if config.memory == "lean" else torch.float32


def held(*models: Any) -> int:
    return sum(p.nbytes for model in models if model is not None for p in model.parameters())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.second] if i else []) for i, n in enumerate(TRAININGS)]
)
def test_the_predicted_peak_is_the_measured_one(name: str) -> None:
    _compare(*TRAININGS[name])


def test_what_products_in_float32_hold_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens, whose activations are less than a matrix that is converted for them."""
    without_instructions(monkeypatch)
    monkeypatch.setattr("pyprune.runtime.products.BLOCK", 1 << 30)  # a whole matrix at a time
    auto = _compare(replace(LEAN, dtype="auto"), Objective, length=4)
    named = training_memory(shapes(torch.bfloat16), LEAN, Objective(), 4, device=CPU)
    assert auto.activations > 1.1 * named.activations


def _compare(config: TrainConfig, make: Make, *, length: int = LENGTH, of: PreTrainedConfig = SHAPES) -> TrainingMemory:
    found = training_memory(shapes(weights_of(config), of), config, make(), length, device=CPU)
    model = real(weights_of(config), of)
    measured = held(model) + extra_peak(lambda: train(model, samples()[:, :length], config, make()), CPU)
    assert found.total == pytest.approx(measured, rel=0.1)
    assert found.weights == pytest.approx(held(model), rel=0.01)
    return found


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.second)])
def test_the_peak_of_a_mixture_is_predicted(dtype: Literal["float32", "bfloat16"]) -> None:
    """Which expert gets which token is not known beforehand, and torch has no shapes of their products in float32."""
    _compare(replace(BASE, dtype=dtype), Objective, of=MIXTURE)


@pytest.mark.second
@pytest.mark.parametrize("name", RECOVERIES)
def test_the_predicted_peak_of_a_recovery_is_the_measured_one(name: str) -> None:
    config = RECOVERIES[name]
    dtype = weights_of(config.train)
    teachers = [make(torch.bfloat16) if config.distill else None for make in (shapes, real)]
    model = shapes(dtype)
    objective = recovery_objective(model, config, teacher=teachers[0])
    lora = config.adapters == "lora"
    with adapters(model, target_names(model, config), config) if lora else nullcontext(model) as trained:
        found = training_memory(trained, config.train, objective, LENGTH, device=CPU, teacher=teachers[0])
    model = real(dtype)
    before = held(model, teachers[1])
    measured = before + extra_peak(lambda: recover(model, samples(), config, teacher=teachers[1]), CPU)
    assert found.total == pytest.approx(measured, rel=0.1)
    assert (found.teacher > 0) == (config.distill is not None)


def test_lean_holds_less_than_half_of_full() -> None:
    full, lean = (training_memory(shapes(weights_of(c)), c, Objective(), LENGTH, device=CPU) for c in (BASE, LEAN))
    assert lean.in_backward
    assert not full.in_backward
    assert lean.total < 0.5 * full.total
    assert lean.weights == pytest.approx(full.weights / 2, rel=1e-4)  # but for the angles of the positions
    assert lean.moments < 0.26 * full.moments + 1e5


def test_copies_are_counted_where_they_are_kept() -> None:
    def copies(**options: Any) -> tuple[int, int]:
        config = replace(LEAN, **options)
        found = training_memory(shapes(torch.bfloat16), config, Objective(), 16, device=torch.device("cuda"))
        return found.copies, found.on_host

    weights = held(shapes(torch.bfloat16))
    assert copies(copies="off") == (0, 0)
    assert copies(copies="device") == (weights, 0)
    assert copies() == (0, weights)
    assert copies(early_stop_patience=2) == (0, 2 * weights)


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_can_be_looked_at(family: str) -> None:
    real_one = tiny_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(real_one.config)(**real_one.config.to_dict()))
    config = replace(BASE, batch_size=2, micro_batch_size=2)
    found = training_memory(model, config, Objective(), 128, device=CPU)
    assert found.gradients == held(real_one)
    assert found.moments == 2 * found.gradients
    assert found.activations > 0


def test_layers_that_may_be_dropped_at_random_are_counted() -> None:
    """OPT asks a random number whether it skips a layer; half of its layers hold half of its activations."""

    def activations(layers: int) -> int:
        config = type(tiny_model("opt").config)(**{**tiny_model("opt").config.to_dict(), "num_hidden_layers": layers})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        many = replace(BASE, batch_size=8, micro_batch_size=8)
        found = training_memory(model, many, Objective(), 256, device=CPU)
        return found.activations + found.gradients

    assert activations(16) > 1.6 * activations(8)


def test_checkpointing_keeps_no_bfloat16_copies_of_weights() -> None:
    """Each is made where it is used, and again in the backward pass."""
    config = LlamaConfig(**{**SHAPES.to_dict(), "vocab_size": 64})
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2)]
    copies = 2 * sum(p.numel() for p in models[0].model.layers.parameters() if p.ndim == 2)
    two_passes = replace(BASE, micro_batch_size=2)  # in the second one all gradients are there
    kept, freed = (
        training_memory(model, replace(two_passes, gradient_checkpointing=on), Objective(), 8, device=CPU).activations
        for model, on in zip(models, (False, True), strict=True)
    )
    assert freed < 0.5 * copies < copies < kept
