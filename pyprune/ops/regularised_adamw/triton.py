"""Triton kernels of AdamW. ``reference.py`` is the definition, ``philox.py`` that of the random bits.

A program works on a few blocks of 128 elements as ``[blocks, 8 parts, 16 lanes]``. In that shape one Philox counter
serves eight elements, and the 8-bit moments of a block share a scale. Tensors that need the same kernel are stepped in
one launch: a model has hundreds, most of them too small to fill a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from pyprune.ops.group_penalty.reference import slope_scales
from pyprune.ops.group_penalty.triton import group_sums
from pyprune.ops.regularised_adamw.reference import (
    PURPOSE_FIRST,
    PURPOSE_SECOND,
    PURPOSE_WEIGHT,
    Moments,
    Penalty,
    Randomness,
    Scalars,
)
from pyprune.ops.triton_launch import launch, load_float32, to_storage, upper_half

BLOCKS = 8
KINDS = {"l1": 1, "l2": 2}


@triton.jit
def _words(lane, purpose, step, stream, key0, key1):
    c0 = lane.to(tl.uint32)
    zero = c0 * 0
    return tl.philox_impl(
        c0, zero + purpose.to(tl.uint32), zero + step.to(tl.uint32), zero + stream.to(tl.uint32),
        zero + key0.to(tl.uint32), zero + key1.to(tl.uint32), 10,
    )  # fmt: skip


@triton.jit
def _bits(block, lane, part, purpose, step, stream, key0, key1):
    """Make 16 random bits as uint32; ``block [n,1,1]``, ``part [1,8,1]``, ``lane [1,1,16]``, or all of one shape."""
    w0, w1, w2, w3 = _words(block * 16 + lane, purpose, step, stream, key0, key1)
    word = part % 4
    chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    return tl.where(part < 4, chosen & 0xFFFF, chosen >> 16)


@triton.jit
def _to_weight(value, bits, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        raw = value.to(tl.uint32, bitcast=True)
        return upper_half(tl.where(value == value, raw + bits, raw | 0x400000))
    else:
        return to_storage(value, dtype)


@triton.jit
def _decode(code, scale, MANTISSA: tl.constexpr, SIGNED: tl.constexpr):
    TOP: tl.constexpr = 127 if SIGNED else 255
    BASE: tl.constexpr = (127 << MANTISSA) - TOP
    wide = code.to(tl.int32)
    magnitude = wide & TOP
    value = ((magnitude + BASE) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude == 0, 0.0, value)
    return tl.where(wide > TOP, -value, value) * scale


@triton.jit
def _encode(value, bits, MANTISSA: tl.constexpr, SIGNED: tl.constexpr):
    """Return codes ``[n,8,16]`` and scales ``[n,1,1]``."""
    TOP: tl.constexpr = 127 if SIGNED else 255
    BASE: tl.constexpr = (127 << MANTISSA) - TOP
    SHIFT: tl.constexpr = 23 - MANTISSA
    magnitude = tl.abs(value)
    # Compared as integers: NaN is then larger than infinity, and infinity larger than every number.
    raw = magnitude.to(tl.int32, bitcast=True)
    largest_bits = tl.max(tl.max(raw, axis=2, keep_dims=True), axis=1, keep_dims=True)
    largest = largest_bits.to(tl.float32, bitcast=True)
    broken = largest_bits >= 0x7F800000
    usable = (largest_bits > 0) & (largest_bits < 0x7F800000)
    share = tl.where(usable, tl.div_rn(magnitude, tl.where(usable, largest, 1.0) + magnitude * 0.0), 0.0)
    smallest = tl.full((1, 1, 1), (BASE + 1) << SHIFT, tl.int32).to(tl.float32, bitcast=True)
    regular = ((share.to(tl.uint32, bitcast=True) + (bits << (SHIFT - 16))) >> SHIFT).to(tl.int32) - BASE
    if SIGNED:
        below = (share * 65536.0 > bits.to(tl.float32) * smallest).to(tl.int32)
    else:
        below = (share > 0).to(tl.int32)
    code = tl.minimum(tl.where(share < smallest, below, regular), TOP)
    code = tl.where(broken, TOP, code)
    if SIGNED:
        code = tl.where(value < 0, code + 128, code)
    scale = tl.where(broken, float("nan"), largest)
    return code.to(tl.uint8), scale


@triton.jit
def _blocks(
    program, weight, gradient, first, second, first_scale, second_scale, coefficients, count, cols,
    decay, rate1, beta2, rate2, step_size, root_correction, eps, gradient_scale, offset,
    step, stream, key0, key1,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, QUANTISED: tl.constexpr, STOCHASTIC: tl.constexpr,
    FOR_WEIGHT: tl.constexpr, FOR_FIRST: tl.constexpr, FOR_SECOND: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Step the N blocks of one weight that belong to its program number ``program``."""
    block = (program.to(tl.int64) * N + tl.arange(0, N))[:, None, None]
    part = tl.arange(0, 8)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    i = block * 128 + part * 16 + lane
    inside = i < count
    has_block = block * 128 < count
    w = load_float32(weight + i, inside)
    g = load_float32(gradient + i, inside) * gradient_scale
    if KIND != 0:
        group = i // cols if BY_ROW else i % cols
        coefficient = tl.load(coefficients + group, mask=inside, other=0.0)
        value = w + offset
        if KIND == 1:
            g += tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0)) * coefficient
        if KIND == 2:
            g += tl.where(coefficient == 0, 0.0, value * coefficient)
    if QUANTISED:
        m = _decode(
            tl.load(first + i, mask=inside, other=0), tl.load(first_scale + block, mask=has_block, other=0.0), 3, True
        )
        r = _decode(
            tl.load(second + i, mask=inside, other=0),
            tl.load(second_scale + block, mask=has_block, other=0.0),
            4,
            False,
        )
        v = r * r
    else:
        m = tl.load(first + i, mask=inside, other=0.0)
        v = tl.load(second + i, mask=inside, other=0.0)
    m += (g - m) * rate1
    v = v * beta2 + g * g * rate2
    root = tl.sqrt_rn(v)
    scale = root * root_correction + eps
    w = w * decay - step_size * tl.div_rn(m, scale)
    if QUANTISED:
        bits = _bits(block, lane, part, tl.full((), FOR_FIRST, tl.int32), step, stream, key0, key1)
        codes, scales = _encode(tl.where(inside, m, 0.0), bits, 3, True)
        tl.store(first + i, codes, mask=inside)
        tl.store(first_scale + block, scales, mask=has_block)
        bits = _bits(block, lane, part, tl.full((), FOR_SECOND, tl.int32), step, stream, key0, key1)
        codes, scales = _encode(tl.where(inside, root, 0.0), bits, 4, False)
        tl.store(second + i, codes, mask=inside)
        tl.store(second_scale + block, scales, mask=has_block)
    else:
        tl.store(first + i, m, mask=inside)
        tl.store(second + i, v, mask=inside)
    bits = tl.zeros((1, 1, 1), tl.uint32)
    if STOCHASTIC:
        bits = _bits(block, lane, part, tl.full((), FOR_WEIGHT, tl.int32), step, stream, key0, key1)
    tl.store(weight + i, _to_weight(w, bits, weight.dtype.element_ty, STOCHASTIC), mask=inside)


