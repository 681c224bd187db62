"""A dense checkpoint on disk whose decoder layers are read one at a time, for passes through a model in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from pyprune.checkpoint.stored import StoredModel
from pyprune.families import Family
from pyprune.probe.streams import LayerRunner

STREAM_BYTES = 1 << 30
"""Limit of the streams of batches that branch, together; one batch with one branch may exceed it."""


class Tensors(Protocol):
    """A model whose tensors are read one at a time.

    Attributes:
        device: where tensors are put.
        family: with the table of their names.
    """

    device: torch.device
    family: Family

    def model(self) -> PreTrainedModel:
        """Build the model without its parameters, which are on the meta device."""

    def read(self, name: str) -> Tensor:
        """Read the values of a parameter, by its name."""


class ReadLayers(LayerRunner):
    """Layers that are read when they are needed; one at a time is in memory.

    Everything outside of the layers but the head stays in memory. A head that is not tied has values only in the block
    of :meth:`head`.

    Args:
        tensors: read in the dtype and on the device that the layers compute with.

    Raises:
        CheckpointError: a tensor is missing, or its values are not finite.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        super().__init__(tensors.model(), tensors.family)
        self.device = tensors.device
        self._read_ends()

    def _read_ends(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        rows = {name: self.family.match(name) for name in names}
        self._read(name for name, (row, layer) in rows.items() if layer is None and row.role != "head")
        if self.model.config.tie_word_embeddings:
            head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
            head.weight = embedding.weight
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(self.device))

    @override
    def batch_groups(self, batches: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Return all of them in one group, so that every layer is read once."""
        return [batches]

    @override
    def branch_group_sizes(self, batches: Sequence[Tensor], starts: Sequence[int]) -> tuple[int, int]:
        """Return the sizes with the fewest reads of layers and the head whose streams fit :data:`STREAM_BYTES`."""
        longest = max(batch.numel() for batch in batches)
        streams = STREAM_BYTES // (longest * self.model.config.hidden_size * self.model.dtype.itemsize)
        ways = [(many, min(len(starts), streams // many - 1)) for many in range(1, len(batches) + 1)]
        possible = [(many, branches) for many, branches in ways if branches > 0]
        return min(possible, key=lambda way: self._reads(len(batches), starts, *way), default=(1, 1))

    def _reads(self, batches: int, starts: Sequence[int], many: int, branches: int) -> int:
        """Count the layers and heads that are read; each walk begins after the last branch of the one before it."""
        begins = [0, *(starts[at - 1] + 1 for at in range(branches, len(starts), branches))]
        return -(-batches // many) * sum(len(self.layers) + 1 - begin for begin in begins)

    @contextmanager
    @override
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Yield one decoder layer with its weights, until the block ends; they are read again each time."""
        layer = self.layers[index]
        self._read([f"{self.family.layers_path}.{index}.{name}" for name, _ in layer.named_parameters()])
        try:
            yield layer
        finally:
            _drop_after([name for name, _ in layer.named_parameters()], layer)  # buffers are computed once, and stay

    @contextmanager
    @override
    def head(self) -> Iterator[None]:
        """Give the head its weights until the block ends; those that the embedding does not share are read again."""
        head = {id(p) for p in self.model.get_output_embeddings().parameters() if p.is_meta}
        names = [name for name, p in self.model.named_parameters() if id(p) in head]
        self._read(names)
        try:
            yield
        finally:
            self._drop(names)

    def whole(self) -> PreTrainedModel:
        """Return the model for calls as a whole; each layer has its matrices in memory only while it runs.

        Vectors (norms, biases) and all parameters outside of the layers stay in memory, the head too.
        """
        names = [name for name, p in self.model.named_parameters() if p.is_meta]
        within = [f"{self.family.layers_path}.{index}." for index in range(len(self.layers))]
        matrices = {
            start: [n for n in names if n.startswith(start) and self.model.get_parameter(n).ndim > 1]
            for start in within
        }
        inside = {name for group in matrices.values() for name in group}
        self._read([name for name in names if name not in inside])
        for start, layer in zip(within, self.layers, strict=True):
            passing = [name.removeprefix(start) for name in matrices[start]]
            # The hooks hold no reference to the model, so that it is freed as soon as nobody uses it.
            layer.register_forward_pre_hook(partial(_read_before, self.tensors, start, passing))
            layer.register_forward_hook(partial(_drop_after, passing), always_call=True)
        return self.model

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            _set(self.model, name, self.read_parameter(name))

    def _drop(self, names: Iterable[str]) -> None:
        _drop_after(names, self.model)

    def read_parameter(self, name: str) -> nn.Parameter:
        """Read one parameter from the files."""
        return nn.Parameter(self.tensors.read(name), requires_grad=False)


def _read_before(tensors: Tensors, start: str, names: Iterable[str], layer: nn.Module, *_: Any) -> None:
    """Read the values of a layer's parameters, whose names in the model begin with ``start``."""
    for name in names:
        _set(layer, name, nn.Parameter(tensors.read(start + name), requires_grad=False))


def _drop_after(names: Iterable[str], module: nn.Module, *_: Any) -> None:
    for name in names:
        _set(module, name, nn.Parameter(module.get_parameter(name).to("meta"), requires_grad=False))


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)


class StoredLayers(ReadLayers):
    """The layers of a checkpoint folder with safetensors; changed values are stored and read from then on.

    Args:
        stored: the checkpoint, read in the dtype and on the device that the layers compute with.

    Raises:
        CheckpointError: a tensor is missing, or its values are not finite.
    """

    def __init__(self, stored: StoredModel) -> None:
        self.stored = stored
        super().__init__(stored)

    @override
    def keep(self, index: int, names: Iterable[str]) -> None:
        """Store the changed values of a layer's parameters, which ``stored`` reads from then on."""
        for name in names:
            values = self.layers[index].get_parameter(name)
            self.stored.replace(f"{self.family.layers_path}.{index}.{name}", values)

    @override
    def keep_outside(self, names: Iterable[str]) -> None:
        """Store the changed values of parameters outside of the layers, which ``stored`` reads from then on."""
        for name in names:
            self.stored.replace(name, self.model.get_parameter(name))

    @override
    def keep_zeros(self, name: str, count: int) -> None:
        """Store a parameter of zeros that the checkpoint lacks."""
        self.stored.replace(name, torch.zeros(count, dtype=self.stored.dtype))
