"""The pruned OPT for vLLM: every layer has separate heads and FFN width, and the hidden size may be sliced.

vLLM's OPT derives head_dim from the hidden size, and its LayerNorm divides by the stored size: here the configuration
names both. Imported by vLLM only when a checkpoint names the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.opt import (
    OPTAttention,
    OPTDecoder,
    OPTForCausalLM,
    OPTLearnedPositionalEmbedding,
    OPTModel,
)
from vllm.model_executor.models.utils import (
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)

from pyprune.serving.vllm.layers import layer_norm
from pyprune.serving.vllm.model import check_served

LAYER_NORM_EPS = 1e-5
"""Default of torch's LayerNorm, which every implementation uses: OPT's configuration holds no epsilon."""


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
    """An OPT layer at the sizes of its index, without the sub-blocks that were removed."""

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
        """Add a block; every OPT but the 350M one normalises before the block, that one after it."""
        if self.do_layer_norm_before:
            return stream + block(norm(stream))
        return norm(stream + block(stream))  # type: ignore[no-any-return]

    def _feed_forward(self, hidden_states: Tensor) -> Tensor:
        inner, _ = self.fc1(hidden_states)
        output, _ = self.fc2(self.activation_fn(inner))
        return output  # type: ignore[no-any-return]


def _layer_norm(config: Any) -> nn.Module:
    return layer_norm(config, LAYER_NORM_EPS, affine=config.layer_norm_elementwise_affine)


class PrunedOPTDecoder(OPTDecoder):
    """vLLM's OPT decoder with sizes per layer; vLLM's constructor builds layers of one size."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        nn.Module.__init__(self)
        self.config = config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.word_embed_proj_dim)
        self.embed_positions = OPTLearnedPositionalEmbedding(config.max_position_embeddings, config.hidden_size)
        self.project_in = self.project_out = None
        if config.word_embed_proj_dim != config.hidden_size:
            options: dict[str, Any] = {"bias": False, "quant_config": vllm_config.quant_config}
            outer, inner = config.word_embed_proj_dim, config.hidden_size
            self.project_in = ReplicatedLinear(outer, inner, prefix=f"{prefix}.project_in", **options)
            self.project_out = ReplicatedLinear(inner, outer, prefix=f"{prefix}.project_out", **options)
        ends_with_norm = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = _layer_norm(config) if ends_with_norm else None
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: PrunedOPTDecoderLayer(config, vllm_config.cache_config, vllm_config.quant_config, prefix),
            prefix=f"{prefix}.layers",
        )


@support_torch_compile
class PrunedOPTModel(OPTModel):
    """vLLM's OPT model around the decoder above."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.decoder = PrunedOPTDecoder(vllm_config, f"{prefix}.decoder")
        hidden = vllm_config.model_config.hf_config.hidden_size
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(["hidden_states"], hidden)


class PrunedOPTForCausalLM(OPTForCausalLM):
    """OPT with per-layer sizes, a decoupled head_dim and a LayerNorm over a virtual size.

    Raises:
        CheckpointError, ConfigError: see :func:`pyprune.serving.vllm.model.check_served`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served(vllm_config)
        nn.Module.__init__(self)
        self.config = config = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.model = PrunedOPTModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        head = ParallelLMHead(config.vocab_size, config.word_embed_proj_dim, prefix=maybe_prefix(prefix, "lm_head"))
        self.lm_head = head.tie_weights(self.model.decoder.embed_tokens) if config.tie_word_embeddings else head
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
