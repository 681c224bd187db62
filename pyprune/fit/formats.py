"""Count the bytes of a tensor in each format that a checkpoint can be exported in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self

from pyprune.errors import ConfigError, did_you_mean
from pyprune.families import Row
from pyprune.serving.gguf import blocks
from pyprune.serving.quantise import SCHEMES

Layout = Literal["plain", "channel", "packed", "gguf"]

GGUF_ALIGNMENT = 32
"""Every tensor of a GGUF file begins at a multiple of this many bytes."""
GROUPS = SCHEMES["w4a16"].groups
"""Inputs that share a scale in w4a16: the first that divides every width; an export is refused where none does."""
SHAPE_BYTES = 16
"""A packed matrix stores its shape as well, two int64."""


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint stores its weights.

    Attributes:
        name: as it is written on the command line.
        layout: plain (every tensor in one dtype), channel (linear weights of the layers in one byte and one scale for
            each output channel), packed (the same in 32-bit words, one scale for each group of inputs) or gguf.
        bits: of one element of a linear weight in the layouts channel and packed.
        item: bytes of an element of all other tensors, scales among them.
        group: inputs that share a scale in the layout packed; 0 = all of a row. See :meth:`choose_group`.
        kv_item: bytes of an element of the key/value cache that engines use for such a checkpoint.
    """

    name: str
    layout: Layout
    bits: int = 0
    item: int = 2
    group: int = 0
    kv_item: int = 2

    def nbytes(self, row: Row, shape: tuple[int, ...], *, head: bool) -> int:
        """Count the bytes of a tensor, without the header of the file.

        Args:
            row: of the family's table.
            shape: of the tensor, rows first.
            head: whether it makes the logits (the embedding does where the head is tied to it).
        """
        if self.layout == "gguf":
            return align(blocks.nbytes(shape, blocks.kind_of(shape, self.name, head=head)))
        linear = len(shape) == 2 and row.block is not None
        if self.layout == "plain" or not linear:
            return prod(shape) * self.item
        rows, columns = shape
        if self.layout == "channel":
            return rows * (columns * self.bits // 8 + self.item)
        words = -(-columns // (32 // self.bits))
        groups = -(-columns // self.group) if self.group else 1
        return rows * (4 * words + groups * self.item) + SHAPE_BYTES

    def choose_group(self, widths: Iterable[int]) -> Self:
        """Take the largest group that divides all these widths (any divides 0); 32 if none does."""
        if not self.group:
            return self
        fitting = (group for group in GROUPS if not any(width % group for width in widths))
        return replace(self, group=next(fitting, GROUPS[-1]))


def align(nbytes: int) -> int:
    """Round the bytes of a tensor up to its size in a GGUF file."""
    return -(-nbytes // GGUF_ALIGNMENT) * GGUF_ALIGNMENT


WEIGHT_FORMATS = {
    form.name: form
    for form in (
        WeightFormat("float32", "plain", item=4, kv_item=4),
        WeightFormat("bfloat16", "plain"),
        WeightFormat("float16", "plain"),
        WeightFormat("w8a8-int8", "channel", bits=8),
        WeightFormat("fp8", "channel", bits=8),
        WeightFormat("w8a16", "packed", bits=8),
        WeightFormat("w4a16", "packed", bits=4, group=GROUPS[0]),
        *(WeightFormat(name, "gguf") for name in blocks.FORMATS),
    )
}
"""Name -> format: dtypes of a safetensors folder, its quantised forms, and the formats of GGUF files."""


def weight_format(name: str) -> WeightFormat:
    """Return the format of this name.

    Raises:
        ConfigError: an unknown name; the message lists all.
    """
    if name not in WEIGHT_FORMATS:
        raise ConfigError(did_you_mean(name, WEIGHT_FORMATS, "format of the weights"))
    return WEIGHT_FORMATS[name]
