"""Tiny models of the types without a table that lose whole layers, each built from the type's own classes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedModel

from tests._support.tiny import VOCAB, random_model

LAYERS = 8
ALONE = (
    *("axk2", "biogpt", "bitnet", "bloom", "codegen", "ctrl"),
    *("deepseek_v4", "diffllama", "falcon", "git", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox_japanese", "gptj", "inkling_text", "jetmoe"),
    *("modernbert-decoder", "moshi", "mpt"),
    *("openai-gpt", "persimmon", "phi4_multimodal", "recurrent_gemma", "xglm", "xlstm"),
)
"""Every type without a table that loses whole layers; the contract of whole layers runs on all of them."""
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"),
            *("pegasus", "plbart", "prophetnet", "whisper"),
        ),
        "it has an encoder and a decoder",
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "trocr", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        "it is an encoder: each position sees those after it",
    ),
    **dict.fromkeys(
        (
            *("blt", "emu3", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified"),
            *("gemma4_unified_assistant", "got_ocr2", "llama4", "mllama", "qwen3_5", "qwen3_5_moe"),
            *("qwen4_exp",),
        ),
        "its configuration names no number of layers",
    ),
    **dict.fromkeys(
        (*("cohere_compass_text", "dbrx", "musicgen", "musicgen_melody", "qwen4_exp_text"),),
        "no model of its default configuration can be built",
    ),
    "cpmant": "it puts tokens of its own in front of each text",
    "fuyu": "36 layers are built where 35 are kept",
    "gemma3n_text": "embed_tokens_per_layer.weight outside the layers",
    "hrm_text": "it has no list of 128 layers, the number that its configuration names",
    "hy_v4": "its layers read the tokens that earlier layers chose (indexer_types)",
    "longcat_flash": "it has no list of 56 layers, the number that its configuration names",
    "minimax": "self_attn.num_hidden_layers of layer 3 is 32",
    "rwkv": "it divides weights and stream by powers of 2 that depend on the index of a layer",
    "xlm": "layer_norm1.11.weight outside the layers",
    "xlnet": "each position sees those after it",
    "zamba": "belongs to layers 2 and 7",
    "zamba2": "belongs to layers 6 and 12",
    "zaya": "its layers hand states of their routers to the next layer",
}
"""Every other type without a table -> a part of the reason why its layers stay."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size", "ffn_dim", "dim_ff", "dff"), 48),
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "head_dim": 8},
    **INDEXER,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
WITHOUT = {
    "falcon": ("head_dim",),
    "xlstm": ("head_dim", "v_head_dim"),
}
"""Model type -> sizes that its class refuses."""
VALUES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk2", "deepseek_v3"), LATENT),
    "bamba": {**MAMBA, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"] * 4},
    "codegen": {"rotary_dim": 8},
    "deepseek_v4": {"q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, **INDEXER},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "git": {"vision_config": TOWER},
    "gptj": {"rotary_dim": 8},
    "hy_v4": LATENT,
    "inkling_text": {"rel_extent": 16, "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"n_groups": 1, "ssm_state_size": 16, "chunk_size": 8, "moe_latent_size": None},
    },
    "phi4_multimodal": {"vision_config": TOWER, "audio_config": TOWER | {"num_blocks": 1, "ext_pw_out_channel": 32}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "window_size": 6},
}


def tiny_alone(model_type: str, **values: Any) -> PreTrainedModel:
    """A randomised float32 model in eval mode, of 8 layers and short windows."""
    # Transformers makes a cache of windows for any configuration that has the field.
    windows = {"sliding_window": 6} if getattr(AutoConfig.for_model(model_type), "sliding_window", None) else {}
    sizes = SIZES | windows | VALUES.get(model_type, {}) | values
    return random_model(model_type, **{k: v for k, v in sizes.items() if k not in WITHOUT.get(model_type, ())})
