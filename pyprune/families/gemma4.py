"""Gemma 4 text: heads by kind of layer, keys and values that later layers read, and embeddings of their own for layers.

The rows of a layer are Gemma 3's. A layer whose keys and values others read, and one that reads them, keep their
attention whole: it is a closed block there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from pyprune.families.base import (
    MIXTURE,
    Axis,
    Block,
    Family,
    Row,
    StockClasses,
    StockTarget,
    decoder_blocks,
    is_mixture,
)
from pyprune.families.common import LAYER, first_obstacle, output_bias_obstacle
from pyprune.families.gemma import ROWS
from pyprune.families.gguf_forms import GgufForm, GgufSizes, same
from pyprune.families.mixtures import experts_obstacle, rows_obstacle
from pyprune.plan import BlockSizes, PrunePlan

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

_SOURCE, _READER = "_source", "_reader"
"""Ends of the kinds of layers whose keys and values other layers read, and of layers that read them."""
_WORDS = ("sliding_attention", "full_attention")
_ENDS: dict[str, dict[Block, tuple[Axis, ...]]] = {
    "": {"attention": ("heads", "kv_heads"), "mlp": ("ffn",)},
    _SOURCE: {"self_attn": (), "mlp": ("ffn",)},
    _READER: {"self_attn": (), "mlp": ("ffn",)},
    f"_{MIXTURE}": {"attention": ("heads", "kv_heads"), "mlp": ("ffn", "shared_ffn", "experts")},
}
"""End of a kind of layers -> its blocks. The MLP of a mixture is its shared expert."""
_WIDTHS = {"ffn": "moe_intermediate_size", "shared_ffn": "intermediate_size", "experts": "num_experts"}
_KINDS = {word + end: blocks for word in _WORDS for end, blocks in _ENDS.items()}


def _rows() -> Iterator[Row]:
    """Yield the rows: of attention and MLP once for each kind of layers, of experts, and of embeddings for layers."""
    for row, (kind, blocks) in product(ROWS, _KINDS.items()):
        renamed: dict[Axis, Axis] = {"ffn": "shared_ffn" if is_mixture(kind) else "ffn"}
        if closed := row.block == "attention" and "self_attn" in blocks:
            renamed = {"heads": "inner", "kv_heads": "inner"}
        axes = tuple(renamed.get(str(axis), axis) for axis in row.axes)
        if row.block is not None:
            yield replace(row, kind=kind, block="self_attn" if closed else row.block, axes=axes)
    yield from (row for row in ROWS if row.block is None)
    for kind in (word + f"_{MIXTURE}" for word in _WORDS):
        yield Row(LAYER + "router.scale", ("hidden",), "inner", "mlp", kind=kind)  # times the root of the hidden size
        yield Row(LAYER + "router.per_expert_scale", ("experts",), "inner", "mlp", kind=kind)
        yield Row(LAYER + "router.proj.weight", ("experts", "hidden"), "reader", "mlp", kind=kind)
        yield Row(LAYER + "experts.gate_up_proj", ("experts", ("ffn", "ffn"), "hidden"), "reader", "mlp", kind=kind)
        yield Row(LAYER + "experts.down_proj", ("experts", "hidden", "ffn"), "writer", "mlp", kind=kind)
        yield Row(LAYER + "pre_feedforward_layernorm_2.weight", ("hidden",), "pre_norm", "mlp", kind=kind)
        yield Row(LAYER + "post_feedforward_layernorm_1.weight", ("hidden",), "post_norm", "mlp", kind=kind)
        yield Row(LAYER + "post_feedforward_layernorm_2.weight", ("hidden",), "post_norm", "mlp", kind=kind)
    yield Row("model.embed_tokens_per_layer.weight", ("vocab", "layers"), "inner")
    yield Row("model.per_layer_model_projection.weight", ("layers", "hidden"), "reader", by_root=True)
    yield Row("model.per_layer_projection_norm.weight", ("inner",), "inner")
    yield Row(LAYER + "per_layer_input_gate.weight", ("inner", "hidden"), "reader")
    yield Row(LAYER + "per_layer_projection.weight", ("hidden", "inner"), "writer")
    yield Row(LAYER + "post_per_layer_input_norm.weight", ("hidden",), "post_norm")


def _layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the kind of every layer; the last ones read the keys and values of the last other layer of their word."""
    words: list[str] = config.layer_types
    first = len(words) - (config.num_kv_shared_layers or 0)
    last = {word: index for index, word in enumerate(words[:first]) if word in words[first:]}
    if getattr(config, "enable_moe_block", False):
        return tuple(f"{word}_{MIXTURE}" for word in words)
    ends = [_READER if i >= first else _SOURCE if last.get(word) == i else "" for i, word in enumerate(words)]
    return tuple(map("".join, zip(words, ends, strict=True)))


def _block_sizes(family: Family, config: PretrainedConfig, kind: str) -> Mapping[Block, BlockSizes]:
    """Return the sizes of the blocks of a kind of layers, whose heads the configuration counts by layer."""
    own: Any = config.per_layer_config[_layer_kinds(config).index(kind)]
    blocks = decoder_blocks(family, own, kind)
    if kind.endswith(_READER) and config.use_double_wide_mlp:
        blocks["mlp"] = BlockSizes({"ffn": 2 * own.intermediate_size})
    if is_mixture(kind):
        blocks["mlp"] = BlockSizes({axis: getattr(own, name) for axis, name in _WIDTHS.items()})
    return {block: blocks.get(block, BlockSizes()) for block in family.kinds[kind]}


