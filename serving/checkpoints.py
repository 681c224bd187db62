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


def read_checkpoint(source: str | Path) -> Checkpoint:
    """Read a local checkpoint folder, or a hub id (downloaded: weights as safetensors, config, tokenizer).

    Raises:
        CheckpointError: no such folder or id, no config.json, no safetensors, or a damaged file.
    """
    folder = _resolve(source)
    config = _read_config(folder)
    files = _weight_files(folder)
    counts: dict[str, int] = {}
    for file in files:
        counts |= _tensor_sizes(file)
    if config.get("tie_word_embeddings"):
        counts.pop("lm_head.weight", None)
    return Checkpoint(folder, config, sum(counts.values()), sum(f.stat().st_size for f in files))


def verify_checkpoint(source: str | Path) -> None:
    """Compare a local checkpoint with the SHA-256 that its pruning.json holds of every file.

    A folder without pruning.json (another program wrote it) and a hub id have nothing to be compared with.

    Raises:
        CheckpointError: a file, or pruning.json itself, is missing, truncated or changed; the message names it.
    """
    from pyprune.record import RECORD_NAME, read_pruning_json

    if (Path(source) / RECORD_NAME).is_file():
        read_pruning_json(source, verify_files=True)


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: hub repositories may hold the same weights in another layout beside them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor {index.name}. Only safetensors checkpoints are served; "
            "convert others with `pyprune export`."
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r}); fetch or write the checkpoint again.") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {index.name} names; fetch it again.")
    return [folder / name for name in names]


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


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Number of elements of each tensor in a safetensors header; check that the file is as long as the header says."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= HEADER_LIMIT_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file (its header length is {length}).")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged safetensors header ({error}).") from error
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if path.stat().st_size != end:
        raise CheckpointError(f"{path} is {path.stat().st_size} bytes, its header says {end}: it is truncated.")
    return {name: math.prod(entry["shape"]) for name, entry in tensors.items()}
