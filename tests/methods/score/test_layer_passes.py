"""Gradient scores of a model on disk: the bits of the model in memory, however few streams are kept between layers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.stored import StoredModel
from pyprune.config.run import PruneConfig
from pyprune.families import named_axes
from pyprune.methods.base import PlanRequest
from pyprune.methods.registry import get_method
from pyprune.methods.score import ScoreMethod
from pyprune.methods.score._layer_passes import LayerPasses
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.obs import ObsOptions
from tests._support.models import TINY, tiny_batch, tiny_model
from tests._support.options import scoring_config

SAMPLES = tiny_batch(batch=5, length=11)
STREAM = 5 * 11 * 48 * 4
"""Bytes of the stream of all samples at one point."""

SCORED: dict[str, tuple[str, dict[str, Any]]] = {
    "vectorize": ("taylor", {"form": "vectorize"}),
    "param_first": ("taylor", {"form": "param_first"}),
    "param_second": ("taylor", {"form": "param_second"}),
    "param_mix": ("taylor", {"form": "param_mix"}),
    "obs": ("obs", {}),
    "smoothgrad": ("smoothgrad", {"draws": 3}),
    "moreau": ("moreau", {"draws": 2, "steps": 2}),
}


def config_of(which: str, **score: Any) -> PruneConfig:
    method, own = SCORED[which]
    return scoring_config(method, **own, **score)


def stored_in(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> StoredModel:
    tiny_model(name).save_pretrained(folder, max_shard_size="40KB")
    return StoredModel(folder, dtype=dtype)


def both(stored: StoredModel, config: PruneConfig) -> tuple[Scoring, Scoring]:
    """The scores of the model in memory, and of the model on disk."""
    model = AutoModelForCausalLM.from_pretrained(stored.folder, dtype=stored.dtype).eval()
    shell = stored.model()
    method = get_method(config.method)
    assert isinstance(method, ScoreMethod)
    assert method.streaming_obstacle(config) is None
    runs = (
        Scoring.of(model, SAMPLES, PlanRequest.of(model, config)),
        Scoring.of(shell, SAMPLES, PlanRequest.of(shell, config), stored=stored),
    )
    for run in runs:
        method.scorer(run)
    assert all(p.is_meta for p in shell.parameters())
    return runs


def assert_same_bits(memory: Scoring, disk: Scoring) -> None:
    assert memory.scores.sums.keys() == disk.scores.sums.keys() != set()
    for place, parts in memory.scores.sums.items():
        assert parts.keys() == disk.scores.sums[place].keys()
        for part, values in parts.items():
            assert torch.equal(values, disk.scores.sums[place][part]), (place, part)
    said = [[run.details.get(name) for name in ("loss", "losses", "residuals")] for run in (memory, disk)]
    assert said[0] == said[1] != [None, None, None]
    assert memory.details["memory"]["layer_bytes"] == disk.details["memory"]["layer_bytes"]


@pytest.mark.parametrize("name", TINY)
def test_scores_are_those_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    """In micro batches of unlike size, whose parts are summed in the same order."""
    stored = stored_in(tmp_path, name)
    for which in ("param_mix", "obs"):
        assert_same_bits(*both(stored, config_of(which, batch_size=2)))


@pytest.mark.parametrize("which", SCORED)
@pytest.mark.parametrize("change", [
    {}, {"batch_size": 3, "layers": (1, 3)}, {"axes": ("ffn",), "last_layer": 1}, {"heads_unit": "query_head"},
])  # fmt: skip
def test_forms_and_options_mean_the_same(which: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert_same_bits(*both(stored_in(tmp_path, "gemma3"), config_of(which, **change)))


@pytest.mark.parametrize("which", [which for which in SCORED if which != "obs"])
@pytest.mark.parametrize("change", [{}, {"batch_size": 2}, {"axes": ("hidden", "ffn"), "batch_size": 3}])
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_hidden_channels_reach_outside_of_the_layers(
    name: str, change: dict[str, Any], which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings, final norm and head, tied and not; they come with the layers, one of which is in memory at a time."""
    stored = stored_in(tmp_path, name)
    with monkeypatch.context() as patch:
        counted(patch)
        memory, disk = both(stored, config_of(which, **{"axes": ("hidden",), **change}))
    assert_same_bits(memory, disk)
    parts_a_sample = which in ("param_second", "param_mix")  # sums of all parameters are held between its passes
    open_bytes = sum(p.parameter.nbytes for p in memory.open_params)
    assert (memory.details["memory"]["state_bytes"] >= 2 * open_bytes) or not parts_a_sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TINY)
