"""A small GGUF file of the tiny model, and where the parts of its header lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests._support.models import VOCAB, tiny_model
from tests._support.tokenizer import tiny_tokenizer

SIZES: dict[str, int] = {
    "block_count": 4,
    "context_length": 512,
    "embedding_length": 48,
    "feed_forward_length": 40,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 8,
    "vocab_size": VOCAB,
}


def write_gguf(path: Path, sizes: Mapping[str, Any] = SIZES, without: str = "", tokens: int = VOCAB) -> None:
    """Write the tiny llama as GGUF in float32.

    Args:
        path: the file.
        sizes: what the header says of it.
        without: a tensor that is left out.
        tokens: how many words its vocabulary has.
    """
    model = tiny_model("llama")
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in sizes.items():
        add = {int: writer.add_int64, float: writer.add_float64, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        if isinstance(value, int) and 0 <= value < 2**32:
            add = writer.add_uint32
        add(f"llama.{name}", value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, tokens)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored != without:
            writer.add_tensor(stored, _rotated(model.config, name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(name, value)
    else:
        {float: writer.add_float64, str: writer.add_string, list: writer.add_array}[type(value)](name, value)


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: int) -> None:
    vocabulary = tiny_tokenizer().get_vocab()
    words = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    words += [f"word {number}" for number in range(VOCAB - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words[:tokens])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _rotated(config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """The rows of queries and keys in the order that llama.cpp reads."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
