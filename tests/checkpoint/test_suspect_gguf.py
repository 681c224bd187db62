"""GGUF files that claim what they do not hold."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pyprune.checkpoint.load import load_model
from pyprune.errors import CheckpointError
from tests._support.gguf import write_gguf


def refused_gguf(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_model(folder, gguf_file="x.gguf")
    assert "\n" not in str(caught.value)


def test_a_whole_gguf_is_read(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    model, tokenizer = load_model(gguf_folder, gguf_file="x.gguf")
    assert len(model.model.layers) == 2
    assert tokenizer is not None


@pytest.mark.parametrize("claimed", [1, 3, 0, 2**31])
def test_a_gguf_with_a_wrong_block_count_is_refused(gguf_folder: Path, claimed: int) -> None:
    write_gguf(gguf_folder / "x.gguf", claimed=claimed)
    refused_gguf(gguf_folder, f"says that it has {claimed} blocks .* but its tensors belong to 2")


@pytest.mark.parametrize("name", ["zz", "blk.0.attn_q.bias", "blk.1.ffn_gate_exps.weight"])
def test_a_gguf_with_tensors_that_nothing_takes_is_refused(gguf_folder: Path, name: str) -> None:
    write_gguf(gguf_folder / "x.gguf", extra=[name])
    refused_gguf(gguf_folder, f"no parameter of its llama model takes \\('{name}'\\)")


def test_a_gguf_that_claims_a_large_model_is_refused(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf", hidden=2_000_000)
    refused_gguf(gguf_folder, "describes a model of")


@pytest.mark.parametrize("at", [8, 16, 24])
def test_counts_and_lengths_of_a_gguf_are_bounded_by_the_file(gguf_folder: Path, at: int) -> None:
    write_gguf(gguf_folder / "x.gguf")
    data = bytearray((gguf_folder / "x.gguf").read_bytes())
    data[at : at + 8] = struct.pack("<Q", 1 << 60)
    (gguf_folder / "x.gguf").write_bytes(data)
    refused_gguf(gguf_folder, "could not be read as GGUF")


def test_a_list_of_a_gguf_without_end_is_refused(gguf_folder: Path) -> None:
    """gguf's own reader goes through 2^60 steps here."""
    key, kind, inner, length = b"a", 9, 0, 1 << 60
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", kind, inner, length)
    (gguf_folder / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    refused_gguf(gguf_folder, "list of 1,152,921,504,606,846,976 numbers")


def test_a_truncated_gguf_is_refused(gguf_folder: Path) -> None:
    write_gguf(gguf_folder / "x.gguf")
    data = (gguf_folder / "x.gguf").read_bytes()
    for length in (0, 3, 20, 200, len(data) // 2, len(data) - 200):
        (gguf_folder / "x.gguf").write_bytes(data[:length])
        refused_gguf(gguf_folder, "could not be read as GGUF")
