"""Choose the architecture of llama.cpp that holds a checkpoint, and make the tensors of its file one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from pyprune.checkpoint.places import Places
from pyprune.checkpoint.shards import TensorFiles, check_finite
from pyprune.cut.target import choose_target
from pyprune.errors import CheckpointError, UnsupportedModelError
from pyprune.families import Family, Row, dense_family, family_for
from pyprune.families.base import unit_of
from pyprune.families.gguf_forms import BLOCK, CORRECTIONS, Change, GgufForm, GgufSizes, has_windows
from pyprune.families.mixtures import expert_groups
from pyprune.plan import PrunePlan, Sizes
from pyprune.serving.gguf.blocks import Array

ZERO_FFN = 32
"""Channels of the FFN of zeros that stands for a skipped MLP: llama.cpp's deci drops the residual stream of a layer
without one. Blocks of 32 divide it; K-quants leave it to others."""

KEPT = ("_norm.", "ffn_gate_inp.")
"""Parts of the names of tensors that are float32 in every format."""

ACTIVATIONS = ("hidden_activation", "hidden_act", "mlp_hidden_act")
"""Fields of configurations with the activation of the MLP; classes without one have SiLU."""

COMPUTED_ROPE = ("default", "linear")
"""Types of rotary positions that llama.cpp computes from the metadata."""


@dataclass(frozen=True)
class Stored:
    """A parameter of a checkpoint: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Model:
    """A checkpoint and the form in which it is written.

    Attributes:
        family: of the dense model.
        config: of the checkpoint.
        form: llama.cpp's architecture.
        sizes: of every layer.
        folder: of the checkpoint.
        tensors: parameter name -> its shape, and a function that reads it. The buffers that belong to experts are here
            too.
        buffers: the same of the other stored buffers that the form reads.
    """

    family: Family
    config: PretrainedConfig
    form: GgufForm
    sizes: GgufSizes
    folder: Path
    tensors: dict[str, Stored]
    buffers: dict[str, Stored]

    @property
    def head(self) -> str:
        """Name in the file of the matrix that makes the logits."""
        return "token_embd.weight" if self.sizes.tied and not self.form.own_head else "output.weight"


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

    @property
    def is_matrix(self) -> bool:
        """True of what is multiplied with activations; norms, biases and routers are float32 in every format."""
        return len(self.shape) > 1 and self.name.endswith(".weight") and not any(k in self.name for k in KEPT)


def open_model(folder: Path) -> Model:
    """Read a checkpoint folder, or the text tower of a multimodal one, and choose the architecture.

    Raises:
        CheckpointError: the folder is damaged, or its tensors are not those of its config.json.
        UnsupportedModelError: llama.cpp has no architecture for the family or these sizes; the message has the reason.
    """
    from pyprune.checkpoint.configuration import read_dense_files, read_tower_config

    files = TensorFiles(folder)
    buffers: dict[str, Stored] = {}
    if tower := read_tower_config(folder):
        config, shapes, names = tower
        stored = {name: Stored(files.shape(own), partial(files.read, own)) for name, own in names.items()}
        tensors = {name: one for name, one in stored.items() if name in shapes or name.endswith(CORRECTIONS)}
        buffers = {name: one for name, one in stored.items() if name not in tensors}
    else:
        dense = read_dense_files(folder)
        config, shapes = dense.config, dense.shapes
        tensors = _stored_tensors(files, dense.places, shapes)
        buffers = {name: _stored(files, dense.places, name) for name in dense.places.tensors if name not in tensors}
    family = dense_family(config)
    sizes = sizes_of(family, config, shapes, tied=bool(config.tie_word_embeddings))
    form = choose_form(family, config, sizes, list(tensors))
    return Model(family, config, form, sizes, folder, tensors, buffers)


