"""Decoder layers for vLLM with sizes per layer, and the embedding, norm and head of each family.

A family's table names its layer (``vllm_layer``). Each of them takes the residual stream in two parts, as vLLM's LLaMA
hands it on, and does not build a sub-block that was removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.gemma3 import Gemma3Attention, Gemma3MLP
from vllm.model_executor.models.granite import GraniteAttention
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index

from pyprune.modeling.layers import VirtualLayerNorm


class NoAttention(nn.Module):
    """Stands in while a layer without attention is built: no weights, and no key-value cache is registered."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


class NormedAttention(LlamaAttention):
    """LLaMA attention that normalises queries and keys before the rotation; subclasses define how."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, *self.normalise(q, k))
        output, _ = self.o_proj(self.attn(q, k, v))
        return output  # type: ignore[no-any-return]

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise this rank's queries [tokens, heads x head_dim] and keys [tokens, KV heads x head_dim]."""
        raise NotImplementedError


class HeadNormedAttention(NormedAttention):
    """An RMSNorm over every query and key head (Qwen3)."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`NormedAttention.normalise`."""
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).flatten(-2)
        return q, self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim))).flatten(-2)


class WidthNormedAttention(NormedAttention):
    """An RMSNorm over all queries of a layer and one over all its keys (OLMo 2), whichever ranks hold them.

    Every rank has as many heads as every other, and heads that several ranks hold are held by equally many. So the mean
    of squares over a whole projection is the mean of the ranks' own means: two numbers for each token are exchanged.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        self.eps: float = config.rms_norm_eps
        self.ranks: int = get_tensor_model_parallel_world_size()
        self.q_norm = _NormWeight(self.total_num_heads, self.head_dim)
        self.k_norm = _NormWeight(self.total_num_kv_heads, self.head_dim)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`NormedAttention.normalise`. The mean and what it divides are float32."""
        squares = torch.stack([part.float().square().mean(-1) for part in (q, k)])
        if self.ranks > 1:
            # Flat, because a fused kernel for GPUs takes two dimensions for activations of 16 bits.
            squares = tensor_model_parallel_all_reduce(squares.flatten()).view_as(squares) / self.ranks
        q_scale, k_scale = (squares + self.eps).rsqrt().unsqueeze(-1)
        return self.q_norm(q, q_scale), self.k_norm(k, k_scale)


class _NormWeight(nn.Module):
    """The weight of a norm over all heads, as far as this rank holds those."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        size = max(1, heads // ranks) * head_dim
        self.first = rank * heads // ranks * head_dim  # with fewer heads than ranks, neighbours hold the same one
        self.weight = nn.Parameter(torch.ones(size))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Take this rank's part of the weight [heads x head_dim]; vLLM calls it, on a reload with ``param`` by name."""
        param.data.copy_(loaded_weight.narrow(0, self.first, param.shape[0]))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """[tokens, this rank's heads x head_dim], float32 [tokens, 1] -> scaled, in the dtype of ``x``."""
        return (self.weight * (x.float() * scale)).to(x.dtype)


class Surroundings:
    """The parts of a family before its first layer and after its last; by default those of vLLM's LLaMA.

    Attributes:
        model_class: embedding, layers and last norm.
        head_bias: the head adds a bias to the logits.
        embedding_modules: modules that vLLM prepares for adapters in addition to the projections.
    """

    model_class: type[LlamaModel] = LlamaModel
    head_bias = False
    embedding_modules: Mapping[str, str] = getattr(LlamaForCausalLM, "embedding_modules", {})

    @staticmethod
    def logits_options(config: Any) -> dict[str, Any]:
        """Return the options of vLLM's logits processor; {} = the logits are unchanged."""
        return {}


class PrunedDecoderLayer(Surroundings, LlamaDecoderLayer):
    """A LLaMA layer at the sizes of its index, without the sub-blocks that were removed."""

    attention_class: type[nn.Module] = LlamaAttention

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        whole = config or vllm_config.model_config.hf_config
        own = self.adapt(whole.layer_config(extract_layer_index(prefix)))
        skip = getattr(own, "skip", ())
        self.attends, self.feeds = "attention" not in skip, "mlp" not in skip
        attention = self.attention_class if self.attends else NoAttention
        super().__init__(vllm_config, prefix, own, attn_layer_type=attention)
        if getattr(whole, "output_bias", False):
            _give_output_biases(self, own, vllm_config, prefix)
        if not self.attends:
            del self.self_attn, self.input_layernorm
        if not self.feeds:
            del self.mlp, self.post_attention_layernorm

    def adapt(self, config: Any) -> Any:
        """Return the layer's configuration under the names that vLLM's LLaMA layer reads."""
        return config

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        if self.attends:
            hidden_states, residual = _normalise(self.input_layernorm, hidden_states, residual)
            hidden_states = self.scale_output(self.self_attn(positions=positions, hidden_states=hidden_states))
        if self.feeds:
            hidden_states, residual = _normalise(self.post_attention_layernorm, hidden_states, residual)
            hidden_states = self.scale_output(self.mlp(hidden_states))
        return hidden_states, residual

    def scale_output(self, output: Tensor) -> Tensor:
        """Return the output of a sub-block as it is added to the stream."""
        return output


