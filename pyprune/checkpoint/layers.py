"""A dense checkpoint on disk whose decoder layers are read one at a time, for what walks through a model in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from typing_extensions import override

from pyprune.checkpoint.load import read_dense_config
from pyprune.checkpoint.shards import TensorFiles, check_finite
from pyprune.errors import CheckpointError
from pyprune.families import family_for
from pyprune.probe.streams import LayerRunner


class StoredLayers(LayerRunner):
    """The layers of a checkpoint folder with safetensors: embeddings stay in memory, of the layers one at a time.

    Args:
        folder: a dense checkpoint.
        dtype: of the weights in memory.
        device: where they are computed with.

    Raises:
        CheckpointError: the folder holds no safetensors, a tensor is missing, or its values are not finite.
        UnsupportedModelError: a model type that pyprune does not know.
    """

    def __init__(self, folder: Path | str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        config, _ = read_dense_config(folder)
        config.dtype = dtype
        self.folder = Path(folder)
        self.files = TensorFiles(self.folder)
        self.dtype = dtype
        self.device = torch.device(device)
        with no_init_weights():  # memory that nobody writes is not resident
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config)).eval()
        super().__init__(model, family_for(config))
        for layer in self.layers:
            layer.to("meta")
        self._read_embeddings()

    def _read_embeddings(self) -> None:
        """Read what makes the stream; the head and the final norm are never used, and stay without values."""
        for name, parameter in self.model.named_parameters():
            row, _ = self.family.match(name)
            if row.role == "embedding":
                parameter.data = self._tensor(name, parameter)
        for child in self.model.base_model.modules():
            if not any(p.is_meta for p in child.parameters()):
                child.to(self.device)

    @contextmanager
    @override
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Give one decoder layer with its weights, for the time of the block; they are read anew each time."""
        layer = self.layers[index]
        prefix = f"{self.family.layers_path}.{index}."
        for name, parameter in list(layer.named_parameters()):
            owner, _, last = name.rpartition(".")
            values = nn.Parameter(self._tensor(prefix + name, parameter), requires_grad=False)
            setattr(layer.get_submodule(owner), last, values)
        try:
            yield layer
        finally:
            layer.to("meta")

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        """A tensor by its name in the model; some checkpoints hold the decoder without the causal LM around it."""
        names = [n for n in (name, name.removeprefix("model.")) if n in self.files.names()]
        if not names or self.files.shape(names[0]) != tuple(like.shape):
            found = f"has the shape {self.files.shape(names[0])}" if names else "is missing"
            raise CheckpointError(
                f"{name} of {self.folder} {found}; by config.json it is {tuple(like.shape)}. The checkpoint is "
                "incomplete or its config.json was changed; fetch it again."
            )
        tensor = self.files.read(names[0])
        check_finite(name, tensor, self.folder)
        # A copy: what is mapped from the file would change with it.
        return tensor.to(self.device, self.dtype, copy=True)
