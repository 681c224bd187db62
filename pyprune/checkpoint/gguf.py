"""Read the header of a GGUF file within the bounds of the file.

The readers of gguf and Transformers trust every length and count in a file: a damaged one sends them through 2^60
steps, and they drop blocks beyond ``block_count`` silently. Therefore the header is checked here first.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from pyprune.errors import CheckpointError, MissingDependencyError, shown

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Value type in a GGUF file -> struct's name for it; 8 is a string and 9 an array."""
STRING, ARRAY = 8, 9
BLOCK = re.compile(r"blk\.(\d{1,9})\.")
DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from the model's configuration; no parameter takes them."""
MAX_TENSORS, MAX_NAME_BYTES, MAX_DIMENSIONS = 1_000_000, 1 << 16, 8
LONGEST_LIST = 4096
"""Numbers of a list that is kept: one for each layer."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        tensors: name -> number of elements.
        blocks: number of decoder blocks, by the metadata and by the tensors.
        facts: the metadata, name -> number, text or tuple of numbers; another or a long list is None.
    """

    path: Path
    tensors: dict[str, int]
    blocks: int
    facts: dict[str, Any]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(self.tensors.values())


def read_gguf_header(path: Path) -> GgufHeader:
    """Walk through the header of a GGUF file.

    Raises:
        CheckpointError: a length, count, type or name that the file cannot hold; or a ``block_count`` that is not the
            number of its blocks.
        MissingDependencyError: the package gguf is not installed.
    """
    try:
        with path.open("rb") as stream:
            return _Walk(stream, path).header()
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} could not be read as GGUF: {error}. The file is truncated or damaged; fetch it again."
        ) from error


class _Walk:
    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.path = stream, path
        self.size = path.stat().st_size
        self.order = "<"

    def header(self) -> GgufHeader:
        """Read and check the whole header."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._take(4)
        if version[:2] == b"\0\0":
            self.order = ">"
        (number,) = struct.unpack(self.order + "I", version)
        if number not in (2, 3):
            raise ValueError(f"its version is {number}; 2 and 3 are read")
        tensors, entries = self._number("Q"), self._number("Q")
        if max(tensors, entries) > MAX_TENSORS:
            raise ValueError(f"it claims {tensors:,} tensors and {entries:,} entries")
        facts = dict(self._entry() for _ in range(entries))
        sizes = self._tensors(tensors, facts)
        return GgufHeader(self.path, sizes, self._blocks(facts, sizes), facts)

    def _take(self, length: int) -> bytes:
        if length > self.size - self.stream.tell():
            raise ValueError(f"it claims {length:,} bytes where fewer are left")
        return self.stream.read(length)

    def _number(self, kind: str) -> Any:
        return struct.unpack(self.order + kind, self._take(struct.calcsize("=" + kind)))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", errors="replace")

    def _name(self) -> str:
        length = self._number("Q")
        if length > MAX_NAME_BYTES:
            raise ValueError(f"a name in it claims {length:,} bytes")
        return self._take(length).decode("utf-8")

    def _entry(self) -> tuple[str, Any]:
        return self._name(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        """Read a number, a text or a short list of numbers; skip any other array."""
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            inner, length = self._number("I"), self._number("Q")
            if inner in FORMATS and length <= LONGEST_LIST:
                return tuple(self._number(FORMATS[inner]) for _ in range(length))
            self._skip(inner, length)
            return None
        if kind not in FORMATS:
            raise ValueError(f"a value in it is of the unknown type {kind}")
        return self._number(FORMATS[kind])

    def _skip(self, kind: int, length: int) -> None:
        if kind == STRING:
            # Every text takes eight bytes at least, so that the file bounds the loop.
            if length * 8 > self.size:
                raise ValueError(f"it claims a list of {length:,} texts")
            for _ in range(length):
                self._take(self._number("Q"))
        elif kind in FORMATS:
            nbytes = length * struct.calcsize("=" + FORMATS[kind])
            if nbytes > self.size - self.stream.tell():
                raise ValueError(f"it claims a list of {length:,} numbers")
            self.stream.seek(nbytes, 1)
        else:
            raise ValueError(f"a list in it is of the unknown type {kind}")

    def _tensors(self, count: int, facts: dict[str, Any]) -> dict[str, int]:
        """Return name -> elements; refuse data beyond the end of the file, and tensors that share data."""
        sizes: dict[str, int] = {}
        spans = []
        for _ in range(count):
            name = self._name()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS or name in sizes:
                raise ValueError(f"the tensor {shown(name)} has {dimensions} dimensions, or occurs twice")
            sizes[name] = prod(self._number("Q") for _ in range(dimensions))
            nbytes = _bytes(self._number("I"), sizes[name])
            begin = self._number("Q")
            spans.append((begin, begin + nbytes, name))
        align = facts.get("general.alignment", 32)
        if not isinstance(align, int) or not 0 < align <= 1 << 20:
            raise ValueError(f"its alignment is {shown(align)}")
        room = self.size - -(-self.stream.tell() // align) * align
        end = 0
        for begin, stop, name in sorted(spans):
            if begin < end or stop > room:
                raise ValueError(f"the tensor {shown(name)} reaches beyond the file or into another one")
            end = stop
        if room - end >= align:
            raise ValueError(f"{room - end:,} bytes at its end belong to no tensor")
        return sizes

    def _blocks(self, facts: dict[str, Any], tensors: dict[str, int]) -> int:
        claimed = facts.get(f"{facts.get('general.architecture')}.block_count")
        blocks = {int(match[1]) for name in tensors if (match := BLOCK.match(name))}
        if type(claimed) is not int or blocks != set(range(claimed if claimed <= len(tensors) else 0)):
            raise CheckpointError(
                f"{self.path} says that it has {shown(claimed)} blocks (block_count), but its tensors belong to "
                f"{len(blocks)}, the last being block {max(blocks, default=-1)}. "
                "The file is damaged, or one of several parts; fetch it again."
            )
        return claimed


def _bytes(kind: int, elements: int) -> int:
    """Return the size of a tensor's data."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingDependencyError("gguf", "gguf", "Reading GGUF files") from error
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return int(-(-elements // block) * nbytes)


def refuse_unused(header: GgufHeader, model: Any) -> None:
    """Refuse tensors of a GGUF file that no parameter of the model takes; Transformers leaves them out silently.

    Args:
        header: of the file.
        model: on the meta device, from the file's configuration.

    Raises:
        CheckpointError: the message names the first of them.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    # Llama's and Mistral's files are called the same, and so are their tensors.
    processor = TENSOR_PROCESSORS.get(model.config.model_type, TensorProcessor)(config=model.config.to_dict())
    taken = get_gguf_hf_weights_map(model, processor)
    unused = [name for name in header.tensors if name not in taken and name not in DERIVED]
    if unused:
        raise CheckpointError(
            f"{header.path} holds {len(unused)} tensors that no parameter of its {model.config.model_type} model takes "
            f"({', '.join(map(shown, unused[:3]))}); they would be left out. The file is damaged, or its architecture "
            "is not what it says."
        )
