"""Tiny random models, one configuration a family; the shared contract test runs on every one of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests._support.tiny import VOCAB, random_model

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama-head-dim": ("llama", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-mha-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "llama",
        {
            "num_key_value_heads": 3,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-window": ("mistral", {"num_key_value_heads": 2, "sliding_window": 6}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen2-tied": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3-tied": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 48, "dropout": 0.0}),
    "opt-untied": (
        "opt",
        {"ffn_dim": 40, "word_embed_proj_dim": 48, "dropout": 0.0, "tie_word_embeddings": False},
    ),
    "phi": ("phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "phi-tied": ("phi", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "gemma3-untied": (
        "gemma3_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "tie_word_embeddings": False,
        },
    ),
}

_GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
TINY |= {
    "granite": ("granite", {"num_key_value_heads": 2, **_GRANITE_FACTORS}),
    "granite-tied-bias": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **_GRANITE_FACTORS},
    ),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "starcoder2-tied": ("starcoder2", {"num_key_value_heads": 2, "sliding_window": 6}),
    "starcoder2-no-bias": (
        "starcoder2",
        {"num_key_value_heads": 2, "use_bias": False, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-tied-no-bias": ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "olmo2-tied-bias": ("olmo2", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"num_key_value_heads": 2}),
    "phi3-window": ("phi3", {"sliding_window": 6, "head_dim": 16}),
    "phi3-longrope": (
        "phi3",
        {
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.2,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.2, 1.5, 3.0],
            },
        },
    ),
}


def one_of_each() -> list[str]:
    """The first entry of every model type in :data:`TINY`; asked for late, since packages may bring entries."""
    return list({model_type: name for name, (model_type, _) in reversed(TINY.items())}.values())[::-1]


def tiny_model(name: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A randomised float32 model of :data:`TINY`, in eval mode; norms and biases are random as well."""
    model_type, values = TINY[name]
    if model_type == "opt":
        overrides.setdefault("activation_function", "relu")
    return random_model(model_type, seed=seed, **{**_SMALL, **values, **overrides})


def tiny_batch(seed: int = 0, batch: int = 2, length: int = 17) -> torch.Tensor:
    """Random token ids [batch, length] that avoid the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)
