"""A rotation of the residual stream that does not change the model's output.

RMSNorm divides a token's stream by its root mean square, which no rotation changes: norm(x Q) = norm(x) Q for every
orthogonal Q, if the norm has no weight. The norm's weight g is therefore multiplied into the weights that read it. Then
every weight that touches the stream is rotated (weights as ``torch.nn.Linear`` stores them, [out, in]):

    embedding    E <- E Q                   reads a norm    W <- W diag(g) Q,  b unchanged,  g <- 1.
    writes       W <- Q^T W,  b <- Q^T b    head            H <- H diag(g of the final norm) Q.

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

AT_ONCE = 1 << 24
"""Numbers that are rotated at once, in float64."""


def rotation_obstacle(family: Family, config: PretrainedConfig) -> str | None:
    """Return why the stream of a model cannot be rotated, by its family's table; None if it can."""
    norms = [row for row in family.rows if row.role in ("pre_norm", "post_norm", "final_norm")]
    if family.norm != "rms":
        return "its LayerNorm subtracts the mean over the channels, which depends on the choice of channels"
    if any(row.role == "post_norm" for row in norms):
        return "a norm with a weight for each channel stands between its blocks and the stream"
    if any(row.is_bias for row in norms):
        return "its norms have biases"
    other = [row.pattern for row in family.rows if row.role == "inner" and row.axis_dim("hidden") is not None]
    if other:
        return f"{other[0]} acts on single channels of the stream"
    if config.tie_word_embeddings:
        return "its head is tied to the embedding, and the final norm's weight fits only into an untied head"
    return None


def check_rotatable(model: PreTrainedModel) -> None:
    """Refuse a model whose stream cannot be rotated.

    Raises:
        UnsupportedModelError: the stream cannot be rotated; the message names the reason.
    """
    family = family_for(model)
    if reason := rotation_obstacle(family, model.config):
        raise UnsupportedModelError(
            f"The residual stream of this {family.model_type!r} model cannot be rotated: {reason}. pca needs RMSNorm "
            "in front of the blocks and an untied head; to remove hidden channels as they are, choose another method "
            "(dress)."
        )


@torch.no_grad()
def rotate_(model: PreTrainedModel | LayerRunner, rotation: Tensor) -> None:
    """Rotate the residual stream of a dense model, in place; the weights of its norms become 1 (0 where 1 is added).

    Products are float64 and rounded once to the weights' dtype. The logits are the same up to that rounding.

    Args:
        model: a dense model of a family without a :func:`rotation_obstacle`, any dtype and device, or a runner that
            holds and keeps its layers one at a time.
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
        layers.keep_outside(_rotate_params(layers, places.pop(None), rotation))
    for index, params in track(places.items(), "rotating layers"):
        prefix = f"{layers.family.layers_path}.{index}."
        with layers.layer(cast(int, index)):
            names = _rotate_params(layers, params, rotation)
            layers.keep(cast(int, index), [name.removeprefix(prefix) for name in names])


def _rotate_params(layers: LayerRunner, params: Sequence[NamedParam], rotation: Tensor) -> list[str]:
    """Rotate the parameters of one layer, or those outside of the layers, in memory; return their names."""
    here = [replace(param, parameter=layers.model.get_parameter(param.name)) for param in params]
    touched = [param for param in here if param.axis_dim("hidden") is not None]
    norms = [param for param in touched if param.row.is_norm_weight]
    family = layers.family
    gains = {(p.row.role, p.row.block): family.effective(p.row, p.parameter.detach().double()) for p in norms}
    for param in touched:
        if not param.row.is_norm_weight:
            _rotate_parameter(param.parameter, cast(int, param.axis_dim("hidden")), _gain(param, gains), rotation)
    for param in norms:
        param.parameter.fill_(1.0 - family.offset(param.row))
    return [param.name for param in touched]


def _gain(param: NamedParam, gains: Mapping[tuple[Role, Block | None], Tensor]) -> Tensor | None:
    """Return the weight of the norm in front of a parameter that reads the stream, float64 [H]; None if it has none."""
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
    matrix = rotation.to(rows.device)
    if gain is not None:
        matrix = gain.to(rows.device)[:, None] * matrix
    for chunk in rows.split(max(1, AT_ONCE // prod(rows.shape[1:]))):
        chunk.copy_(chunk.double() @ matrix)