def _stored_tensors(files: TensorFiles, places: Places, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Return the parameters, and the buffers that belong to experts, of a model whose files are not a tower's."""
    placed = places.tensors
    for name, shape in shapes.items():
        place = placed.get(name)
        stored = files.shape(place.names(0)[0]) if place and place.converter is None else shape
        if place is None or stored != shape:
            seen = "is missing" if place is None else f"has the shape {stored}"
            raise CheckpointError(
                f"{name} of {files.folder} {seen}; by config.json it is {shape}. The checkpoint is incomplete or "
                "damaged; fetch or write it again."
            )
    buffers = {name: _stored(files, places, name) for name in placed if name.endswith(CORRECTIONS)}
    return buffers | {name: Stored(shape, partial(placed[name].read, files.read)) for name, shape in shapes.items()}


def _stored(files: TensorFiles, places: Places, name: str) -> Stored:
    """Return a buffer of a checkpoint."""
    place = places.tensors[name]
    return Stored(files.shape(place.names(0)[0]), partial(place.read, files.read))


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
    dense, kinds = family.sizes(config), family.layer_kinds(config)
    layers: list[dict[str, int]] = [{} for _ in range(config.num_hidden_layers)]
    for name, shape in shapes.items():
        row, index = family.match(name, kinds)
        if index is not None:
            for axes, size in zip(row.dimensions, shape, strict=True):
                if len(axes) == 1:
                    layers[index][axes[0]] = size // unit_of(axes[0], dense, index, row.head_dim)[1]
                elif "kv_heads" in axes:
                    layers[index]["qkv"] = size // _head_dim(dense)
    for layer in layers:
        layer.setdefault("kv_heads", (layer.get("qkv", 0) - layer.get("heads", 0)) // 2)
    widths = tuple((layer.get("heads", 0), layer["kv_heads"], layer.get("ffn", 0)) for layer in layers)
    mixtures = tuple((layer.get("experts", 0), layer.get("shared_ffn", 0)) for layer in layers)
    mixtures = mixtures if family.mixture_fields else ()
    return GgufSizes(config.hidden_size, _head_dim(dense), widths, tied, mixtures, _blocks(family, kinds))


def _head_dim(dense: Sizes) -> int:
    """Return the channels of a head of the last kind of layers with attention; 0 = there is none."""
    blocks = [block for kind in dense.kinds.values() for block in kind.values() if block.head_dim]
    return blocks[-1].head_dim or 0 if blocks else 0


def _blocks(family: Family, kinds: Iterable[str]) -> tuple[tuple[bool, bool], ...]:
    """Return whether the kind of each layer has attention, and whether it has an MLP."""
    return tuple(("attention" in family.kinds[kind], "mlp" in family.kinds[kind]) for kind in kinds)


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
        raise UnsupportedModelError(
            f"A {family.model_type} model cannot be written as GGUF: {family.gguf} `pyprune families` lists the types "
            "that can; export this one as safetensors."
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
    if len(numbers := sizes.numbers_of_experts) > 1:
        return (
            f"its layers have {' or '.join(map(str, numbers))} experts, and a file of llama.cpp has one expert_count. "
            "Choose equally many of every layer: METHOD.ranking=local, or METHOD.keep=N"
        )
    if not form.per_layer and not sizes.are_equal:
        return "sizes differ between layers or a sub-block is skipped"
    if getattr(config, "norm_size", None) is not None:
        return "its LayerNorm divides by the stored hidden size, the model's by the dense one"
    rows = [family.match(name)[0] for name in names]
    foreign = [row.pattern for row in rows if not form.names_of(row) and not form.key_of(row.pattern)]
    if foreign:
        return f"it has no place for {foreign[0]}"
    if form.square and sizes.heads[0] * sizes.head_dim != sizes.hidden:
        return (
            f"its {sizes.heads[0]} heads of {sizes.head_dim} channels must together be as wide as the hidden size "
            f"{sizes.hidden}"
        )
    activation = next(filter(None, (getattr(config, name, None) for name in ACTIVATIONS)), form.activation)
    if activation != form.activation:
        return f"its MLP uses {form.activation}, the model's {activation}"
    kind = rope_type(config)
    given = {"llama3": form.rope_factors, "proportional": form.rope_factors, "yarn": form.yarn}
    if kind not in COMPUTED_ROPE and not given.get(kind):
        return f"it is not given rotary positions of the type {kind!r}"
    if form.windows == "always" and not has_windows(config):
        return "some of its layers have a sliding window"
    return _experts_obstacle(form, config, sizes) or form.obstacle(config, sizes)


def _experts_obstacle(form: GgufForm, config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    dense = sum(not experts for experts, _ in sizes.mixtures)
    if dense == len(sizes.mixtures):
        return "it has mixtures of experts" if dense and form.dense_first else None
    if form.dense_first and dense > sizes.dense_layers:
        return "its dense layers are the first ones"
    normed = form.normed_experts
    if normed is not None and getattr(config, "norm_topk_prob", normed) != normed:
        return f"it computes with norm_topk_prob = {normed}, the model's is {config.norm_topk_prob}"
    # llama.cpp ranks groups by the sum of their two best corrected scores, as routers with a correction do.
    return (
        "it ranks no groups of experts by their best scores" if expert_groups(config) > 1 and form.gating == 1 else None
    )


def rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """Return Transformers' parameters of the rotary positions of the layers without a window."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
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
        widths = tuple(layer.widths for layer in plan.layers)
        mixtures = tuple((len(layer.units("experts")), len(layer.units("shared_ffn"))) for layer in plan.layers)
        mixtures = mixtures if family.mixture_fields else ()
        blocks = _blocks(self._family, (layer.kind for layer in plan.layers))
        sizes = GgufSizes(len(plan.hidden), _head_dim(plan.dense), widths, tied, mixtures, blocks)
        biases = [pattern.replace("{i}", "0") for pattern, _ in target.zero_biases]
        try:
            choose_form(family, target.config, sizes, [*self._names, *biases])
        except UnsupportedModelError as error:
            return str(error)
        return None


def planned_tensors(model: Model) -> Iterator[Planned]:
    """Yield every tensor of the file but the rotary factors, in the order of the checkpoint's parameters."""
    fused: dict[int, dict[str, Planned]] = {}
    kinds = model.family.layer_kinds(model.config)
    for name, stored in model.tensors.items():
        row, index = model.family.match(name, kinds)
        names = model.form.names_of(row)
        for part, pattern in enumerate(names):
            change = partial(_arranged, model, row, pattern, part, len(names))
            make = partial(_made, model, name, row, change)
            shape = tuple(change(torch.empty(stored.shape, device="meta")).shape)
            planned = Planned(pattern.replace("{i}", str(index)), shape, make)
            kind = pattern.removeprefix(BLOCK).partition(".")[0].removeprefix("attn_")
            if model.form.fused_qkv and index is not None and kind in ("q", "k", "v"):
                parts = fused.setdefault(index, {})
                parts[kind] = planned
                if len(parts) == 3:
                    yield _fuse(index, [parts[kind] for kind in "qkv"])
            else:
                yield planned
            if model.form.own_head and model.sizes.tied and pattern == "token_embd.weight":
                yield replace(planned, name="output.weight")
    for name, buffer in model.buffers.items():
        for pattern, form_change in model.form.changes_of(re.sub(r"\.\d+\.", ".{i}.", name, count=1)).items():
            yield _planned_buffer(model, name, buffer, pattern, form_change)
    for index, ((_, _, ffn), (_, has_mlp)) in enumerate(zip(model.sizes.layers, model.sizes.has_blocks, strict=True)):
        if has_mlp and not ffn:
            yield from _zero_ffn(index, model.sizes.hidden)


def _planned_buffer(model: Model, name: str, buffer: Stored, pattern: str, change: Change) -> Planned:
    """Return the tensor that a buffer of a layer becomes."""
    index = next(part for part in name.split(".") if part.isdigit())

    def make() -> Array:
        values: Array = change(_read(model, name, buffer), model.config).numpy()
        return values

    return Planned(pattern.replace("{i}", index), buffer.shape, make)


def _made(model: Model, name: str, row: Row, change: Callable[[Tensor], Tensor]) -> Array:
    """Read a parameter and return what the file holds of it."""
    tensor = _read(model, name, model.tensors[name])
    offset = model.family.unit_offset_norm and (row.is_norm_weight or row.axes == ("head_dim",))
    return change(tensor + 1 if offset else tensor).contiguous().numpy()


def _read(model: Model, name: str, stored: Stored) -> Tensor:
    tensor = stored.read()
    check_finite(name, tensor, model.folder)
    return tensor.float()


def _arranged(model: Model, row: Row, pattern: str, part: int, parts: int, values: Tensor) -> Tensor:
    """Put the values of a parameter in the order of the file.

    Args:
        model: see there.
        row: of the parameter.
        pattern: of the tensor's name in the file.
        part: the tensor's place among those that the parameter becomes.
        parts: their number.
        values: of the parameter.
    """
    if change := model.form.changes_of(row.pattern).get(pattern):
        changed: Tensor = change(values, model.config)
        return changed
    if "inner" in row.axes:
        values = values.squeeze()  # the gate of shared experts is a vector in the file
    if row.by_group and "kv_heads" in row.dimensions[0]:
        values = _whole_axes(values, model.sizes.head_dim)
    if values.ndim == 3 and (row.fused_dim == 2 or row.axes[1] == "ffn"):
        values = values.transpose(1, 2)  # the outputs of an expert are its rows
    if model.form.adjacent_pairs and pattern.startswith((BLOCK + "attn_q.", BLOCK + "attn_k.")):
        turned = int(model.sizes.head_dim * rope_parameters(model.config).get("partial_rotary_factor", 1.0))
        values = _adjacent_pairs(values, model.sizes.head_dim, turned)
    if parts == 1:
        return values
    dim = values.ndim - 1 if row.is_bias else values.ndim - 2
    size = values.shape[dim] // parts
    if row.by_group:  # one channel of each after another
        return values.movedim(dim, 0)[part::parts].movedim(0, dim)
    return values.narrow(dim, part * size, size)


def _whole_axes(values: Tensor, head_dim: int) -> Tensor:
    """Put all queries in front of all keys and all values, [heads x (query, key, value) x head_dim, ...] in and out."""
    rest = values.shape[1:]
    return values.view(-1, 3, head_dim, *rest).transpose(0, 1).reshape(values.shape)


def _adjacent_pairs(values: Tensor, head_dim: int, turned: int) -> Tensor:
    """Put channels j and j + turned / 2 of every head next to each other: [heads x head_dim, ...] in and out.

    Args:
        values: of queries or keys.
        head_dim: channels of a head.
        turned: how many of them, the first ones, have rotary positions.
    """
    order = torch.arange(head_dim, device=values.device)
    order[:turned] = order[:turned].view(2, -1).T.reshape(-1)
    return values.view(-1, head_dim, *values.shape[1:])[:, order].reshape(values.shape)


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
