"""Verdicts on stock checkpoints of each model type in vLLM 0.32.

It was measured with tiny models on a CPU in float32, cut with equal sizes in every layer. ``make test-all`` measures it
again (``tests/serving/test_stock_types.py``, and ``test_stock_exports.py`` for families with a table).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyprune.families.base import Family
from pyprune.families.prefix import dense_type

STOCK = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "phi", "gemma3_text", "opt", "granite", "starcoder2", "phi3"),
        *("olmo2", "gpt_neox"),
        *("afmoe", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5", "exaone4"),
        *("exaone_moe", "falcon_h1", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt_oss"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hyperclovax", "jais2", "llama4_text", "mellum", "ministral", "ministral3"),
        *("mixtral", "nanochat", "nemotron", "olmo", "olmo3", "olmoe", "qwen2_moe", "qwen3_moe", "seed_oss"),
        *("smollm3", "granitemoehybrid", "hy_v3", "mamba2", "gemma4_unified_text", "nemotron_h"),
        *("solar_open", "stablelm"),
    )
)
"""Types that vLLM serves with Transformers' log probabilities, equal to 1e-5."""
NEARLY: Mapping[str, str] = {
    **dict.fromkeys(("gemma2", "vaultgemma"), "vLLM's kernel on a CPU rounds capped scores; exact without a cap"),
    "apertus": "vLLM computes the factors of xIELU in bfloat16",
    **dict.fromkeys(("gemma4_text", "minicpm3"), "rounding in float32: 2e-5"),
}
"""Type -> why the log probabilities differ by more than that, in texts of 150 tokens by less than 0.01."""
REFUSED: Mapping[str, str] = {
    "aria_text": "vLLM has a class of the whole model alone, not of its text part",
    "axk1": "vLLM's class has a norm behind the MLP of dense layers, and Transformers' has none",
    "bamba": "vLLM has no class of it, and its Transformers backend does not take the mixer",
    "doge": "vLLM has no class of it, and its Transformers backend answers otherwise",
    "phimoe": "vLLM knows an older name of its class, and its Transformers backend fails in the experts",
    "youtu": "vLLM's Transformers backend has no kernel for its heads; with VLLM_MLA_DISABLE=1 it is exact",
}
"""Type -> why vLLM does not load it, or answers otherwise than Transformers."""
NOT_ON_CPU: Mapping[str, str] = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "selective scans have no kernel there"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "lfm2", "lfm2_moe"),
        "the kernel of rotary positions there takes queries of several heads for those of one",
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "its sparse attention has no kernel there"),
    "ernie4_5_moe": "its router leaves out the biases of experts there",
    **dict.fromkeys(("laguna", "minimax_m2"), "its router has no kernel there"),
    "kimi_linear": "its linear attention needs Triton",
    "olmo_hybrid": "its gated delta nets need Triton",
    "qwen3_next": "its gated delta nets need bfloat16 there",
}
"""Type -> why vLLM does not serve it on a CPU. No GPU was tried."""


def _untied(config: Mapping[str, Any]) -> str | None:
    return (
        None if config.get("tie_word_embeddings", True) else "vLLM ties the head to the embedding, and this head is not"
    )


def _not_square(config: Mapping[str, Any]) -> str | None:
    hidden, heads, head_dim = (config.get(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    if not head_dim or not heads or hidden == heads * head_dim:
        return None
    return f"vLLM derives the head size as {hidden} / {heads}, not {head_dim}"


def _other_lfm2(config: Mapping[str, Any]) -> str | None:
    if config.get("model_type") == "lfm2" and not config.get("conv_dim"):
        return "vLLM reads conv_dim of config.json, which published models have and this one lacks"
    return _untied(config) or _not_square(config)


def _not_alternating(config: Mapping[str, Any]) -> str | None:
    kinds = list(config.get("layer_types") or ())
    words = ["full_attention" if i % 2 else "sliding_attention" for i in range(len(kinds))]
    return (
        None if kinds == words else "vLLM takes a sliding window in layers 0, 2, 4 and so on, and this model does not"
    )


def _uneven_mixtures(config: Mapping[str, Any]) -> str | None:
    step, layers = config.get("interleave_moe_layer_step"), config.get("moe_layers")
    if not step or layers is None:
        return None
    expected = [i for i in range(config.get("num_hidden_layers", 0)) if (i + 1) % step == 0]
    return None if layers == expected else f"vLLM takes the layers {expected} for mixtures, and this model has {layers}"


def _dense_later(config: Mapping[str, Any]) -> str | None:
    words, count = list(config.get("mlp_layer_types") or ()), config.get("first_k_dense_replace") or 0
    first = words.index("sparse") if "sparse" in words else len(words)
    dense = words.count("dense")
    return None if first == dense == count else f"vLLM takes the first {count} layers alone for dense ones"


PER_LAYER: Mapping[str, tuple[str, str]] = {
    "arcee": ("ArceeForCausalLM", "ArceeDecoderLayer"),
    "cwm": ("CwmForCausalLM", "PrunedDecoderLayer"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "NeighbourDecoderLayer"),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4DecoderLayer"),
    "glm": ("GlmForCausalLM", "NeighbourDecoderLayer"),
    "glm4": ("Glm4ForCausalLM", "Glm4DecoderLayer"),
    "helium": ("HeliumForCausalLM", "NeighbourDecoderLayer"),
    "ministral": ("MinistralForCausalLM", "PrunedDecoderLayer"),
    "ministral3": ("Ministral3ForCausalLM", "LongDecoderLayer"),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3DecoderLayer"),
    "seed_oss": ("SeedOssForCausalLM", "QkvBiasedDecoderLayer"),
    "smollm3": ("SmolLM3ForCausalLM", "SomeRotatedDecoderLayer"),
}
"""Inferred type -> its causal LM, and the layer in ``pyprune.serving.vllm.layers`` that has sizes of its own."""
MIXTURES: Mapping[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Inferred type of a mixture -> its causal LM, whose layers vLLM builds with sizes of their own
(``pyprune.serving.vllm.mixtures``)."""
EXPERT_FOR_EACH_RANK = frozenset(
    (
        *("cohere2_moe", "ernie4_5_moe", "exaone_moe", "hy_v3", "laguna", "lfm2_moe", "mimo_v2_flash", "minimax_m2"),
        *("qwen2_moe", "qwen3_moe"),
    )
)
"""Types whose class in vLLM refuses more ranks of tensor parallelism than a layer has experts."""
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""Fields that count shared experts."""
CONDITIONS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "gemma2"), _untied),
    **dict.fromkeys(
        (
            *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "jamba", "olmoe"),
            "qwen2_moe",
        ),
        _not_square,
    ),
    "hy_v3": _dense_later,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _other_lfm2),
    "llama4_text": _uneven_mixtures,
    "gpt_oss": _not_alternating,
}
"""Type -> (config.json as plain data) -> why vLLM does not serve this variant as Transformers does, or None."""


