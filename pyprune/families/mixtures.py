"""Mixtures of experts: which layers are mixtures, how wide their experts are, and the tiny sizes that tell them apart.

The experts of a layer have one width, which is the axis ``ffn`` of its MLP, as in a dense layer: plans, budgets and
scores then need no other name for it. Unit j is channel j of every expert. The shared experts, which read every token,
have the axis ``shared_ffn`` of the same block, and ``experts`` counts those between which the router chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pyprune.errors import ConfigError, PlanError
from pyprune.families.base import MIXTURE, Axis, Block, Family, decoder_blocks, is_mixture
from pyprune.plan import DECODER, BlockSizes, PrunePlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALIGNED = 4
"""The kernels of Transformers' experts read rows of a multiple of 16 bytes: this many numbers of float32."""
SHARED_WIDTH = "shared_expert_width"
"""Field of pruned configurations: channels of the shared experts, if their stock field counts experts."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
FIXED = {"phimoe": 2}
"""Type whose routers choose this many experts, whatever the configuration names."""
MIN_OF_GROUP = 2
"""Experts of a group that its rank is made of."""
DENSE_WIDTHS = ("intermediate_size_mlp", "prefix_dense_intermediate_size", "dense_intermediate_size")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)

_IS_DENSE: Mapping[str, Callable[[Any, int], bool]] = {
    "first_k_dense_replace": lambda count, layer: layer < count,
    "num_dense_layers": lambda count, layer: layer < count,
    "mlp_only_layers": lambda layers, layer: layer in layers,
    "decoder_sparse_step": lambda step, layer: (layer + 1) % step != 0,
    "moe_layers": lambda layers, layer: layer not in layers,
    "moe_layer_start_index": lambda first, layer: layer < first,
    "moe_layer_end_index": lambda last, layer: layer > last,
    "moe_layer_interval": lambda step, layer: (layer + 1) % step != 0,
}
"""Field of a configuration -> (its value, index of a layer) -> whether it makes the layer dense. A list of the kinds of
all layers, ``mlp_layer_types`` or ``layers_num_experts``, has the last word."""
TINY_EXPERTS = 7
"""Experts of a tiny mixture; nothing else in it is as many."""
TINY_EXPERT_FFN = 44
_DENSE_FFN, _SHARED_FFN, _SHARED = 46, 52, 3
TINY_WIDTHS: dict[int, Any] = {
    TINY_EXPERTS: "experts",
    TINY_EXPERT_FFN: "ffn",
    2 * TINY_EXPERT_FFN: ("ffn", "ffn"),
    **dict.fromkeys((_SHARED_FFN, _SHARED * TINY_EXPERT_FFN), "shared_ffn"),
    **{2 * n: ("shared_ffn", "shared_ffn") for n in (_SHARED_FFN, _SHARED * TINY_EXPERT_FFN)},
}
"""Size in a tiny mixture -> the axis that it counts, in addition to those of dense types."""


def tiny_mixture_values(fields: Collection[str], layers: int, hidden: int) -> dict[str, Any]:
    """Return the values of a tiny mixture, with dense layers if the type can have them; {} for a dense type.

    Args:
        fields: of the configuration class.
        layers: number of layers.
        hidden: hidden size of a tiny dense model.
    """
    if "is_moe" in fields or not any(name in fields for name in EXPERT_COUNTS):
        return {}  # a switch of a dense type (Doge) is looked at as every other switch
    values: dict[str, Any] = dict.fromkeys(EXPERT_COUNTS, TINY_EXPERTS)
    values |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
    values |= dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step", "moe_layer_interval"), 1)
    values |= dict.fromkeys(SHARED_COUNTS, _SHARED) | dict.fromkeys(SHARED_WIDTHS, _SHARED_FFN)
    values |= dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 2)
    values |= {"moe_intermediate_size": TINY_EXPERT_FFN, "mlp_only_layers": [1], "moe_layer_end_index": -1}
    values |= {"moe_layers": [i for i in range(layers) if i % 3 != 1]}
    values |= {"mlp_layer_types": ["sparse" if i % 2 else "dense" for i in range(layers)]}
    values |= dict.fromkeys(DENSE_WIDTHS, _DENSE_FFN) | {"mup_enabled": True}  # as all of AFMoE's models have it
    if "moe_intermediate_size" not in fields:
        values["intermediate_size"] = TINY_EXPERT_FFN
    tiny = {name: value for name, value in values.items() if name in fields}
    return tiny | {"hidden_size": -hidden // ALIGNED * -ALIGNED}


def mixture_values(
    fields: Collection[str], axes: Collection[str], kinds: Mapping[str, Mapping[Block, tuple[Axis, ...]]]
) -> dict[str, Any]:
    """Return the fields of :class:`Family` that describe the mixtures of a type.

    Args:
        fields: of the configuration class, without other names for them.
        axes: of the rows.
        kinds: of the layers: name -> blocks -> axes, without those of shared experts.
    """
    experts = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    dense = next((name for name in DENSE_WIDTHS if name in fields), "intermediate_size")
    widths = {"ffn": experts}
    if "shared_ffn" in axes:
        widths["shared_ffn"] = next((name for name in SHARED_WIDTHS if name in fields), SHARED_WIDTH)
    widths["experts"] = next(name for name in EXPERT_COUNTS if name in fields)
    count = next((name for name in SHARED_COUNTS if name in fields), None)
    return {
        "kinds": {kind: {**own, "mlp": tuple(widths)} if is_mixture(kind) else own for kind, own in kinds.items()},
        "block_sizes": partial(block_sizes, count),
        "intermediate_field": dense,
        "mixture_fields": widths,
        "kind_values": kind_values,
        "plan_obstacle": experts_obstacle,
    }


def mlp_kinds(config: Any) -> tuple[str, ...]:
    """Return what the MLP of every layer is, a mixture of experts or that of a usual decoder."""
    layers = range(config.num_hidden_layers)
    if not any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return (DECODER,) * len(layers)
    if types := getattr(config, "mlp_layer_types", None):
        return tuple(DECODER if name == "dense" else MIXTURE for name in types)
    if counts := getattr(config, "layers_num_experts", None):
        return tuple(MIXTURE if count > 1 else DECODER for count in counts)
    fields = {name: getattr(config, name, None) for name in _IS_DENSE}
    rules = [(_IS_DENSE[name], value) for name, value in fields.items() if value is not None]
    return tuple(DECODER if any(dense(value, i) for dense, value in rules) else MIXTURE for i in layers)


def kind_values(config: PretrainedConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the values that make a configuration name these kinds of layers, other than lists by layer.

    Raises:
        PlanError: no values name them.
    """
    mixtures = [i for i, kind in enumerate(kinds) if is_mixture(kind)]
    mlps = tuple(MIXTURE if i in mixtures else DECODER for i in range(len(kinds)))
    if mlps == mlp_kinds(config) or getattr(config, "mlp_layer_types", None):
        return {}
    first = mixtures[0] if mixtures else len(kinds)
    values: dict[str, Any] = dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), first
    )
    values |= {"mlp_only_layers": [i for i in range(len(kinds)) if i not in mixtures], "moe_layers": mixtures}
    values |= {"decoder_sparse_step": 1, "moe_layer_interval": 1, "moe_layer_end_index": [-1, *mixtures][-1]}
    values = {name: value for name, value in values.items() if getattr(config, name, None) is not None}
    if values and mlp_kinds(SimpleNamespace(num_experts=1, num_hidden_layers=len(kinds), **values)) != mlps:
        dense = sorted(set(range(len(kinds))) - set(mixtures))
        raise PlanError(
            f"No configuration of {config.model_type!r} has dense layers at {dense} of {len(kinds)} and mixtures at "
            "the others. Remove other layers."
        )
    return values


