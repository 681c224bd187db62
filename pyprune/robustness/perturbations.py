"""Give a model slightly other weights: rounded, or moved as far as an adapter moves them.

Everything is computed and held in float32: a variant differs by its values, not by its dtype. bfloat16 and float16
round every parameter. lora and int8 change only the matrices of the decoder layers, because adapters and weight-only
quantisation do; embeddings, head, norms and biases are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.base import LARGEST_SEED, Config, option
from pyprune.config.train import LARGEST_RANK
from pyprune.errors import ConfigError, PypruneError
from pyprune.families import NamedParam, named_axes

DENSE = "float32"
"""The unchanged model."""

VARIANTS = ("bfloat16", "float16", "lora", "int8")

INT8_LARGEST = 127
"""Levels run from -127 to 127, so that a row has at most 255 values."""

Change = Callable[[NamedParam, Tensor], Tensor]
"""(parameter, its original float32 values) -> the variant's values, float32, same shape."""


class VariantError(PypruneError):
    """Weights that a variant cannot hold."""


@dataclass(frozen=True)
class Adapter(Config):
    """A low-rank update the size of a trained LoRA's.

    Attributes:
        rank: of the update of every matrix.
        size: Frobenius norm of the update relative to the matrix's.
        seed: of the two factors' normals.
    """

    rank: int = option(8, at_least=1, at_most=LARGEST_RANK)
    size: float = option(0.01, above=0, below=1)
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)


@dataclass(frozen=True)
class VariantReport:
    """How far a variant changed the weights.

    Attributes:
        name: of the variant.
        relative_size: Frobenius norm of the change over that of all weights.
        changed: share of the weights whose value differs.
    """

    name: str
    relative_size: float
    changed: float


@torch.no_grad()
def set_variant_(
    model: PreTrainedModel, originals: Mapping[str, Tensor], name: str, adapter: Adapter | None = None
) -> VariantReport:
    """Put a variant's weights into the model, in place, one tensor at a time.

    Args:
        model: float32, of a known family.
        originals: parameter name -> original values, float32; not changed.
        name: float32 (the originals), or one of :data:`VARIANTS`.
        adapter: of the variant lora; None = the defaults.

    Raises:
        ConfigError: no variant of this name, or a model that is not float32.
        VariantError: weights beyond float16's range.
    """
    change = _changes(adapter or Adapter()).get(name)
    if change is None:
        raise ConfigError(f"There is no variant {name!r}; use {', '.join((DENSE, *VARIANTS))}.")
    moved = size = 0.0
    changed = count = 0
    for param, original in _float32_parameters(model, originals):
        values = change(param, original)
        param.parameter.copy_(values)
        moved += float((values - original).double().square().sum())
        size += float(original.double().square().sum())
        changed += int((values != original).sum())
        count += original.numel()
    return VariantReport(name, math.sqrt(moved / size), changed / count)


def _float32_parameters(model: PreTrainedModel, originals: Mapping[str, Tensor]) -> Iterator[tuple[NamedParam, Tensor]]:
    for param in named_axes(model):
        if param.parameter.dtype != torch.float32:
            raise ConfigError(
                f"{param.name} is {param.parameter.dtype}; variants are computed in float32, so load the model so."
            )
        yield param, originals[param.name]


def _changes(adapter: Adapter) -> dict[str, Change]:
    generator = torch.Generator().manual_seed(adapter.seed)
    return {
        DENSE: lambda param, w: w,
        "bfloat16": lambda param, w: w.to(torch.bfloat16).float(),
        "float16": _to_float16,
        "lora": lambda param, w: w + low_rank(w, adapter, generator) if is_layer_matrix(param) else w,
        "int8": lambda param, w: round_to_int8(w) if is_layer_matrix(param) else w,
    }


def is_layer_matrix(param: NamedParam) -> bool:
    """Check whether a parameter is a matrix inside a decoder layer."""
    return param.layer is not None and param.parameter.dim() == 2


def _to_float16(param: NamedParam, weight: Tensor) -> Tensor:
    rounded = weight.to(torch.float16).float()
    if not torch.isfinite(rounded).all():
        raise VariantError(
            f"{param.name} holds {float(weight.abs().max()):.4g}, beyond float16's range (65504); leave that variant "
            "out."
        )
    return rounded


def low_rank(weight: Tensor, adapter: Adapter, generator: torch.Generator) -> Tensor:
    """Draw B A with normal factors, scaled to ``size`` times the matrix's Frobenius norm, float32 [out, in].

    Args:
        weight: [out, in].
        adapter: rank and size.
        generator: of the factors, on the CPU; each call draws on.
    """
    rows, columns = weight.shape
    b = torch.randn(rows, adapter.rank, generator=generator).to(weight.device)
    a = torch.randn(adapter.rank, columns, generator=generator).to(weight.device)
    update: Tensor = b @ a
    return update * float(adapter.size * weight.norm() / update.norm())


def round_to_int8(weight: Tensor) -> Tensor:
    """Round to nearest, symmetric, one scale an output channel, and back to float32 [out, in].

    The scale of row i is max_j |w_ij| / 127; a row of zeros remains zero.
    """
    scale = weight.abs().amax(1, keepdim=True) / INT8_LARGEST
    levels = torch.where(scale > 0, weight / scale, torch.zeros_like(weight)).round()
    rounded: Tensor = levels.clamp(-INT8_LARGEST, INT8_LARGEST) * scale
    return rounded
