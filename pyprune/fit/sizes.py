"""Choose widths that run well on the target: multiples for each format, or those of a profile. Does not import torch.

A matrix product over a width that does not fill the tiles of its kernel wastes a part of the last one. Which multiples
matter depends on the format of the weights and on the machine. They are rules for a search, and :func:`slow_sizes`
lists the layers that break them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from pyprune.errors import ConfigError, did_you_mean
from pyprune.fit.quantities import Widths, head_pairs
from pyprune.plan import PrunePlan
from pyprune.serving.widths import LayerSizes, layer_widths, named_layers, off_multiples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyprune.fit.profile import Product, Profile

MULTIPLES = (1, 8, 16, 32, 64)
"""Multiples that the micro-benchmark of a profile compares."""
TOLERANCE = 0.02
"""Share by which a smaller multiple may take longer per column than the best one."""
HEAD_PAIRS = 4
"""Most distinct pairs of query and KV heads by default: vLLM plans the attention of each pair separately."""
FFN_MULTIPLES = {
    **dict.fromkeys(("float32", "bfloat16", "float16", "w8a8-int8"), 64),
    **dict.fromkeys(("fp8", "w8a16"), 128),
    **dict.fromkeys(("w4a16", "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"), 32),
    **dict.fromkeys(("q6_k", "q5_k", "q4_k"), 256),
}
"""Format of the weights -> good multiple of FFN widths: 128 for the tiles of fp8 and Marlin, 32 for groups of four-bit
weights and llama.cpp's blocks, 256 for its K-quants (whose matrices fall back to another format otherwise)."""

SHARED_MULTIPLES = {"w4a16": 128}
"""Format of the weights -> multiple for the share of each of several devices, if that is more: groups of inputs that
share a scale must not be divided, and have this size if every width allows it."""

FITTED_RULES = "widths that run well"
"""Entry of a fitted checkpoint's record that holds the rules of its search."""


@dataclass(frozen=True)
class SizeRules:
    """Multiples that widths should keep to. A dense width is always allowed.

    Attributes:
        ffn_multiple: of FFN channels.
        hidden_multiple: of hidden channels.
        query_heads_multiple: of query heads (tensor parallelism gives each device the same number).
        kv_heads_multiple: of KV heads.
        max_head_pairs: most distinct pairs of query and KV heads in a model; None = any number.

    Raises:
        ConfigError: a number below 1.
    """

    ffn_multiple: int = 64
    hidden_multiple: int = 64
    query_heads_multiple: int = 1
    kv_heads_multiple: int = 1
    max_head_pairs: int | None = HEAD_PAIRS

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {value}; it must be a whole number of at least 1."
            for name, value in vars(self).items()
            if value is not None and (type(value) is not int or value < 1)
        ]
        if wrong:
            raise ConfigError(wrong)

    @classmethod
    def of(cls, target: str = "bfloat16", *, tensor_parallel: int = 1, max_head_pairs: int | None = HEAD_PAIRS) -> Self:
        """Return the defaults for a format of the weights.

        Args:
            target: a key of :data:`FFN_MULTIPLES`.
            tensor_parallel: devices that share every layer; each gets whole heads and a whole multiple of FFN channels.
            max_head_pairs: see :class:`SizeRules`.

        Raises:
            ConfigError: an unknown target, or a number below 1.
        """
        if target not in FFN_MULTIPLES:
            raise ConfigError(did_you_mean(target, FFN_MULTIPLES, "format of the weights"))
        if tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel is {tensor_parallel}; it must be at least 1.")
        step = FFN_MULTIPLES[target]
        of_each = SHARED_MULTIPLES.get(target, step) if tensor_parallel > 1 else step
        return cls(
            ffn_multiple=of_each * tensor_parallel,
            hidden_multiple=step,
            query_heads_multiple=tensor_parallel,
            kv_heads_multiple=tensor_parallel,
            max_head_pairs=max_head_pairs,
        )

    @classmethod
    def read(cls, fit: Mapping[str, Any], target: str) -> Self | None:
        """Read the rules by which a checkpoint was fitted, else the defaults; None for a format without defaults.

        Args:
            fit: the section "fit" of the checkpoint's record; empty if it was not fitted.
            target: format of the weights. The defaults are returned if the budget was for another format, and if the
                recorded rules are damaged.
        """
        usual = cls.of(target) if target in FFN_MULTIPLES else None
        rules = fit.get(FITTED_RULES)
        if fit.get("weights") != target or not isinstance(rules, Mapping):
            return usual
        names = {field.name for field in fields(cls)}
        try:
            return cls(**{name: value for name, value in rules.items() if name in names})
        except ConfigError:
            return usual

    @classmethod
    def learn(cls, profile: Profile, *, tensor_parallel: int = 1) -> Self:
        """Take the smallest multiple that is fast enough on the profile's machine, else the defaults.

        Fast enough is a median time per column of at most 2 % above the best. For llama.cpp widths are also multiples
        of the format's blocks: other widths would fall back to another format.

        Args:
            profile: one with products; without any, the defaults of its format are returned.
            tensor_parallel: see :meth:`of`.

        Raises:
            ConfigError: a dtype without defaults, or a number below 1.
        """
        rules = cls.of(profile.dtype, tensor_parallel=tensor_parallel)
        best = fast_multiple(profile.products)
        if best is None:
            return rules
        step = math.lcm(best, FFN_MULTIPLES[profile.dtype]) if profile.engine == "llamacpp" else best
        return replace(rules, ffn_multiple=step * tensor_parallel, hidden_multiple=step)