def block_sizes(
    shared_count: str | None, family: Family, config: PretrainedConfig, kind: str
) -> Mapping[str, BlockSizes]:
    """Return the sizes of the blocks of a layer; closed ones have none.

    Args:
        shared_count: the field that counts shared experts of the experts' width; None = there is one.
        family: of the model.
        config: of the model.
        kind: of the layer.
    """
    config = copy(config)
    vars(config).update(family.plain_values(config))
    blocks = decoder_blocks(family, config, kind) if any(family.kinds[kind].values()) else {}
    fields = family.width_fields(kind)
    widths: dict[str, Any] = {axis: getattr(config, name, None) for axis, name in fields.items()}
    if fields.get("shared_ffn") == SHARED_WIDTH and not widths["shared_ffn"]:
        count = getattr(config, shared_count) if shared_count else 1
        widths["shared_ffn"] = (count or 0) * widths["ffn"]
    blocks["mlp"] = BlockSizes({axis: n for axis, n in widths.items() if n})
    return {block: blocks.get(block, BlockSizes()) for block in family.kinds[kind]}


def chosen_experts(config: Any) -> int:
    """Return how many experts the routers of a model choose for a token; 0 without routers."""
    return next((int(count) for name in CHOSEN_COUNTS if (count := getattr(config, name, None))), 0)


