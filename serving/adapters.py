"""Compare the adapters (LoRA) of a server with the model: vLLM 0.32 accepts those of another model without an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pyprune.runtime.files import parse_json

FILE = "adapter_model.safetensors"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
"""Name of an adapter's factor in PEFT's files: the module, and A [rank, inputs] or B [outputs, rank]."""
Shapes = Mapping[str, tuple[int, ...]]


def adapter_folders(modules: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each local adapter.

    Args:
        modules: values of ``--lora-modules``: name=path, or a JSON object with both.
    """
    for value in modules:
        try:
            fields = parse_json(value) if value.lstrip().startswith("{") else {}
        except ValueError:
            continue  # vLLM says what is wrong with it
        name, _, path = value.partition("=")
        name, path = (str(fields.get("name")), str(fields.get("path"))) if fields else (name, path)
        if (Path(path) / FILE).is_file():
            yield name, Path(path)


def foreign_adapter(model: Path, modules: Iterable[str]) -> str | None:
    """Explain why an adapter was trained on another model than this one; None where none was.

    Args:
        model: folder of the checkpoint that is served.
        modules: see :func:`adapter_folders`.

    Raises:
        CheckpointError: a header is damaged.
    """
    from pyprune.checkpoint.shards import TensorFiles, has_safetensors, read_header

    adapters = list(adapter_folders(modules))
    if not adapters or not has_safetensors(model):
        return None
    files = TensorFiles(model)
    weights = {name: files.shape(name) for name in files.names()}
    for name, folder in adapters:
        adapter = {place.entry.name: place.entry.shape for place in read_header(folder / FILE)}
        if reason := _difference(adapter, weights):
            return (
                f"the adapter {name} in {folder} was trained on another model: {reason}. Train it on this checkpoint."
            )
    return None


def _difference(adapter: Shapes, weights: Shapes) -> str | None:
    layers, model_layers = _count_layers(adapter), _count_layers(weights)
    if layers > model_layers:
        return f"it has layers up to number {layers - 1}, and this model has {model_layers}, numbered from 0"
    for name, shape in adapter.items():
        factor = _FACTOR.fullmatch(name)
        weight = weights.get(f"{factor[1]}.weight") if factor else None
        if factor is None or weight is None or len(shape) != 2 or len(weight) != 2:
            continue
        dim, verb = (1, "reads") if factor[2] == "A" else (0, "writes")
        if shape[dim] != weight[dim]:
            return f"{factor[1]} {verb} {shape[dim]} channels in it and {weight[dim]} here"
    return None


def _count_layers(names: Iterable[str]) -> int:
    return max((int(layer[1]) + 1 for layer in map(_LAYER.search, names) if layer), default=0)
