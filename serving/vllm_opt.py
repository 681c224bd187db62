"""The pruned OPT for vLLM: every layer reads its own heads and FFN width, and the hidden size may be sliced.

On top of vLLM's own OPT, whose attention derives head_dim from the hidden size and whose LayerNorm divides by the
stored size: both are given by the configuration here. Imported by vLLM only when a checkpoint names the architecture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.opt import OPTAttention, OPTForCausalLM
from vllm.model_executor.models.utils import extract_layer_index, make_layers, maybe_prefix

from pyprune.modeling.layers import VirtualLayerNorm
from pyprune.serving.checkpoints import verify_checkpoint

LAYER_NORM_EPS = 1e-5
"""OPT's configuration holds no epsilon: every implementation uses this default of torch's LayerNorm."""


class PrunedOPTAttention(OPTAttention):
    """OPT attention whose heads together may be narrower or wider than the stream."""

    def __init__(self, config: Any, cache_config: CacheConfig | None, quant_config: Any, prefix: str) -> None:
        heads, head_dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        width, bias = heads * head_dim, config.enable_bias
        super().__init__(width, heads, bias, cache_config, quant_config, prefix)
        if width != hidden:
            # The stock constructor knows one size; what it built reads and writes the heads' width instead.
            options = {"bias": bias, "quant_config": quant_config}
            self.qkv_proj = QKVParallelLinear(hidden, head_dim, heads, prefix=f"{prefix}.qkv_proj", **options)
            self.out_proj = RowParallelLinear(width, hidden, prefix=f"{prefix}.out_proj", **options)


class PrunedOPTDecoderLayer(nn.Module):
    """An OPT layer at the sizes of its own index; a sub-block that was removed is not built at all."""

    def __init__(self, config: Any, cache_config: CacheConfig | None, quant_config: Any, prefix: str) -> None:
        super().__init__()
        own = config.layer_config(extract_layer_index(prefix))
        skip = getattr(own, "skip", ())
        self.attends, self.feeds = "attention" not in skip, "mlp" not in skip
        self.do_layer_norm_before = own.do_layer_norm_before
        if self.attends:
            self.self_attn = PrunedOPTAttention(own, cache_config, quant_config, f"{prefix}.self_attn")
            self.self_attn_layer_norm = _layer_norm(own)
        if self.feeds:
            options = {"bias": own.enable_bias, "quant_config": quant_config}
            self.fc1 = ColumnParallelLinear(own.hidden_size, own.ffn_dim, prefix=f"{prefix}.fc1", **options)
            self.activation_fn = get_act_fn(own.activation_function)
            self.fc2 = RowParallelLinear(own.ffn_dim, own.hidden_size, prefix=f"{prefix}.fc2", **options)
            self.final_layer_norm = _layer_norm(own)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Add what is left of the layer to the stream, [tokens, hidden] -> [tokens, hidden]."""
        if self.attends:
            hidden_states = self._add(self.self_attn_layer_norm, self.self_attn, hidden_states)
        if self.feeds:
            hidden_states = self._add(self.final_layer_norm, self._feed_forward, hidden_states)
        return hidden_states

    def _add(self, norm: nn.Module, block: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        """Every OPT but the 350M one normalises before the block, that one after it."""
        if self.do_layer_norm_before:
            return stream + block(norm(stream))
        return norm(stream + block(stream))  # type: ignore[no-any-return]

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        inner, _ = self.fc1(hidden_states)
        output, _ = self.fc2(self.activation_fn(inner))
        return output  # type: ignore[no-any-return]


def _layer_norm(config: Any) -> nn.Module:
    """Return OPT's LayerNorm, or, where channels of the stream were removed, the one that divides by the dense size."""
    size, affine = config.hidden_size, config.layer_norm_elementwise_affine
    norm_size = getattr(config, "norm_size", None)
    if norm_size is None:
        return LayerNorm(size, LAYER_NORM_EPS, elementwise_affine=affine)  # type: ignore[no-any-return]
    return VirtualLayerNorm(size, norm_size, LAYER_NORM_EPS, affine=affine)


@contextmanager
def _without_layers(model_config: ModelConfig) -> Iterator[None]:
    """Let vLLM's constructors see a model of no layers; afterwards the configuration is the whole one again."""
    whole = model_config.hf_config
    stub = copy.deepcopy(whole)
    stub.per_layer_config = None
    stub.num_hidden_layers = 0
    model_config.hf_config = stub
    try:
        yield
    finally:
        model_config.hf_config = whole


class PrunedOPTForCausalLM(OPTForCausalLM):
    """OPT with per-layer sizes, a decoupled head_dim and a LayerNorm over a virtual size.

    Raises:
        CheckpointError: the folder differs from what was written (see :func:`verify_checkpoint`).
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        verify_checkpoint(model_config.model)
        with _without_layers(model_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.config = config = model_config.hf_config
        self.model.decoder.config = config
        self._build_layers(config, vllm_config, maybe_prefix(prefix, "model.decoder"))

    def _build_layers(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        decoder = self.model.decoder
        decoder.start_layer, decoder.end_layer, decoder.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: PrunedOPTDecoderLayer(config, vllm_config.cache_config, vllm_config.quant_config, prefix),
            prefix=f"{prefix}.layers",
        )
        if decoder.final_layer_norm is not None:
            decoder.final_layer_norm = _layer_norm(config)
