"""Rounding of float32 values to bfloat16 that keeps small changes: up or down at random, with the right mean."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

AT_ONCE = 1 << 22
"""Values that are rounded at once: a few arrays of this size are held in addition to the result."""
_BETWEEN = 1 << 16
"""Steps of float32 between two neighbours of bfloat16."""
_SEEDING = 4096
"""The random bits depend on this many first values."""
_SPREAD = 0.24
"""Values anywhere between their neighbours are on average 0.25 of a spacing away from the nearer one."""


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to the bfloat16 value below or above it, with probabilities that make the mean exact.

    Args:
        value: float32.
        bits: 16 random bits for each element, int64.
    """
    raw = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((raw + bits) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


def changed_to_bfloat16(weight: Tensor, name: str) -> Tensor:
    """Round a changed weight to bfloat16, so that the change is kept on average over its elements.

    The weights of a bfloat16 checkpoint are values of bfloat16. Rounding to nearest would undo a training that moves
    them by less than half the distance to the next value: an update of 2e-5 of a weight of 0.02. Where the values of a
    weight are nearer to bfloat16's than by chance, they are rounded stochastically instead; unchanged elements stay as
    they are either way. Other values are rounded to nearest, which is then as good in the mean and nearer.

    Args:
        weight: float32, of any shape.
        name: of the weight. Its first values and its name give the random bits: on one device the same weight gives the
            same result, and one that is trained and rounded again does not always move the same way.

    Returns:
        bfloat16, of the same shape, on the same device.
    """
    flat = weight.detach().reshape(-1)
    if not _lies_on_bfloat16(flat):
        return weight.detach().to(torch.bfloat16)
    result = torch.empty_like(flat, dtype=torch.bfloat16)
    begins = flat[:_SEEDING].cpu().numpy().tobytes()
    generator = torch.Generator(flat.device).manual_seed(crc32(begins, crc32(name.encode())))
    for start in range(0, flat.numel(), AT_ONCE):
        part = flat[start : start + AT_ONCE]
        bits = torch.randint(_BETWEEN, part.shape, generator=generator, device=flat.device)
        result[start : start + AT_ONCE] = round_stochastically(part, bits)
    return result.view(weight.shape)


def _lies_on_bfloat16(flat: Tensor) -> bool:
    """Check whether the elements that are not values of bfloat16 are nearer to one than by chance."""
    distance = changed = 0
    for part in flat.split(AT_ONCE):
        between = part.view(torch.int32) & (_BETWEEN - 1)
        distance += int(torch.minimum(between, _BETWEEN - between).sum())
        changed += int(between.count_nonzero())
    return distance < _SPREAD * _BETWEEN * changed
