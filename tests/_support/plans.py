"""Plans that exercise every axis of a tiny model."""

from __future__ import annotations

from collections.abc import Sequence

from pyprune.plan import PrunePlan, kv_head_of


def keep_kv_groups(plan: PrunePlan, layer: int, kv_heads: list[int], per_group: int | None = None) -> PrunePlan:
    """Keep whole KV groups of a layer, or only the last ``per_group`` query heads of each."""
    sizes = plan.dense.blocks(layer)["attention"]
    heads = []
    for kv in kv_heads:
        group = [q for q in range(sizes.axes["query_heads"]) if kv_head_of(q, sizes) == kv]
        heads += group if per_group is None else group[-per_group:]
    return plan.with_layer(layer, query_heads=heads, kv_heads=kv_heads)


def with_shared(plan: PrunePlan, layer: int, channels: Sequence[int]) -> PrunePlan:
    """Keep channels of the shared experts of a layer, if it has any."""
    has_shared = layer < plan.dense.num_layers and plan.dense.units("shared_ffn", layer)
    return plan.with_layer(layer, shared_ffn=channels) if has_shared else plan


def with_experts(plan: PrunePlan, layer: int, experts: Sequence[int]) -> PrunePlan:
    """Keep experts of a layer, if it has any."""
    has_experts = layer < plan.dense.num_layers and plan.dense.units("experts", layer)
    return plan.with_layer(layer, experts=experts) if has_experts else plan


def axis_plans(identity: PrunePlan) -> dict[str, PrunePlan]:
    """One plan an axis, then combinations; indices are chosen so that a wrong one cannot pass unnoticed."""
    dense = identity.dense
    layers = range(dense.num_layers)
    last_kv = {i: dense.units("kv_heads", i) - 1 for i in layers}
    kv_kept = {i: [last] if last < 2 else [0, last] for i, last in last_kv.items()}
    heads = query_heads = ffn = experts = identity
    attention, mlp = ([i for i in layers if dense.units(axis, i)] for axis in ("query_heads", "ffn"))
    for i in mlp:
        ffn = with_shared(ffn.with_layer(i, ffn=range(3, 27)), i, range(4, 40))
        experts = with_experts(experts, i, [1, 2, 4, 6])
    for i in attention:
        heads = keep_kv_groups(heads, i, kv_kept[i])
        if dense.blocks(i)["attention"].group_size > 1:
            query_heads = keep_kv_groups(query_heads, i, list(range(dense.units("kv_heads", i))), 1)
    unequal, skipped, dropped = identity, identity, 3
    if mlp:
        unequal = identity.with_layer(mlp[1 % len(mlp)], ffn=range(0, 40, 3)).with_layer(
            mlp[2 % len(mlp)], ffn=range(7)
        )
        unequal = with_shared(with_shared(unequal, mlp[2 % len(mlp)], range(1, 44, 2)), mlp[3 % len(mlp)], range(5))
        for i, kept in zip(mlp, ([0, 5], range(1, 7), [2, 3, 6]), strict=False):
            unequal = with_experts(unequal, i, kept)
    several = [i for i in mlp if len(dense.blocks(i)) > 1]
    if several:
        skipped = identity.with_layer(several[2 % len(several)], ffn=[])
    if attention:
        unequal = keep_kv_groups(unequal, attention[0], [last_kv[attention[0]]])
        # The cache's length is read from one layer: attention goes from the first and from a later one.
        for i in (i for i in (attention[0], attention[3 % len(attention)]) if len(dense.blocks(i)) > 1):
            skipped = skipped.with_layer(i, query_heads=[], kv_heads=[])
    everything = skipped
    if attention:
        again = attention[1 % len(attention)]
        everything = keep_kv_groups(skipped, again, kv_kept[again])
        dropped = 2 if again == dropped else dropped
    everything = with_experts(with_shared(everything, 4, range(3, 30)), 4, [1, 3, 4, 5, 6])
    odd_hidden = [i for i in range(dense.hidden_size) if i not in (0, 5, 7)]
    plans = {
        "identity": identity,
        "layers": identity.drop_layers([0, 2]),
        "hidden": identity.keep_hidden(range(36)),
        "hidden-odd": identity.keep_hidden(odd_hidden),
        "heads": heads,
        "ffn": ffn,
        "unequal": unequal,
        "skipped": skipped,
        "everything": everything.drop_layers([dropped]).keep_hidden(range(4, 40)),
    }
    if experts is not identity:
        plans["experts"] = experts
    if query_heads is not identity:
        plans["query-heads"] = query_heads
    return plans
