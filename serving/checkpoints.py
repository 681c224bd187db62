"""Read sizes, bytes and architecture of a checkpoint folder without loading a model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyprune.errors import CheckpointError, shown
from pyprune.families import has_unread_sizes
from pyprune.plan import MAX_INDEX
from pyprune.serving.widths import BITS_OF_A_WORD, size_fields

if TYPE_CHECKING:
    from pyprune.checkpoint.shards import TensorFiles

COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
"""Fields of config.json that hold a number; "null" stands for the architecture's default."""
KEYS = re.compile(r"blk\.\d+\.attn_(?:k|qkv)\.weight")
"""Tensors of a GGUF file whose rows are the keys of a token (with ``qkv``, an upper bound)."""
BESIDE_WEIGHTS = re.compile(r".*\.(?:weight|input|output|k|v)_(?:global_scale|scale|zero_point|g_idx|shape)")
"""Tensors that compressed-tensors stores beside weights, which are no parameters of the model."""
PACKED = ".weight_packed"
"""End of the name of a weight whose values are packed into words."""
BESIDE_WORDS = re.compile(r"(.*\.)(?:scales|qzeros|g_idx)")
"""Tensors that GPTQ and AWQ store beside ``qweight``, which are no parameters of the model."""
WORDS = ".qweight"
"""End of the name of a weight whose values GPTQ or AWQ packed into words."""
FORMAT_KEY = "pyprune.quantise"
"""Key of the format that was asked for, in GGUF files of pyprune."""
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.bpe")
CODE = "*.py"
"""Downloaded only where a model may run code of its own."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, read from its config.json and safetensors headers only, or a GGUF file, from its header.

    Attributes:
        folder: where it is; the file itself for GGUF.
        config: config.json as plain data; for GGUF the same facts under the same names.
        parameters: of the model, a tied head once, from its record or else from its files. Weights that
            compressed-tensors, GPTQ or AWQ packed count unpacked, scales do not count. For a GGUF file, its elements.
        bytes: size of the weight files in bytes.
        format: of most of a GGUF file's matrices, such as q8_0; None for a folder.
    """

    folder: Path
    config: dict[str, Any]
    parameters: int
    bytes: int
    format: str | None = None

    @property
    def architecture(self) -> str:
        """Return the name of the class that loads it."""
        return architecture_of(self.config)

    @property
    def is_stock(self) -> bool:
        """Check that plain Transformers and vLLM load it: no architecture of pyprune, and no sizes per layer."""
        return not (self.architecture.startswith("Pruned") or has_unread_sizes(self.config))

    @property
    def max_length(self) -> int | None:
        """The longest sequence in tokens, or None where the config sets no limit."""
        return scaled_positions(self.config) or None

    @property
    def vocab_size(self) -> int:
        """Number of token ids.

        Raises:
            CheckpointError: config.json leaves it to a default.
        """
        if "vocab_size" not in self.config:
            raise CheckpointError(
                f"{self.folder / 'config.json'} does not say vocab_size. Write it in, to draw prompts."
            )
        return int(self.config["vocab_size"])


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the name of the class that loads a model, "unknown" where its config.json names none."""
    return str((config.get("architectures") or ["unknown"])[0])


def scaled_positions(config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence by config.json; 0 if it names none.

    Linear and dynamic rotary scaling make the sequence longer. With other kinds of scaling, and in Gemma 3,
    max_position_embeddings is the length after it.
    """
    positions, (kind, factor) = int(config.get("max_position_embeddings") or 0), rotary_scaling(config)
    if kind not in ("linear", "dynamic") or "gemma3" in str(config.get("model_type")):
        return positions
    if isinstance(factor, (int, float)) and 1 <= factor <= MAX_INDEX:
        return int(positions * factor)
    return positions  # vLLM reports a wrong factor