@triton.jit(do_not_specialize=["count", "step", "stream", "key0", "key1"])
def _update(
    weight, gradient, first, second, first_scale, second_scale, coefficients, count, cols,
    decay, rate1, beta2, rate2, step_size, root_correction, eps, gradient_scale, offset,
    step, stream, key0, key1,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, QUANTISED: tl.constexpr, STOCHASTIC: tl.constexpr,
    FOR_WEIGHT: tl.constexpr, FOR_FIRST: tl.constexpr, FOR_SECOND: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Step one weight."""
    _blocks(
        tl.program_id(0), weight, gradient, first, second, first_scale, second_scale, coefficients, count, cols,
        decay, rate1, beta2, rate2, step_size, root_correction, eps, gradient_scale, offset,
        step, stream, key0, key1,
        KIND, BY_ROW, QUANTISED, STOCHASTIC, FOR_WEIGHT, FOR_FIRST, FOR_SECOND, N,
    )  # fmt: skip


@triton.jit
def _pointer(entry, dtype: tl.constexpr):
    return tl.load(entry).to(tl.pointer_type(dtype))


@triton.jit(do_not_specialize=["step", "key0", "key1"])
def _update_many(
    weight, moment, owners, table, gradient_scales,
    decay, rate1, beta2, rate2, step_size, root_correction, eps, offset, step, key0, key1,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, QUANTISED: tl.constexpr, STOCHASTIC: tl.constexpr,
    FOR_WEIGHT: tl.constexpr, FOR_FIRST: tl.constexpr, FOR_SECOND: tl.constexpr, N: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Step many weights: ``owners`` has the weight of each program, ``table`` a row for each weight (:func:`_row_of`).

    ``weight`` and ``moment`` are any of them, for their dtypes.
    """
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner * FIELDS
    _blocks(
        tl.program_id(0) - tl.load(row + 9),
        _pointer(row, weight.dtype.element_ty), _pointer(row + 1, weight.dtype.element_ty),
        _pointer(row + 2, moment.dtype.element_ty), _pointer(row + 3, moment.dtype.element_ty),
        _pointer(row + 4, tl.float32), _pointer(row + 5, tl.float32), _pointer(row + 6, tl.float32),
        tl.load(row + 7), tl.load(row + 8),
        decay, rate1, beta2, rate2, step_size, root_correction, eps, tl.load(gradient_scales + owner), offset,
        step, tl.load(row + 10), key0, key1,
        KIND, BY_ROW, QUANTISED, STOCHASTIC, FOR_WEIGHT, FOR_FIRST, FOR_SECOND, N,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of one weight.

    Attributes:
        matrix: the weight as ``[rows, cols]``, contiguous, float32, bfloat16 or float16, not empty.
        gradient: like ``matrix``.
        moments: its moments.
        scalars: of this step.
        penalty: with its index on the device, or None.
        by_row: the penalty's groups are rows of ``matrix``, else columns.
        random: seed, step and stream of the random bits.
    """

    matrix: torch.Tensor
    gradient: torch.Tensor
    moments: Moments
    scalars: Scalars
    penalty: Penalty | None
    by_row: bool
    random: Randomness

    @property
    def kind(self) -> int:
        """The kind of penalty that the kernel handles; 0 without one."""
        return 0 if self.penalty is None else KINDS[self.penalty.kind]

    @property
    def keys(self) -> tuple[int, int]:
        """The words of the seed."""
        return self.random.seed & 0xFFFFFFFF, (self.random.seed >> 32) & 0xFFFFFFFF

    @property
    def programs(self) -> int:
        """The number of programs for all elements."""
        return int(triton.cdiv(self.matrix.numel(), BLOCKS * 128))

    @property
    def offset(self) -> float:
        """The number that the penalty adds to the weights."""
        return 0.0 if self.penalty is None else self.penalty.offset

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Weight, gradient, moments and their scales; the weight takes the place of missing scales."""
        own = self.moments
        scales = [self.matrix if scale is None else scale for scale in (own.first_scale, own.second_scale)]
        return [self.matrix, self.gradient, own.first, own.second, *scales]

    def coefficients(self) -> torch.Tensor:
        """One factor a group for the gradient of the penalty, float32; without a penalty the weight."""
        if self.penalty is None:
            return self.matrix
        axis = 0 if self.by_row else 1
        values = torch.zeros(self.matrix.shape[axis], dtype=torch.float32, device=self.matrix.device)
        selected: torch.Tensor | float = self.penalty.penalty_weight
        if self.penalty.kind == "l2":
            norms = group_sums(self.matrix, self.penalty.index, axis, "l2", self.penalty.offset).sqrt()
            selected = slope_scales(norms, self.penalty.penalty_weight, torch.float32)
        values[self.penalty.index] = selected
        return values


def step_tensors(steps: Sequence[Step], *, stochastic: bool) -> None:
    """Step many weights, in place: one launch for all that need the same kernel and scalars.

    Norms for l2 penalties are launches of their own for each weight.

    Args:
        steps: of weights of one dtype and device.
        stochastic: round bfloat16 weights stochastically.
    """
    alike: dict[object, list[Step]] = defaultdict(list)
    for step in steps:
        scalars = replace(step.scalars, gradient_scale=1.0)
        kernel = (step.kind, step.by_row, step.moments.quantised)
        alike[kernel, scalars, step.offset, step.random.step, step.random.seed].append(step)
    for members in alike.values():
        _update_alike(members, stochastic)


def _update_alike(steps: Sequence[Step], stochastic: bool) -> None:
    """Pass over all elements of weights that differ only in their tensors, streams and gradient scales."""
    like, coefficients = steps[0], [step.coefficients() for step in steps]
    own, random = like.scalars, like.random
    values = (own.decay, own.rate1, own.beta2, own.rate2, own.step_size, own.root_correction, own.eps)
    constants: dict[str, Any] = {
        "KIND": like.kind, "BY_ROW": like.by_row, "QUANTISED": like.moments.quantised,
        "STOCHASTIC": stochastic, "FOR_WEIGHT": PURPOSE_WEIGHT, "FOR_FIRST": PURPOSE_FIRST,
        "FOR_SECOND": PURPOSE_SECOND, "N": BLOCKS,
    }  # fmt: skip
    if len(steps) == 1:
        # Such as in backward, where a table for each weight would be one more transfer.
        launch(
            _update, (like.programs,),
            *like.tensors, coefficients[0], like.matrix.numel(), like.matrix.shape[1], *values, own.gradient_scale,
            like.offset, random.step, random.stream, *like.keys, **constants,
        )  # fmt: skip
        return
    device = like.matrix.device
    # Work on another stream must not use a table before it is there.
    queue = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    owners = program_owners(tuple(step.programs for step in steps), device, queue)
    first, rows = 0, []
    for step, factors in zip(steps, coefficients, strict=True):
        rows.append(_row_of(step, factors, first))
        first += step.programs
    table = kernel_table(tuple(rows), device, queue)
    scales = _scales(tuple(step.scalars.gradient_scale for step in steps), device, queue)
    launch(
        _update_many, (first,),
        like.matrix, like.moments.first, owners, table, scales, *values, like.offset, random.step, *like.keys,
        **constants, FIELDS=len(rows[0]),
    )  # fmt: skip


def _row_of(step: Step, coefficients: torch.Tensor, first: int) -> tuple[int, ...]:
    """Return a weight's row for :func:`_update_many`: seven addresses, count, columns, first program and stream."""
    addresses = (tensor.data_ptr() for tensor in (*step.tensors, coefficients))
    return (*addresses, step.matrix.numel(), step.matrix.shape[1], first, step.random.stream)


# Every step has the same lists: cached, they are copied to the device once. A table holds addresses, not tensors, and
# stays valid for whatever is stored there. ``queue`` only tells entries apart.
@lru_cache(maxsize=8)
def program_owners(programs: tuple[int, ...], device: torch.device, queue: int) -> torch.Tensor:
    counts = torch.tensor(programs)
    return torch.arange(len(programs), dtype=torch.int32).repeat_interleave(counts).to(device)


@lru_cache(maxsize=64)
def kernel_table(rows: tuple[tuple[int, ...], ...], device: torch.device, queue: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _scales(values: tuple[float, ...], device: torch.device, queue: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