def column_times(products: Sequence[Product]) -> dict[int, float]:
    """Multiple -> median seconds of its products for each column of the width."""
    times: dict[int, list[float]] = defaultdict(list)
    for product in products:
        times[product.multiple].append(product.seconds / product.width)
    return {multiple: median(seconds) for multiple, seconds in sorted(times.items())}


def fast_multiple(products: Sequence[Product]) -> int | None:
    """Return the smallest multiple that takes at most 2 % more per column than the best one; None without products."""
    times = column_times(products)
    return next((m for m, seconds in times.items() if seconds <= (1 + TOLERANCE) * min(times.values())), None)


def slow_sizes(model: PrunePlan | Mapping[str, Any], rules: SizeRules) -> list[str]:
    """Describe the sizes of a model that break the rules, one sentence for each size, with the layers that have it.

    Args:
        model: a plan (layers are named by their dense indices, and dense widths are allowed), or config.json as plain
            data (layers are named by their own indices).
        rules: of the target.
    """
    if isinstance(model, PrunePlan):
        dense = model.dense
        widths: list[LayerSizes] = [layer.widths for layer in model.layers]
        whole: list[tuple[int, ...]] = [
            tuple(dense.units(axis, i) for axis in ("query_heads", "kv_heads", "ffn")) for i in model.kept_layers
        ]
        hidden, names = len(model.hidden), list(model.kept_layers)
        off_hidden = hidden != dense.hidden_size and hidden % rules.hidden_multiple != 0
    else:
        widths, hidden = layer_widths(model), int(model.get("hidden_size") or 0)
        names, whole = list(range(len(widths))), [(0, 0, 0)] * len(widths)
        off_hidden = hidden % rules.hidden_multiple != 0
    slow = [f"hidden size {hidden} is not a multiple of {rules.hidden_multiple}."] if off_hidden else []
    kinds = (
        ("query heads", rules.query_heads_multiple),
        ("KV heads", rules.kv_heads_multiple),
        ("FFN channels", rules.ffn_multiple),
    )
    for axis, (what, multiple) in enumerate(kinds):
        pairs = zip(widths, whole, strict=True)
        cut = [0 if kept[axis] == usual[axis] else kept[axis] for kept, usual in pairs]
        for width, places in off_multiples(cut, multiple).items():
            where = named_layers([names[i] for i in places])
            slow.append(f"{where}: {width} {what} are not a multiple of {multiple}.")
    count = head_pairs(Widths(*layer) for layer in widths)
    if rules.max_head_pairs is not None and count > rules.max_head_pairs:
        slow.append(f"{count} different pairs of query and KV heads; at most {rules.max_head_pairs} run well.")
    return slow
