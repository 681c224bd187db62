"""The GGUF forms of state-space models, and of models that have their mixers in some layers or next to attention.

llama.cpp stores what it computes with: minus the exponential of ``A_log``, kernels without the dimension of groups, and
the numbers of heads as columns. Factors that it does not know are multiplied into the weights (Falcon-H1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyprune.families.gguf_forms import Change, GgufForm, GgufSizes, norm_epsilon, same

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Parts = Mapping[str, Mapping[str, Change]]


def convolution(values: Any, config: Any) -> Any:
    """Drop the dimension of groups: [channels, 1, taps] in, [channels, taps] out."""
    return values.squeeze(1)


def _decay(values: Any, config: Any) -> Any:
    return -values.exp()


def _decay_of_heads(values: Any, config: Any) -> Any:
    return -values.exp().unsqueeze(1)


def _of_heads(values: Any, config: Any) -> Any:
    return values.unsqueeze(1)


def _grouped(values: Any, config: Any) -> Any:
    """Divide the weight of a norm by groups: [channels] in, [groups, channels of a group] out."""
    return values.unflatten(0, (_first(config, "n_groups", "mamba_n_groups"), -1))


def _first(config: Any, *names: str) -> Any:
    return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)


_SCAN: Parts = {
    "conv1d.weight": {"ssm_conv1d.weight": convolution},
    "conv1d.bias": {"ssm_conv1d.bias": same},
    "dt_proj.bias": {"ssm_dt.bias": same},
    "dt_bias": {"ssm_dt.bias": same},
}
MAMBA_PARTS: Parts = {**_SCAN, ".A_log": {"ssm_a": _decay}, ".D": {"ssm_d": same}}
MAMBA2_PARTS: Parts = {
    **_SCAN,
    ".A_log": {"ssm_a": _decay_of_heads},
    ".D": {"ssm_d": _of_heads},
    "mamba.norm.weight": {"ssm_norm.weight": _grouped},
    "mixer.norm.weight": {"ssm_norm.weight": _grouped},
}


def _scan(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the sizes of the mixers of Mamba."""
    dense: int = getattr(config, "source_hidden_size", None) or config.hidden_size
    expanded = config.mamba_expand * dense if hasattr(config, "mamba_expand") else config.intermediate_size
    return {
        "ssm.conv_kernel": _first(config, "conv_kernel", "mamba_d_conv"),
        "ssm.inner_size": expanded,
        "ssm.state_size": _first(config, "state_size", "mamba_d_state"),
        "ssm.time_step_rank": _first(config, "time_step_rank", "mamba_dt_rank"),
    }


def _head_scan(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the sizes of the mixers of Mamba 2, which have heads."""
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    return {
        "ssm.conv_kernel": _first(config, "conv_kernel", "mamba_d_conv"),
        "ssm.inner_size": heads * _first(config, "mamba_d_head", "mamba_head_dim", "head_dim"),
        "ssm.state_size": _first(config, "state_size", "ssm_state_size", "mamba_d_state"),
        "ssm.time_step_rank": heads,
        "ssm.group_count": _first(config, "n_groups", "mamba_n_groups"),
    }


def _delta_net(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the sizes of gated delta nets, and the layers that have one."""
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.group_count": config.linear_num_key_heads,
        "attention.head_count_kv": sizes.heads[1],
        "attention.recurrent_layers": [not attention for attention, _ in sizes.has_blocks],
    }