def read_fewer_experts_(config: Any, modules: Iterable[Any], count: int) -> None:
    """Let the routers of a model with mixtures choose fewer experts for a token.

    Args:
        config: of the model.
        modules: all of the model; none where they are not made yet.
        count: experts of a token.

    Raises:
        ConfigError: tokens read fewer experts, or their number is no choice of the type.
    """
    if fixed := FIXED.get(config.model_type):
        raise ConfigError(
            f"cut.experts_per_token is {count}, and routers of {config.model_type!r} models choose {fixed} experts "
            "whatever their configuration names. Leave it out."
        )
    chosen = chosen_experts(config)
    if not 1 <= count <= chosen:
        raise ConfigError(
            f"cut.experts_per_token is {count}, and each token of this model reads {chosen} experts. Give 1 to "
            f"{chosen}."
        )
    _choose_(config, modules, count)


def _choose_(config: Any, modules: Iterable[Any], count: int) -> None:
    """Set how many experts of a token the routers choose, wherever it is kept."""
    for name in (name for name in CHOSEN_COUNTS if getattr(config, name, None)):
        setattr(config, name, count)
    for module in modules:
        for name in {*vars(module)} & {"top_k", *CHOSEN_COUNTS}:
            setattr(module, name, count)


@contextmanager
def experts_read(config: Any, layer: Any, count: int | None) -> Iterator[None]:
    """Let the routers of a layer choose another number of experts for a token meanwhile.

    Args:
        config: of the model, which some routers ask.
        layer: whose modules choose.
        count: experts of a token; None = as many as the configuration says.
    """
    usual = chosen_experts(config)
    if count is None or count == usual:
        yield
        return
    _choose_(config, layer.modules(), count)
    try:
        yield
    finally:
        _choose_(config, layer.modules(), usual)


def expert_groups(config: PretrainedConfig) -> int:
    """Return into how many groups of equally many experts the routers of a model divide them; 1 = they do not."""
    return int(getattr(config, "n_group", None) or 1)


def fewest_experts(config: PretrainedConfig) -> int:
    """Return how many experts a layer keeps at least: those that a token reads, and some of each group."""
    groups, chosen = expert_groups(config), chosen_experts(config)
    if groups == 1:
        return chosen
    # The sum of its two best experts is the rank of a group, and the experts are chosen from the best groups.
    topk_group: int = config.topk_group
    return groups * max(MIN_OF_GROUP, -(-chosen // topk_group))


def experts_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Return why the routers of a model cannot choose between the experts that a plan leaves, or None."""
    for layer in plan.layers:
        dense, kept = plan.dense.units("experts", layer.index), layer.units("experts")
        if not kept or len(kept) == dense:
            continue
        chosen, groups = chosen_experts(config), expert_groups(config)
        start = f"The plan keeps {len(kept)} experts of layer {layer.index}"
        if len(kept) < chosen:
            return f"{start}, and each token of this model reads {chosen}. Keep {chosen} to {dense} experts there."
        if groups == 1:
            continue
        numbers = [sum(expert * groups // dense == group for expert in kept) for group in range(groups)]
        least = fewest_experts(config) // groups
        if len({*numbers}) > 1 or numbers[0] < least:
            return (
                f"{start}, which are {', '.join(map(str, numbers))} of its {groups} groups. Keep equally many of each "
                f"group, and at least {least}."
            )
    return None


def rows_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Return why the kernels of a stock architecture cannot run the experts that a plan leaves, or None."""
    multiple = ALIGNED if str(config.dtype).endswith("float32") else 2 * ALIGNED
    widths = {len(layer.ffn) for layer in plan.layers if is_mixture(layer.kind) and layer.ffn}
    widths |= {len(plan.hidden)} if any(map(is_mixture, plan.dense.layers)) else set()
    odd = sorted(width for width in widths if width % multiple)
    return f"its experts need widths that are a multiple of {multiple}, not {odd[0]}" if odd else None


def one_width_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Return why a stock architecture with one field for experts and dense layers cannot hold a plan, or None."""
    widths = {len(layer.ffn) for layer in plan.layers if layer.ffn}
    return "its experts and its dense layers have one width" if len(widths) > 1 else None


def shared_width_obstacle(config: PretrainedConfig, plan: PrunePlan) -> str | None:
    """Return why a stock architecture whose shared experts are a number of experts cannot hold a plan, or None."""
    for layer in plan.layers:
        dense, kept = (plan.dense.units(axis, layer.index) for axis in ("ffn", "shared_ffn")), layer.units
        experts, shared = dense
        if shared and len(kept("shared_ffn")) * experts != shared * len(kept("ffn")):
            return "its shared experts are as wide as a number of experts"
    return None
