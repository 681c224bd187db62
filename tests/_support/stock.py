"""Stock exports of tiny models of inferred types, with sizes that vLLM takes, and equal ones in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from pyprune.cut.compact import compact_
from pyprune.cut.target import choose_target
from pyprune.families import family_for
from pyprune.families.engines import CONDITIONS, mixture_obstacle, stock_obstacle
from pyprune.families.infer import tiny_sizes
from pyprune.plan import PrunePlan
from pyprune.serving.export import export
from tests._support.inferred import VALUES
from tests._support.plans import with_experts
from tests._support.served import everything
from tests._support.tiny import VOCAB, damp_, random_model
from tests._support.tokenizer import tiny_tokenizer

AXES = ("layers", "hidden", "heads", "ffn")
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_LATENT: dict[str, Any] = {
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
}
_WINDOW = {"sliding_window": 6}
_PERIODS = {"gpt_oss": [1, 2], "llama4_text": [1, 2]}
"""Type whose layers vLLM tells apart by the parity of their index -> the layers that are removed."""
_TIED = {"tie_word_embeddings": True}
_ROPE: dict[str, Any] = VALUES["ministral3"]["rope_parameters"]
_LONG = {"ministral3": {"rope_parameters": _ROPE | {"original_max_position_embeddings": 64}}}
"""Values for layers of pyprune: vLLM's own do not scale queries beyond this length, and ours do."""
_WIDE = {
    **dict.fromkeys(("moe_intermediate_size", "prefix_dense_intermediate_size"), 96),
    "shared_expert_intermediate_size": 64,
}
"""Fields of mixtures -> widths of which some are multiples of what vLLM's kernels for experts take."""
SERVED_VALUES: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "cohere": _TIED,
    "cohere2": {**_TIED, "sliding_window": 256},
    "cohere2_moe": {**_TIED, "sliding_window": 256},
    "ernie4_5_moe": {"moe_layer_end_index": 4},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16},
    "gemma2": _TIED,
    **{name: {"global_head_dim": 64} for name in ("gemma4_text", "gemma4_unified_text")},
    "lfm2": {**_TIED, "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128},
    "lfm2_moe": _TIED,
    "glm4_moe_lite": {
        **{"mlp_layer_types": ["dense", *["sparse"] * 4], "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "intermediate_size": 256},
    "hy_v3": {
        **{"mlp_layer_types": ["dense", *["sparse"] * 4], "first_k_dense_replace": 1, "expert_hidden_dim": 44},
        **{"qk_norm": True, "route_norm": True},
    },
    "llama4_text": {"moe_layers": [1, 3], "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": {"rope_parameters": _ROPE | {"original_max_position_embeddings": 256}},
    "nemotron_h": {
        "mamba_head_dim": 64,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "full_attention"],
    },
}
"""Type -> values that its published models have, besides those that tests of its table have."""


REFUSED_VALUES: dict[str, dict[str, Any]] = {
    **{name: {} for name in CONDITIONS if name != "olmoe"},  # whose stock class has no other heads
    **{name: {"tie_word_embeddings": False} for name in ("cohere", "cohere2", "cohere2_moe", "gemma2")},
    "hy_v3": {"first_k_dense_replace": 2},
}
"""Type -> values of a variant that vLLM does not serve as Transformers does, if any cut can make one."""


def served_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Make a tiny model of an inferred type with sizes that vLLM takes; ``changes`` are values of its configuration."""
    tiny = tiny_sizes(model_type)
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96}
    sizes |= _LATENT if "kv_lora_rank" in tiny else _HEADS
    values = tiny | VALUES.get(model_type, {}) | sizes | SERVED_VALUES.get(model_type, {}) | changes
    model = random_model(model_type, **values)
    if getattr(model.config, "sliding_window", None) and "sliding_window" not in values:
        model = random_model(model_type, **values | _WINDOW)
    damp_(model)
    return model


def write_per_layer(model_type: str, out: Path, **changes: Any) -> None:
    """Write a tiny model with all biases, cut along all axes, otherwise in each layer, in the pruned architecture."""
    switches = AutoConfig.for_model(model_type).to_dict()
    biases = {name: True for name, value in switches.items() if value is False and name.endswith("bias")}
    model = served_model(model_type, **(biases | _LONG.get(model_type, {}) | changes))
    plan = everything(family_for(model).plan(model.config))
    assert not compact_(model, plan).stock
    export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})


def write_mixture(model_type: str, out: Path) -> None:
    """Write a tiny mixture, cut along all axes that vLLM carries, otherwise in each layer: the pruned architecture."""
    fields = tiny_sizes(model_type)
    model = served_model(model_type, **{name: width for name, width in _WIDE.items() if name in fields})
    config, family = model.config, family_for(model)
    every = family.plan(config).drop_layers(_PERIODS.get(model_type, [1]))
    for at, layer in enumerate(every.kept_layers):
        every = with_experts(every, layer, ([0, 5], [1, 2, 3, 4, 6], [2, 3, 6])[at % 3])
    for axes in (axes for count in (3, 2, 1, 0) for axes in combinations(("ffn", "heads", "hidden"), count)):
        plan = every.keep_hidden(range(96)) if "hidden" in axes else every
        for at, layer in enumerate(every.kept_layers):
            if "ffn" in axes:
                plan = plan.with_layer(layer, ffn=range(32 if at % 2 else 64))
            if "heads" in axes:
                plan = plan.with_layer(layer, query_heads=[1, 3] if at % 2 else [0, 1, 2, 3])
        if not mixture_obstacle(choose_target(family, config, plan).config.to_dict()):
            break
    assert not compact_(model, plan).stock
    export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})


def write_stock(model_type: str, out: Path, *, refused: bool = False, **changes: Any) -> tuple[str, ...]:
    """Write a tiny model that is cut along most axes and stays of its type; return the axes.

    Args:
        model_type: of an inferred family.
        out: the folder to create.
        refused: cut it so that vLLM does not serve the result as Transformers does.
        changes: other values of the configuration.
    """
    model = served_model(model_type, **changes)
    plan, axes = uniform_cut(model, refused=refused)
    assert compact_(model, plan).stock
    export(model, out, plan=plan, tokenizer=tiny_tokenizer(), provenance={"method": "by hand"})
    return axes


def uniform_cut(
    model: PreTrainedModel,
    *,
    refused: bool = False,
    removed: Sequence[int] | None = None,
    obstacle: Callable[[PrunePlan], str | None] | None = None,
) -> tuple[PrunePlan, tuple[str, ...]]:
    """Return the plan that cuts most axes with equal sizes in every layer, so that the type holds it, and its axes.

    Mixtures lose experts in any case.

    Args:
        model: of an inferred family.
        refused: look for one that vLLM does not serve as Transformers does.
        removed: the layers that are removed; None = those that vLLM can do without.
        obstacle: why a plan is not looked for; None = what vLLM says.
    """
    config = model.config
    dense, closed = family_for(model).plan(config), family_for(model).closed_axes(config)
    for layer in dense.kept_layers:
        dense = with_experts(dense, layer, [1, 2, 4, 6])
    layers = removed or ([1] if refused else _PERIODS.get(dense.model_type, [1]))
    subsets = [axes for count in (4, 3, 2, 1) for axes in combinations(AXES, count) if not {*axes} & {*closed}]
    for axes, hidden in product(subsets, (96, 64)):  # 64: as wide as the heads that are kept
        plan = dense
        for axis in axes:
            plan = _cut(plan, axis, hidden, layers)
        target = choose_target(family_for(config), config, plan)
        reason = obstacle(plan) if obstacle else stock_obstacle(target.config.to_dict())
        if plan != dense and target.stock is not None and bool(reason) is refused:
            return plan, axes
    raise AssertionError("no axis can be cut")


def _cut(plan: PrunePlan, axis: str, hidden: int, removed: Sequence[int]) -> PrunePlan:
    if axis == "layers":
        return plan.drop_layers(removed)
    if axis == "hidden":
        return plan.keep_hidden(range(hidden))
    dense = plan.dense
    for layer in plan.kept_layers:
        if axis == "ffn" and "ffn" in dense.axes and (width := dense.units("ffn", layer)):
            plan = plan.with_layer(layer, ffn=range(width * 2 // 3 // 8 * 8))
        if axis == "heads" and "kv_heads" in dense.axes and (groups := dense.units("kv_heads", layer)):
            heads = range(dense.units("query_heads", layer) // groups * (groups // 2))
            plan = plan.with_layer(layer, query_heads=heads, kv_heads=range(groups // 2))
    return plan
