"""A dense checkpoint on disk whose decoder layers are read one at a time, for what walks through a model in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.checkpoint.stored import StoredModel
from pyprune.probe.streams import LayerRunner


class StoredLayers(LayerRunner):
    """The layers of a checkpoint folder with safetensors: of the layers one is in memory at a time.

    What makes the stream, and the final norm, through which the model's own forward pass sends it, stay in memory; the
    head is never used and has no values.

    Args:
        stored: the checkpoint, read in the dtype and on the device that the layers compute with.

    Raises:
        CheckpointError: a tensor is missing, or its values are not finite.
    """

    def __init__(self, stored: StoredModel) -> None:
        self.stored = stored
        super().__init__(stored.model(), stored.family)
        self._read_ends()

    def _read_ends(self) -> None:
        for name, _ in list(self.model.named_parameters()):
            if self.family.match(name)[0].role in ("embedding", "final_norm"):
                owner, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(owner), last, self._parameter(name))
        for child in self.model.base_model.modules():
            if not any(p.is_meta for p in child.parameters()):
                child.to(self.stored.device)

    @override
    def walking_together(self, batches: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """All of them in one group, so that every layer is read once."""
        return [batches]

    @contextmanager
    @override
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give one decoder layer with its weights, for the time of the block; they are read anew each time."""
        layer = self.layers[index]
        prefix = f"{self.family.layers_path}.{index}."
        for name, _ in list(layer.named_parameters()):
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, self._parameter(prefix + name))
        try:
            yield layer
        finally:
            layer.to("meta")

    @override
    def keep(self, index: int, names: Iterable[str]) -> None:
        """Write what parameters of a layer were changed to where ``stored`` reads them from then on."""
        for name in names:
            values = self.layers[index].get_parameter(name)
            self.stored.replace(f"{self.family.layers_path}.{index}.{name}", values)

    @override
    def keep_zeros(self, name: str, count: int) -> None:
        """Write a parameter that the checkpoint lacks."""
        self.stored.replace(name, torch.zeros(count, dtype=self.stored.dtype))

    def _parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.stored.read(name), requires_grad=False)
