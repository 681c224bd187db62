"""Layers of a model on the host visit a device: what is computed there, and what stays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyprune.families import family_for
from pyprune.probe.streams import HostLayers, LayerRunner, Part
from pyprune.runtime import processes
from tests._support.models import TINY, tiny_batch, tiny_model

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, as a GPU does; the one without values takes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
        assert len({t.device for t in given}) < 2, f"{func} of two devices"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_layer_at_work_and_the_streams_are_on_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device where tensors have no values."""
    monkeypatch.setattr(LayerRunner, "autocast", lambda *_: nullcontext())  # which that device lacks
    model = tiny_model(family)
    layers = HostLayers(model, family_for(model), ELSEWHERE)
    stream = layers.embed(tiny_batch(0, 2, 8))
    assert stream.is_meta
    for index in range(2):
        with layers.layer(index) as layer, torch.no_grad(), OneDevice():
            assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
            assert not any(p.is_meta for p in layers.layers[index + 1].parameters())
            stream = layers.run(layer, Part(index, ("attention", "mlp")), stream)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert stream.is_meta


def test_a_layer_that_stayed_on_the_host_would_be_found() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="of two devices"):
        torch.nn.functional.linear(torch.zeros(2, 2, device=ELSEWHERE), torch.zeros(2, 2))


@pytest.mark.parametrize("first", [True, False])
def test_what_is_kept_stays_and_the_rest_is_the_memory_it_was(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    layers = HostLayers(model, family_for(model), CPU)
    before = {name: p.data for name, p in model.named_parameters()}
    monkeypatch.setattr(processes, "gets_result", lambda: first)
    with layers.layer(1) as layer:
        for module in (layer.mlp.down_proj, layer.mlp.up_proj):
            module.weight.data.fill_(1.0)
        layers.keep(1, ["mlp.down_proj.weight"])
    for name, parameter in model.named_parameters():
        if first and name == "model.layers.1.mlp.down_proj.weight":
            assert bool((parameter == 1).all())
        else:
            assert parameter.data.data_ptr() == before[name].data_ptr()
            assert not bool((parameter == 1).all()) or parameter.ndim == 1


def test_streams_are_those_of_the_model_itself() -> None:
    model, ids = tiny_model("llama"), tiny_batch(0, 2, 8)
    found = []
    for runner in (LayerRunner(model, family_for(model)), HostLayers(model, family_for(model), CPU)):
        streams = [runner.embed(ids)]
        runner.through_(streams)
        found.append(streams[0])
    assert torch.equal(*found)
