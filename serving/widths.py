"""Widths of every layer of a checkpoint, read from config.json as plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from pyprune.families import all_families, find_family
from pyprune.families.base import MIXTURE
from pyprune.families.engines import EXPERT_FOR_EACH_RANK
from pyprune.families.mixtures import EXPERT_COUNTS, mlp_kinds
from pyprune.families.prefix import dense_type
from pyprune.plan import format_ranges

LayerSizes = tuple[int, int, int]
"""Query heads, KV heads and FFN channels of a layer; 0 where the sub-block is skipped."""
COLUMNS = ("query heads", "KV heads", "FFN channels")
"""Names of the columns of :data:`LayerSizes`."""
HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads")
"""The fields of config.json that hold the head counts, of the model or of a layer."""
KV_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's key-value cache on a CPU; a sequence occupies whole blocks."""

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""Environment variable by which vLLM divides layers among the ranks of pipeline parallelism, such as 14,9."""


def layer_widths(config: Mapping[str, Any]) -> list[LayerSizes]:
    """Return the widths of every layer, with the changes of ``per_layer_config``; of a mixture, those of an expert.

    Args:
        config: config.json as plain data, of a dense or a pruned architecture.

    Returns:
        One entry for each layer; [] where the file lacks the sizes that every decoder has.
    """
    heads = config.get("num_attention_heads")
    usual = {**config, HEAD_FIELDS[1]: config.get(HEAD_FIELDS[1]) or heads}
    layers, fields = _layers(config), ffn_fields(config)
    if not fields or not all(type(usual.get(name)) is int for name in (*HEAD_FIELDS, *fields)):
        return []
    widths = []
    for sizes, field in zip(layers, fields, strict=True):
        q, kv, ffn = (int(sizes.get(name, usual[name])) for name in (*HEAD_FIELDS, field))
        skip = sizes.get("skip", ())
        q, kv = (0, 0) if "attention" in skip else (q, kv)
        widths.append((q, kv, 0 if "mlp" in skip else ffn))
    return widths


def layer_experts(config: Mapping[str, Any]) -> list[int]:
    """Return the number of experts of every layer between which a router chooses; 0 of a layer without a mixture.

    Args:
        config: config.json as plain data, of a dense or a pruned architecture.
    """
    field = _mixture_fields(config).get("experts", "")
    pairs = zip(_layers(config), _mixtures(config), strict=False)
    return [
        int(sizes.get(field, config.get(field)) or 0) if mixture and "mlp" not in sizes.get("skip", ()) else 0
        for sizes, mixture in pairs
    ]


def ffn_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the field of config.json that holds the FFN width of every layer; of a mixture, that of an expert."""
    family = find_family(config.get("model_type"))
    dense = family.intermediate_field if family else "intermediate_size"
    experts = _mixture_fields(config).get("ffn", dense)
    return [experts if mixture else dense for mixture in _mixtures(config)]


