"""Pruned causal LMs: the stock model with every layer rebuilt to its own sizes."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, cast

from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    OPTForCausalLM,
    PhiForCausalLM,
    PretrainedConfig,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoderLayer
from transformers.models.phi.modeling_phi import PhiDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from pyprune.families import Family
from pyprune.families.base import Block
from pyprune.modeling.configuration import (
    PREFIX,
    PrunedConfigMixin,
    PrunedGemma3TextConfig,
    PrunedLlamaConfig,
    PrunedMistralConfig,
    PrunedOPTConfig,
    PrunedPhiConfig,
    PrunedQwen2Config,
    PrunedQwen3Config,
)
from pyprune.modeling.layers import SkippedAttention, SkippedModule, VirtualLayerNorm


class PrunedModelMixin:
    """Builds a stock model without layers, then one stock layer per index at that layer's sizes."""

    config_class: Any
    decoder_layer_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PretrainedConfig) -> None:
        stub = copy.deepcopy(config)
        stub.per_layer_config = None
        stub.num_hidden_layers = 0
        super().__init__(stub)  # type: ignore[call-arg]
        # The stock constructor resolves the attention implementation on the configuration it is given.
        config._attn_implementation = stub._attn_implementation
        self._build_layers(cast(Any, config))

    def _build_layers(self, config: Any) -> None:
        family: Family = config.family
        model = cast(Any, self)
        layers = family.layers(model)
        for i in range(config.num_hidden_layers):
            layer = self._build_layer(config.layer_config(i), i, family)
            if getattr(config, "output_bias", False):
                _give_output_biases(layer, family)
            layers.append(layer)
        norm_size = getattr(config, "norm_size", None)
        if norm_size is not None:
            _use_virtual_norms(model, config.hidden_size, norm_size)
        for module in model.modules():
            # One shared configuration, as in a stock model: a later change of it reaches every module.
            if isinstance(getattr(module, "config", None), PrunedConfigMixin):
                module.config = config
        model.post_init()

    def _build_layer(self, config: Any, index: int, family: Family) -> nn.Module:
        layer = self.decoder_layer_class(config, index)
        for block in getattr(config, "skip", ()):
            _skip_block(layer, block, index, family)
        return layer


def _skip_block(layer: nn.Module, block: Any, index: int, family: Family) -> None:
    """Replace a sub-block by modules without parameters whose contribution is exactly zero."""
    if block == "attention":
        setattr(layer, family.attention_module, SkippedAttention(index))
    else:
        *first, last = family.mlp_modules
        for name in first:
            setattr(layer, name, nn.Identity())
        setattr(layer, last, SkippedModule())
    for norm in family.block_norms(block):
        setattr(layer, norm, nn.Identity())


def _give_output_biases(layer: nn.Module, family: Family) -> None:
    """Let the output projections that the layer has carry a bias (bias compensation)."""
    blocks: tuple[Block, ...] = ("attention", "mlp")
    for name in map(family.output_projection, blocks):
        parent, _, last = name.rpartition(".")
        owner = dict(layer.named_modules()).get(parent)
        projection = getattr(owner, last, None)
        if isinstance(projection, nn.Linear):
            setattr(owner, last, nn.Linear(projection.in_features, projection.out_features))


def _use_virtual_norms(model: nn.Module, size: int, norm_size: int) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.LayerNorm and child.normalized_shape == (size,):
                given = {"affine": child.elementwise_affine, "bias": child.bias is not None}
                setattr(parent, name, VirtualLayerNorm(size, norm_size, child.eps, **given))


class PrunedLlamaForCausalLM(PrunedModelMixin, LlamaForCausalLM):
    """LLaMA with per-layer sizes."""

    config_class = PrunedLlamaConfig
    decoder_layer_class = LlamaDecoderLayer


class PrunedMistralForCausalLM(PrunedModelMixin, MistralForCausalLM):
    """Mistral with per-layer sizes."""

    config_class = PrunedMistralConfig
    decoder_layer_class = MistralDecoderLayer


class PrunedQwen2ForCausalLM(PrunedModelMixin, Qwen2ForCausalLM):
    """Qwen2 with per-layer sizes."""

    config_class = PrunedQwen2Config
    decoder_layer_class = Qwen2DecoderLayer


class PrunedQwen3ForCausalLM(PrunedModelMixin, Qwen3ForCausalLM):
    """Qwen3 with per-layer sizes."""

    config_class = PrunedQwen3Config
    decoder_layer_class = Qwen3DecoderLayer


class PrunedGemma3ForCausalLM(PrunedModelMixin, Gemma3ForCausalLM):
    """Gemma 3 text with per-layer sizes."""

    config_class = PrunedGemma3TextConfig
    decoder_layer_class = Gemma3DecoderLayer


class PrunedPhiForCausalLM(PrunedModelMixin, PhiForCausalLM):
    """Phi with per-layer sizes."""

    config_class = PrunedPhiConfig
    decoder_layer_class = PhiDecoderLayer


class PrunedOPTForCausalLM(PrunedModelMixin, OPTForCausalLM):
    """OPT with per-layer sizes; its stock attention derives head_dim, so that is set afterwards."""

    config_class = PrunedOPTConfig
    decoder_layer_class = OPTDecoderLayer

    def _build_layer(self, config: Any, index: int, family: Family) -> nn.Module:
        heads = config.num_attention_heads
        config.num_attention_heads = 1  # always divides; the stock check knows no explicit head_dim
        layer = super()._build_layer(config, index, family)
        if isinstance(layer.self_attn, OPTAttention):
            _set_opt_heads(layer.self_attn, config.hidden_size, heads, config.head_dim)
        return layer


def _set_opt_heads(attention: OPTAttention, hidden_size: int, heads: int, head_dim: int) -> None:
    width, bias = heads * head_dim, attention.enable_bias
    attention.num_heads, attention.head_dim, attention.scaling = heads, head_dim, head_dim**-0.5
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(hidden_size, width, bias=bias))
    attention.out_proj = nn.Linear(width, hidden_size, bias=bias)


PRUNED_MODELS: dict[str, Any] = {
    cls.config_class.model_type.removeprefix(PREFIX): cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, PrunedModelMixin) and cls is not PrunedModelMixin
}
