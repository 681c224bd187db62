"""Tiny models of the types whose families are inferred, each built from the type's own configuration class."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from pyprune.families import find_family
from pyprune.families.exceptions import VARIANTS
from pyprune.families.infer import tiny_sizes
from tests._support.tiny import VOCAB, random_model

DENSE = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "laguna",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo3",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "vaultgemma",
)
"""Every dense type that is inferred."""
CLOSED = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "mimo_v2_flash",
    "minimax_m3_vl_text",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Every type that is inferred with closed blocks; most carry a state along the text, which gathers rounding."""
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")
"""Every type that is inferred with latent attention."""
GIVEN = ("gemma4_text", "gemma4_unified_text")
"""Every type with a table that is proven as those that are inferred; some variants have layers of more kinds."""
INFERRED = (*DENSE, *CLOSED, *LATENT, *GIVEN)
"""Every type that is inferred; the contract runs on all of them."""
_DENSE: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2},
}
WITHOUT_EXPERTS = tuple(f"{name}-dense" for name in _DENSE)
"""Types some of whose models have no experts, each with the end that :func:`tiny_inferred` reads."""
NOT_INFERRED = (
    *("axk2", "bart"),
    *("bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet"),
    *("blenderbot", "blenderbot-small", "bloom", "blt", "camembert", "codegen"),
    *("cohere_compass_text", "cpmant", "ctrl", "data2vec-text", "dbrx"),
    *("deepseek_v4", "diffllama"),
    *("electra", "emu3", "ernie"),
    *("falcon", "fuyu", "gemma3"),
    *("gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_unified"),
    *("gemma4_unified_assistant", "git"),
    *("got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox_japanese", "gptj"),
    *("hrm_text", "hy_v4"),
    *("inkling_text", "jetmoe"),
    *("llama4", "longcat_flash"),
    *("marian", "mbart", "megatron-bert"),
    *("minimax", "mllama", "modernbert-decoder"),
    *("moshi", "mpt", "musicgen", "musicgen_melody", "mvp"),
    *("openai-gpt", "pegasus", "persimmon", "phi4_multimodal"),
    *("plbart", "prophetnet", "qwen3_5", "qwen3_5_moe"),
    *("qwen4_exp", "qwen4_exp_text"),
    *("recurrent_gemma", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "rwkv", "trocr", "whisper", "xglm"),
    *("xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod"),
    *("zamba", "zamba2", "zaya"),
)
"""Every other type without a table for which Transformers has a causal LM: mixtures, hybrids, encoders and so on."""
VALUES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    **{
        name: {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
        for name in ("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")
    },
    "cohere2": {"logit_scale": 0.3},
    "gemma2": {"query_pre_attn_scalar": 24},
    "hyperclovax": {"residual_multiplier": 0.7, "embedding_multiplier": 1.0, "logits_scaling": 2.0},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6},
    "falcon_h1": {
        "embedding_multiplier": 1.0,
        "ssm_in_multiplier": 0.8,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
        "attention_in_multiplier": 1.3,
    },
    "vaultgemma": {"query_pre_attn_scalar": 24},
    "youtu": {"pad_token_id": None},  # its class sets the row of this token to zero when it loads a checkpoint
}
"""Model type -> values that make a rule of its own matter."""
_HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": _HYBRID * 8},
    "granitemoehybrid-dense": {"num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": _HYBRID * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    },
    "nemotron_h": {"hybrid_override_pattern": "MEMEM*EMEM*E"},
    "nemotron_h-dense": {"hybrid_override_pattern": "M-M-M*-M-M*-"},
}
"""Model type -> values of its published models that are not the defaults of its class."""


def tiny_inferred(model_type: str, *, tied: bool = False, **changes: Any) -> PreTrainedModel:
    """A randomised float32 model in eval mode, with every bias that its configuration can switch on, and short windows.

    Buffers that a checkpoint holds have other values than their constructors give them.

    Args:
        model_type: of :data:`INFERRED` or :data:`WITHOUT_EXPERTS`.
        tied: the head shares the embedding's tensor.
        changes: other values of the configuration.
    """
    model_type, is_variant, _ = model_type.partition("-dense")
    values = (
        tiny_sizes(model_type)
        | (_DENSE[model_type] if is_variant else {})
        | {"vocab_size": VOCAB, "tie_word_embeddings": tied}
        | VALUES.get(model_type, {})
        | changes
    )
    config = AutoConfig.for_model(model_type, **values).to_dict()
    values |= {name: True for name, value in config.items() if value is False and name.endswith("bias")}
    if config.get("sliding_window"):
        values["sliding_window"] = 6
    model = random_model(model_type, **values)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.mul_(1.5)
    return model


def closed_by(model: PreTrainedModel, axis: str) -> str | None:
    """Return the reason why the plan of an axis (:func:`tests._support.plans.axis_plans`) is refused, or None."""
    family = find_family(model.config.model_type)
    closed = family.closed_axes(model.config) if family else {}
    cuts = {"hidden-odd": ("hidden",), "query-heads": ("heads",), "unequal": ("heads", "ffn"), "skipped": ()}
    cuts |= {"identity": (), "everything": ("layers", "hidden", "heads", "ffn")}
    return next((closed[one] for one in cuts.get(axis, (axis,)) if one in closed), None)
