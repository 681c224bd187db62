"""Moments in 8 bits, read by another number of processes than wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from pyprune.errors import CheckpointError
from pyprune.ops.regularised_adamw import decode_moment, encode_moment
from pyprune.runtime import processes
from pyprune.train.blocks import ENDS, Place, recut_whole
from pyprune.train.sharded import Whole
from pyprune.train.shards import SHARDS, read_shards, silence_torch
from pyprune.train.state import TrainState, load_state, save_state

SHAPES = {"rows": (7, 5), "few rows": (2, 300), "columns": (6, 12), "blocks": (3, 768), "vector": (600,)}
"""Of two and three processes: parts of other sizes, none in the third, and blocks that are the same in any."""
ALONG = {"columns": 1, "blocks": 1}
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
NAMES = [f"{kind}{end}" for kind in SIGNED for end in ENDS]


def values(shape: tuple[int, ...], kind: str) -> Tensor:
    """Numbers over many orders of magnitude, as moments are."""
    generator = torch.Generator().manual_seed(len(shape) + SIGNED[kind])
    found = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp()
    return found if SIGNED[kind] else found.abs()


def part(whole: Tensor, name: str, number: int, count: int) -> Tensor:
    pieces = whole.chunk(count, ALONG.get(name, 0))
    return (pieces[number] if number < len(pieces) else whole[:0]).contiguous()


def entries(name: str, number: int, count: int) -> dict[str, Tensor]:
    """The optimizer's entries of one of so many processes."""
    found: dict[str, Tensor] = {}
    for kind, signed in SIGNED.items():
        blocks = encode_moment(part(values(SHAPES[name], kind), name, number, count), signed=signed)
        found |= dict(zip((f"0.{kind}{end}" for end in ENDS), blocks, strict=True))
    return found


def written(folder: Path, count: int, *parts: dict[str, Tensor]) -> Path:
    """A checkpoint of so many processes."""
    named = {f"optimizer/{key}@{n}/{count}": t for n, given in enumerate(parts) for key, t in given.items()}

    def write(place: Path, _: object) -> None:
        with silence_torch():
            save({"weights/w": torch.ones(2), **named}, checkpoint_id=place / SHARDS, no_dist=True)

    return save_state(folder, TrainState(4, {}), write_tensors=write)


def read_as(path: Path, name: str, number: int, count: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setattr(processes, "number", lambda: number)
    monkeypatch.setattr(processes, "count", lambda: count)
    place = Place.piece(torch.Size(SHAPES[name]), ALONG.get(name, 0), number, count)
    return read_shards(path / SHARDS, places=lambda _: place)["optimizer"]


def assert_near(found: dict[str, Tensor], name: str, number: int, count: int) -> None:
    """What the process would have written, but for two roundings to nearest: of the writer, and of the reader."""
    for kind, signed in SIGNED.items():
        got = decode_moment(*(found[f"0.{kind}{end}"] for end in ENDS), signed=signed)
        want = part(values(SHAPES[name], kind), name, number, count)
        assert got.shape == want.shape
        # Codes have 3 and 4 bits after the first, down to 2e-5 of the largest of their block.
        allowed = want.abs() * (2.1 * 2.0 ** -(4 if signed else 5)) + values(SHAPES[name], kind).abs().max() * 4e-5
        assert bool(((got - want).abs() <= allowed).all()), kind


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2)])
def test_parts_are_cut_again(
    name: str, before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, before, *(entries(name, n, before) for n in range(before)))
    for number in range(after):
        found = read_as(path, name, number, after, monkeypatch)
        assert sorted(found) == sorted(f"0.{entry}" for entry in NAMES)
        assert_near(found, name, number, after)
        if name == "blocks":
            assert all(torch.equal(found[key], t) for key, t in entries(name, number, after).items()), "the same bits"


@pytest.mark.parametrize("name", SHAPES)
def test_what_one_process_wrote_is_cut(name: str) -> None:
    for number in range(3):
        place = Place.piece(torch.Size(SHAPES[name]), ALONG.get(name, 0), number, 3)
        found = recut_whole({**entries(name, 0, 1), "0.step": torch.tensor(4.0)}, lambda _, place=place: place)
        assert sorted(found) == sorted(f"0.{entry}" for entry in NAMES)
        assert_near(found, name, number, 3)


def test_what_every_process_had_whole_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = entries("vector", 0, 1)
    path = written(tmp_path, 2, given, given)
    found = read_as(path, "vector", 0, 1, monkeypatch)
    assert all(torch.equal(found[key], t) for key, t in given.items())


def test_states_of_another_training_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 2, *(entries("rows", n, 2) for n in range(2)))
    with pytest.raises(CheckpointError, match=r"parts of shapes \(4, 5\), \(3, 5\), which do not make a parameter of"):
        load_state(path, lambda folder: read_shards(folder / SHARDS, places=lambda _: Place.whole(torch.Size((8, 5)))))
    with pytest.raises(CheckpointError, match="parameter number 0, but 0 are trained"):
        Whole(torch.nn.Linear(1, 1)).load(path)
    with pytest.raises(CheckpointError, match="in parts of 2 processes, which nothing but the training that wrote"):
        load_state(path)
