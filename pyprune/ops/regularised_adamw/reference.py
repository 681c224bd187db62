"""Definition of AdamW with a fused group penalty, stochastic rounding and 8-bit moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyprune.ops.dispatch import round_scalar
from pyprune.ops.group_penalty.reference import slope_scales
from pyprune.ops.regularised_adamw.philox import BLOCK, random16
from pyprune.ops.rounding import round_stochastically

PURPOSE_WEIGHT, PURPOSE_FIRST, PURPOSE_SECOND = range(3)
FIRST_BITS, SECOND_BITS = 3, 4
"""Mantissa bits of the stored moments; the first moment needs one bit for its sign."""
_TOP_CODE = (255, 127)
"""The largest code of a magnitude: unsigned, signed."""
_AT_ONCE = BLOCK << 12


@dataclass(frozen=True)
class Penalty:
    """A group penalty on selected slices of one weight, whose gradient joins the loss's in the optimizer's pass.

    Attributes:
        index: the selected positions along ``axis``, each at most once; may be empty.
        axis: the dimension that ``index`` counts along.
        kind: "l2" (norm of each slice, not squared) or "l1" (sum of absolute values).
        penalty_weight: lambda, >= 0.
        offset: penalise ``w + offset`` (1 for norms that multiply by 1 + w).
    """

    index: Tensor
    axis: int
    kind: Literal["l1", "l2"] = "l2"
    penalty_weight: float = 1e-3
    offset: float = 0.0


@dataclass
class Moments:
    """Adam's running means of the gradient and of its square, for one weight.

    Attributes:
        first: like the weight, float32 (float64 for a float64 weight); or uint8 codes.
        second: likewise; the codes hold its square root.
        first_scale: float32, one for every 128 elements of the flat weight; None unless coded.
        second_scale: likewise.
    """

    first: Tensor
    second: Tensor
    first_scale: Tensor | None = None
    second_scale: Tensor | None = None

    @property
    def quantised(self) -> bool:
        """Check whether the moments are stored in 8 bits."""
        return self.first_scale is not None

    @staticmethod
    def zeros(weight: Tensor, *, quantised: bool = False) -> Moments:
        """Return the moments before the first step."""
        layout = Moments.layout(weight, quantised=quantised)
        made = {
            name: torch.zeros(shape, dtype=dtype, device=weight.device) for name, (shape, dtype) in layout.items()
        }  # fmt: skip
        return Moments(**made)

    @staticmethod
    def layout(weight: Tensor, *, quantised: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every attribute that is not None."""
        shape = tuple(weight.shape)
        if not quantised:
            dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            return {"first": (shape, dtype), "second": (shape, dtype)}
        codes, scales = (shape, torch.uint8), ((-(-weight.numel() // BLOCK),), torch.float32)
        return {"first": codes, "second": codes, "first_scale": scales, "second_scale": scales}


@dataclass(frozen=True)
class Hyper:
    """The optimizer's options.

    Attributes:
        lr: learning rate, > 0 or 0.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay per unit learning rate.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Scalars:
    """The factors of a step, rounded to float32 (unless the weight is float64) for every backend alike."""

    decay: float
    rate1: float
    beta2: float
    rate2: float
    step_size: float
    root_correction: float
    eps: float
    gradient_scale: float

    @staticmethod
    def of(hyper: Hyper, step: int, gradient_scale: float, dtype: torch.dtype) -> Scalars:
        """Return the scalars of step ``step`` (from 1).

        Raises:
            OpError: one is not finite once it is rounded.
        """
        beta1, beta2 = hyper.betas
        values = {
            "1 - lr * weight_decay": 1 - hyper.lr * hyper.weight_decay,
            "1 - beta1": 1 - beta1,
            "beta2": beta2,
            "1 - beta2": 1 - beta2,
            "lr / (1 - beta1^step)": hyper.lr / (1 - beta1**step),
            "1 / sqrt(1 - beta2^step)": 1 / math.sqrt(1 - beta2**step),
            "eps": hyper.eps,
            "gradient_scale": gradient_scale,
        }
        return Scalars(*(round_scalar(value, dtype, name) for name, value in values.items()))


@dataclass(frozen=True)
class Randomness:
    """The words of the Philox key and counter that make one tensor's random bits of one step."""

    seed: int
    step: int
    stream: int

    def bits(self, count: int, purpose: int, device: torch.device) -> Tensor:
        """Return 16 bits for each of ``count`` elements."""
        return random16(count, self.seed, purpose, self.step, self.stream, device)


def step_tensor(
    weight: Tensor,
    gradient: Tensor,
    moments: Moments,
    scalars: Scalars,
    penalty: Penalty | None,
    random: Randomness,
    *,
    stochastic: bool,
) -> None:
    """One step of one weight, in place: gradient and penalty, moments, decay and step.

    Arithmetic in float32 (float64 for float64 weights); the weight is rounded once.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    w, g = weight.detach().to(wide), gradient.detach().to(wide) * scalars.gradient_scale
    if penalty is not None:
        _add_penalty_gradient(g, w, penalty)
    m, v = read_moments(moments, wide)
    m = m + (g - m) * scalars.rate1
    v = v * scalars.beta2 + g * g * scalars.rate2
    scale = _root(v) * scalars.root_correction + scalars.eps
    w = w * scalars.decay - scalars.step_size * (m / scale)
    write_moments(moments, m, v, random)
    if stochastic and weight.dtype == torch.bfloat16:
        bits = random.bits(weight.numel(), PURPOSE_WEIGHT, weight.device).view(weight.shape)
        w = round_stochastically(w, bits)
    weight.detach().copy_(w)


def _add_penalty_gradient(g: Tensor, w: Tensor, penalty: Penalty) -> None:
    """Add lambda times the gradient of the penalty: none for a zero or infinite slice, NaN for a slice with NaN."""
    axis = penalty.axis
    value = w.index_select(axis, penalty.index) + penalty.offset
    if penalty.kind == "l1":
        slope = value.sign() * penalty.penalty_weight
    else:
        others = tuple(d for d in range(w.dim()) if d != axis)
        norms = torch.linalg.vector_norm(value, dim=others, keepdim=True, dtype=torch.float64)
        factor = slope_scales(norms, penalty.penalty_weight, w.dtype)
        slope = torch.where(factor == 0, 0.0, value * factor)
    g.index_add_(axis, penalty.index, slope)


def read_moments(moments: Moments, wide: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the two moments as numbers."""
    if moments.first_scale is None or moments.second_scale is None:
        return moments.first.to(wide), moments.second.to(wide)
    root = _decode(moments.second, moments.second_scale, SECOND_BITS, signed=False)
    return _decode(moments.first, moments.first_scale, FIRST_BITS, signed=True), root * root


def write_moments(moments: Moments, first: Tensor, second: Tensor, random: Randomness) -> None:
    """Store the two moments, rounded stochastically where they are coded."""
    if moments.first_scale is None or moments.second_scale is None:
        moments.first.copy_(first)
        moments.second.copy_(second)
        return
    count, device = first.numel(), first.device
    bits = random.bits(count, PURPOSE_FIRST, device)
    _encode(first, moments.first, moments.first_scale, FIRST_BITS, bits, signed=True)
    bits = random.bits(count, PURPOSE_SECOND, device)
    _encode(_root(second), moments.second, moments.second_scale, SECOND_BITS, bits, signed=False)


def decode_moment(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Decode 8-bit codes, to float32 of the codes' shape.

    Args:
        codes: uint8, contiguous.
        scales: float32, one for every 128 elements of the flat codes.
        signed: first moments; else the roots of second ones.
    """
    values = torch.empty(codes.shape, device=codes.device)
    flat, source, mantissa = values.view(-1), codes.view(-1), FIRST_BITS if signed else SECOND_BITS
    for here, blocks in _passes(flat.numel()):
        flat[here] = _decode(source[here], scales[blocks], mantissa, signed=signed)
    return values


def encode_moment(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of numbers, each rounded to the nearest code.

    The result of :func:`decode_moment` for the same blocks has its codes and scales again (above 1e-38).

    Args:
        values: float32, contiguous.
        signed: first moments; else the roots of second ones, >= 0.
    """
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(-(-values.numel() // BLOCK), device=values.device)
    flat, made, mantissa = values.view(-1), codes.view(-1), FIRST_BITS if signed else SECOND_BITS
    middle = torch.tensor(1 << 15, device=values.device)  # of the 16 random bits: half of them round down
    for here, blocks in _passes(flat.numel()):
        _encode(flat[here], made[here], scales[blocks], mantissa, middle, signed=signed)
        if signed:  # also of a zero: a small negative number may have been rounded to it
            made[here] |= flat[here].signbit().to(torch.uint8) << 7
    return codes, scales


def _passes(count: int) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of elements and of their blocks, small enough for the temporaries to be small."""
    for start in range(0, count, _AT_ONCE):
        stop = min(count, start + _AT_ONCE)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _first_code_bits(mantissa: int, *, signed: bool) -> int:
    """Return the bit pattern of 1.0 shifted to the code's resolution, minus the code of 1.0."""
    return (127 << mantissa) - _TOP_CODE[signed]


def _root(x: Tensor) -> Tensor:
    """Take the square root, correctly rounded as in the kernels; MKL's, which torch takes, is not on an AMD CPU."""
    return x.double().sqrt().float() if x.dtype == torch.float32 and x.device.type == "cpu" else x.sqrt()


def _decode(codes: Tensor, scales: Tensor, mantissa: int, *, signed: bool) -> Tensor:
    code = codes.to(torch.int32)
    magnitude = code & 127 if signed else code
    value = ((magnitude + _first_code_bits(mantissa, signed=signed)) << (23 - mantissa)).view(torch.float32)
    value = torch.where(magnitude == 0, 0.0, value)
    if signed:
        value = torch.where(code >= 128, -value, value)
    spread = scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
    return value * spread


def _encode(value: Tensor, codes: Tensor, scales: Tensor, mantissa: int, bits: Tensor, *, signed: bool) -> None:
    """Store codes of a small floating-point format (4 exponent bits) relative to the largest value of each block.

    A block that holds NaN or infinity gets the scale NaN: the loss of its moments stays visible.
    """
    flat = value.reshape(-1).float()
    blocks = scales.numel()
    padded = torch.zeros(blocks * BLOCK, device=flat.device)
    padded[: flat.numel()] = flat.abs()
    largest = padded.view(blocks, BLOCK).amax(dim=1) if blocks else scales.clone()
    scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))
    spread = largest.repeat_interleave(BLOCK)[: flat.numel()]
    share = torch.where(spread > 0, flat.abs() / spread, 0.0)
    first, shift = _first_code_bits(mantissa, signed=signed), 23 - mantissa
    raw = share.view(torch.int32).to(torch.int64)
    code = ((raw + (bits << (shift - 16))) >> shift) - first
    smallest = torch.tensor((first + 1) << shift, dtype=torch.int32).view(torch.float32).item()
    if signed:
        # Below the smallest value: 0 or that value, with the right mean.
        below = (share * 65536 > bits.float() * smallest).to(torch.int64)
    else:
        # A second moment that is not 0 must not become 0: the step divides by its root.
        below = (share > 0).to(torch.int64)
    code = torch.where(share < smallest, below, code).clamp(0, _TOP_CODE[signed])
    code = torch.where(spread.isfinite(), code, _TOP_CODE[signed])
    if signed:
        code = torch.where(flat < 0, code + 128, code)
    codes.copy_(code.to(torch.uint8).view(codes.shape))


def regularised_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[Moments],
    hyper: Hyper,
    steps: list[int],
    penalties: list[Penalty | None],
    gradient_scales: list[float],
    randoms: list[Randomness],
    *,
    stochastic: bool,
) -> None:
    """Call :func:`step_tensor` for every tensor."""
    for i, weight in enumerate(weights):
        scalars = Scalars.of(hyper, steps[i], gradient_scales[i], weight.dtype)
        step_tensor(weight, gradients[i], moments[i], scalars, penalties[i], randoms[i], stochastic=stochastic)
