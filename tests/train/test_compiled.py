"""Decoder layers under torch.compile: the same training, really compiled, and layers that are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Never

import pytest
import torch
from torch import nn

from pyprune.config.train import RecoverConfig, TrainConfig
from pyprune.errors import ConfigError
from pyprune.families import decoder_layers
from pyprune.train.compiled import compiled_layers
from pyprune.train.loop import train
from pyprune.train.recover import recover
from tests._support.compiled import graphs, only_traced
from tests._support.models import tiny_batch, tiny_model

CONFIG = TrainConfig(steps=3, batch_size=4, micro_batch_size=2, learning_rate=1e-3, optimizer="fused_adamw")

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, while it traces


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What other tests compiled would not be compiled again, nor counted."""
    torch._dynamo.reset()


@pytest.fixture
def quick() -> Iterator[None]:
    with only_traced():
        yield


@pytest.mark.second
def test_a_compiled_training_is_the_same_training_and_leaves_the_layers_as_they_were() -> None:
    plain, compiled = tiny_model(), tiny_model()
    expected = train(plain, tiny_batch(1, 8, 16), CONFIG)
    before = graphs()
    found = train(compiled, tiny_batch(1, 8, 16), replace(CONFIG, compile=True))
    assert graphs() > before + 1, "nothing was compiled but what tries the compiler"
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for (name, a), (_, b) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=name)
    assert not any("forward" in vars(layer) for layer in decoder_layers(compiled))


@pytest.mark.process
@pytest.mark.usefixtures("quick")
def test_adapters_checkpointing_and_rows_of_many_lengths() -> None:
    plain, compiled = tiny_model(), tiny_model()
    samples = tiny_batch(1, 8, 24)
    samples[::2, 12:] = -100  # right padding, so that passes have two lengths
    config = RecoverConfig(rank=4, train=replace(CONFIG, micro_batch_size=1, gradient_checkpointing=True))
    expected = recover(plain, samples, config)
    before = graphs()
    found = recover(compiled, samples, replace(config, train=replace(config.train, compile=True)))
    assert graphs() > before + 1
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.process
@pytest.mark.usefixtures("quick")
def test_unequal_layers_are_all_compiled_and_a_validation_runs_as_it_is() -> None:
    model = tiny_model(num_hidden_layers=5)
    for i, layer in enumerate(decoder_layers(model)):
        mlp, width = layer.mlp, 8 + 4 * i
        mlp.gate_proj, mlp.up_proj = (nn.Linear(mlp.hidden_size, width, bias=False) for _ in range(2))
        mlp.down_proj = nn.Linear(width, mlp.hidden_size, bias=False)
    # Torch gives up after so many forms of one code, and runs the rest as it is.
    with torch._dynamo.config.patch(recompile_limit=2), compiled_layers(model, replace(CONFIG, compile=True)):
        before = graphs()
        with torch.no_grad():
            model(tiny_batch())
        assert graphs() == before, "a pass without gradients was compiled"
        model(tiny_batch()).logits.sum().backward()
    assert graphs() - before >= 5


def test_no_compiler_is_said_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> Never:
        raise RuntimeError("No working C++ compiler found\nin a long list")

    monkeypatch.setattr(torch, "compile", missing)
    with pytest.raises(ConfigError, match=r"No working C\+\+ compiler found On a CPU .* set compile to false"):
        train(tiny_model(), tiny_batch(1, 8, 16), replace(CONFIG, compile=True))