def stock_obstacle(config: Mapping[str, Any]) -> str | None:
    """Explain why vLLM does not serve a stock checkpoint of an inferred type; None if it does, or nobody knows.

    Args:
        config: config.json as plain data.
    """
    name = str(config.get("model_type"))
    reason = REFUSED.get(name) or (CONDITIONS[name](config) if name in CONDITIONS else None)
    return f"vLLM 0.32 does not serve this {name!r} model as Transformers does: {reason}." if reason else None


def mixture_obstacle(config: Mapping[str, Any]) -> str | None:
    """Explain why vLLM's layers of a mixture, built with sizes of their own, do not serve a pruned checkpoint; or None.

    Args:
        config: config.json as plain data. None for a type that is no key of :data:`MIXTURES`.
    """
    name = dense_type(config.get("model_type"))
    if name not in MIXTURES or name == config.get("model_type"):
        return None
    start = f"vLLM 0.32 builds whole layers of {name!r} models"
    if config.get("output_bias"):
        return f"{start}, without the biases that make up for a cut. Prune it without cut.reconstruct=bias."
    if config.get("norm_size"):
        return f"{start}, whose norms divide by the stored hidden size. Prune it without hidden channels."
    overrides = {int(index): own for index, own in (config.get("per_layer_config") or {}).items()}
    for index in range(config.get("num_hidden_layers") or 0):
        own = overrides.get(index, {})
        if skipped := list(own.get("skip", ())):
            return f"{start}, and layer {index} has lost its {skipped[0]}. Keep the block, or remove the whole layer."
        layer = {**config, **own}
        reason = CONDITIONS[name](layer) if name in CONDITIONS else None
        reason = reason or _other_shared(layer) or (_other_sinks(config, layer) if name == "gpt_oss" else None)
        if reason:
            return f"vLLM 0.32 does not serve layer {index} of this {name!r} model as Transformers does: {reason}."
    return None


def _other_shared(layer: Mapping[str, Any]) -> str | None:
    shared, count = layer.get("shared_expert_width"), next((layer[name] for name in _SHARED if layer.get(name)), 1)
    width = layer.get("moe_intermediate_size") or layer.get("intermediate_size") or 0
    if not shared or shared == count * width:
        return None
    return f"vLLM makes its shared experts {count} times as wide as an expert, which is {count * width}, not {shared}"


def _other_sinks(config: Mapping[str, Any], layer: Mapping[str, Any]) -> str | None:
    whole, heads = (values.get("num_attention_heads") for values in (config, layer))
    return None if whole == heads else f"vLLM reads {whole} sinks in every layer, and this one has {heads} query heads"


def vllm_layer(model_type: str) -> str:
    """Return the import path of the vLLM layer of an inferred type; "" = there is none."""
    return f"pyprune.serving.vllm.layers:{PER_LAYER[model_type][1]}" if model_type in PER_LAYER else ""


def vllm_mixture(model_type: str) -> str:
    """Return the import path of the vLLM model of an inferred type of mixtures; "" = there is none."""
    return f"pyprune.serving.vllm.mixtures:Pruned{MIXTURES[model_type]}" if model_type in MIXTURES else ""


def inferred_architectures() -> dict[str, str]:
    """Return the pruned architecture in config.json -> type, of inferred types whose sizes per layer vLLM serves."""
    layers = {f"Pruned{model}": name for name, (model, _) in PER_LAYER.items()}
    return layers | {f"Pruned{model}": name for name, model in MIXTURES.items()}


def vllm_cell(family: Family) -> str:
    """Return what vLLM serves of a type, in a few words."""
    names = {"stock": STOCK, "nearly": NEARLY, "not on a CPU": NOT_ON_CPU, "no": REFUSED}
    words = [word for word, types in names.items() if family.model_type in types]
    return ", ".join([*words, "per layer"] if family.served_by else words or ["untested"])
