"""What a checkpoint folder says about itself without loading a model: sizes, bytes, architecture."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyprune.errors import CheckpointError

HEADER_LIMIT_BYTES = 100_000_000
"""The safetensors format's own limit on its header; a larger length field is a damaged file."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, read from its config.json and safetensors headers only.

    Attributes:
        folder: where it is.
        config: config.json as plain data.
        parameters: number of stored parameters (a tied head is stored, and counted, once).
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


def read_checkpoint(source: str | Path) -> Checkpoint:
    """Read a local checkpoint folder, or a hub id (downloaded: weights as safetensors, config, tokenizer).

    Raises:
        CheckpointError: no such folder or id, no config.json, no safetensors, or a damaged file.
    """
    folder = _resolve(source)
    config = _read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no .safetensors file. Only safetensors checkpoints are served; convert others with "
            "`pyprune export`."
        )
    return Checkpoint(
        folder, config, sum(_count_parameters(file) for file in files), sum(f.stat().st_size for f in files)
    )


def _resolve(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise CheckpointError(f"{source} is neither a folder nor a hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"]))
    except Exception as error:
        raise CheckpointError(f"{source} is not a local folder, and the hub did not give it: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}. Is {folder} a checkpoint folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); the checkpoint is damaged.") from error
    if not isinstance(config, dict) or "vocab_size" not in {**config, **config.get("text_config", {})}:
        raise CheckpointError(f"{path} does not describe a language model (it has no vocab_size).")
    return {**config.get("text_config", {}), **config}


def _count_parameters(path: Path) -> int:
    """Sum the shapes in a safetensors header; check that the file is as long as the header says."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= HEADER_LIMIT_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file (its header length is {length}).")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged safetensors header ({error}).") from error
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if path.stat().st_size != end:
        raise CheckpointError(f"{path} is {path.stat().st_size} bytes, its header says {end}: it is truncated.")
    return sum(math.prod(entry["shape"]) for entry in tensors)
