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
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.gemma3 import Gemma3Attention, Gemma3MLP
from vllm.model_executor.models.granite import GraniteAttention
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllm.model_executor.models.mistral import MistralAttention
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index

from pyprune.modeling.layers import VirtualLayerNorm


class NoAttention(nn.Module):
    """Stands in while a layer without attention is built: no weights, and no key-value cache is registered."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


class RotatedAttention(LlamaAttention):
    """LLaMA attention that rotates queries and keys as its class and its layer's configuration say."""

    neighbours = False
    """Pairs are channels next to each other, not of the two halves of a head."""

    def _init_rotary_emb(self, config: Any, quant_config: Any) -> None:
        if not getattr(config, "rotates", True):
            self.rotary_emb = _no_rotation
            return
        rope, positions = config.rope_parameters, self.max_position_embeddings
        self.rotary_emb = get_rope(self.head_dim, positions, not self.neighbours, rope)


def _no_rotation(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


class NeighbourAttention(RotatedAttention):
    """Attention that rotates channels next to each other (ERNIE 4.5, GLM, Helium)."""

    neighbours = True


class NormedAttention(RotatedAttention):
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


class FamilyLayer:
    """A decoder layer, and the parts of its family around the layers; by default those of vLLM's LLaMA.

    Attributes:
        model_class: embedding, layers and last norm.
        head_bias: the head adds a bias to the logits.
        embedding_modules: modules that vLLM prepares for adapters in addition to the projections.
        attention_norms: names of the norms before and after attention; None = there is none.
        mlp_norms: names of those before and after the MLP.
    """

    model_class: type[LlamaModel] = LlamaModel
    head_bias = False
    embedding_modules: Mapping[str, str] = getattr(LlamaForCausalLM, "embedding_modules", {})
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    self_attn: Any
    mlp: Any

    def read_sizes(self, whole: Any, prefix: str) -> Any:
        """Return the configuration of the layer at its own sizes, and remember which sub-blocks it has."""
        self.index = extract_layer_index(prefix)
        own = whole.layer_config(self.index)
        skip = getattr(own, "skip", ())
        self.attends, self.feeds = "attention" not in skip, "mlp" not in skip
        return own

    @staticmethod
    def logits_options(config: Any) -> dict[str, Any]:
        """Return the options of vLLM's logits processor; {} = the logits are unchanged."""
        return {}

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        if self.attends:
            before, after = self.attention_norms
            hidden_states, residual = self._normalise(before, hidden_states, residual)
            hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
            hidden_states = self.scale_output(hidden_states if after is None else getattr(self, after)(hidden_states))
        if self.feeds:
            before, after = self.mlp_norms
            hidden_states, residual = self._normalise(before, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
            hidden_states = self.scale_output(hidden_states if after is None else getattr(self, after)(hidden_states))
        return hidden_states, residual

    def scale_output(self, output: Tensor) -> Tensor:
        """Return the output of a sub-block as it is added to the stream."""
        return output

    def _normalise(self, name: str | None, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(stream), stream); vLLM's RMSNorms add the two parts themselves."""
        norm = None if name is None else getattr(self, name)
        if residual is not None and isinstance(norm, (RMSNorm, GemmaRMSNorm)):
            normed, stream = norm(hidden_states, residual)
            return normed, stream
        stream = hidden_states if residual is None else hidden_states + residual
        return stream if norm is None else norm(stream), stream


class PrunedDecoderLayer(FamilyLayer, LlamaDecoderLayer):
    """A LLaMA layer at the sizes of its index, without the sub-blocks that were removed."""

    attention_class: type[nn.Module] = LlamaAttention

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        whole = config or vllm_config.model_config.hf_config
        own = self.adapt(self.read_sizes(whole, prefix))
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


def _give_output_biases(layer: Any, own: Any, vllm_config: VllmConfig, prefix: str) -> None:
    """Give the output projections a bias; vLLM's switch for the MLP would require one on its other projections too."""
    options = {"output_size": own.hidden_size, "bias": True, "quant_config": vllm_config.quant_config}
    if layer.attends:
        width = own.num_attention_heads * own.head_dim
        layer.self_attn.o_proj = RowParallelLinear(width, prefix=f"{prefix}.self_attn.o_proj", **options)
    if layer.feeds:
        name = "fc2" if isinstance(layer.mlp, PlainMLP) else "down_proj"
        projection = RowParallelLinear(own.intermediate_size, prefix=f"{prefix}.mlp.{name}", **options)
        setattr(layer.mlp, name, projection)


class BiasedDecoderLayer(PrunedDecoderLayer):
    """Qwen2: biases on the query, key and value projections, none on the output projection."""

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        config.qkv_bias = True
        return config


class NormedDecoderLayer(PrunedDecoderLayer):
    """Qwen3: norms on query and key heads."""

    attention_class = HeadNormedAttention


class QkvBiasedDecoderLayer(PrunedDecoderLayer):
    """Seed-OSS: biases on the query, key and value projections, and on the output projection, are two switches."""

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        config.qkv_bias, config.attention_bias = config.attention_bias, config.attention_out_bias
        return config


class SomeRotatedDecoderLayer(PrunedDecoderLayer):
    """SmolLM3: some layers do not rotate."""

    attention_class = RotatedAttention

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        config.rotates = bool(config.no_rope_layers[self.index])
        return config


class LongDecoderLayer(PrunedDecoderLayer):
    """Ministral 3: queries beyond the length that it was trained with first are scaled."""

    attention_class = MistralAttention

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        rope = config.rope_parameters
        if beta := rope.get("llama_4_scaling_beta"):
            length = rope["original_max_position_embeddings"]
            config.llama_4_scaling = {"original_max_position_embeddings": length, "beta": beta}
        return config


class NeighbourDecoderLayer(PrunedDecoderLayer):
    """ERNIE 4.5, Helium and GLM: channels next to each other are rotated."""

    attention_class = NeighbourAttention

    def adapt(self, config: Any) -> Any:
        """See :meth:`PrunedDecoderLayer.adapt`."""
        if hasattr(config, "use_bias"):
            config.attention_bias = config.mlp_bias = config.use_bias
        else:
            config.qkv_bias, config.attention_bias = config.attention_bias, False
        return config


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
        """See :meth:`FamilyLayer.logits_options`."""
        return {"scale": 1 / config.logits_scaling}

    def scale_output(self, output: Tensor) -> Tensor:
        """See :meth:`FamilyLayer.scale_output`."""
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


class OwnDecoderLayer(FamilyLayer, nn.Module):
    """A layer that does not fit vLLM's LLaMA layer; subclasses make its parts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__()
        own = self.read_sizes(config or vllm_config.model_config.hf_config, prefix)
        if self.attends:
            self.self_attn = self.make_attention(own, vllm_config, f"{prefix}.self_attn")
        if self.feeds:
            self.mlp = self.make_mlp(own, vllm_config, f"{prefix}.mlp")
        names = (*(self.attention_norms if self.attends else ()), *(self.mlp_norms if self.feeds else ()))
        for name in filter(None, names):
            setattr(self, name, self.make_norm(own))
        if getattr(own, "output_bias", False):
            _give_output_biases(self, own, vllm_config, prefix)

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """Make the attention.

        Args:
            own: configuration with the sizes of this layer.
            vllm_config: of the engine.
            prefix: name of the module.
        """
        raise NotImplementedError

    def make_mlp(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """Make the MLP; the arguments are those of :meth:`make_attention`."""
        raise NotImplementedError

    def make_norm(self, own: Any) -> nn.Module:
        """Make one of the layer's norms."""
        raise NotImplementedError


class GemmaDecoderLayer(OwnDecoderLayer):
    """Gemma 3: norms before and after each sub-block."""

    model_class = GemmaModel
    embedding_modules: Mapping[str, str] = {}  # vLLM takes no adapters on a head of 262,144 words
    attention_norms = ("input_layernorm", "post_attention_layernorm")
    mlp_norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        options = {"head_dim": own.head_dim, "attn_logits_soft_cap": own.attn_logit_softcapping}
        return _attention(Gemma3Attention, own, vllm_config, prefix, **options)

    def make_mlp(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_mlp`."""
        activation, quant_config = own.hidden_activation, vllm_config.quant_config
        return Gemma3MLP(own.hidden_size, own.intermediate_size, activation, quant_config, prefix)  # type: ignore[no-any-return]

    def make_norm(self, own: Any) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_norm`."""
        return GemmaRMSNorm(own.hidden_size, eps=own.rms_norm_eps)  # type: ignore[no-any-return]

    @staticmethod
    def logits_options(config: Any) -> dict[str, Any]:
        """See :meth:`FamilyLayer.logits_options`."""
        return {"soft_cap": config.final_logit_softcapping}


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

    def __init__(self, own: Any, vllm_config: VllmConfig, prefix: str, *, bias: bool) -> None:
        super().__init__()
        inner, outer, options = own.intermediate_size, own.hidden_size, {"quant_config": vllm_config.quant_config}
        self.fc1 = ColumnParallelLinear(outer, inner, bias=bias, prefix=f"{prefix}.fc1", **options)
        self.act = get_act_fn(own.hidden_act)
        self.fc2 = RowParallelLinear(inner, outer, bias=bias, prefix=f"{prefix}.fc2", **options)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        inner, _ = self.fc1(hidden_states)
        output, _ = self.fc2(self.act(inner))
        return output  # type: ignore[no-any-return]


def _attention(kind: Any, own: Any, vllm_config: VllmConfig, prefix: str, **options: Any) -> nn.Module:
    return kind(  # type: ignore[no-any-return]
        config=own,
        hidden_size=own.hidden_size,
        num_heads=own.num_attention_heads,
        num_kv_heads=own.num_key_value_heads or own.num_attention_heads,
        max_position_embeddings=own.max_position_embeddings,
        quant_config=vllm_config.quant_config,
        cache_config=vllm_config.cache_config,
        prefix=prefix,
        **options,
    )


class LayerNormDecoderLayer(OwnDecoderLayer):
    """LayerNorms before LLaMA's attention and an MLP without a gate."""

    model_class: type[LayerNormModel]

    def has_bias(self, own: Any) -> bool:
        """Return whether the projections have a bias."""
        return True

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        bias = self.has_bias(own)
        return _attention(LlamaAttention, own, vllm_config, prefix, bias=bias, bias_o_proj=bias)

    def make_mlp(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_mlp`."""
        return PlainMLP(own, vllm_config, prefix, bias=self.has_bias(own))

    def make_norm(self, own: Any) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_norm`."""
        return layer_norm(own, getattr(own, self.model_class.eps_field))


class PhiDecoderLayer(LayerNormDecoderLayer):
    """Phi-1/1.5/2: attention and MLP side by side after one LayerNorm, biases everywhere."""

    model_class = PhiModel
    head_bias = True
    mlp_norms = ("input_layernorm", None)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        normed, stream = self._normalise("input_layernorm", hidden_states, residual)
        if not self.feeds:
            return self.self_attn(positions=positions, hidden_states=normed), stream
        output = self.mlp(normed)
        if self.attends:
            output = output + self.self_attn(positions=positions, hidden_states=normed)
        return output, stream


class Starcoder2DecoderLayer(LayerNormDecoderLayer):
    """StarCoder2: a LayerNorm before attention and one before the MLP; all projections have a bias, or none."""

    model_class = Starcoder2Model

    def has_bias(self, own: Any) -> bool:
        """See :meth:`LayerNormDecoderLayer.has_bias`."""
        return bool(own.use_bias)


class Olmo2DecoderLayer(OwnDecoderLayer):
    """OLMo 2: no norms before a sub-block and one after each; queries and keys are normalised over their width."""

    attention_norms: tuple[str | None, str | None] = (None, "post_attention_layernorm")
    mlp_norms: tuple[str | None, str | None] = (None, "post_feedforward_layernorm")

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        biases = {"bias": own.attention_bias, "bias_o_proj": own.attention_bias}
        return _attention(WidthNormedAttention, own, vllm_config, prefix, **biases)

    def make_mlp(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_mlp`."""
        sizes, quant_config = (own.hidden_size, own.intermediate_size), vllm_config.quant_config
        return LlamaMLP(*sizes, own.hidden_act, quant_config, prefix=prefix)  # type: ignore[no-any-return]

    def make_norm(self, own: Any) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_norm`."""
        return RMSNorm(own.hidden_size, eps=own.rms_norm_eps)  # type: ignore[no-any-return]


class Olmo3DecoderLayer(Olmo2DecoderLayer):
    """OLMo 3: layers with a sliding window rotate otherwise."""

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        own.rope_parameters = own.rope_parameters[own.layer_types[self.index]]
        return super().make_attention(own, vllm_config, prefix)


class Exaone4DecoderLayer(Olmo2DecoderLayer):
    """EXAONE 4: norms as OLMo 2, norms on heads as Qwen3; layers without a window do not rotate if others have one."""

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        own.rotates = own.sliding_window is None or own.layer_types[self.index] == "sliding_attention"
        return _attention(HeadNormedAttention, own, vllm_config, prefix)


class Glm4DecoderLayer(Olmo2DecoderLayer):
    """GLM-4: norms before and after each sub-block."""

    attention_norms = ("input_layernorm", "post_self_attn_layernorm")
    mlp_norms = ("post_attention_layernorm", "post_mlp_layernorm")

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        return _attention(NeighbourAttention, own, vllm_config, prefix, bias=own.attention_bias)


class ArceeModel(LlamaModel):
    """Arcee: other names in the checkpoint."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_substr={".up_proj.": ".fc1.", ".down_proj.": ".fc2."}, orig_to_new_stacked=_QKV
    )


class ArceeDecoderLayer(Olmo2DecoderLayer):
    """Arcee: LLaMA with an MLP without a gate."""

    model_class = ArceeModel
    attention_norms = ("input_layernorm", None)
    mlp_norms = ("post_attention_layernorm", None)

    def make_attention(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_attention`."""
        biases = {"bias": own.attention_bias, "bias_o_proj": own.attention_bias}
        return _attention(LlamaAttention, own, vllm_config, prefix, **biases)

    def make_mlp(self, own: Any, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """See :meth:`OwnDecoderLayer.make_mlp`."""
        return PlainMLP(own, vllm_config, prefix, bias=own.mlp_bias)
