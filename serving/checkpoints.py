"""What a checkpoint folder says about itself without loading a model: sizes, bytes, architecture."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyprune.errors import CheckpointError, shown

COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
"""What is read from config.json as a number; "null" stands for the architecture's own value."""
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, read from its config.json and safetensors headers only.

    Attributes:
        folder: where it is.
        config: config.json as plain data.
        parameters: number of stored parameters (a tied head is counted once, also where a file repeats it).
        bytes: size of the weight files in bytes.
    """

    folder: Path
    config: dict[str, Any]
    parameters: int
    bytes: int

    @property
    def architecture(self) -> str:
        """The class name that loads it."""
        names = self.config.get("architectures") or ["unknown"]
        return str(names[0])

    @property
    def max_length(self) -> int | None:
        """The longest sequence in tokens, or None where the config sets no limit."""
        value = self.config.get("max_position_embeddings")
        return int(value) if value else None

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.config["vocab_size"])


def read_checkpoint(source: str | Path, *, verify: bool = True) -> Checkpoint:
    """Read a local checkpoint folder, or a hub id (downloaded: weights as safetensors, config, tokenizer).

    Args:
        source: folder or hub id.
        verify: compare a pyprune checkpoint with its record first (:func:`verify_checkpoint`).

    Raises:
        CheckpointError: no such folder or id, no config.json, no safetensors, an adapter next to them, a damaged file,
            or (with ``verify``) one that is not as it was written.
    """
    from pyprune.checkpoint.plausible import refuse_adapter
    from pyprune.checkpoint.shards import read_header, weight_files

    folder = _resolve(source)
    refuse_adapter(folder)
    if verify:
        verify_checkpoint(folder)
    config = _read_config(folder)
    files = weight_files(folder)
    entries = [place.entry for file in files for place in read_header(file)]
    counts = {entry.name: math.prod(entry.shape) for entry in entries}
    if config.get("tie_word_embeddings"):
        counts.pop("lm_head.weight", None)
    return Checkpoint(folder, config, sum(counts.values()), sum(f.stat().st_size for f in files))


def verify_checkpoint(source: str | Path) -> None:
    """Compare a local checkpoint with its pruning.json: every file it lists, and no other that would be loaded.

    A folder without pruning.json (another program wrote it) and a hub id have nothing to be compared with.

    Raises:
        CheckpointError: a file, or pruning.json itself, is missing, truncated or changed, or a file is there that
            pruning.json does not list and a loader would read; the message names it.
    """
    from pyprune.checkpoint.record import has_record, read_pruning_json

    if has_record(source):
        read_pruning_json(source, verify_files=True)


def _resolve(source: str | Path) -> Path:
    if os.path.isdir(source):
        return Path(source)
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise CheckpointError(f"{shown(str(source))} is neither a folder nor a hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    from pyprune.runtime.limits import one_line

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(DOWNLOADED)))
    except Exception as error:
        raise CheckpointError(
            f"{shown(str(source))} is not a local folder, and the hub did not give it: {one_line(str(error))}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    from pyprune.checkpoint.plausible import read_config

    whole = read_config(folder)
    text = whole.get("text_config") or {}
    config = {**text, **whole} if isinstance(text, dict) else whole
    path = folder / "config.json"
    if "vocab_size" not in config:
        raise CheckpointError(f"{path} does not describe a language model (it has no vocab_size).")
    for name in COUNTS:
        value = config.get(name)
        wrong = type(value) is not int or value < 1
        if wrong and (value is not None or name == "vocab_size"):
            raise CheckpointError(f"{path} is damaged: {name} is {shown(value)}, not a whole number of at least 1.")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path} is damaged: architectures is {shown(names)}, not a list of class names.")
    return config
