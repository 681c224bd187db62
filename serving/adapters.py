"""Adapters (LoRA) that a server is given, compared with the model: vLLM takes those of another model without a word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pyprune.runtime.files import parse_json

FILE = "adapter_model.safetensors"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
"""Name of an adapter's factor in PEFT's files -> the module, and A [rank, inputs] or B [outputs, rank]."""
Shapes = Mapping[str, tuple[int, ...]]


def adapter_folders(modules: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Name and folder of each adapter that lies here.

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


def why_not_of_this_model(model: Path, modules: Iterable[str]) -> str:
    """Why an adapter was trained on another model than the one that it is for; empty where none was.

    Args:
        model: folder of the checkpoint that is served.
        modules: see :func:`adapter_folders`.

    Raises:
        CheckpointError: a header is damaged.
    """
    from pyprune.checkpoint.shards import TensorFiles, has_safetensors, read_header

    given = list(adapter_folders(modules))
    if not given or not has_safetensors(model):
        return ""
    files = TensorFiles(model)
    weights = {name: files.shape(name) for name in files.names()}
    for name, folder in given:
        adapter = {place.entry.name: place.entry.shape for place in read_header(folder / FILE)}
        if reason := _difference(adapter, weights):
            return (
                f"the adapter {name} in {folder} was trained on another model: {reason}. Train it on this checkpoint."
            )
    return ""


def _difference(adapter: Shapes, weights: Shapes) -> str:
    reached, there = _layers(adapter), _layers(weights)
    if reached > there:
        return f"it has layers up to number {reached - 1}, and this model has {there}, numbered from 0"
    for name, shape in adapter.items():
        found = _FACTOR.fullmatch(name)
        weight = weights.get(f"{found[1]}.weight") if found else None
        if found is None or weight is None or len(shape) != 2 or len(weight) != 2:
            continue
        own, wanted, what = (shape[1], weight[1], "reads") if found[2] == "A" else (shape[0], weight[0], "writes")
        if own != wanted:
            return f"{found[1]} {what} {own} channels in it and {wanted} here"
    return ""


def _layers(names: Iterable[str]) -> int:
    return max((int(found[1]) + 1 for found in map(_LAYER.search, names) if found), default=0)
