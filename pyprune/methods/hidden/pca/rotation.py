"""A rotation of the residual stream that leaves what the model computes as it is.

RMSNorm divides a token's stream by its root mean square, which no rotation changes: norm(x Q) = norm(x) Q for every
orthogonal Q, as long as the norm has no weight of its own. So the norm's weight g goes into what reads it, and then
everything that touches the stream is rotated (weights as ``torch.nn.Linear`` stores them, [out, in]):

    embedding    E <- E Q                   reads a norm    W <- W diag(g) Q,  b as it was,  g <- 1
    writes       W <- Q^T W,  b <- Q^T b    head            H <- H diag(g of the final norm) Q

This is SliceGPT's observation (Ashkboos et al. 2024, section 3.1). Theirs has a rotation for each block and a matrix on
every residual connection to go from one to the next; this has one for the whole model, so that no part is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pyprune.errors import UnsupportedModelError
from pyprune.families import Family, NamedParam, family_for, named_axes
from pyprune.families.base import Block, Role
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.progress import track

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_AT_ONCE = 1 << 24
"""Numbers that are rotated at once, in float64."""


def why_not(family: Family, config: PretrainedConfig) -> str:
    """Why the stream of a model cannot be rotated, by its family's table; empty when it can."""
    norms = [row for row in family.rows if row.role in ("pre_norm", "post_norm", "final_norm")]
    if family.norm != "rms":
        return "its LayerNorm subtracts the mean over the channels, which depends on what the channels are"
    if any(row.role == "post_norm" for row in norms):
        return "a norm with a weight for each channel stands between its blocks and the stream"
    if any(row.is_bias for row in norms):
        return "its norms have biases"
    other = [row.pattern for row in family.rows if row.role == "inner" and row.axis_dim("hidden") is not None]
    if other:
        return f"{other[0]} acts on single channels of the stream"
    if config.tie_word_embeddings:
        return "its head is tied to the embedding, and the final norm's weight fits into a head of its own only"
    return ""


def check_rotatable(model: PreTrainedModel) -> None:
    """Refuse a model whose stream cannot be rotated.

    Raises:
        UnsupportedModelError: it says why.
    """
    family = family_for(model)
    if reason := why_not(family, model.config):
        raise UnsupportedModelError(
            f"The residual stream of this {family.model_type!r} model cannot be rotated: {reason}. pca needs RMSNorm "
            "in front of the blocks and an untied head; to remove hidden channels as they are, choose another method "
            "(dress)."
        )


@torch.no_grad()
def rotate_(model: PreTrainedModel | LayerRunner, rotation: Tensor) -> None:
    """Rotate the residual stream of a dense model, in place; the weights of its norms become 1 (0 where 1 is added).

    Products are float64 and rounded once to the weights' dtype. The logits stay the same up to that rounding.

    Args:
        model: a dense model of a family that :func:`why_not` has nothing against, any dtype and device, or its layers
            as something else holds and keeps them, one at a time.
        rotation: Q, orthogonal, float64 [H, H]; its columns are the new channels.

    Raises:
        UnsupportedModelError: as :func:`check_rotatable`.
    """
    layers = LayerRunner.of(model)
    check_rotatable(layers.model)
    places: dict[int | None, list[NamedParam]] = {}
    for param in named_axes(layers.model):
        places.setdefault(param.layer, []).append(param)
    with layers.head():
        layers.keep_outside(_rotated(layers, places.pop(None), rotation))
    for index, params in track(places.items(), "rotating layers"):
        prefix = f"{layers.family.layers_path}.{index}."
        with layers.layer(cast(int, index)):
            layers.keep(cast(int, index), [name.removeprefix(prefix) for name in _rotated(layers, params, rotation)])


def _rotated(layers: LayerRunner, params: Sequence[NamedParam], rotation: Tensor) -> list[str]:
    """Rotate the parameters of one layer, or of what lies outside of the layers, which are in memory; their names."""
    here = [replace(param, parameter=layers.model.get_parameter(param.name)) for param in params]
    touched = [param for param in here if param.axis_dim("hidden") is not None]
    norms = [param for param in touched if param.row.is_norm_weight]
    family = layers.family
    gains = {(p.row.role, p.row.block): family.used(p.row, p.parameter.detach().double()) for p in norms}
    for param in touched:
        if not param.row.is_norm_weight:
            _rotate_parameter(param.parameter, cast(int, param.axis_dim("hidden")), _gain(param, gains), rotation)
    for param in norms:
        param.parameter.fill_(1.0 - family.offset(param.row))
    return [param.name for param in touched]


def _gain(param: NamedParam, gains: Mapping[tuple[Role, Block | None], Tensor]) -> Tensor | None:
    """Weight of the norm in front of what reads the stream, float64 [H]; None where there is none."""
    if param.row.role == "head":
        return gains.get(("final_norm", None))
    if param.row.role != "reader":
        return None
    # One norm may serve both blocks of a layer.
    return gains.get(("pre_norm", param.row.block), gains.get(("pre_norm", None)))


def _rotate_parameter(parameter: nn.Parameter, dim: int, gain: Tensor | None, rotation: Tensor) -> None:
    """Multiply a parameter along ``dim`` by the gain, and then by the rotation."""
    rows = parameter.data.movedim(dim, -1)
    if rows.ndim == 1:
        rows = rows[None]
    turning = rotation.to(rows.device)
    if gain is not None:
        turning = gain.to(rows.device)[:, None] * turning
    for some in rows.split(max(1, _AT_ONCE // prod(rows.shape[1:]))):
        some.copy_(some.double() @ turning)
