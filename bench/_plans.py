"""Plans of bench/fit/profile_error.py: every kind of cut and mixtures of them, none of which a profile measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyprune.plan import PrunePlan, Sizes, kv_head_of

SMOLLM2 = PrunePlan.identity("llama", Sizes.decoder(30, 576, 9, 3, 64, 1536, 49152))


def never_profiled(dense: PrunePlan = SMOLLM2) -> dict[str, PrunePlan]:
    """Name -> plan, for a model of at least 12 layers, 3 KV groups and FFN widths in 128s.

    Args:
        dense: the plan that removes nothing.
    """
    last = dense.dense.num_layers - 1
    width = dense.dense.intermediate_size
    hidden = dense.dense.hidden_size
    middle = range(2, last)
    fewer = dense.drop_layers(range(4, last, 4))
    spread = [width, width * 5 // 6, width * 2 // 3, width // 3]
    mixed = with_ffn(with_groups(dense, range(5, last, 3), 2), spread)
    narrow = with_ffn(dense.keep_hidden(range(hidden * 8 // 9)), [width * 5 // 6])
    return {
        "a quarter of the layers": fewer,
        "two of five layers": dense.drop_layers(i for i in middle if i % 5 in (1, 3)),
        "ffn 5 of 6": with_ffn(dense, [width * 5 // 6]),
        "ffn 1 of 3": with_ffn(dense, [width // 3]),
        "ffn by layers": with_ffn(dense, spread),
        "kv groups in half of the layers": with_groups(dense, range(0, last, 2), 2),
        "kv groups by layers": with_groups(with_groups(dense, range(3, last, 3), 2), range(4, last, 3), 1),
        "hidden 8 of 9": dense.keep_hidden(range(hidden * 8 // 9)),
        "hidden 2 of 3": dense.keep_hidden(range(hidden * 2 // 3)),
        "attention skipped": _skip(dense, range(6, last, 4), query_heads=(), kv_heads=()),
        "mlp skipped": _skip(dense, range(7, last, 4), ffn=()),
        "heads and ffn": mixed,
        "heads, ffn and layers": mixed.drop_layers(range(8, last, 5)),
        "hidden, ffn and attention": _skip(narrow, range(9, last, 5), query_heads=(), kv_heads=()),
    }


def with_ffn(plan: PrunePlan, widths: Sequence[int]) -> PrunePlan:
    """Give the kept layers these FFN widths in turn.

    Args:
        plan: to change.
        widths: of the first kept layer, the second one, ...; they start again at the end.
    """
    for position, index in enumerate(plan.kept_layers):
        plan = plan.with_layer(index, ffn=range(widths[position % len(widths)]))
    return plan


def with_groups(plan: PrunePlan, layers: Iterable[int], kept: int) -> PrunePlan:
    """Keep that many KV groups with all their query heads in these layers.

    Args:
        plan: to change.
        layers: dense indices of kept layers.
        kept: KV groups, the first ones.
    """
    sizes = plan.dense
    heads = [q for q in range(sizes.num_attention_heads) if kv_head_of(q, sizes) < kept]
    for index in layers:
        plan = plan.with_layer(index, query_heads=heads, kv_heads=range(kept))
    return plan


def _skip(plan: PrunePlan, layers: range, **nothing: tuple[int, ...]) -> PrunePlan:
    for index in layers:
        plan = plan.with_layer(index, **nothing)
    return plan