def test_hidden_channels_of_every_family_mean_the_same(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = stored_in(tmp_path, name, dtype)
    for which in ("param_mix", "moreau"):
        assert_same_bits(*both(stored, config_of(which, axes=("hidden",), batch_size=2)))


def test_what_is_open_outside_of_the_layers_is_scored(tmp_path: Path) -> None:
    """Without the embeddings' own part the sums would be others."""
    stored = stored_in(tmp_path, "llama")
    _, disk = both(stored, config_of("param_first", axes=("hidden",)))
    model = tiny_model("llama")
    loss = model(input_ids=SAMPLES, labels=SAMPLES).loss
    loss.backward()
    wanted = torch.zeros(model.config.hidden_size)
    for param in named_axes(model):
        dim = param.axis_dim("hidden")
        if dim is not None:
            products = (param.parameter * param.parameter.grad).abs().detach()
            wanted += products.movedim(dim, 0).reshape(len(wanted), -1).sum(1)
    torch.testing.assert_close(disk.scores.group_scores(None, "hidden").float(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("which", ["param_first", "param_second", "smoothgrad"])
def test_weights_in_bfloat16_mean_the_same(which: str, tmp_path: Path) -> None:
    assert_same_bits(*both(stored_in(tmp_path, "phi", torch.bfloat16), config_of(which, batch_size=2)))


def test_obs_in_bfloat16_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config_of("obs", batch_size=2), options=ObsOptions(dtype="bfloat16"))
    counted(monkeypatch)
    assert_same_bits(*both(stored_in(tmp_path, "granite"), config))


@pytest.mark.parametrize("which", ["param_first", "obs"])
def test_few_kept_streams_give_the_same_bits(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream is kept for every layer they are read twice, else more often; never more streams at once."""
    stored = stored_in(tmp_path, "opt")
    reads: dict[int, list[int]] = {}
    for kept in (1, 2, 4):
        with monkeypatch.context() as patch:
            patch.setattr("pyprune.methods.score._layer_passes.KEPT_BYTES", kept * STREAM)
            seen = counted(patch)
            memory, disk = both(stored, config_of(which, batch_size=2))
        assert_same_bits(memory, disk)
        reads[kept] = [seen.count(index) for index in range(4)]
        assert disk.details["memory"]["state_bytes"] >= (kept + 2) * STREAM
    assert reads == {4: [2, 2, 2, 2], 2: [3, 2, 3, 2], 1: [5, 4, 3, 2]}


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are read, in order; one of them is in memory at a time, also in copies and graphs."""
    seen: list[int] = []
    alive: list[weakref.ref[Any]] = []
    layer, parameter = StoredLayers.layer, StoredLayers.read_parameter

    def remembered(self: StoredLayers, name: str) -> nn.Parameter:
        found = parameter(self, name)
        if ".layers." in name:
            alive.append(weakref.ref(found.untyped_storage()))
        return found

    def read(self: StoredLayers, index: int) -> Any:
        assert all(p.is_meta for other in self.layers for p in other.parameters())
        assert not any(storage() is not None for storage in alive), "a layer that was read before is still held"
        tied = self.model.get_input_embeddings().weight
        assert all(p.is_meta or p is tied for p in self.model.get_output_embeddings().parameters())
        seen.append(index)
        return layer(self, index)

    patch.setattr(StoredLayers, "layer", read)
    patch.setattr(StoredLayers, "read_parameter", remembered)
    return seen


@pytest.mark.parametrize("kept", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("count", [2, 3, 10, 33])
def test_streams_are_kept_where_the_fewest_layers_run_again(count: int, kept: int) -> None:
    """Every point is visited with what enters it, from the last to the first, and no more streams are kept."""
    walk, run = LayerPasses.__new__(LayerPasses), [0]

    def forward(streams: list[Tensor], start: int, stop: int) -> list[Tensor]:
        run[0] += stop - start
        return [Tensor([stop])]

    walk._run = forward  # type: ignore[method-assign]
    visited = [(index, int(streams[0])) for index, streams in walk._backwards([Tensor([0])], 0, count, kept)]
    assert visited == [(index, index) for index in reversed(range(count))]
    assert run[0] == fewest(count, kept)


def fewest(count: int, kept: int) -> int:
    """Layers that are run to visit so many points, over all places for the next kept stream."""
    best = {(1, k): 0 for k in range(kept + 1)}
    for n in range(2, count + 1):
        for k in range(1, kept + 1):
            best[n, k] = min(at + best[n - at, k - 1] + best[at, k] for at in range(1, n) if (n - at, k - 1) in best)
    return best[count, kept]
