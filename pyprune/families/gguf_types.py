"""The GGUF forms of types, besides those of families with a file of their own, and the verdicts on all of them.

It was measured with tiny models in llama.cpp (xllamacpp 2026.10) in float32, cut with equal sizes in every layer.
``make test-all`` measures it again (``tests/serving/gguf/test_types.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyprune.families.gguf_forms import (
    DECODER_BIASES,
    LAYER_NORM_BIASES,
    LLAMA,
    QKV_BIASES,
    Change,
    GgufForm,
    GgufSizes,
    same,
    window_period,
)
from pyprune.families.gguf_mixers import MIXERS, convolution

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Obstacle = Callable[["PretrainedConfig", GgufSizes], "str | None"]


def _needs(**values: Any) -> Obstacle:
    """Return an obstacle that names the first field with another value than llama.cpp computes with."""

    def obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
        for name, value in values.items():
            if getattr(config, name) != value:
                return f"it computes with {name} = {value}, the model's is {getattr(config, name)}"
        return None

    return obstacle


def _gemma2_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    from pyprune.families.gemma import gguf_obstacle

    limits = config.final_logit_softcapping and config.attn_logit_softcapping
    return gguf_obstacle(46, config, sizes) if limits else "it limits scores and logits"


def _exaone4_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.sliding_window is None or (len(sizes.layers) == 64 and window_period(config) == 4):
        return None
    return "it has windows in models of 64 layers alone, in three of four"


def _cohere_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.use_qk_norm == (len(sizes.layers) >= 64):
        return None
    return "it has norms of queries and keys in models of 64 layers and more, and in no other"


def _grouped_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    return None if sizes.layers[0][0] == sizes.layers[0][1] else "each of its query heads has a key and a value"


def _unrotated_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    expected = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == expected else "its layers without rotary positions are each fourth"


def _afmoe_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    expected = [(i + 1) % 4 != 0 for i in range(config.num_hidden_layers)]
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    return None if slides == expected else "each fourth of its layers, and no other, is without a window"


def _llama4_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    step, layers = config.interleave_moe_layer_step, range(config.num_hidden_layers)
    if list(config.moe_layers) != [i for i in layers if (i + 1) % step == 0]:
        return f"its mixtures are each layer number {step}, by interleave_moe_layer_step"
    if config.use_qk_norm == (sizes.mixtures[step - 1][0] == 128):
        return "it normalises queries and keys, but not in models of 128 experts"
    if config.max_position_embeddings > LLAMA4_CHUNK and not config.attn_temperature_tuning:
        return f"it scales queries beyond {LLAMA4_CHUNK} tokens"
    return _unrotated_obstacle(config, sizes) or _needs(
        attention_chunk_size=LLAMA4_CHUNK, floor_scale=LLAMA4_CHUNK, attn_scale=0.1
    )(config, sizes)


def _short_convolution(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    return {"shortconv.l_cache": config.conv_L_cache}


def _ministral3_scaling(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    return {"attention.temperature_scale": float(config.rope_parameters.get("llama_4_scaling_beta") or 0)}


def _latent_keys(values: Any, config: PretrainedConfig) -> Any:
    """Take the rows that make keys: [heads x (nope + v), rank] in, [heads, rank, nope] out."""
    heads = values.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
    return heads[:, : config.qk_nope_head_dim].transpose(1, 2)


def _latent_values(values: Any, config: PretrainedConfig) -> Any:
    """Take the rows that make values: [heads x (nope + v), rank] in, [heads, v, rank] out."""
    heads = values.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))
    return heads[:, config.qk_nope_head_dim :]


def _latent_attention(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the keys of latent attention, which llama.cpp computes as attention with one KV head, the latents."""
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    values = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "leading_dense_block_count": sizes.dense_layers,
        "expert_feed_forward_length": sizes.layers[-1][2],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
    }
    if config.q_lora_rank is not None:
        values["attention.q_lora_rank"] = config.q_lora_rank
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":  # llama.cpp divides by 0.1 again
        values |= {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"], "rope.scaling.attn_factor": 1.0}
    return values


def _whole_latent_attention(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the keys of latent attention that llama.cpp computes with keys and values of heads."""
    return {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _latent_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if not getattr(config, "rope_interleave", True):
        return "rotary positions turn channels 2j and 2j + 1"
    if config.q_lora_rank is None and len(sizes.layers) not in (26, 27):
        return "it knows queries without a latent rank in models of 26 and 27 layers alone"
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn" and (not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim")):
        return "YaRN scales its scores by mscale and mscale_all_dim, which are equal"
    return None


def _dense_latent_attention(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the keys of latent attention without experts, which llama.cpp asks for too."""
    experts = {"expert_shared_count": 0, "expert_weights_scale": 1.0, "expert_gating_func": 1}
    return _latent_attention(config, sizes) | experts


def _third(part: int) -> Change:
    """Return a change that takes one of the three parts of the rows: of queries, keys or values."""
    return lambda values, config: values.chunk(3)[part]


def _kimi_linear(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    return _latent_attention(config, sizes) | {
        "attention.head_count_kv": [int(attention) for attention, _ in sizes.has_blocks],
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
    }


def _kimi_linear_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.q_lora_rank is not None:
        return "its queries have no latent rank"
    count, attention = config.linear_num_heads, sizes.heads[0]
    if count != attention:
        return f"its linear attention has {attention} heads as its attention, the model's {count}"
    return None


LATENT_PARTS = {"kv_b_proj.weight": {"attn_k_b.weight": _latent_keys, "attn_v_b.weight": _latent_values}}
KIMI_LINEAR = GgufForm(
    "kimi-linear",
    (),
    own_head=True,
    gating=2,
    parts={
        **LATENT_PARTS,
        "conv1d.weight": {f"ssm_conv1d_{name}.weight": _third(part) for part, name in enumerate("qkv")},
        "dt_bias": {"ssm_dt.bias": same},
        "A_log": {"ssm_a": lambda values, config: -values.exp().reshape(-1, 1)},
        "f_a_proj.weight": {"ssm_f_a.weight": same},
        "f_b_proj.weight": {"ssm_f_b.weight": same},
    },
    obstacle=_kimi_linear_obstacle,
    metadata=_kimi_linear,
)
LATENT = GgufForm(
    "deepseek2",
    (),
    yarn=True,
    parts=LATENT_PARTS,
    obstacle=_latent_obstacle,
    metadata=_latent_attention,
)
LFM2 = GgufForm(
    "lfm2",
    (),
    square=True,
    parts={"conv.conv.weight": {"shortconv.conv.weight": convolution}},
    metadata=_short_convolution,
)
LLAMA4_CHUNK = 8192
"""Tokens of LLaMA 4 that see each other in layers with rotary positions."""
GELU = "gelu_pytorch_tanh"
FORMS: Mapping[str, GgufForm] = {
    **MIXERS,
    "apertus": GgufForm(
        "apertus",
        (),
        "xielu",
        rope_factors=True,
        own_head=True,
        layer_keys={f"act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "afmoe": GgufForm("afmoe", (), windows="always", own_head=True, gating=2, obstacle=_afmoe_obstacle),
    "arcee": replace(LLAMA, architecture="arcee", biases=QKV_BIASES, activation="relu2"),
    "cohere": GgufForm("command-r", square=True, obstacle=_cohere_obstacle),
    "cohere2": GgufForm("cohere2", square=True, windows="always"),
    "cwm": LLAMA,
    "deepseek_v2": LATENT,
    "deepseek_v3": replace(LATENT, gating=2),
    "dots1": GgufForm("dots1", own_head=True, gating=2, obstacle=_grouped_obstacle),
    "ernie4_5": GgufForm("ernie4_5"),
    "ernie4_5_moe": GgufForm(
        "ernie4_5-moe", normed_experts=True, metadata=lambda config, sizes: {"interleave_moe_layer_step": 1}
    ),
    "exaone4": GgufForm("exaone4", square=True, windows="some", obstacle=_exaone4_obstacle),
    "exaone_moe": GgufForm("exaone-moe", windows="always", gating=2),
    "gemma": GgufForm("gemma", activation=GELU),
    "gemma2": GgufForm("gemma2", activation=GELU, windows="always", obstacle=_gemma2_obstacle),
    "glm": GgufForm("chatglm", square=True, own_head=True),
    "glm4": GgufForm("glm4"),
    "glm4_moe_lite": replace(LATENT, gating=2),
    "glm4_moe": GgufForm("glm4moe", gating=2),
    "gpt_neox": GgufForm(
        "gptneox",
        ("attn_qkv", *DECODER_BIASES, *LAYER_NORM_BIASES),
        "gelu",
        square=True,
        own_head=True,
        metadata=lambda config, sizes: {"use_parallel_residual": config.use_parallel_residual},
    ),
    "gpt_oss": GgufForm(
        "gpt-oss", (*QKV_BIASES, "attn_output"), yarn=True, windows="always", own_head=True, normed_experts=True
    ),
    "granitemoe": replace(LLAMA, architecture="granitemoe", normed_experts=True),
    "granitemoeshared": replace(LLAMA, architecture="granitemoe", normed_experts=True),
    "helium": replace(LLAMA, adjacent_pairs=False),
    "hunyuan_v1_dense": GgufForm("hunyuan-dense"),
    "hunyuan_v1_moe": GgufForm("hunyuan-moe", normed_experts=True),
    "hyperclovax": replace(
        LLAMA, architecture="granite", metadata=lambda config, sizes: {"logit_scale": 1 / config.logits_scaling}
    ),
    "jais2": GgufForm("jais2", (*DECODER_BIASES, *LAYER_NORM_BIASES), "relu2"),
    "minicpm3": GgufForm(
        "minicpm3",
        (),
        obstacle=_needs(scale_emb=12, dim_model_base=256, scale_depth=1.4),
        metadata=_whole_latent_attention,
    ),
    "minimax_m2": GgufForm("minimax-m2", own_head=True, normed_experts=True, gating=2),
    "llama4_text": GgufForm(
        "llama4",
        (),
        own_head=True,
        rope_factors=True,
        dense_first=False,
        gating=2,
        obstacle=_llama4_obstacle,
        metadata=lambda config, sizes: {"interleave_moe_layer_step": config.interleave_moe_layer_step},
    ),
    "ministral": LLAMA,
    "kimi_linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2_moe": replace(LFM2, architecture="lfm2moe", normed_experts=True, gating=2),
    "ministral3": replace(LLAMA, architecture="mistral3", metadata=_ministral3_scaling),
    "mixtral": replace(LLAMA, normed_experts=True),
    "nemotron": GgufForm("nemotron", (*DECODER_BIASES, *LAYER_NORM_BIASES), "relu2", square=True, own_head=True),
    "olmo": GgufForm("olmo", square=True, adjacent_pairs=True),
    "olmo2": GgufForm("olmo2", square=True, own_head=True),
    "olmo3": GgufForm("olmo2", square=True, own_head=True, windows="some"),
    "olmoe": GgufForm("olmoe", square=True, own_head=True, normed_experts=False, obstacle=_grouped_obstacle),
    "phi3": GgufForm("phi3", square=True),
    "qwen2_moe": GgufForm("qwen2moe", square=True, own_head=True, normed_experts=False),
    "qwen3_moe": GgufForm("qwen3moe", normed_experts=True, yarn=True),
    "seed_oss": GgufForm("seed_oss"),
    "smollm3": GgufForm("smollm3", adjacent_pairs=True, obstacle=_unrotated_obstacle),
    "solar_open": GgufForm("glm4moe", gating=2),
    "youtu": replace(LATENT, metadata=_dense_latent_attention),
    "stablelm": GgufForm("stablelm", (*QKV_BIASES, *LAYER_NORM_BIASES), square=True, own_head=True),
    "starcoder2": GgufForm("starcoder2", (*DECODER_BIASES, *LAYER_NORM_BIASES), GELU, square=True),
}
"""Type -> the architecture of llama.cpp that holds it."""


NEARLY: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt_neox", "phi", "starcoder2"),
        "up to 5e-3: llama.cpp looks GELU up in a table of float16",
    ),
    "falcon_mamba": "up to 1e-3: llama.cpp's norms in mixers add layer_norm_epsilon, the model's mixer_rms_eps",
    "glm4_moe_lite": "5e-5: llama.cpp's norms of the latents add rms_norm_eps, the model's 1e-6",
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), "rounding in float32: 6e-5"),
    "kimi_linear": "4e-4: llama.cpp's norms of latents, queries and keys add rms_norm_eps, the model's 1e-6",
    "minicpm3": "rounding in float32: 3e-5",
}
"""Type -> by how much log probabilities differ, and why; those of all others differ by less than 1e-5."""
_UNNAMED = {
    **{"cohere2_moe": "cohere2moe", "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa"},
    **{"deepseek_v32": "deepseek32", "hy_v3": "hy_v3", "laguna": "laguna", "mellum": "mellum"},
}
REFUSED: Mapping[str, str] = {
    **{name: f"the package gguf 0.19 does not name llama.cpp's {known}" for name, known in _UNNAMED.items()},
    **dict.fromkeys(
        ("aria_text", "axk1", "doge", "flex_olmo", "nanochat", "olmo_hybrid", "opt"),
        "llama.cpp has no architecture for it",
    ),
    "phimoe": "llama.cpp's phimoe divides by the root mean square, and the model's LayerNorm subtracts the mean first",
    "vaultgemma": "llama.cpp's gemma2 needs norms behind attention and MLP",
}
"""Type -> why llama.cpp holds none of its models, or the package gguf cannot write them."""


def gguf_forms(model_type: str) -> tuple[GgufForm, ...] | str:
    """Return the forms of a type without a file of its own, or a sentence why it has none."""
    form = FORMS.get(model_type)
    if form is not None:
        return (form,)
    reason = REFUSED.get(model_type, "pyprune has no layout for this family")
    return f"{reason}."


def gguf_cell(model_type: str, forms: tuple[GgufForm, ...] | str) -> str:
    """Return what llama.cpp computes of a type, in the words of :func:`pyprune.families.engines.vllm_cell`."""
    if isinstance(forms, str):
        return "no"
    word = "nearly" if model_type in NEARLY else "stock"
    return f"{word}, per layer" if any(form.per_layer for form in forms) else word
