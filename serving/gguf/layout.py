"""Choose the architecture of llama.cpp that holds a checkpoint, and make the tensors of its file one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig

from pyprune.checkpoint.places import Places
from pyprune.checkpoint.shards import TensorFiles, check_finite
from pyprune.cut.target import choose_target
from pyprune.errors import CheckpointError, UnsupportedModelError
from pyprune.families import Family, all_families, dense_family, family_for
from pyprune.families.gguf_forms import BLOCK, GgufForm, GgufSizes
from pyprune.plan import PrunePlan
from pyprune.serving.gguf.blocks import Array

ZERO_FFN = 32
"""Channels of the FFN of zeros that stands for a skipped MLP: llama.cpp's deci drops the residual stream of a layer
without one. Blocks of 32 divide it; K-quants leave it to others."""

COMPUTED_ROPE = ("default", "linear")
"""Types of rotary positions that llama.cpp computes from the metadata."""


@dataclass(frozen=True)
class Model:
    """A checkpoint and the form in which it is written.

    Attributes:
        family: of the dense model.
        config: of the checkpoint.
        form: llama.cpp's architecture.
        sizes: of every layer.
        tensors: the checkpoint's tensors.
        stored: parameter name -> its name in the checkpoint.
    """

    family: Family
    config: PretrainedConfig
    form: GgufForm
    sizes: GgufSizes
    tensors: TensorFiles
    stored: dict[str, str]

    @property
    def head(self) -> str:
        """Name in the file of the matrix that makes the logits."""
        return "token_embd.weight" if self.sizes.tied else "output.weight"


@dataclass(frozen=True)
class Planned:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: rows first, as in torch; the file names the dimensions in the other order.
        make: its values in float32.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Array]


def open_model(folder: Path) -> Model:
    """Read a checkpoint folder, or the text tower of a multimodal one, and choose the architecture.

    Raises:
        CheckpointError: the folder is damaged, or its tensors are not those of its config.json.
        UnsupportedModelError: llama.cpp has no architecture for the family or these sizes; the message has the reason.
    """
    from pyprune.checkpoint.configuration import read_dense_files, read_tower_config

    tensors = TensorFiles(folder)
    if tower := read_tower_config(folder):
        config, shapes, stored = tower
    else:
        files = read_dense_files(folder)
        config, shapes = files.config, files.shapes
        stored = _stored_names(tensors, files.places, shapes, folder)
    family = dense_family(config)
    tied = bool(config.tie_word_embeddings)
    sizes = sizes_of(family, config, shapes, tied=tied)
    return Model(family, config, choose_form(family, config, sizes, list(stored)), sizes, tensors, stored)


def _stored_names(
    tensors: TensorFiles, places: Places, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, str]:
    """Return parameter name -> name in the files, of a model whose parameters are all stored as they are."""
    stored = {}
    for name, shape in shapes.items():
        place = next(iter(places.tensors[name].names(0)), None) if name in places.tensors else None
        if place is None or tensors.shape(place) != shape:
            seen = "is missing" if place is None else f"has the shape {tensors.shape(place)}"
            raise CheckpointError(
                f"{name} of {folder} {seen}; by config.json it is {shape}. The checkpoint is incomplete or damaged; "
                "fetch or write it again."
            )
        stored[name] = place
    return stored


def sizes_of(
    family: Family, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], *, tied: bool
) -> GgufSizes:
    """Read the sizes of every layer off the shapes of its parameters.

    Args:
        family: of the dense model.
        config: of the checkpoint.
        shapes: parameter name -> shape.
        tied: whether the head is the embedding.
    """
    head_dim = family.sizes(config).head_dim
    layers: list[dict[str, int]] = [{} for _ in range(config.num_hidden_layers)]
    for name, shape in shapes.items():
        row, index = family.match(name)
        if index is not None:
            layers[index] |= {axis: size for axis, size in zip(row.axes, shape, strict=True) if isinstance(axis, str)}
    widths = tuple(
        (layer.get("heads", 0) // head_dim, layer.get("kv_heads", 0) // head_dim, layer.get("ffn", 0))
        for layer in layers
    )
    return GgufSizes(config.hidden_size, head_dim, widths, tied)


def choose_form(family: Family, config: PretrainedConfig, sizes: GgufSizes, names: list[str]) -> GgufForm:
    """Choose the first form of the family that holds the model.

    Args:
        family: of the dense model.
        config: of the checkpoint.
        sizes: of every layer.
        names: of all parameters.

    Raises:
        UnsupportedModelError: none does; the message has the reason of each.
    """
    if isinstance(family.gguf, str):
        able = sorted(name for name, other in all_families().items() if not isinstance(other.gguf, str))
        raise UnsupportedModelError(
            f"A {family.model_type} model cannot be written as GGUF: {family.gguf} "
            f"Families that can: {', '.join(able)}."
        )
    reasons = []
    for form in family.gguf:
        reason = _form_obstacle(form, family, config, sizes, names)
        if not reason:
            return form
        reasons.append(f"{form.architecture}: {reason}")
    raise UnsupportedModelError(
        f"No architecture of llama.cpp holds this {config.model_type} model ({'; '.join(reasons)}). "
        "Export it as safetensors, or prune it to sizes that one of them takes."
    )


def _form_obstacle(
    form: GgufForm, family: Family, config: PretrainedConfig, sizes: GgufSizes, names: list[str]
) -> str | None:
    if not form.per_layer and not sizes.are_equal:
        return "sizes differ between layers or a sub-block is skipped"
    if getattr(config, "norm_size", None) is not None:
        return "its LayerNorm divides by the stored hidden size, the model's by the dense one"
    foreign = [row.pattern for row in (family.match(name)[0] for name in names) if form.name_of(row.pattern) is None]
    if foreign:
        return f"it has no place for {foreign[0]}"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != form.activation:
        return f"its MLP uses {form.activation}, the model's {activation}"
    kind = rope_type(config)
    if kind not in COMPUTED_ROPE and not (kind == "llama3" and form.rope_factors):
        return f"it is not given rotary positions of the type {kind!r}"
    return form.obstacle(config, sizes)


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """Return Transformers' parameters of the rotary positions of the layers without a window."""
    parameters = dict(config.rope_parameters)
    return dict(parameters["full_attention"]) if "full_attention" in parameters else parameters


