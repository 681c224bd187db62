"""Residual streams that walk through a model one part of a layer at a time.

A part is what writes to the stream at one point: the attention of a layer, its MLP, or both where they stand side by
side (Phi). Running parts by themselves means that two models can be compared point by point while only their streams
and one layer are at work, whatever the rest of the model lies on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from typing_extensions import override

from pyprune.families import Family, decoder_layers, family_for
from pyprune.families.base import BLOCKS, Block
from pyprune.runtime import processes
from pyprune.runtime.products import products_in
from pyprune.runtime.progress import track


@dataclass(frozen=True)
class Part:
    """What writes to the stream at one point.

    Attributes:
        layer: index of the decoder layer.
        blocks: its blocks that write there, one or (side by side) both.
    """

    layer: int
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return f"layer {self.layer} {' and '.join(self.blocks)}"


def parts_of(family: Family, layer: int) -> tuple[Part, ...]:
    """The parts of a layer in the order in which they write; one part where the blocks stand side by side."""
    side_by_side = any(row.role == "pre_norm" and row.block is None for row in family.rows)
    return (Part(layer, BLOCKS),) if side_by_side else tuple(Part(layer, (block,)) for block in BLOCKS)


class LayerRunner:
    """The decoder layers of a model, each called as the model itself would call it.

    Args:
        model: a causal LM of a known family, dense or cut.
        family: of the model.

    Attributes:
        device: where its streams are.
    """

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self.model = model
        self.family = family
        self.layers = decoder_layers(model)
        self.device = model.device
        self._calls: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._bfloat16 = False

    @staticmethod
    def of(model: PreTrainedModel | LayerRunner) -> LayerRunner:
        """The layers of a dense model in memory; what holds and keeps layers already is given back.

        Raises:
            UnsupportedModelError: unknown model type or variant.
        """
        return model if isinstance(model, LayerRunner) else LayerRunner(model, family_for(model))

    def embed(self, ids: Tensor) -> Tensor:
        """The stream [B, T, H] that enters the first layer for token ids int64 [B, T]."""
        calls: list[dict[str, Any]] = []
        streams: list[Tensor] = []

        def record(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            streams.append(hidden_states)
            calls.append(kwargs)
            return hidden_states

        with replaced_forwards(dict.fromkeys(self.layers, record)):
            self.model.base_model(input_ids=ids.to(self.model.device), use_cache=False)
        self._calls[ids.shape[0], ids.shape[1]] = self._without_plain_masks(calls)
        return streams[0]

    def _without_plain_masks(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls of the layers without masks that hide what lies ahead and nothing else.

        Transformers makes such a mask where a sequence is as long as the window. Without one, torch's attention is
        causal by itself and takes half the time.
        """
        if self.model.config._attn_implementation != "sdpa":
            return calls
        masks = {id(mask): mask for mask in (call.get("attention_mask") for call in calls)}
        plain = {key for key, mask in masks.items() if mask is not None and _is_causal(mask)}
        return [c | {"attention_mask": None} if id(c.get("attention_mask")) in plain else c for c in calls]

    @contextmanager
    def computing(self, dtype: str) -> Iterator[None]:
        """Let layers compute in bfloat16 (autocast) meanwhile, or as their weights are; streams keep their dtype.

        Args:
            dtype: bfloat16, which is obeyed also where it is slow, or float32.
        """
        self._bfloat16 = dtype == "bfloat16"
        try:
            with products_in(dtype):
                yield
        finally:
            self._bfloat16 = False

    def walking_together(self, batches: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Batches in the groups whose streams are best taken through a layer before the next one: each by itself."""
        return [[batch] for batch in batches]

    def branching_together(self, batches: Sequence[Tensor], starts: Sequence[int]) -> tuple[int, int]:
        """How many batches, and how many branches of each, are best taken through a layer before the next one.

        Args:
            batches: token ids, int64 [B, T] each.
            starts: the layers at which every one of their streams branches, ascending.

        Returns:
            One and one, which hold least: layers in memory can be come back to at no cost.
        """
        return 1, 1

    def through_(self, streams: list[Tensor]) -> None:
        """Take the streams [B, T, H] of batches through all layers, in their list."""
        for _ in track(self.points_(streams), "running layers", total=len(self.layers)):
            pass

    def points_(self, streams: list[Tensor]) -> Iterator[int]:
        """As :meth:`through_`, but stop in front of every layer, and give its index."""
        for index in range(len(self.layers)):
            yield index
            with self.layer(index) as layer:
                self.run_(layer, Part(index, BLOCKS), streams)

    def leave(self, ids: Tensor, stream: Tensor) -> None:
        """Give a stream [B, T, H] to what lies behind the layers, for those who listen; the head computes nothing.

        Args:
            ids: token ids, int64 [B, T], of the stream.
            stream: behind the last layer.
        """
        with self.ending(stream) as model, replaced_forwards({model.get_output_embeddings(): _same}):
            model(input_ids=ids.to(model.device), use_cache=False)

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give one decoder layer with its weights, for the time of the block."""
        yield self.layers[index]

    @contextmanager
    def head(self) -> Iterator[None]:
        """Let the model's head have its weights, for the time of the block."""
        yield

    def keep(self, index: int, names: Iterable[str]) -> None:
        """Keep what parameters of a layer were changed to, in the block of :meth:`layer`; a model in memory does."""

    def keep_outside(self, names: Iterable[str]) -> None:
        """Keep what parameters outside of the layers were changed to, by their whole names; a model in memory does.

        Those of a head are changed and kept in the block of :meth:`head`.
        """

    def keep_zeros(self, name: str, count: int) -> None:
        """Keep a vector of zeros as a parameter that the model lacked and was given; a model in memory does."""

    def run(self, module: nn.Module, part: Part, stream: Tensor) -> Tensor:
        """The stream [B, T, H] behind a part.

        Args:
            module: the layer, or a copy of it.
            part: which blocks of it write; the others add zero.
            stream: [B, T, H] before the part, of a shape [B, T] that :meth:`embed` has seen.
        """
        call = self.keywords(part.layer, stream)
        with silent_blocks(module, self.family, set(BLOCKS) - set(part.blocks)), self._autocast(stream):
            return module(stream, **call)  # type: ignore[no-any-return]

    def run_(self, module: nn.Module, part: Part, streams: list[Tensor]) -> None:
        """Take the streams [B, T, H] of batches through a part, in their list: one is held twice at a time."""
        for number, stream in enumerate(streams):
            streams[number] = self.run(module, part, stream)

    def keywords(self, index: int, stream: Tensor) -> dict[str, Any]:
        """What the model gives a layer beside a stream [B, T, ...] of a shape [B, T] that :meth:`embed` has seen."""
        return self._calls[stream.shape[0], stream.shape[1]][index]

    @contextmanager
    def ending(self, stream: Tensor) -> Iterator[PreTrainedModel]:
        """Give the model as it goes on from a stream [B, T, H] behind its last layer; its layers are not run."""

        def passed_over(*_: Any, **__: Any) -> Tensor:
            return stream

        with replaced_forwards(dict.fromkeys(self.layers, passed_over)):
            yield self.model

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a module inside a layer makes of x [..., in], in the dtype that :meth:`run` computes in."""
        with self._autocast(x):
            return module(x)  # type: ignore[no-any-return]

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self._bfloat16)


class HostLayers(LayerRunner):
    """The decoder layers of a model on the host, each of which is on a device for as long as it is at work.

    Of several processes those that do not get the result (:func:`pyprune.runtime.processes.gets_result`) keep no
    change, so that models that are mapped from the same files go on sharing them.

    Args:
        model: on the host.
        family: of the model.
        device: for streams and the layer at work.
    """

    def __init__(self, model: PreTrainedModel, family: Family, device: torch.device) -> None:
        super().__init__(model, family)
        self.device = device
        self._changed: dict[str, Tensor] = {}

    @override
    def embed(self, ids: Tensor) -> Tensor:
        """The stream [B, T, H] that enters the first layer, on the device."""
        stream = super().embed(ids)
        there: dict[int, Tensor] = {}  # what layers share stays one tensor

        def moved(value: Any) -> Any:
            return there.setdefault(id(value), value.to(self.device)) if isinstance(value, Tensor) else value

        shape = ids.shape[0], ids.shape[1]
        self._calls[shape] = [tree_map(moved, call) for call in self._calls[shape]]
        return stream.to(self.device)

    @contextmanager
    @override
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give a copy of one decoder layer's weights on the device; :meth:`keep` says what stays of changes to them."""
        layer = self.layers[index]
        modules = layer.modules()
        stores: list[dict[str, Any]] = [store for module in modules for store in (module._parameters, module._buffers)]
        here = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
        for store, name, tensor in here:
            there = tensor.detach().to(self.device, copy=True)
            store[name] = nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
        try:
            yield layer
        finally:
            for store, name, tensor in here:
                store[name] = tensor
            for name, values in self._changed.items():
                layer.get_parameter(name).data = values
            self._changed.clear()

    @contextmanager
    @override
    def ending(self, stream: Tensor) -> Iterator[PreTrainedModel]:
        """Give the model as it goes on, on the host, from a stream [B, T, H] behind its last layer."""
        with super().ending(stream.to(self.model.device)) as model:
            yield model

    @override
    def keep(self, index: int, names: Iterable[str]) -> None:
        """Keep what parameters of the layer at work were changed to, on the host."""
        if processes.gets_result():
            changed = {name: self.layers[index].get_parameter(name).data for name in names}
            self._changed |= {name: values.to(self.model.device) for name, values in changed.items()}


@contextmanager
def silent_blocks(layer: nn.Module, family: Family, blocks: set[Block]) -> Iterator[None]:
    """Let blocks of a layer add zero to the stream, without computing them."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    if "attention" in blocks:
        forwards[getattr(layer, family.attention_module)] = _no_attention
    if "mlp" in blocks:
        *first, last = (getattr(layer, name) for name in family.mlp_modules)
        forwards |= dict.fromkeys(first, _same) | {last: torch.zeros_like}
    with replaced_forwards(forwards):
        yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules compute something else meanwhile; their own ``forward`` comes back as it was."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            del module.forward
            if own is not None:
                module.forward = own


def _is_causal(mask: Tensor) -> bool:
    """Whether a boolean mask [..., T, T] lets each position see itself and all before it, and nothing else."""
    return mask.dtype == torch.bool and bool((mask == torch.ones_like(mask).tril()).all())


def _no_attention(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return torch.zeros_like(hidden_states), None


def _same(hidden_states: Tensor) -> Tensor:
    return hidden_states


@contextmanager
def listening(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keep what named modules read and wrote at their latest call: name -> (input, output)."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            seen[name] = (args[0], output)

        return after

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        seen.clear()
