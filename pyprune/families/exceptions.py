"""Facts of model types that inference cannot know: values of fields of their families, by model type."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

REFUSED = {
    "cpmant": "it puts tokens of its own in front of each text",
    "rwkv": "it divides weights and stream by powers of 2 that depend on the index of a layer",
    "xlnet": "each position sees those after it",
    "zaya": "its layers hand states of their routers to the next layer",
}
"""Types without a table that do not keep the contract of whole layers, with the reason."""
_QWEN: dict[str, Any] = {
    "layer_types": ("linear_attention", "full_attention"),
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GEMMA4: dict[str, Any] = {
    "layer_types": ("sliding_attention", "full_attention"),
    "global_head_dim": 20,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
}
TINY: dict[str, dict[str, Any]] = {
    "jamba": {
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0},
        **{"mamba_d_state": 8, "mamba_dt_rank": 5},
    },
    "gemma4_text": _GEMMA4 | {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": _GEMMA4,
    "kimi_linear": {
        "layer_types": ("linear_attention", "full_attention"),
        "mlp_layer_types": ("dense", "dense", "sparse", "sparse"),
        "linear_head_dim": 12,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {"layer_types": ("conv", "full_attention")},
    "lfm2": {"layer_types": ("conv", "full_attention"), "block_auto_adjust_ff_dim": False},
    "minimax_m3_vl_text": {
        "layer_types": ("full_attention", "minimax_m3_sparse"),
        "mlp_layer_types": ("dense", "dense", "sparse", "sparse"),
        **{"index_n_heads": 3, "index_head_dim": 10, "index_block_size": 4, "index_topk_blocks": 2, "rotary_dim": 8},
    },
    "mimo_v2_flash": {
        "layer_types": ("full_attention", "sliding_attention"),
        "mlp_layer_types": ("dense", "dense", "sparse", "sparse"),
        "v_head_dim": 11,
    },
    "mamba": {"state_size": 8, "time_step_rank": 5},
    "mamba2": {"num_heads": 4, "head_dim": 31, "n_groups": 2, "state_size": 8},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 5},
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_next": _QWEN | {"mlp_only_layers": [0, 1]},
    "olmo_hybrid": {"layer_types": ("linear_attention", "full_attention")},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 14, "mamba_d_ssm": 56, "mamba_d_state": 8},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_state": 8},
    "granitemoehybrid": {
        "layer_types": ("linear_attention", "full_attention"),
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
    },
    "nemotron_h": {
        "layers_block_type": ("linear_attention", "full_attention", "mlp", "moe"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 14,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
}
"""Type with kinds of layers -> values of its tiny model, so that sizes inside closed blocks differ from all others.

A tuple is a value for each layer, in turn."""
VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 46},
}
"""Type -> values of a second tiny model, whose layers are of other kinds."""


def _plain_lfm2(config: Any) -> dict[str, Any]:
    """Return the FFN width of LFM2, which its classes derive from intermediate_size, and no rule to derive it."""
    if not config.block_auto_adjust_ff_dim:
        return {}
    factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
    width = int((1 if factor is None else factor) * int(2 * config.intermediate_size / 3))
    return {"intermediate_size": -(-width // multiple) * multiple, "block_auto_adjust_ff_dim": False}


def _refuse_shared_tokens(config: Any) -> str | None:
    shares = "shared" in config.indexer_types
    return "its layers read the tokens that earlier layers chose (indexer_types)." if shares else None


def _refuse_latent_experts(config: Any) -> str | None:
    latent = config.moe_latent_size
    return "its experts read and write a latent space (moe_latent_size), of which no row is known." if latent else None


EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"needs_positions": True},
    "gemma": {"begins_with_bos": True},
    "gemma2": {"begins_with_bos": True},
    "glm_moe_dsa": {"refuse": _refuse_shared_tokens},
    "granitemoehybrid": {"intermediate_field": "shared_intermediate_size"},
    "lfm2": {"plain_values": _plain_lfm2, "refused_switches": {}},
    "nemotron_h": {"refuse": _refuse_latent_experts},
    "recurrent_gemma": {"begins_with_bos": True},
    "vaultgemma": {"begins_with_bos": True},
}


def _give_multipliers(layer: Any, config: Any) -> None:
    modelling = import_module("transformers.models.falcon_h1.modeling_falcon_h1")
    layer.mamba.register_buffer("mup_vector", modelling.compute_mup_vector(config), persistent=False)


FINISH: dict[str, Callable[[Any, Any], None]] = {"falcon_h1": _give_multipliers}
"""(layer, its configuration): what a model, not the constructor of its layers, gives to layers."""