def rope_type(config: PretrainedConfig) -> str:
    """Return Transformers' name of their type."""
    return str(rope_parameters(config).get("rope_type", "default"))


class GgufRules:
    """Check which plans of a dense model llama.cpp can hold, by the rules of :func:`choose_form`.

    The tokenizer, which no plan changes, is not checked.

    Args:
        config: of the dense model.
        names: of its parameters.
    """

    def __init__(self, config: PretrainedConfig, names: Iterable[str]) -> None:
        self._config = config
        self._family = family_for(config)
        one_of_each = {self._family.match(name)[0].pattern: name for name in names}
        self._names = tuple(one_of_each.values())

    def obstacle(self, plan: PrunePlan) -> str | None:
        """Explain why the model of a plan cannot be written; None when it can."""
        target = choose_target(self._family, self._config, plan)
        family = dense_family(target.config)
        tied = bool(target.config.tie_word_embeddings)
        sizes = GgufSizes(len(plan.hidden), plan.dense.head_dim, tuple(layer.widths for layer in plan.layers), tied)
        biases = [pattern.replace("{i}", "0") for pattern, _ in target.zero_biases]
        try:
            choose_form(family, target.config, sizes, [*self._names, *biases])
        except UnsupportedModelError as error:
            return str(error)
        return None


def planned_tensors(model: Model) -> Iterator[Planned]:
    """Yield every tensor of the file but the rotary factors, in the order of the checkpoint's parameters."""
    fused: dict[int, dict[str, Planned]] = {}
    for name, stored in model.stored.items():
        row, index = model.family.match(name)
        pattern = model.form.name_of(row.pattern)
        if pattern is None:
            continue
        planned = _plan_tensor(model, stored, pattern, index, norm=row.is_norm_weight or row.axes == ("head_dim",))
        part = pattern.removeprefix(BLOCK)
        if model.form.fused_qkv and index is not None and part in ("attn_q.weight", "attn_k.weight", "attn_v.weight"):
            parts = fused.setdefault(index, {})
            parts[part] = planned
            if len(parts) == 3:
                yield _fuse(index, [parts[f"attn_{kind}.weight"] for kind in "qkv"])
        else:
            yield planned
    for index, (_, _, ffn) in enumerate(model.sizes.layers):
        if not ffn:
            yield from _zero_ffn(index, model.sizes.hidden)


def _plan_tensor(model: Model, stored: str, pattern: str, index: int | None, *, norm: bool) -> Planned:
    shape = model.tensors.shape(stored)
    turned = model.form.adjacent_pairs and pattern.startswith((BLOCK + "attn_q.", BLOCK + "attn_k."))

    def make() -> Array:
        tensor = model.tensors.read(stored)
        check_finite(stored, tensor, model.tensors.folder)
        values = tensor.float()
        if norm and model.family.unit_offset_norm:
            values = values + 1
        return _adjacent_pairs(values, model.sizes.head_dim).numpy() if turned else values.numpy()

    return Planned(pattern if index is None else pattern.replace("{i}", str(index)), shape, make)


def _adjacent_pairs(values: Tensor, head_dim: int) -> Tensor:
    """Put channels j and j + head_dim / 2 of every head next to each other: [heads x head_dim, ...] in and out."""
    rest = values.shape[1:]
    return values.view(-1, 2, head_dim // 2, *rest).transpose(1, 2).reshape(values.shape)


def _fuse(index: int, parts: list[Planned]) -> Planned:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Planned(f"blk.{index}.attn_qkv.weight", shape, lambda: np.concatenate([part.make() for part in parts]))


def _zero_ffn(index: int, hidden: int) -> Iterator[Planned]:
    """Yield the tensors of an FFN whose output is zero."""
    yield _constant(f"blk.{index}.ffn_norm.weight", (hidden,), 1.0)
    yield _constant(f"blk.{index}.ffn_gate.weight", (ZERO_FFN, hidden), 0.0)
    yield _constant(f"blk.{index}.ffn_up.weight", (ZERO_FFN, hidden), 0.0)
    yield _constant(f"blk.{index}.ffn_down.weight", (hidden, ZERO_FFN), 0.0)


def _constant(name: str, shape: tuple[int, ...], value: float) -> Planned:
    return Planned(name, shape, lambda: np.full(shape, value, np.float32))
