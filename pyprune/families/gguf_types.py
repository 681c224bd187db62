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
    GgufForm,
    GgufSizes,
    window_period,
)

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


def _smollm3_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    expected = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == expected else "its layers without rotary positions are each fourth"


GELU = "gelu_pytorch_tanh"
FORMS: Mapping[str, GgufForm] = {
    "arcee": replace(LLAMA, architecture="arcee", biases=QKV_BIASES, activation="relu2"),
    "cohere": GgufForm("command-r", square=True, obstacle=_cohere_obstacle),
    "cohere2": GgufForm("cohere2", square=True, windows="always"),
    "cwm": LLAMA,
    "dots1": GgufForm("dots1", own_head=True, gating=2, obstacle=_grouped_obstacle),
    "ernie4_5": GgufForm("ernie4_5"),
    "ernie4_5_moe": GgufForm(
        "ernie4_5-moe", normed_experts=True, metadata=lambda config: {"interleave_moe_layer_step": 1}
    ),
    "exaone4": GgufForm("exaone4", square=True, windows="some", obstacle=_exaone4_obstacle),
    "exaone_moe": GgufForm("exaone-moe", windows="always", gating=2),
    "gemma": GgufForm("gemma", activation=GELU),
    "gemma2": GgufForm("gemma2", activation=GELU, windows="always", obstacle=_gemma2_obstacle),
    "glm": GgufForm("chatglm", square=True, own_head=True),
    "glm4": GgufForm("glm4"),
    "glm4_moe": GgufForm("glm4moe", gating=2),
    "gpt_neox": GgufForm(
        "gptneox",
        ("attn_qkv", *DECODER_BIASES, *LAYER_NORM_BIASES),
        "gelu",
        square=True,
        own_head=True,
        metadata=lambda config: {"use_parallel_residual": config.use_parallel_residual},
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
        LLAMA, architecture="granite", metadata=lambda config: {"logit_scale": 1 / config.logits_scaling}
    ),
    "jais2": GgufForm("jais2", (*DECODER_BIASES, *LAYER_NORM_BIASES), "relu2"),
    "minimax_m2": GgufForm("minimax-m2", own_head=True, normed_experts=True, gating=2),
    "ministral": LLAMA,
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
    "smollm3": GgufForm("smollm3", adjacent_pairs=True, obstacle=_smollm3_obstacle),
    "solar_open": GgufForm("glm4moe", gating=2),
    "stablelm": GgufForm("stablelm", (*QKV_BIASES, *LAYER_NORM_BIASES), square=True, own_head=True),
    "starcoder2": GgufForm("starcoder2", (*DECODER_BIASES, *LAYER_NORM_BIASES), GELU, square=True),
}
"""Type -> the architecture of llama.cpp that holds it."""


NEARLY = frozenset(("gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "starcoder2"))
"""Types whose log probabilities differ by up to 5e-3, because llama.cpp looks GELU up in a table of float16; of
all others by less than 1e-5."""
_UNNAMED = {
    **{"cohere2_moe": "cohere2moe", "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa"},
    **{"hy_v3": "hy_v3", "laguna": "laguna", "mellum": "mellum"},
}
REFUSED: Mapping[str, str] = {
    **{name: f"the package gguf 0.19 does not name llama.cpp's {known}" for name, known in _UNNAMED.items()},
    **dict.fromkeys(
        ("aria_text", "bamba", "doge", "flex_olmo", "nanochat", "olmo_hybrid", "opt"),
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