def rotary_scaling(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (kind, factor) by which config.json scales rotary positions; None for one that is missing or wrong."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, Mapping):
        return None, None
    return rotary.get("rope_type", rotary.get("type")), rotary.get("factor")


@dataclass(frozen=True)
class Hub:
    """How a hub id is downloaded.

    Attributes:
        revision: branch, tag or commit; None = the newest.
        cache: folder that keeps it; None = the hub's own cache.
        token: of an account that may read it; True = the one that is logged in, None = that one where there is one.
        code: whether its Python code is downloaded too.
    """

    revision: str | None = None
    cache: str | None = None
    token: str | bool | None = None
    code: bool = False


def read_checkpoint(source: str | Path, *, verify: bool = True, server: str = "", hub: Hub = Hub()) -> Checkpoint:
    """Read a local checkpoint folder, or a hub id (downloaded: weights as safetensors, config, tokenizer).

    Args:
        source: folder or hub id.
        verify: compare a pyprune checkpoint with its record first (:func:`verify_checkpoint`).
        server: see :func:`verify_checkpoint`.
        hub: how a hub id is downloaded.

    Raises:
        CheckpointError: no such folder or id, no config.json, no safetensors, an adapter next to them, a damaged file,
            or (with ``verify``) one that was changed.
    """
    from pyprune.checkpoint.plausible import refuse_adapter
    from pyprune.checkpoint.shards import weight_files

    folder = _resolve(source, hub)
    refuse_adapter(folder)
    if verify:
        verify_checkpoint(folder, server=server)
    config = _read_config(folder)
    parameters = _parameters(folder, config)
    return Checkpoint(folder, config, parameters, sum(f.stat().st_size for f in weight_files(folder)))


def _parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """Count the model's parameters: from its record or, without one, from its files."""
    from pyprune.checkpoint.record import read_record
    from pyprune.checkpoint.shards import TensorFiles

    tensors = TensorFiles(folder)  # also of a folder with a record: a damaged header is an error
    record = read_record(folder)
    recorded = record.provenance.get("parameters") if record is not None else None
    if recorded is not None:
        return int(recorded)
    names = set(tensors.names())
    if config.get("tie_word_embeddings"):
        names.discard("lm_head.weight")
    facts = config.get("quantization_config")
    bits = facts.get("bits") if isinstance(facts, Mapping) else None
    names = {name for name in names if not _is_auxiliary(name, names, quantised=bool(facts))}
    return sum(math.prod(_shape(tensors, name, bits)) for name in names)


def _is_auxiliary(name: str, names: Collection[str], *, quantised: bool) -> bool:
    """Check for a tensor, such as scales, that only helps to read a parameter; older GPTQ folders have no config."""
    words = BESIDE_WORDS.fullmatch(name)
    beside_words = words is not None and f"{words[1]}{WORDS[1:]}" in names
    return beside_words or (quantised and bool(BESIDE_WEIGHTS.fullmatch(name)))


def _shape(tensors: TensorFiles, name: str, bits: Any) -> tuple[int, ...]:
    """Return the shape of a weight, unpacked if it is packed into words.

    Args:
        tensors: of the folder.
        name: of the weight.
        bits: of a packed value, by config.json.

    Raises:
        CheckpointError: a tensor that describes the packed weight is missing or does not fit it.
    """
    import torch

    if name.endswith(WORDS):
        return _shape_in_words(tensors, name, bits)
    stored, beside = tensors.shape(name), name.removesuffix("_packed") + "_shape"
    if not name.endswith(PACKED):
        return stored
    if beside not in tensors.names() and tensors.dtype(name) == torch.uint8 and len(stored) == 2:
        return stored[0], 2 * stored[1]  # NVFP4 and MXFP4: two values in a byte, without a shape
    shape = tuple(tensors.read(beside).flatten().tolist()) if beside in tensors.names() else ()
    whole = all(type(size) is int for size in shape) and len(shape) == len(stored) == 2
    if not (whole and shape[0] == stored[0] and 1 <= shape[1] <= BITS_OF_A_WORD * stored[1]):
        raise CheckpointError(
            f"{name} of {tensors.folder} has the packed shape {stored}, and {beside}, which says its own, is "
            f"{shape or 'missing'}. The checkpoint is damaged or incomplete; fetch or write it again."
        )
    return shape


def _shape_in_words(tensors: TensorFiles, name: str, bits: Any) -> tuple[int, ...]:
    """Return the shape [inputs, outputs] of a weight that GPTQ packed along its inputs, or AWQ along its outputs.

    Both store scales [groups, outputs]. GPTQ may store the group of every input; without it, ``bits`` gives the inputs.

    Raises:
        CheckpointError: scales are missing, or the tensors do not fit a weight of 2 to 8 bits.
    """
    stem, stored = name.removesuffix(WORDS), tensors.shape(name)
    scales = _shape_or_none(tensors, f"{stem}.scales")
    if len(stored) == 2 and scales is not None and len(scales) == 2:
        groups = _shape_or_none(tensors, f"{stem}.g_idx")
        inputs, outputs = stored[0], scales[1]
        if stored[1] == outputs:
            known = type(bits) is int and bits > 0
            inputs = groups[0] if groups else inputs * BITS_OF_A_WORD // bits if known else 0
        if 2 * inputs * outputs <= BITS_OF_A_WORD * math.prod(stored) <= 8 * inputs * outputs:
            return inputs, outputs
    raise CheckpointError(
        f"{name} of {tensors.folder} has the packed shape {stored} and scales of {scales or 'no shape'}: not 2 to 8 "
        f"bits as GPTQ and AWQ write them (quantization_config has bits {shown(bits)}). Add missing bits there, or "
        "fetch the checkpoint again."
    )


def _shape_or_none(tensors: TensorFiles, name: str) -> tuple[int, ...] | None:
    return tensors.shape(name) if name in tensors.names() else None


def is_gguf(source: str | Path) -> bool:
    """Check whether a source is named like a GGUF file, and not a folder."""
    return Path(source).suffix == ".gguf" and not os.path.isdir(source)


def read_gguf(path: Path) -> Checkpoint:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: the file is missing, truncated or damaged, or holds no language model.
        MissingDependencyError: the package gguf is not installed.
    """
    from pyprune.checkpoint.gguf import read_gguf_header

    header = read_gguf_header(path)
    facts = header.facts
    architecture = str(facts.get("general.architecture"))
    hidden = facts.get(f"{architecture}.embedding_length")
    embedding = header.tensors.get("token_embd.weight", 0)
    if type(hidden) is not int or hidden < 1 or embedding < hidden:
        raise CheckpointError(
            f"{path} does not describe a language model (architecture {shown(architecture)}: it has no embedding of "
            "tokens); give another file."
        )
    keys = [count for name, count in header.tensors.items() if KEYS.fullmatch(name)]
    config = {
        "architectures": [f"llama.cpp {architecture}"],
        "vocab_size": embedding // hidden,
        "hidden_size": hidden,
        "num_hidden_layers": header.blocks,
        "num_attention_heads": 1,
        "head_dim": max(keys, default=hidden * hidden) // hidden,  # all KV heads as one: enough for the cache's size
        "max_position_embeddings": facts.get(f"{architecture}.context_length"),
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
    }
    return Checkpoint(path, config, header.elements, path.stat().st_size, _format(facts))


def _format(facts: Mapping[str, Any]) -> str:
    """Return the format of the matrices: the one in a file of pyprune, else llama.cpp's name of the file's type."""
    from gguf import LlamaFileType

    written_as, file_type = facts.get(FORMAT_KEY), facts.get("general.file_type")
    if isinstance(written_as, str):  # llama.cpp has no name for a file of q4_k alone
        return written_as
    try:
        name = str(LlamaFileType(file_type).name)
    except ValueError:
        return "unknown format"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def refuse_unread_sizes(checkpoint: Checkpoint, source: str | Path) -> None:
    """Refuse sizes per layer in a folder of another program: engines would build a model of equal layers.

    Raises:
        CheckpointError: a stock architecture with ``per_layer_config`` that it does not read.
    """
    if has_unread_sizes(checkpoint.config):
        raise CheckpointError(
            f"{source} has sizes per layer that no stock architecture reads; give a checkpoint that pyprune wrote."
        )


def verify_checkpoint(source: str | Path, *, server: str | None = None) -> None:
    """Verify a local checkpoint by its pruning.json: every file it lists, and that no other file would be loaded.

    In a folder without pruning.json (of another program) an index must name the tensors of its files. A hub id is not
    verified.

    Args:
        source: folder or hub id.
        server: name of a server, one of whose processes verifies for all
            (:func:`pyprune.checkpoint.verify.verify_files`). None = the server of this process, if it has one;
            "" = none.

    Raises:
        CheckpointError: a file, or pruning.json itself, is missing, truncated or changed, or a file is there that
            pruning.json does not list and a loader would read; the message names it.
    """
    from pyprune.checkpoint.record import has_record, read_pruning_json
    from pyprune.checkpoint.verify import INDEX, current_server, is_verification_on, verify_files

    is_verification_on()  # refuses a wrong value of the variable for every folder
    if has_record(source):
        name = current_server() if server is None else server
        verify_files(Path(source), read_pruning_json(source), server=name)
    elif Path(source, INDEX).is_file():
        from pyprune.checkpoint.shards import weight_files

        weight_files(Path(source))  # refuses names outside of the folder


def _resolve(source: str | Path, hub: Hub) -> Path:
    if os.path.isdir(source):
        return Path(source)
    if is_gguf(source):
        raise CheckpointError(
            f"{shown(str(source))} is a GGUF file where a checkpoint folder is needed; llama.cpp runs it "
            "(pyprune bench --engine llamacpp), and --gguf-file reads one inside a folder."
        )
    if isinstance(source, Path):  # has lost the ./ that distinguishes a folder from a hub id
        raise CheckpointError(f"There is no folder {shown(str(source))}. (A hub id is given as text, not as a Path.)")
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(f"{shown(str(source))} is neither a folder nor a hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    from pyprune.runtime.limits import one_line

    try:
        place: dict[str, Any] = {"revision": hub.revision, "cache_dir": hub.cache, "token": hub.token}
        patterns = [*DOWNLOADED, *([CODE] if hub.code else [])]
        return Path(snapshot_download(str(source), allow_patterns=patterns, **place))
    except Exception as error:
        raise CheckpointError(
            f"{shown(str(source))} is no local folder, and the hub did not give it: {one_line(str(error))}. Check "
            "the name."
        ) from error


def _is_own_value(name: str, value: Any, sizes: Collection[str]) -> bool:
    """Check a value of ``per_layer_config``; names that pyprune does not read may have any."""
    if name == "skip":
        return isinstance(value, list) and all(isinstance(block, str) for block in value)
    return name not in sizes or (type(value) is int and value >= 0)


def _read_config(folder: Path) -> dict[str, Any]:
    from pyprune.checkpoint.plausible import read_config

    whole = read_config(folder)
    text = whole.get("pruned_config") or whole.get("text_config") or {}
    config = {**text, **whole} if isinstance(text, dict) else whole
    path = folder / "config.json"
    if "vocab_size" not in config and not (text and isinstance(text, dict)):  # Gemma 3 leaves it to its default
        raise CheckpointError(f"{path} does not describe a language model (it has no vocab_size); give another folder.")
    refuse_damaged(config, path)
    return config


def refuse_damaged(config: Mapping[str, Any], path: Path) -> None:
    """Refuse values of a config.json from which no sizes can be read.

    Raises:
        CheckpointError: the message names the value.
    """
    per_layer = config.get("per_layer_config") or {}
    if not isinstance(per_layer, dict) or not all(isinstance(own, dict) for own in per_layer.values()):
        raise CheckpointError(
            f"{path} is damaged: its per_layer_config is no mapping from layers to values; fetch it again."
        )
    sizes = size_fields()
    for layer, name, value in ((layer, *item) for layer, own in per_layer.items() for item in own.items()):
        if not _is_own_value(name, value, sizes):
            raise CheckpointError(
                f"{path} is damaged: in its per_layer_config, {name} of layer {shown(layer)} is {shown(value)}; "
                "fetch it again."
            )
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"{path} is damaged: layer_types is {shown(kinds)}, not a list of names; fetch it again.")
    for name in COUNTS:
        value = config.get(name)
        wrong = type(value) is not int or value < 1
        if wrong and (value is not None or (name == "vocab_size" and name in config)):
            raise CheckpointError(
                f"{path} is damaged: {name} is {shown(value)}, not a whole number from 1; fetch it again."
            )
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path} is damaged: architectures is {shown(names)}, not a list of names; fetch it again."
        )