def _qwen35(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    sections = config.rope_parameters.get("mrope_section") or (11, 11, 10)
    return _delta_net(config, sizes) | {"rope.dimension_sections": [*sections, 0]}


def _tiled(dim: int, width: str = "") -> Change:
    """Return a change of the order of value heads: llama.cpp has the first of each key head, then the second of each.

    Args:
        dim: that counts their channels, which may follow those of queries and keys.
        width: field with the channels of a head; "" = each has one number.
    """

    def change(values: Any, config: Any) -> Any:
        channels = getattr(config, width) if width else 1
        keys, count = config.linear_num_key_heads, config.linear_num_value_heads
        start = values.shape[dim] - count * channels
        heads = values.narrow(dim, start, count * channels)
        heads = heads.unflatten(dim, (keys, count // keys, channels)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        changed = values.clone()
        changed.narrow(dim, start, count * channels).copy_(heads)
        return changed

    return change


def _then(first: Change, second: Change) -> Change:
    return lambda values, config: second(first(values, config), config)


_OF_HEADS, _OF_VALUES = _tiled(0), _tiled(0, "linear_value_head_dim")
_QWEN35_PARTS: Parts = {
    "conv1d.weight": {"ssm_conv1d.weight": _then(convolution, _OF_VALUES)},
    "dt_bias": {"ssm_dt.bias": _OF_HEADS},
    ".A_log": {"ssm_a": _then(_decay, _OF_HEADS)},
    "in_proj_qkv.weight": {"attn_qkv.weight": _OF_VALUES},
    "in_proj_z.weight": {"attn_gate.weight": _OF_VALUES},
    "in_proj_b.weight": {"ssm_beta.weight": _OF_HEADS},
    "in_proj_a.weight": {"ssm_alpha.weight": _OF_HEADS},
    "linear_attn.out_proj.weight": {"ssm_out.weight": _tiled(1, "linear_value_head_dim")},
}


def _delta_net_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.linear_key_head_dim != config.linear_value_head_dim:
        return "its gated delta nets have equally wide keys and values"
    return None


def _doubled_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    inner = _scan(config, sizes)["ssm.inner_size"]
    return (
        None if inner == 2 * sizes.hidden else f"its mixers are {2 * sizes.hidden} channels wide, the model's {inner}"
    )


def _nemotron_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    mlps = {bool(experts) for layer, (experts, _) in zip(sizes.layers, sizes.mixtures, strict=True) if layer[2]}
    return "its MLPs are all dense or all mixtures of experts" if len(mlps) > 1 else None


def _nemotron(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    return _head_scan(config, sizes) | {"attention.layer_norm_epsilon": norm_epsilon(config)}  # read, and not used


def _granite(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    rotates = config.position_embedding_type == "rope"
    return _head_scan(config, sizes) | {"rope.scaling.finetuned": rotates}


def _one_group_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    groups = _first(config, "n_groups", "mamba_n_groups")
    return None if groups == 1 else f"its mixers normalise each of {groups} groups of channels, the model's all at once"


def _falcon_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    if config.tie_word_embeddings:
        return "factors on the embedding and on the logits need a head of its own"
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        return "its mixers have a norm after the gate"
    return None


def _times(*names: str) -> Change:
    """Return a change that multiplies by the product of these fields."""

    def change(values: Any, config: Any) -> Any:
        for name in names:
            field, _, index = name.partition(" ")
            factor = getattr(config, field)
            values = values * (factor[int(index)] if index else factor)
        return values

    return change


def _falcon_inputs(values: Any, config: Any) -> Any:
    """Multiply the rows that make gates, inputs, the two matrices of the state and time steps by their factors."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = (inner, inner, states, states, config.mamba_n_heads)
    factors = values.new_ones(values.shape[0])
    start = 0
    for count, factor in zip(rows, config.ssm_multipliers, strict=True):
        factors[start : start + count] = factor
        start += count
    return values * factors.unsqueeze(1) * config.ssm_in_multiplier


_FALCON_PARTS: Parts = {
    **MAMBA2_PARTS,
    "embed_tokens.weight": {"token_embd.weight": _times("embedding_multiplier")},
    "lm_head.weight": {"output.weight": _times("lm_head_multiplier")},
    "pre_ff_layernorm.weight": {"ffn_norm": same},
    "mamba.in_proj.weight": {"ssm_in.weight": _falcon_inputs},
    "mamba.out_proj.weight": {"ssm_out.weight": _times("ssm_out_multiplier")},
    "q_proj.weight": {"attn_q.weight": _times("attention_in_multiplier")},
    "k_proj.weight": {"attn_k.weight": _times("attention_in_multiplier", "key_multiplier")},
    "v_proj.weight": {"attn_v.weight": _times("attention_in_multiplier")},
    "o_proj.weight": {"attn_output.weight": _times("attention_out_multiplier")},
    "gate_proj.weight": {"ffn_gate.weight": _times("mlp_multipliers 0")},
    "down_proj.weight": {"ffn_down.weight": _times("mlp_multipliers 1")},
}
MAMBA = GgufForm("mamba", (), parts=MAMBA_PARTS, obstacle=_doubled_obstacle, metadata=_scan)
QWEN35 = GgufForm("qwen35", (), parts=_QWEN35_PARTS, obstacle=_delta_net_obstacle, metadata=_qwen35)
GRANITE = GgufForm(
    "granitehybrid",
    (),
    adjacent_pairs=True,
    normed_experts=True,
    dense_first=False,
    parts=MAMBA2_PARTS,
    obstacle=_one_group_obstacle,
    metadata=_granite,
)
MIXERS: Mapping[str, GgufForm] = {
    "bamba": replace(
        GRANITE, metadata=lambda config, sizes: _head_scan(config, sizes) | {"rope.scaling.finetuned": True}
    ),
    "falcon_h1": GgufForm(
        "falcon-h1", (), own_head=True, parts=_FALCON_PARTS, obstacle=_falcon_obstacle, metadata=_head_scan
    ),
    "falcon_mamba": replace(MAMBA, metadata=lambda config, sizes: _scan(config, sizes) | {"ssm.dt_b_c_rms": True}),
    "granitemoehybrid": GRANITE,
    "jamba": GgufForm(
        "jamba", (), square=True, normed_experts=False, dense_first=False, parts=MAMBA_PARTS, metadata=_scan
    ),
    "mamba": MAMBA,
    "mamba2": GgufForm("mamba2", (), parts=MAMBA2_PARTS, obstacle=_one_group_obstacle, metadata=_head_scan),
    "nemotron_h": GgufForm(
        "nemotron_h_moe",
        (),
        "relu2",
        own_head=True,
        dense_first=False,
        gating=2,
        parts={**MAMBA2_PARTS, "experts.up_proj": {"ffn_up_exps.weight": same}},
        obstacle=_nemotron_obstacle,
        metadata=_nemotron,
    ),
    "qwen3_5_moe_text": replace(QWEN35, architecture="qwen35moe", normed_experts=True),
    "qwen3_5_text": QWEN35,
    "qwen3_next": GgufForm(
        "qwen3next",
        (),
        normed_experts=True,
        parts={**_SCAN, ".A_log": {"ssm_a": _decay}},
        obstacle=_delta_net_obstacle,
        metadata=_delta_net,
    ),
}
"""Type -> the architecture of llama.cpp that holds it."""
