"""Moments in 8 bits: read by as many processes as wrote them, and refused by any other number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from pyprune.errors import CheckpointError
from pyprune.ops.regularised_adamw import encode_moment
from pyprune.runtime import processes
from pyprune.train.shards import BLOCKS, SHARDS, read_parts, read_shards, silence_torch
from pyprune.train.state import TrainState, load_state, save_state


def moments(number: int) -> dict[str, Tensor]:
    """The optimizer's entries of one process."""
    blocks = encode_moment(torch.full((3, 5), float(number + 1)), signed=True)
    return dict(zip((f"0.exp_avg{end}" for end in BLOCKS), blocks, strict=True))


def written(folder: Path) -> Path:
    """A checkpoint of two processes."""
    named = {f"optimizer/{key}@{n}/2": t for n in range(2) for key, t in moments(n).items()}

    def write(place: Path, _: object) -> None:
        with silence_torch():
            save({"weights/w": torch.ones(2), **named}, checkpoint_id=place / SHARDS, no_dist=True)

    return save_state(folder, TrainState(4, {}), write_tensors=write)


def test_as_many_processes_read_their_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(processes, "count", lambda: 2)
    for number in range(2):
        monkeypatch.setattr(processes, "number", lambda number=number: number)
        found = read_shards(path / SHARDS)
        assert found["weights"]["w"].tolist() == [1, 1]
        assert found["optimizer"].keys() == moments(number).keys()
        assert all(torch.equal(found["optimizer"][key], t) for key, t in moments(number).items())


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_of_several_are_refused_in_another_number(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    monkeypatch.setattr(processes, "count", lambda: count)
    with pytest.raises(CheckpointError, match=r"a lean training in 2 processes.*: continue it in 2 processes"):
        load_state(path)


def test_blocks_of_one_process_are_refused_in_several(tmp_path: Path) -> None:
    path = save_state(tmp_path, TrainState(4, {}, {"weights": {"w": torch.ones(2)}, "optimizer": moments(0)}))
    assert load_state(path).tensors["optimizer"].keys() == moments(0).keys()
    with pytest.raises(CheckpointError, match=r"a lean training in 1 process.*: continue it in 1 process"):
        read_parts(path, lambda *_: None, lambda group, key, tensor: tensor)
