"""Tiny GGUF files: of a LLaMA model, whole or with a lie in it, and of any model with the metadata that is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS = 32, 16, 40, 4, 2


def write_gguf(
    path: Path,
    *,
    blocks: int = 2,
    claimed: int | None = None,
    extra: Sequence[str] = (),
    merges: Sequence[str] = ("a b",),
    hidden: int = HIDDEN,
) -> None:
    """Write the file.

    Args:
        path: of the file.
        blocks: decoder blocks that it holds.
        claimed: what its ``block_count`` says; None = the truth.
        extra: names of further tensors.
        merges: of the tokenizer, whose vocabulary is a, b, ab, t0, t1, ...
        hidden: what its ``embedding_length`` says.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(blocks if claimed is None else claimed)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(VOCAB - 3))])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    values = np.random.default_rng(0)
    for name, shape in (_shapes(blocks) | dict.fromkeys(extra, (4,))).items():
        writer.add_tensor(name, values.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(blocks: int) -> dict[str, tuple[int, ...]]:
    narrow = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), "output.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    for i in range(blocks):
        shapes |= {f"blk.{i}.{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}.weight": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{name}.weight": (narrow, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}.weight": (FFN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down.weight"] = (HIDDEN, FFN)
    return shapes


def write_model_as_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Write a model as llama.cpp's converter does where that changes no weight (not LLaMA's, whose heads it turns).

    Args:
        model: in float32.
        path: of the file.
        architecture: llama.cpp's name.
        keys: metadata other than sizes, without the architecture's name; names with a colon are written as they are
            behind it.
        tensors: further tensors, of one dimension.
    """
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in {**sizes, **keys}.items():
        add[type(value)](key[1:] if key.startswith(":") else f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(config.vocab_size - 3))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    state = dict(model.named_parameters())  # a tied head once
    for name, tensor in state.items():
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), tensor.detach().numpy())
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
