"""The GGUF forms of a family: the names of its tensors in the file, and the limits of llama.cpp's architecture.

A family file lists its forms in ``Family.gguf``, the first that fits is written. Everything here is data about
llama.cpp's architectures; :mod:`pyprune.serving.gguf` reads it and writes the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYER = "model.layers.{i}."
BLOCK = "blk.{i}."

OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""Modules outside the layers -> their names in the file."""
ATTENTION = {
    LAYER + "self_attn.q_proj": BLOCK + "attn_q",
    LAYER + "self_attn.k_proj": BLOCK + "attn_k",
    LAYER + "self_attn.v_proj": BLOCK + "attn_v",
}
GATED_MLP = {
    LAYER + "mlp.gate_proj": BLOCK + "ffn_gate",
    LAYER + "mlp.up_proj": BLOCK + "ffn_up",
    LAYER + "mlp.down_proj": BLOCK + "ffn_down",
}
DECODER = {
    **OUTER,
    **ATTENTION,
    **GATED_MLP,
    LAYER + "self_attn.o_proj": BLOCK + "attn_output",
    LAYER + "input_layernorm": BLOCK + "attn_norm",
    LAYER + "post_attention_layernorm": BLOCK + "ffn_norm",
}
"""A LLaMA-like decoder."""
NORMED_DECODER = {
    **DECODER,
    LAYER + "self_attn.q_norm": BLOCK + "attn_q_norm",
    LAYER + "self_attn.k_norm": BLOCK + "attn_k_norm",
}
"""A LLaMA-like decoder with a norm of every query and key head."""
QKV_BIASES = ("attn_q", "attn_k", "attn_v")
DECODER_BIASES = (*QKV_BIASES, "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class GgufSizes:
    """The sizes of a model as a GGUF file states them.

    Attributes:
        hidden: channels of the residual stream.
        head_dim: channels of a head.
        layers: (query heads, KV heads, FFN channels) of every layer; 0 = the sub-block is skipped.
        tied: the head is the embedding.
    """

    hidden: int
    head_dim: int
    layers: tuple[tuple[int, int, int], ...]
    tied: bool

    @property
    def are_equal(self) -> bool:
        """True if all layers have the same sizes, and all their sub-blocks."""
        return len(set(self.layers)) == 1 and all(self.layers[0])


@dataclass(frozen=True)
class GgufForm:
    """One architecture of llama.cpp that can hold models of a family.

    Attributes:
        architecture: its name, ``general.architecture``.
        modules: pattern of a module -> its name in the file; ``{i}`` is the layer.
        biases: names (without the block) of modules that may have a bias; norms of a LayerNorm are named too.
        activation: of the MLP, as Transformers names it.
        per_layer: sizes may differ between layers, and sub-blocks may be missing.
        adjacent_pairs: rotary positions turn channels 2j and 2j + 1, not j and j + head_dim / 2, so rows of queries and
            keys are put in that order.
        fused_qkv: queries, keys and values are one tensor, ``attn_qkv``.
        rope_factors: the file may hold ``rope_freqs``, one factor for each rotary frequency (LLaMA 3).
        windows: the architecture knows sliding windows; ``metadata`` states them.
        obstacle: (config, sizes) -> reason why this architecture cannot hold the model, or None.
        metadata: (config) -> further keys without the architecture's name; int, float or text.
    """

    architecture: str
    modules: Mapping[str, str]
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    per_layer: bool = False
    adjacent_pairs: bool = False
    fused_qkv: bool = False
    rope_factors: bool = False
    windows: bool = False
    obstacle: Callable[[PretrainedConfig, GgufSizes], str | None] = lambda config, sizes: None
    metadata: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}

    def name_of(self, pattern: str) -> str | None:
        """Return the name pattern of a parameter in the file, or None if the architecture has no place for it."""
        module, _, kind = pattern.rpartition(".")
        name = self.modules.get(module)
        if name is None or (kind == "bias" and name.removeprefix(BLOCK) not in self.biases):
            return None
        return f"{name}.{kind}"


def square_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    """Explain why an architecture without a separate size for the heads cannot hold the model, or None."""
    heads = sizes.layers[0][0]
    if heads * sizes.head_dim == sizes.hidden:
        return None
    return f"its {heads} heads of {sizes.head_dim} channels must together be as wide as the hidden size {sizes.hidden}"


def _deci_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if not sizes.layers[0][0]:
        return "llama.cpp reads the size of a head from layer 0, whose attention is skipped"
    return None


DECI = GgufForm(
    "deci",
    DECODER,
    DECODER_BIASES,
    per_layer=True,
    adjacent_pairs=True,
    rope_factors=True,
    obstacle=_deci_obstacle,
)
"""LLaMA with sizes per layer (in llama.cpp for Llama-3.1-Nemotron)."""
LLAMA = GgufForm("llama", DECODER, DECODER_BIASES, adjacent_pairs=True, rope_factors=True)
