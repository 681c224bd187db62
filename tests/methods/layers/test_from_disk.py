"""Losses without a layer or block are the same bits from disk, with few reads and no more streams than are allowed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyprune.checkpoint import layers
from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.load import load_model
from pyprune.checkpoint.stored import StoredModel
from pyprune.families import family_for
from pyprune.methods.layers._units import losses_without
from pyprune.methods.ratio import Unit
from pyprune.probe.streams import LayerRunner
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model
from tests._support.text import write_model

LAYERS = 7
DEEPER: dict[str, Any] = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]}}
BATCHES = tiny_batch(1, 10, 12).split(2)
STREAM = 2 * 12 * 48 * 4
"""Bytes of the stream of one batch."""
GONE = (2,)
CANDIDATES = (5, 0, 1, 3, 4)
ALL, SOME, TWO, NONE = 30, 7, 2, 0
"""Streams that may be held: six of each of five batches, less than all, the fewest that can be, and fewer than that."""


def opened(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[LayerRunner, StoredLayers]:
    """The layers of one model in memory and on disk."""
    write_model(tiny_model(name, num_hidden_layers=LAYERS, **DEEPER.get(name, {})).to(dtype), folder)
    model, _ = load_model(folder, dtype=str(dtype).removeprefix("torch."))
    return LayerRunner(model, family_for(model)), StoredLayers(StoredModel(folder, dtype=dtype))


def losses(runner: LayerRunner, unit: Unit = "layer") -> dict[int, float]:
    return losses_without(runner, BATCHES, unit, GONE, CANDIDATES, "losses")


def allow(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "STREAM_BYTES", streams * STREAM)


def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each layer, and the head, is read from now on."""
    found: Counter[str] = Counter()
    layer, head = StoredLayers.layer, StoredLayers.head

    @contextmanager
    def read_layer(self: StoredLayers, index: int) -> Iterator[nn.Module]:
        found[str(index)] += 1
        with layer(self, index) as module:
            yield module

    @contextmanager
    def read_head(self: StoredLayers) -> Iterator[None]:
        found["head"] += 1
        with head(self):
            yield

    monkeypatch.setattr(StoredLayers, "layer", read_layer)
    monkeypatch.setattr(StoredLayers, "head", read_head)
    return found


@pytest.mark.parametrize(
    ("name", "unit"),
    [(name, "layer") for name in TINY] + [(name, unit) for name in one_of_each() for unit in ("attention", "mlp")],
)
def test_losses_from_disk_are_those_in_memory(
    name: str, unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, stored = opened(tmp_path, name)
    expected = losses(memory, unit)
    assert list(expected) == sorted(CANDIDATES)
    assert len(set(expected.values())) == len(expected)
    for streams in (ALL, SOME):
        allow(streams, monkeypatch)
        assert losses(stored, unit) == expected
    assert all(p.is_meta for layer in stored.layers for p in layer.parameters())


@pytest.mark.parametrize("streams", [ALL, SOME, TWO, NONE])
def test_losses_in_bfloat16_are_the_same_bits(streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, stored = opened(tmp_path, "gemma3", torch.bfloat16)
    monkeypatch.setattr(layers, "STREAM_BYTES", streams * STREAM // 2)
    assert losses(stored, "mlp") == losses(memory, "mlp")


def test_a_round_reads_every_layer_and_the_head_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored = opened(tmp_path)
    allow(ALL, monkeypatch)
    found = reads(monkeypatch)
    losses(stored)
    assert found == {**dict.fromkeys("013456", 1), "head": 1}, "layer 2 has gone"


@pytest.mark.second
@pytest.mark.parametrize(("streams", "first", "last"), [(ALL, 1, 1), (SOME, 5, 5), (TWO, 5, 25)])
def test_less_memory_is_more_reads_of_what_lies_behind(
    streams: int, first: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ways to divide batches and candidates that hold so many streams, the one with the fewest reads."""
    _, stored = opened(tmp_path)
    allow(streams, monkeypatch)
    expected = min(
        sum(reads_of_one_way(stored, many, branches, monkeypatch).values())
        for many in range(1, 6)
        for branches in range(1, 6)
        if many * (branches + 1) <= streams
    )
    found = reads(monkeypatch)
    losses(stored)
    assert found.total() == expected
    assert (found["0"], found["6"]) == (first, last), (
        "a walk goes on from where the one before it left the common streams"
    )


def reads_of_one_way(stored: StoredLayers, many: int, branches: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    with monkeypatch.context() as patch:
        patch.setattr(StoredLayers, "branch_group_sizes", lambda *_: (many, branches))
        found = reads(patch)
        losses(stored)
    return found


@pytest.mark.parametrize("streams", [ALL, SOME, TWO])
def test_no_more_streams_are_held_than_allowed(streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored = opened(tmp_path)
    allow(streams, monkeypatch)
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Tensor:
            result: Tensor = function(*args)
            alive.append(weakref.ref(result))
            most.append(sum(stream() is not None for stream in alive))
            return result

        return call

    monkeypatch.setattr(StoredLayers, "embed", counted(StoredLayers.embed))
    monkeypatch.setattr(StoredLayers, "run", counted(StoredLayers.run))
    losses(stored)
    assert max(most) <= streams + 1, "and the one that is being made"