def _give_output_biases(layer: Any, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
    """Give the output projections a bias; vLLM's switch for the MLP would require one on gate and up too."""
    options = {"output_size": own.hidden_size, "bias": True, "quant_config": vllm_config.quant_config}
    if layer.attends:
        width = own.num_attention_heads * own.head_dim
        layer.self_attn.o_proj = RowParallelLinear(width, prefix=f"{prefix}.self_attn.o_proj", **options)
    if layer.feeds:
        layer.mlp.down_proj = RowParallelLinear(own.intermediate_size, prefix=f"{prefix}.mlp.down_proj", **options)


def _normalise(norm: Any, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (norm(stream), stream)."""
    if residual is None:
        return norm(hidden_states), hidden_states
    normed, stream = norm(hidden_states, residual)
    return normed, stream


class BiasedDecoderLayer(PrunedDecoderLayer):
    """Qwen2: biases on the query, key and value projections, none on the output projection."""

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        config.qkv_bias = True
        return config


class NormedDecoderLayer(PrunedDecoderLayer):
    """Qwen3: norms on query and key heads."""

    attention_class = HeadNormedAttention


class ScaledAttention(GraniteAttention):
    """vLLM's Granite attention, which scales its scores; its output projection follows ``bias``."""

    def __init__(self, *, bias_o_proj: bool, attn_type: str, **options: Any) -> None:
        super().__init__(**options)


class ScaledEmbedding(LlamaModel):
    """Granite: the embedding is multiplied by a constant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding_multiplier = self.config.embedding_multiplier

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        return super().embed_input_ids(input_ids) * self.embedding_multiplier  # type: ignore[no-any-return]


class ScaledDecoderLayer(PrunedDecoderLayer):
    """Granite: constant factors on scores, outputs of sub-blocks, embedding and logits."""

    attention_class = ScaledAttention
    model_class = ScaledEmbedding

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config)
        self.residual_multiplier: float = (config or vllm_config.model_config.hf_config).residual_multiplier

    @staticmethod
    def logits_options(config: Any) -> dict[str, Any]:
        """See :meth:`Surroundings.logits_options`."""
        return {"scale": 1 / config.logits_scaling}

    def scale_output(self, output: Tensor) -> Tensor:
        """See :meth:`PrunedDecoderLayer.scale_output`."""
        return output * self.residual_multiplier


class GemmaModel(LlamaModel):
    """Gemma 3: the embedding is multiplied by the root of the hidden size, and norms by 1 + w."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if get_pp_group().is_last_rank:
            self.norm = GemmaRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        # Rounded to the model's dtype before it is used, as in Transformers.
        self.register_buffer("normalizer", torch.tensor(self.config.hidden_size**0.5), persistent=False)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]."""
        return super().embed_input_ids(input_ids) * self.normalizer  # type: ignore[no-any-return]


class OwnDecoderLayer(Surroundings, nn.Module):
    """A layer that does not fit vLLM's LLaMA layer; subclasses build it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__()
        own = (config or vllm_config.model_config.hf_config).layer_config(extract_layer_index(prefix))
        skip = getattr(own, "skip", ())
        self.attends, self.feeds = "attention" not in skip, "mlp" not in skip
        self.build(own, vllm_config, prefix)

    def build(self, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """Make the modules of the sub-blocks that exist.

        Args:
            own: configuration with the sizes of this layer.
            vllm_config: of the engine.
            prefix: name of the layer.
        """
        raise NotImplementedError


class GemmaDecoderLayer(OwnDecoderLayer):
    """Gemma 3: norms before and after each sub-block."""

    model_class = GemmaModel
    embedding_modules: Mapping[str, str] = {}  # vLLM takes no adapters on a head of 262,144 words

    def build(self, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """See :meth:`OwnDecoderLayer.build`."""
        size, eps, quant_config = own.hidden_size, own.rms_norm_eps, vllm_config.quant_config
        if self.attends:
            self.input_layernorm = GemmaRMSNorm(size, eps=eps)
            self.self_attn = Gemma3Attention(
                config=own,
                hidden_size=size,
                num_heads=own.num_attention_heads,
                num_kv_heads=own.num_key_value_heads,
                head_dim=own.head_dim,
                max_position_embeddings=own.max_position_embeddings,
                cache_config=vllm_config.cache_config,
                quant_config=quant_config,
                attn_logits_soft_cap=own.attn_logit_softcapping,
                prefix=f"{prefix}.self_attn",
            )
            self.post_attention_layernorm = GemmaRMSNorm(size, eps=eps)
        if self.feeds:
            self.pre_feedforward_layernorm = GemmaRMSNorm(size, eps=eps)
            self.mlp = Gemma3MLP(size, own.intermediate_size, own.hidden_activation, quant_config, f"{prefix}.mlp")
            self.post_feedforward_layernorm = GemmaRMSNorm(size, eps=eps)
        if getattr(own, "output_bias", False):
            _give_output_biases(self, own, vllm_config, prefix)

    @staticmethod
    def logits_options(config: Any) -> dict[str, Any]:
        """See :meth:`Surroundings.logits_options`."""
        return {"soft_cap": config.final_logit_softcapping}

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        if self.attends:
            hidden_states, residual = _normalise(self.input_layernorm, hidden_states, residual)
            hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
            hidden_states = self.post_attention_layernorm(hidden_states)
        if self.feeds:
            hidden_states, residual = _normalise(self.pre_feedforward_layernorm, hidden_states, residual)
            hidden_states = self.post_feedforward_layernorm(self.mlp(hidden_states))
        return hidden_states, residual


def layer_norm(config: Any, eps: float, *, affine: bool = True) -> nn.Module:
    """A LayerNorm over the stream or, where channels of it were removed, the one that divides by the dense size.

    Args:
        config: of the pruned model.
        eps: added to the variance.
        affine: whether it has a weight and a bias.
    """
    norm_size = getattr(config, "norm_size", None)
    if norm_size is None:
        return LayerNorm(config.hidden_size, eps, elementwise_affine=affine)  # type: ignore[no-any-return]
    return VirtualLayerNorm(config.hidden_size, norm_size, eps, affine=affine)


class FinalLayerNorm(nn.Module):
    """The norm after the last layer; vLLM's LLaMA calls it with the stream in two parts."""

    def __init__(self, config: Any, eps: float) -> None:
        super().__init__()
        self.norm = layer_norm(config, eps)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors [tokens, hidden] -> (norm(stream), stream)."""
        stream = hidden_states + residual
        return self.norm(stream), stream


class LayerNormModel(LlamaModel):
    """LLaMA with a LayerNorm after the last layer."""

    eps_field = "layer_norm_eps"

    def __init__(self, *, vllm_config: VllmConfig, **options: Any) -> None:
        config = vllm_config.model_config.hf_config
        eps = getattr(config, self.eps_field)
        config.rms_norm_eps = eps  # of the norm that is replaced below
        super().__init__(vllm_config=vllm_config, **options)
        if get_pp_group().is_last_rank:
            self.norm = FinalLayerNorm(config, eps)


_QKV = {f".{part}_proj": (".qkv_proj", part) for part in "qkv"}


class PhiModel(LayerNormModel):
    """Phi-1/1.5/2: other names in the checkpoint."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".dense.": ".o_proj.", "final_layernorm.": "norm.norm."}, orig_to_new_stacked=_QKV
    )


class Starcoder2Model(LayerNormModel):
    """StarCoder2: other names in the checkpoint."""

    eps_field = "norm_epsilon"
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".c_fc.": ".fc1.", ".c_proj.": ".fc2."},
        orig_to_new_stacked=_QKV,
        orig_to_new_prefix={"norm.": "norm.norm."},
    )


