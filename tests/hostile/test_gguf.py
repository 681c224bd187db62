"""GGUF files: an error, or, where a change does no harm, exactly the weights of the file that was not changed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests._support.models import tiny_model
from tests.hostile._cases import Case, Step, case, now_a_folder, table
from tests.hostile._gguf import SIZES, write_gguf
from tests.hostile._server import Outcome, Run, Server

EXPORT = "export g --gguf-file m.gguf --out c"
NAMES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def folder(folder: Path, whole: Path) -> Path:
    """The materials, and the GGUF file as ``g/m.gguf``."""
    (folder / "g").mkdir()
    (folder / "g/m.gguf").write_bytes(whole.read_bytes())
    return folder


def weights_are_the_originals(folder: Path) -> None:
    found = load_file(folder / "c/model.safetensors")
    model = tiny_model("llama")
    expected, config = model.state_dict(), json.loads((folder / "c/config.json").read_text())
    assert {name: config[name] for name in NAMES} == {name: getattr(model.config, name) for name in NAMES}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_whole_file_is_read(server: Server, folder: Path) -> None:
    (outcome,) = server.run(Run(EXPORT.split(), str(folder)))
    assert outcome.code == 0, outcome.stderr
    weights_are_the_originals(folder)


def changed(change: Callable[[bytearray], object]) -> Step:
    """Change the bytes of the file in place."""

    def step(folder: Path) -> None:
        data = bytearray((folder / "g/m.gguf").read_bytes())
        change(data)
        (folder / "g/m.gguf").write_bytes(data)

    return step


def cut_at(share: float) -> Step:
    def cut(data: bytearray) -> None:
        del data[int(len(data) * share) :]

    return changed(cut)


def put(offset: int, layout: str, value: Any) -> Step:
    """Write a number at an offset."""
    return changed(lambda data: struct.pack_into(layout, data, offset, value))


def flipped(seed: int) -> Step:
    """Flip some bits of the header; where it ends, the weights begin, which nothing vouches for."""

    def flip(data: bytearray) -> None:
        rng = random.Random(seed)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.choice(_structure(bytes(data)))] ^= 1 << rng.randrange(8)

    return changed(flip)


def _structure(data: bytes) -> list[int]:
    """Offsets of the bytes of a header that say what it is made of: counts, sizes, names and types of tensors."""
    places = list(range(24))
    for name in (*SIZES, "tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        start = data.find(name.encode())
        places += range(start - 14, start + len(name) + 12) if start >= 0 else ()
    first = data.find(b"token_embd.weight")
    last = data.rfind(b".weight") if first >= 0 else -1
    return [*places, *range(first - 8, last + 40)] if first >= 0 else places


def with_sizes(**changes: Any) -> Step:
    """Write the file anew with other sizes in its header."""
    sizes = {**SIZES, **{name.replace("__", "."): value for name, value in changes.items()}}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    return lambda folder: write_gguf(folder / "g/m.gguf", sizes)


def wrong_sizes() -> Iterator[Case]:
    for turn, (name, right) in enumerate(SIZES.items()):
        for number, value in enumerate((right - 1, right + 1, 0, -1, 2**31, 2**62, "x", 1.5, [1, 2])):
            # A model may say that it reads less or more text than it was trained on.
            codes = (0, 2) if name in ("context_length", "vocab_size", "rope.dimension_count") else (2,)
            field = name.replace(".", "__")
            yield case(
                f"{name} is {value}",
                EXPORT,
                with_sizes(**{field: value}),
                codes=codes,
                slow=number != turn,
            )
        yield case(f"{name} is missing", EXPORT, with_sizes(**{name.replace(".", "__"): None}), codes=(0, 2))


def without(tensor: str) -> Step:
    """Write the file anew without a tensor."""
    return lambda folder: write_gguf(folder / "g/m.gguf", without=tensor)


def with_words(tokens: int) -> Step:
    """Write the file anew with fewer words."""
    return lambda folder: write_gguf(folder / "g/m.gguf", tokens=tokens)


def renamed(data: bytearray) -> None:
    """Name an architecture that nobody knows."""
    start = data.find(b"llama")
    data[start : start + 5] = b"evil!"


def not_a_number(data: bytearray) -> None:
    """Spoil the last weight."""
    data[-4:] = struct.pack("<f", float("nan"))


SHARES = (0, 0.00001, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.5, 0.99)
COUNTS = (0, 1, 10**6, 2**40, 2**63)


@pytest.mark.second
@table(
    *wrong_sizes(),
    *(case(f"cut at a share of {share}", EXPORT, cut_at(share)) for share in SHARES),
    case("another magic number", EXPORT, put(0, "<I", 0x47475546)),
    *(case(f"version {v}", EXPORT, put(4, "<I", v), codes=(0, 2) if v == 2 else (2,)) for v in (0, 1, 2, 4, 2**31)),
    *(case(f"{n} tensors", EXPORT, put(8, "<Q", n)) for n in (*COUNTS, 38, 40)),
    *(case(f"{n} entries", EXPORT, put(16, "<Q", n)) for n in COUNTS),
    *(case(f"no {n}", EXPORT, without(n)) for n in ("output_norm.weight", "blk.3.ffn_up.weight", "token_embd.weight")),
    *(case(f"{n} words", EXPORT, with_words(n), codes=(0, 2)) for n in (1, 3, 100)),
    case("a folder", EXPORT, now_a_folder("g/m.gguf")),
    case("safetensors", "export dense --gguf-file model.safetensors --out c"),
    case("a model that nobody knows", EXPORT, changed(renamed)),
    case("weights that are not numbers", EXPORT, changed(not_a_number)),
    *(case(f"bits flipped {s}", EXPORT, flipped(s), codes=(0, 2), slow=s >= 8) for s in range(400)),
)
def test_a_gguf_file_that_is_damaged(case: Case, refused: Callable[[Case], Outcome], folder: Path) -> None:
    if refused(case).code == 0:
        weights_are_the_originals(folder)
