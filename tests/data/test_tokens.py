"""A batch: what each row is fed, predicts, and is labelled with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyprune.config.data import DataConfig
from pyprune.data.sampling import sample_sequences
from pyprune.data.tokens import IGNORED, UNNAMED, Batch
from tests._support.models import tiny_batch
from tests._support.tokenizer import tiny_tokenizer
from tests.data._fakes import jsonl, prose, text_file

KINDS = ("prose", "code", "prose", "web", "code", "prose")


def batch() -> Batch:
    ids = tiny_batch(0, 6, 20)
    return Batch(ids, ids, KINDS)


@pytest.mark.parametrize(
    "rows",
    [
        slice(1, 4),
        slice(None, None, 2),
        torch.tensor([4, 0, 0]),
        torch.tensor([True, False, True, True, False, False]),
        torch.tensor([], dtype=torch.int64),
    ],
    ids=str,
)
def test_kinds_follow_their_rows(rows: slice | torch.Tensor) -> None:
    every = batch()
    numbers = torch.arange(6)[rows].tolist()
    assert every[rows].kinds == tuple(KINDS[i] for i in numbers)
    assert torch.equal(every[rows].ids, every.ids[numbers])
    assert Batch(every.ids, every.labels)[rows].kinds == ()


def test_rows_by_kind() -> None:
    found = batch().rows_by_kind()
    assert {kind: rows.tolist() for kind, rows in found.items()} == {"prose": [0, 2, 5], "code": [1, 4], "web": [3]}
    plain = Batch.of(tiny_batch(0, 3, 20))
    assert {kind: rows.tolist() for kind, rows in plain.rows_by_kind().items()} == {UNNAMED: [0, 1, 2]}


def test_micro_batches_and_devices_keep_the_kinds() -> None:
    every = batch()
    every.ids[1, 5:] = IGNORED
    pieces = every.micro_batches(4)
    assert sum((piece.kinds for piece in pieces), ()) == ("code", "prose", "prose", "web", "code", "prose")
    assert every.to("cpu").kinds == KINDS
    assert Batch(every.ids, every.labels).digest() == every.digest(), "kinds are names, not what is computed"


def test_which_batches_count_every_token(tmp_path: Path) -> None:
    ids = tiny_batch(0, 3, 20)
    assert Batch.of(ids).counts_every_token
    assert Batch(ids, ids.clone()).counts_every_token
    masked, padded = ids.clone(), ids.clone()
    masked[0, 3], padded[0, 10:] = IGNORED, IGNORED
    assert not Batch(ids, masked).counts_every_token
    assert not Batch(padded, padded.clone()).counts_every_token
    assert not Batch.of(padded).counts_every_token
    source = text_file(tmp_path, prose(100))
    assert sample_sequences(tiny_tokenizer(), DataConfig(source, samples=3, sequence_length=20)).counts_every_token


def test_samples_are_a_batch(tmp_path: Path) -> None:
    source = text_file(tmp_path, prose(100))
    samples = sample_sequences(tiny_tokenizer(), DataConfig(source, samples=4, sequence_length=20))
    assert Batch.of(samples) is samples
    assert samples.labels is samples.ids
    assert not samples.records
    assert type(samples[:2]) is Batch
    records = jsonl(tmp_path, [{"instruction": f"Say {i}.", "output": str(i)} for i in range(4)])
    whole = DataConfig(records, samples=2, sequence_length=400, layout="instructions")
    drawn = sample_sequences(tiny_tokenizer(), whole)
    assert drawn.records
    assert drawn.kinds == (records, records)
    assert not drawn.counts_every_token


def test_what_decides_is_read_on_the_host() -> None:
    """The meta device has no values at all: reading there raises, where a GPU would make the host wait."""
    ids = tiny_batch(0, 3, 20)
    masked, padded = ids.clone(), ids.clone()
    masked[0, 3], padded[0, 10:] = IGNORED, IGNORED
    for own in (Batch.of(ids), Batch(ids, ids.clone()), Batch(ids, masked), Batch(padded, padded.clone())):
        there = own.to("meta")
        assert there.ids.device.type == "meta"
        assert there.to("meta").counts_every_token == there.counts_every_token == own.counts_every_token
        assert there.token_count() == own.token_count()
        for name in ("predicting_rows", "real_rows"):
            rows, moved = getattr(own, name)(), getattr(there, name)()
            assert (rows is None) == (moved is None)
            if rows is not None:
                assert moved.shape == rows.shape
                assert moved.device.type == "meta"
        assert own.to("cpu").source is None
    with pytest.raises(RuntimeError, match="meta"):
        bool(Batch.of(ids).to("meta").real.all())


def test_rows_that_predict_and_rows_that_are_real() -> None:
    padded = Batch.of(torch.tensor([[5, 6, 7], [8, IGNORED, IGNORED]]))
    predicting, real = padded.predicting_rows(), padded.real_rows()
    assert predicting is not None
    assert real is not None
    assert predicting.tolist() == [0, 1]
    assert real.tolist() == [0, 1, 2, 3]
