"""The pruned architectures for vLLM: every decoder layer reads its own query heads, KV heads and FFN width.

All LLaMA-like families share one layer class on top of vLLM's own LLaMA; the engine sizes the key-value cache
layer by layer by itself. Which family is served by which layer is in its table (``vllm_layer``). Imported by vLLM only
when a checkpoint names one of these architectures.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from pyprune.families import Family, all_families, resolve
from pyprune.serving.checkpoints import verify_checkpoint


class NoAttention(nn.Module):
    """Stands in while a layer without attention is built: no weights, and no key-value cache is registered."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


class NormedAttention(LlamaAttention):
    """LLaMA attention with an RMSNorm over every query and key head before the rotation (Qwen3)."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output  # type: ignore[no-any-return]


class PrunedDecoderLayer(LlamaDecoderLayer):
    """A LLaMA layer at the sizes of its own index; a sub-block that was removed is not built at all."""

    attention_class: type[nn.Module] = LlamaAttention

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        whole = config or vllm_config.model_config.hf_config
        own = self.adapt(whole.layer_config(extract_layer_index(prefix)))
        skip = getattr(own, "skip", ())
        self.attends, self.feeds = "attention" not in skip, "mlp" not in skip
        attention = self.attention_class if self.attends else NoAttention
        super().__init__(vllm_config, prefix, own, attn_layer_type=attention)
        if getattr(whole, "output_bias", False):
            self._give_output_biases(own, self.get_quant_config(vllm_config), prefix)
        if not self.attends:
            del self.self_attn, self.input_layernorm
        if not self.feeds:
            del self.mlp, self.post_attention_layernorm

    def _give_output_biases(self, own: Any, quant_config: Any, prefix: str) -> None:
        """Let the output projections carry a bias; vLLM's switch for the MLP would ask for one on gate and up too."""
        options = {"output_size": own.hidden_size, "bias": True, "quant_config": quant_config}
        if self.attends:
            width = own.num_attention_heads * own.head_dim
            self.self_attn.o_proj = RowParallelLinear(width, prefix=f"{prefix}.self_attn.o_proj", **options)
        if self.feeds:
            self.mlp.down_proj = RowParallelLinear(own.intermediate_size, prefix=f"{prefix}.mlp.down_proj", **options)

    def adapt(self, config: Any) -> Any:
        """Return the layer's configuration with what vLLM's LLaMA layer reads under another name."""
        return config

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add what is left of the layer; the stream is ``hidden_states + residual``, each [tokens, hidden]."""
        if self.attends:
            hidden_states, residual = _normalised(self.input_layernorm, hidden_states, residual)
            hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        if self.feeds:
            hidden_states, residual = _normalised(self.post_attention_layernorm, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


def _normalised(norm: Any, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
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

    attention_class = NormedAttention


class PrunedCausalLM(LlamaForCausalLM):
    """vLLM's LLaMA with decoder layers that read their own sizes.

    A sliding window reaches the layers through vLLM's cache configuration.

    Raises:
        CheckpointError: the folder differs from what was written (see :func:`verify_checkpoint`).
    """

    layer_class: type[PrunedDecoderLayer] = PrunedDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        verify_checkpoint(vllm_config.model_config.model)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=self.layer_class)


def _made(family: Family) -> type[PrunedCausalLM]:
    """The vLLM model of one family with ``vllm_layer``."""
    facts: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{family.pruned_model.removeprefix('Pruned')} with per-layer sizes.",
        "layer_class": resolve(family.vllm_layer),
    }
    fused = {row.pattern.split(".")[-2] for row in family.rows if row.fused_dim is not None}
    if fused:
        # The checkpoint holds these as vLLM does, in one piece.
        facts["packed_modules_mapping"] = {name: [name] for name in fused}
    return type(family.pruned_model, (PrunedCausalLM,), facts)


def __getattr__(name: str) -> type[PrunedCausalLM]:
    """The classes that checkpoints name, such as PrunedLlamaForCausalLM, each made when it is first asked for."""
    for family in all_families().values():
        if family.vllm_layer and family.pruned_model == name:
            return globals().setdefault(name, _made(family))  # type: ignore[no-any-return]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