def _mixture_fields(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return axis -> the field with the sizes of mixtures; {} for a type without them."""
    family = find_family(config.get("model_type"))
    return family.mixture_fields if family else {}


def _layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what ``per_layer_config`` changes of every layer; [] where the number of layers is missing."""
    count = config.get("num_hidden_layers")
    # Transformers writes "00" and "01" where there are more than ten layers.
    changed = {int(key): sizes for key, sizes in (config.get("per_layer_config") or {}).items() if str(key).isdecimal()}
    return [changed.get(index, {}) for index in range(count)] if type(count) is int else []


def _mixtures(config: Mapping[str, Any]) -> list[bool]:
    """Return whether the MLP of every layer is a mixture of experts; [] where a damaged file does not say."""
    count = len(_layers(config))
    if not _mixture_fields(config):
        return [False] * count
    try:
        kinds = mlp_kinds(SimpleNamespace(**{**config, "num_hidden_layers": count}))
    except (TypeError, ValueError, ArithmeticError):
        return []
    return [kind == MIXTURE for kind in kinds] if len(kinds) == count else []


def size_fields() -> set[str]:
    """Return the fields of ``per_layer_config`` that hold sizes, of all families."""
    return {*HEAD_FIELDS, *(family.intermediate_field for family in all_families().values()), *EXPERT_COUNTS}


def off_multiples(widths: Iterable[int], multiple: int, dense: int | None = None) -> dict[int, list[int]]:
    """Find the widths that are no multiple of a number, with the layers that have them.

    Args:
        widths: of every layer; 0 = skipped.
        multiple: what they should be a multiple of.
        dense: a width that is always accepted.

    Returns:
        Width -> indices of its layers, in the order in which the widths come.
    """
    layers: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        if width % multiple and width != dense:
            layers.setdefault(width, []).append(index)
    return layers


def named_layers(indices: list[int]) -> str:
    """Name layers in a message: "layer 3", "layers 0-2,7"."""
    return f"layer {indices[0]}" if len(indices) == 1 else f"layers {format_ranges(indices)}"


BITS_OF_A_WORD = 32
"""Bits of the numbers into which quantised weights are packed."""


def split_obstacle(widths: Sequence[LayerSizes], ranks: int) -> str | None:
    """Explain why vLLM cannot share these layers among the ranks of tensor parallelism; None where it can.

    All ranks get equally many query heads and FFN channels of a layer. KV heads are divided too; where a layer has
    fewer of them than there are ranks, several ranks hold the same one.

    Args:
        widths: of every layer.
        ranks: tensor parallel size; vLLM itself refuses one below 1.
    """
    if not widths or ranks < 2:
        return None
    for column, what in enumerate(COLUMNS):
        sizes = [layer[column] for layer in widths]
        unfit = _unfit(widths, column, ranks)
        if unfit:
            size = sizes[unfit[0]]
            layers = [i for i in unfit if sizes[i] == size]
            allowed = f"a multiple{' or a divisor' if what == 'KV heads' else ''} of {ranks}"
            most = min(ranks - 1, max(map(max, widths)))
            shared = [n for n in range(1, most + 1) if not any(_unfit(widths, i, n) for i in range(len(COLUMNS)))]
            fitting = " or ".join(map(str, shared))
            have, several = "has" if len(layers) == 1 else "have", what if size > 1 else what[:-1]
            return (
                f"{named_layers(layers)} {have} {size} {several}, which {ranks} tensor parallel ranks cannot share "
                f"equally (allowed: {allowed}). Serve it with --tensor-parallel-size {fitting}, or prune to such sizes."
            )
    return None


def group_obstacle(widths: Sequence[LayerSizes], head_dim: int, group: int, ranks: int) -> str | None:
    """Explain why vLLM cannot share weights whose inputs are stored in groups; None where it can.

    The inputs of a block's output projection (all heads, or the FFN channels) are divided among the ranks, and each
    rank needs whole groups of them.

    Args:
        widths: of every layer.
        head_dim: channels of a head.
        group: inputs of a group (:func:`inputs_together`); 0 = inputs are stored separately.
        ranks: tensor parallel size.
    """
    if ranks < 2 or group < 1:
        return None
    for column, channels in ((0, head_dim), (2, 1)):
        unfit = [i for i, layer in enumerate(widths) if layer[column] * channels % (group * ranks)]
        if unfit:
            size = widths[unfit[0]][column]
            layers = [i for i in unfit if widths[i][column] == size]
            have = "has" if len(layers) == 1 else "have"
            return (
                f"{named_layers(layers)} {have} {size} {COLUMNS[column]}: each of {ranks} tensor parallel ranks would "
                f"read {size * channels / ranks:g} inputs, no multiple of the {group} that are stored together. Use "
                "fewer ranks, or w8a8-int8."
            )
    return None


def sharing_obstacle(
    config: Mapping[str, Any], ranks: int, expert_ranks: int = 0, *, balanced: bool = False
) -> str | None:
    """Explain why ranks of tensor and expert parallelism cannot share the layers; None where they can.

    Args:
        config: config.json as plain data.
        ranks: tensor parallel size.
        expert_ranks: ranks that share whole experts; 0 = each has a part of every expert.
        balanced: whether vLLM moves experts between ranks by their load (EPLB).
    """
    widths, experts = layer_widths(config), layer_experts(config)
    if expert_ranks:
        pairs = zip(widths, experts, strict=False)
        widths = [(q, kv, 0 if count else ffn) for (q, kv, ffn), count in pairs]
    reason = split_obstacle(widths, ranks) or group_obstacle(
        widths, head_channels(config), inputs_together(config), ranks
    )
    numbers = sorted({*experts} - {0})
    if balanced and len(numbers) > 1:
        return reason or (
            f"its layers have {numbers[0]} to {numbers[-1]} experts, and vLLM moves experts between ranks only where "
            "all layers have as many. Serve it without --enable-eplb, or keep as many in each layer."
        )
    model_type = dense_type(config.get("model_type"))
    return reason or experts_obstacle(experts, expert_ranks or (ranks if model_type in EXPERT_FOR_EACH_RANK else 0))


def experts_obstacle(experts: Sequence[int], ranks: int) -> str | None:
    """Explain why ranks cannot each have an expert of every mixture; None where they can.

    vLLM gives ranks of expert parallelism one expert more than others where the experts do not divide.

    Args:
        experts: of every layer; 0 = no mixture.
        ranks: among which the experts are divided; 0 = they are not.
    """
    few = [i for i, count in enumerate(experts) if 0 < count < ranks]
    if not few:
        return None
    count = experts[few[0]]
    layers = [i for i in few if experts[i] == count]
    least = min(filter(None, experts))
    return (
        f"{named_layers(layers)} {'has' if len(layers) == 1 else 'have'} {count} experts, and vLLM needs one for each "
        f"of {ranks} ranks (allowed: {ranks} and more). Use at most {least} ranks, or keep more experts there."
    )


def quantised_layout(config: Mapping[str, Any]) -> str:
    """Return compressed-tensors' name for the layout of a folder's weights; "" where config.json names none."""
    rounding = config.get("quantization_config")
    return str(rounding.get("format") or "") if isinstance(rounding, Mapping) else ""


def inputs_together(config: Mapping[str, Any]) -> int:
    """Count the inputs that share a scale, or a number of four bytes, in a folder that compressed-tensors quantised.

    0 where inputs are stored separately, and a scale is of a whole row.

    Args:
        config: config.json as plain data.
    """
    rounding = config.get("quantization_config")
    groups = rounding.get("config_groups") if isinstance(rounding, Mapping) else None
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    group = max((int(found.get("group_size") or 0) for found in weights), default=0)
    if group or quantised_layout(config) != "pack-quantized":
        return group
    return max((BITS_OF_A_WORD // max(1, int(found.get("num_bits") or 8)) for found in weights), default=0)


def head_channels(config: Mapping[str, Any]) -> int:
    """Return the channels of a head, as config.json states or implies."""
    heads, hidden = config.get("num_attention_heads") or 1, config.get("hidden_size") or 0
    return int(config.get("head_dim") or hidden // heads)


def _unfit(widths: Sequence[LayerSizes], column: int, ranks: int) -> list[int]:
    """Return the layers whose size of this column the ranks cannot share."""
    copies = COLUMNS[column] == "KV heads"
    return [i for i, layer in enumerate(widths) if not _can_share(layer[column], ranks, copies=copies)]


def _can_share(size: int, ranks: int, *, copies: bool) -> bool:
    return size % ranks == 0 or (copies and 0 < size < ranks and ranks % size == 0)


def stages_of(layers: int, ranks: int, partition: str = "") -> list[tuple[int, int]]:
    """Divide layers among the ranks of pipeline parallelism as vLLM does.

    Args:
        layers: of the model.
        ranks: pipeline parallel size; below 1 is 1, which vLLM refuses.
        partition: layers of each rank, as in :data:`PARTITION`; vLLM refuses one that does not fit.

    Returns:
        First layer of each rank, and the one after its last.
    """
    ranks = max(1, ranks)
    counts = [int(part) if part.strip().isdigit() else 0 for part in partition.split(",")]
    if len(counts) != ranks or sum(counts) != layers:
        counts = [layers // ranks] * ranks
        for back in range(2, layers % ranks + 2):  # the remainder is added to the ranks before the last one
            counts[-back] += 1
    ends = list(accumulate(counts))
    return list(zip([0, *ends], ends, strict=False))


def stage_obstacle(widths: Sequence[LayerSizes], stages: Sequence[tuple[int, int]]) -> str | None:
    """Explain why vLLM cannot put these layers on the ranks of pipeline parallelism; None where it can.

    vLLM 0.32 divides the memory of a rank by the bytes that its attention stores, so that every rank needs attention.

    Args:
        widths: of every layer.
        stages: first layer of each rank, and the one after its last; [] without such parallelism.
    """
    if len(stages) < 2:
        return None
    for rank, (start, end) in enumerate(stages):
        if any(heads for heads, _, _ in widths[start:end]):
            continue
        holds = f"only {named_layers(list(range(start, end)))}" if start < end else "no layer"
        counts = ",".join(str(end - start) for start, end in stages)
        attend = format_ranges([i for i, (heads, _, _) in enumerate(widths) if heads])
        return (
            f"pipeline parallel rank {rank} would hold {holds}, and vLLM serves no rank without attention. The layers "
            f"are divided {counts}; attention is in {attend}. Set {PARTITION} so that each has some, or use fewer "
            "ranks."
        )
    return None


def draft_obstacle(widths: Sequence[LayerSizes], kinds: Sequence[str] = (), *, hybrid: bool = True) -> str | None:
    """Explain why vLLM cannot use a model with these layers as the draft of another one; None where it can.

    vLLM 0.32 prepares attention once for all layers of a draft, with the head counts of one of them and one cache.

    Args:
        widths: of every layer.
        kinds: of attention of every layer, as config.json's ``layer_types``; () = they are equal.
        hybrid: whether vLLM keeps caches of several kinds, which it does by default.
    """
    attends = {kind for kind, (heads, _, _) in zip(kinds, widths, strict=False) if heads}
    if hybrid and len(attends) > 1:
        return (
            f"a draft model needs one kind of attention in all layers, and this one has "
            f"{' and '.join(sorted(attends))}, "
            "whose caches vLLM keeps apart. Add --disable-hybrid-kv-cache-manager, which gives all layers one."
        )
    pairs: dict[tuple[int, int], int] = {}
    for index, (heads, kv_heads, _) in enumerate(widths):
        if heads:
            pairs.setdefault((heads, kv_heads), index)
    if len(pairs) < 2:
        return None
    (one, first), (other, second) = list(pairs.items())[:2]
    return (
        f"a draft model needs the same heads in all layers; layer {first} has {one[0]} query and {one[1]} KV heads, "
        f"layer {second} has {other[0]} and {other[1]}. Use a model that lost only layers or FFN channels."
    )


def token_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of keys and values that one token takes in all layers; skipped attention takes none.

    0 for latent attention: only vLLM knows whether it stores latents, or the keys and values of all heads.

    Args:
        config: config.json as plain data, of a dense or a pruned architecture.
        dtype: of the cache: bfloat16, float16 or float32.
    """
    if config.get("kv_lora_rank"):
        return 0
    return token_bytes_of(layer_widths(config), head_channels(config), dtype)


def cache_bytes(sequences: int, tokens: int, token: int) -> int:
    """Return the bytes of a cache of vLLM on a CPU that holds whole sequences; vLLM keeps one further block.

    Args:
        sequences: at once.
        tokens: of each.
        token: bytes of a token, see :func:`token_bytes`.
    """
    return (1 + sequences * -(-tokens // KV_BLOCK_TOKENS)) * KV_BLOCK_TOKENS * token


def token_bytes_of(layers: Iterable[LayerSizes], head_dim: int, dtype: str) -> int:
    """Return the bytes of keys and values that one token takes in layers of these widths.

    Args:
        layers: their widths.
        head_dim: channels of a head.
        dtype: of the cache.
    """
    item = 4 if dtype == "float32" else 2
    return 2 * head_dim * item * sum(kv_heads for _, kv_heads, _ in layers)
