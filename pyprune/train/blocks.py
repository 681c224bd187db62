"""Moments in 8 bits for parts that are divided otherwise than the written ones.

A block is 128 elements of a part, in the order of its memory, so that a part of another size has other blocks. One
moment at a time, the written parts that overlap this process's are decoded, its positions are taken from them, and
encoded again, rounded to nearest. A block of the same elements keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyprune.errors import CheckpointError
from pyprune.ops.regularised_adamw import decode_moment, encode_moment

CODES = "_codes"
ENDS = (CODES, "_scale")
"""Ends of the names of a moment's two entries in 8 bits."""
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}

Box = tuple[range, ...]
"""Positions that a part holds, along each dimension of a tensor."""
Read = Callable[[int], Sequence[Tensor]]
"""(number of the part) -> its codes and scales."""


@dataclass(frozen=True)
class Place:
    """The part of a parameter that this process holds.

    Attributes:
        shape: of the whole parameter.
        box: the positions that are held.
    """

    shape: torch.Size
    box: Box

    @staticmethod
    def whole(shape: torch.Size) -> Place:
        """Return the place of a whole parameter."""
        return Place(shape, _all_of(shape))

    @staticmethod
    def piece(shape: torch.Size, dim: int, number: int, count: int) -> Place:
        """Return one of ``count`` pieces along a dimension, by ``torch.chunk`` (a missing one is empty)."""
        size = -(-shape[dim] // count)
        start, stop = (min(shape[dim], n * size) for n in (number, number + 1))
        return Place(shape, (*_all_of(shape[:dim]), range(start, stop), *_all_of(shape[dim + 1 :])))


Places = Callable[[int], Place]
"""Position of a parameter in the optimizer -> the part of it that this process holds."""


def recut(moment: str, shapes: Sequence[torch.Size], read: Read, places: Places) -> dict[str, Tensor]:
    """Return a moment's blocks for the part that this process holds.

    Args:
        moment: its name in a state, such as ``0.exp_avg``.
        shapes: of the parts that were written, in the order of the processes that wrote them.
        read: gives one of them; called for each that overlaps the part of this process, one after another.
        places: the part of each parameter that this process holds.

    Returns:
        The moment's entries: codes uint8, of the shape of this process's part, and scales float32, one for each 128.

    Raises:
        CheckpointError: the parts do not belong to this parameter.
    """
    position, _, kind = moment.partition(".")
    place = places(int(position))
    values = torch.zeros([len(held) for held in place.box])
    for number, held in enumerate(_boxes(moment, shapes, place.shape)):
        common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held, place.box, strict=True)]
        if all(common):
            part = decode_moment(*read(number), signed=_SIGNED[kind])
            values[_inside(place.box, common)] = part[_inside(held, common)]
    return dict(zip((moment + end for end in ENDS), encode_moment(values, signed=_SIGNED[kind]), strict=True))


def recut_whole(entries: Mapping[str, Tensor], places: Places) -> dict[str, Tensor]:
    """Recut all moments in 8 bits of a state that one process wrote; entries of other kinds are left out."""
    blocks: dict[str, Tensor] = {}
    for moment in (key.removesuffix(CODES) for key in entries if key.endswith(CODES)):
        parts = [[entries[moment + end] for end in ENDS]]
        blocks |= recut(moment, [parts[0][0].shape], parts.__getitem__, places)
    return blocks


def _boxes(moment: str, shapes: Sequence[torch.Size], whole: torch.Size) -> list[Box]:
    """Return the box of each written part: they follow each other along the one dimension that was divided."""
    if all(shape == whole for shape in shapes):  # every process had all of it, the same
        return [_all_of(whole)]
    for dim, size in enumerate(whole):
        ends = list(accumulate((shape[dim] for shape in shapes if len(shape) == len(whole)), initial=0))
        boxes = [(*_all_of(whole[:dim]), range(*ends_of), *_all_of(whole[dim + 1 :])) for ends_of in pairwise(ends)]
        if ends[-1] == size and [tuple(map(len, box)) for box in boxes] == [tuple(shape) for shape in shapes]:
            return boxes
    raise CheckpointError(
        f"The state's moment {moment} has parts of shapes {', '.join(str(tuple(s)) for s in shapes)}, which do not "
        f"make a parameter of shape {tuple(whole)}: the state is of another training. Use the same settings, or "
        "another checkpoint folder."
    )


def _all_of(shape: Sequence[int]) -> Box:
    return tuple(map(range, shape))


def _inside(box: Box, common: Sequence[range]) -> tuple[slice, ...]:
    """Return the slices of a part that hold ranges of the whole tensor."""
    return tuple(slice(c.start - b.start, c.stop - b.start) for b, c in zip(box, common, strict=True))