class PlainMLP(nn.Module):
    """Two projections without a gate."""

    def __init__(self, own: Any, vllm_config: VllmConfig, prefix: str, *, bias: bool, output_bias: bool) -> None:
        super().__init__()
        inner, outer, options = own.intermediate_size, own.hidden_size, {"quant_config": vllm_config.quant_config}
        self.fc1 = ColumnParallelLinear(outer, inner, bias=bias, prefix=f"{prefix}.fc1", **options)
        self.act = get_act_fn(own.hidden_act)
        self.fc2 = RowParallelLinear(inner, outer, bias=output_bias, prefix=f"{prefix}.fc2", **options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        inner, _ = self.fc1(hidden_states)
        output, _ = self.fc2(self.act(inner))
        return output  # type: ignore[no-any-return]


def _attention(
    own: Any,
    vllm_config: VllmConfig,
    prefix: str,
    *,
    bias: bool,
    output_bias: bool,
    kind: Any = LlamaAttention,
) -> nn.Module:
    return kind(  # type: ignore[no-any-return]
        config=own,
        hidden_size=own.hidden_size,
        num_heads=own.num_attention_heads,
        num_kv_heads=own.num_key_value_heads or own.num_attention_heads,
        max_position_embeddings=own.max_position_embeddings,
        quant_config=vllm_config.quant_config,
        bias=bias,
        bias_o_proj=output_bias,
        cache_config=vllm_config.cache_config,
        prefix=prefix,
    )


class PhiDecoderLayer(OwnDecoderLayer):
    """Phi-1/1.5/2: attention and MLP side by side after one LayerNorm, biases everywhere."""

    model_class = PhiModel
    head_bias = True

    def build(self, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """See :meth:`OwnDecoderLayer.build`."""
        self.input_layernorm = layer_norm(own, own.layer_norm_eps)
        biases = {"bias": True, "output_bias": True}
        if self.attends:
            self.self_attn = _attention(own, vllm_config, f"{prefix}.self_attn", **biases)
        if self.feeds:
            self.mlp = PlainMLP(own, vllm_config, f"{prefix}.mlp", **biases)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        stream = hidden_states if residual is None else hidden_states + residual
        normed = self.input_layernorm(stream)
        if not self.feeds:
            return self.self_attn(positions=positions, hidden_states=normed), stream
        output = self.mlp(normed)
        if self.attends:
            output = output + self.self_attn(positions=positions, hidden_states=normed)
        return output, stream


class Starcoder2DecoderLayer(OwnDecoderLayer):
    """StarCoder2: a LayerNorm before attention and one before the MLP; all projections have a bias, or none."""

    model_class = Starcoder2Model

    def build(self, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """See :meth:`OwnDecoderLayer.build`."""
        biases = {"bias": own.use_bias, "output_bias": own.use_bias or getattr(own, "output_bias", False)}
        if self.attends:
            self.input_layernorm = layer_norm(own, own.norm_epsilon)
            self.self_attn = _attention(own, vllm_config, f"{prefix}.self_attn", **biases)
        if self.feeds:
            self.post_attention_layernorm = layer_norm(own, own.norm_epsilon)
            self.mlp = PlainMLP(own, vllm_config, f"{prefix}.mlp", **biases)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        stream = hidden_states if residual is None else hidden_states + residual
        if not self.attends:
            return self.mlp(self.post_attention_layernorm(stream)), stream
        output = self.self_attn(positions=positions, hidden_states=self.input_layernorm(stream))
        if not self.feeds:
            return output, stream
        stream = stream + output
        return self.mlp(self.post_attention_layernorm(stream)), stream


class Olmo2DecoderLayer(OwnDecoderLayer):
    """OLMo 2: no norms before a sub-block and one after each; queries and keys are normalised over their width."""

    def build(self, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
        """See :meth:`OwnDecoderLayer.build`."""
        size, eps, quant_config = own.hidden_size, own.rms_norm_eps, vllm_config.quant_config
        if self.attends:
            options = {"bias": own.attention_bias, "output_bias": own.attention_bias, "kind": WidthNormedAttention}
            self.self_attn = _attention(own, vllm_config, f"{prefix}.self_attn", **options)
            self.post_attention_layernorm = RMSNorm(size, eps=eps)
        if self.feeds:
            self.mlp = LlamaMLP(size, own.intermediate_size, own.hidden_act, quant_config, prefix=f"{prefix}.mlp")
            self.post_feedforward_layernorm = RMSNorm(size, eps=eps)
        if getattr(own, "output_bias", False):
            _give_output_biases(self, own, vllm_config, prefix)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        stream = hidden_states if residual is None else hidden_states + residual
        if not self.attends:
            return self.post_feedforward_layernorm(self.mlp(stream)), stream
        output = self.post_attention_layernorm(self.self_attn(positions=positions, hidden_states=stream))
        if not self.feeds:
            return output, stream
        stream = stream + output
        return self.post_feedforward_layernorm(self.mlp(stream)), stream
