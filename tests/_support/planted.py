"""Structures of known importance, written by tensor name and index, without the library's own tables."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

OUTPUT = {"opt": "self_attn.out_proj", "phi": "self_attn.dense"}
UP = {"opt": ("fc1",), "phi": ("mlp.fc1",)}
DOWN = {"opt": "fc2", "phi": "mlp.fc2"}


def layer_of(model: PreTrainedModel, index: int) -> nn.Module:
    decoder = model.model.decoder if model.config.model_type == "opt" else model.model
    return decoder.layers[index]


def head_sizes(model: PreTrainedModel) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim), read off the attention itself."""
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    attention = layer_of(model, 0).self_attn
    return heads, kv_heads, attention.k_proj.weight.shape[0] // kv_heads


def _rows(head: int, width: int) -> slice:
    return slice(head * width, (head + 1) * width)


@torch.no_grad()
def fade_query_head(model: PreTrainedModel, layer: int, head: int, factor: float) -> None:
    """Scale what one query head owns: its rows of q_proj and its columns of the output projection."""
    kind = model.config.model_type
    width = head_sizes(model)[2]
    block = layer_of(model, layer)
    output = block.get_submodule(OUTPUT.get(kind, "self_attn.o_proj"))
    output.weight[:, _rows(head, width)] *= factor
    query = block.self_attn.q_proj
    query.weight[_rows(head, width)] *= factor
    if query.bias is not None:
        query.bias[_rows(head, width)] *= factor


@torch.no_grad()
def fade_kv_group(model: PreTrainedModel, layer: int, kv_head: int, factor: float) -> None:
    """Scale a KV head and the query heads that attention lets read it (repeat_kv: consecutive ones)."""
    heads, kv_heads, width = head_sizes(model)
    block = layer_of(model, layer)
    for projection in (block.self_attn.k_proj, block.self_attn.v_proj):
        projection.weight[_rows(kv_head, width)] *= factor
        if projection.bias is not None:
            projection.bias[_rows(kv_head, width)] *= factor
    readers = torch.arange(kv_heads).repeat_interleave(heads // kv_heads)
    for head in (readers == kv_head).nonzero().flatten().tolist():
        fade_query_head(model, layer, head, factor)


@torch.no_grad()
def fade_ffn_channel(model: PreTrainedModel, layer: int, channel: int, factor: float) -> None:
    """Scale one FFN channel: its rows of gate and up, its column of down, its biases."""
    kind = model.config.model_type
    block = layer_of(model, layer)
    for name in UP.get(kind, ("mlp.gate_proj", "mlp.up_proj")):
        into = block.get_submodule(name)
        into.weight[channel] *= factor
        if into.bias is not None:
            into.bias[channel] *= factor
    block.get_submodule(DOWN.get(kind, "mlp.down_proj")).weight[:, channel] *= factor