def _kind_values(config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
    return {"num_kv_shared_layers": sum(kind.endswith(_READER) for kind in kinds)}


def _stock_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Explain why Gemma 4 cannot hold the plan, or return None: kinds of layers have one number of heads and width."""
    shares = {"query_heads": {1.0 for layer in plan.layers if layer.keeps("self_attn")}}
    for layer in plan.layers:
        for axis, units in ((axis, units) for axes in layer.blocks.values() for axis, units in axes.items()):
            shares.setdefault(axis, set()).add(len(units) / plan.dense.units(axis, layer.index))
    if not plan.is_uniform or any(len(found) > 1 for axis, found in shares.items() if axis != "kv_heads"):
        return "widths differ between layers or a sub-block is skipped"
    if not plan.layers[-1].kind.startswith("full_attention"):
        return "its last layer must have full attention"
    return None


def _variant_obstacle(config: PretrainedConfig) -> str | None:
    if getattr(config, "enable_moe_block", False) and config.num_kv_shared_layers:
        return "its layers have experts and share keys and values."
    return None


def _gives_more(config: PretrainedConfig) -> bool:
    return bool(config.num_kv_shared_layers or getattr(config, "hidden_size_per_layer_input", 0))


def _narrow_layer(layer_class: type[nn.Module], config: Any, index: int) -> nn.Module:
    """Build a layer at the width that its configuration names, also if it reads the keys and values of another."""
    config.use_double_wide_mlp = False
    return layer_class(config, index)


def _gguf_metadata(config: PretrainedConfig, sizes: GgufSizes) -> dict[str, Any]:
    """Return the sizes of heads by kind of layer; layers that share keys and values have those of the configuration."""
    layers = [config.per_layer_config[i] for i in range(len(sizes.layers))]
    slides = [word == "sliding_attention" for word in config.layer_types]
    dense = [(layer.num_attention_heads, layer.num_key_value_heads) for layer in layers]
    heads = [own[:2] if own[0] else other for own, other in zip(sizes.layers, dense, strict=True)]
    full, sliding = (layers[slides.index(word)].head_dim if word in slides else None for word in (False, True))
    values = {
        "attention.head_count": [n for n, _ in heads],
        "attention.head_count_kv": [n for _, n in heads],
        "attention.shared_kv_layers": config.num_kv_shared_layers or 0,
        "attention.sliding_window_pattern": slides,
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0) or 0,
        "final_logit_softcapping": float(config.final_logit_softcapping or 0),  # 30 if it is missing
    }
    for end, size in (("", full), ("_swa", sliding or full)):
        values |= {f"{key}{end}": size for key in ("attention.key_length", "attention.value_length")}
        values[f"rope.dimension_count{end}"] = size
    if sizes.mixtures and sizes.dense_layers == 0:
        values["feed_forward_length"] = [shared for _, shared in sizes.mixtures]
    return values


def _gguf_obstacle(config: PretrainedConfig, sizes: GgufSizes) -> str | None:
    first = len(sizes.layers) - (config.num_kv_shared_layers or 0)
    if first < len(sizes.layers) and config.layer_types[max(0, first - 2) : first] != [*_WORDS]:
        return "the last layers of their own keys and values are one with a window and one without, in this order"
    if not all(layer[2] for layer in sizes.layers):
        return "each layer has an MLP"
    if any(has and not layer[0] for layer, (has, _) in zip(sizes.layers, sizes.has_blocks, strict=True)):
        return "each layer has attention"
    experts = {(layer[2], count) for layer, (count, _) in zip(sizes.layers, sizes.mixtures, strict=False)}
    if any(count for _, count in experts) and len(experts) > 1:
        return "all layers have equally many experts of one width"
    return None


_GGUF = GgufForm(
    "gemma4",
    (),
    "gelu_pytorch_tanh",
    per_layer=True,
    rope_factors=True,
    windows="always",
    dense_first=False,
    parts={
        "layer_scalar": {"layer_output_scale.weight": same},
        "router.scale": {"ffn_gate_inp.scale": same},
        "router.per_expert_scale": {"ffn_down_exps.scale": same},
        "experts.gate_up_proj": {"ffn_gate_up_exps.weight": same},
        **{f"mlp.{part}_proj.weight": {f"ffn_{part}.weight": same} for part in ("gate", "up", "down")},
    },
    obstacle=_gguf_obstacle,
    metadata=_gguf_metadata,
)


def _family(model_type: str, package: str, name: str, experts: Mapping[Axis, str]) -> Family:
    stock = first_obstacle(output_bias_obstacle("Gemma 4's MLP"), _stock_obstacle, rows_obstacle)
    return Family(
        model_type=model_type,
        classes=replace(StockClasses.locate(package, f"{name}Text"), model=f"transformers:{name}ForCausalLM"),
        rows=tuple(_rows()),
        stock_targets=(StockTarget(model_type, stock),),
        kinds=_KINDS,
        layer_kinds=_layer_kinds,
        block_sizes=_block_sizes,
        kind_values=_kind_values,
        needed_kinds={word + _SOURCE: word + _READER for word in _WORDS},
        build_layer=_narrow_layer,
        scaled_embedding=True,
        begins_with_bos=True,
        last_word="full_attention",
        layer_fields=("head_dim", "num_key_value_heads"),
        layer_inputs="hidden_size_per_layer_input",
        layer_scales=("layer_scalar",),
        gives_more=_gives_more,
        more_values={f"{name}TextAttention": 1, f"{name}TextRouter": 2},
        mlp_modules=("mlp", "router", "experts"),
        mixture_fields=experts,
        refuse=_variant_obstacle,
        plan_obstacle=experts_obstacle,
        gguf=(_GGUF,),
    )


GIVEN: dict[str, Family] = {
    "gemma4_text": _family("gemma4_text", "gemma4", "Gemma4", _WIDTHS),
    "gemma4_unified_text": _family("gemma4_unified_text", "gemma4_unified", "Gemma4Unified", {}),
}
