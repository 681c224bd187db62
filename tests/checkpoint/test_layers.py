"""A dense checkpoint read layer by layer: the same bits as from memory, one layer at a time, damage refused."""

from __future__ import annotations

import copy
import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyprune.checkpoint.layers import StoredLayers
from pyprune.checkpoint.stored import StoredModel
from pyprune.cut.compact import compact_
from pyprune.cut.reconstruct import reconstruct_compacted_
from pyprune.errors import CheckpointError, OutputError
from pyprune.families import family_for, named_axes
from pyprune.probe.activations import gather_moments
from tests._support.models import TINY, one_of_each, tiny_batch, tiny_model
from tests._support.plans import axis_plans


@pytest.mark.parametrize("name", TINY)
def test_the_stream_of_stored_layers_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    stored = StoredLayers(StoredModel(tmp_path, dtype=torch.float32))
    ids = tiny_batch()
    with torch.no_grad():
        stream = stored.embed(ids)
        for index in range(4):
            for part in stored.parts(index):
                with stored.layer(index) as layer:
                    assert [p.is_meta for p in stored.layers[index].parameters()] == [False] * len(
                        list(layer.parameters())
                    )
                    stream = stored.run(layer, part, stream)
        expected = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        (name, *_) = (p.name for p in named_axes(model) if p.row.role == "final_norm")
        norm = model.get_submodule(name.rpartition(".")[0])
        assert torch.equal(norm(stream), expected[-1])
    assert all(p.is_meta for layer in stored.layers for p in layer.parameters())


@pytest.mark.parametrize("name", one_of_each())
def test_what_stands_outside_the_layers_is_heard_as_in_memory(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    outside = [(p.row.role, p.name.rpartition(".")[0]) for p in named_axes(model)]
    outputs = list(dict.fromkeys(n for role, n in outside if role in ("embedding", "final_norm")))
    found = [
        gather_moments(source, tiny_batch(batch=6), inputs=["lm_head"], outputs=outputs, batch_size=2)
        for source in (model, StoredLayers(StoredModel(tmp_path, dtype=torch.float32)))
    ]
    assert list(found[0]) == list(found[1]) == ["lm_head", *outputs]
    for loaded, stored in zip(*(f.values() for f in found), strict=True):
        assert loaded.count == stored.count == 6 * 17
        assert torch.equal(loaded.mean, stored.mean)
        assert torch.equal(loaded.squares, stored.squares)
    assert torch.equal(found[0]["lm_head"].mean, found[0][outputs[-1]].mean), "the final norm is heard at the end"


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_reconstruction_from_disk_is_reconstruction_from_memory(name: str, tmp_path: Path) -> None:
    dense = tiny_model(name)
    dense.save_pretrained(tmp_path)
    plan = axis_plans(family_for(dense).plan(dense.config))["everything"]
    samples = tiny_batch(batch=8, length=32)
    results = []
    for source in (dense, StoredLayers(StoredModel(tmp_path, dtype=torch.float32))):
        cut = copy.deepcopy(dense)
        compact_(cut, plan)
        reconstruct_compacted_(cut, plan, source, samples)
        results.append(cut.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("change", ["missing", "shape", "nan"])
def test_a_damaged_checkpoint_is_refused(change: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name].T.contiguous()
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    words = {"missing": "is missing", "shape": "has the shape", "nan": "not finite"}[change]
    with pytest.raises(CheckpointError, match=words), StoredLayers(StoredModel(tmp_path, dtype=torch.float32)).layer(2):
        pass


@pytest.mark.parametrize("beside", [True, False])
def test_zeros_lie_in_a_file_that_goes_with_them(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path / "dense")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder = tmp_path / ("scratch" if beside else "temporary")
    stored = StoredModel(tmp_path / "dense", scratch=folder if beside else None)
    found = stored.zeros((3, 5), torch.float32)
    assert torch.equal(found, torch.zeros(3, 5))
    found.add_(2.0)
    assert torch.equal(found, torch.full((3, 5), 2.0))
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert f"{folder}/pyprune-" in maps.read_text()
    assert not list(folder.iterdir()), "nothing is left where a run is killed"
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", _full, raising=False)
        with pytest.raises(
            OutputError, match=r"A tensor of 0\.0 MB.*no room on the disk" + ("" if beside else ".*TMPDIR")
        ):
            stored.zeros((3, 5), torch.float32)
    with monkeypatch.context() as patch:
        patch.delattr("os.posix_fallocate", raising=False)
        assert torch.equal(stored.zeros((3, 5), torch.float32), torch.zeros(3, 5))
    assert not list(folder.iterdir())


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
