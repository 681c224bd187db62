"""Widths of every layer of a checkpoint, read from config.json as plain data. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyprune.families import all_families
from pyprune.plan import format_ranges

LayerSizes = tuple[int, int, int]
"""Query heads, KV heads and FFN channels of a layer; 0 where the sub-block is skipped."""


def layer_widths(config: Mapping[str, Any]) -> list[LayerSizes]:
    """The widths of every layer, those that ``per_layer_config`` changes among them.

    Args:
        config: config.json as plain data, of a dense or a pruned architecture.

    Returns:
        One entry for each layer; nothing where the file does not name the sizes that every decoder has.
    """
    field = ffn_field(config)
    names = ("num_attention_heads", "num_key_value_heads", field)
    heads = config.get("num_attention_heads")
    usual = {names[0]: heads, names[1]: config.get("num_key_value_heads") or heads, names[2]: config.get(field)}
    layers = config.get("num_hidden_layers")
    if not all(type(value) is int for value in (*usual.values(), layers)):
        return []
    per_layer = config.get("per_layer_config") or {}
    found = []
    for index in range(int(layers or 0)):
        own = per_layer.get(str(index), per_layer.get(index, {}))
        q, kv, ffn = (int(own.get(name, usual[name])) for name in names)
        skip = own.get("skip", ())
        q, kv = (0, 0) if "attention" in skip else (q, kv)
        found.append((q, kv, 0 if "mlp" in skip else ffn))
    return found


def ffn_field(config: Mapping[str, Any]) -> str:
    """The field of config.json that holds the FFN width."""
    family = all_families().get(str(config.get("model_type")).removeprefix("pruned_"))
    return family.intermediate_field if family else "intermediate_size"


def off_multiples(widths: Iterable[int], multiple: int, dense: int | None = None) -> dict[int, list[int]]:
    """Widths that are no multiple of a number, with the layers that have them.

    Args:
        widths: of every layer; 0 = skipped.
        multiple: what they should be a multiple of.
        dense: a width that is as good as it gets, whatever it is a multiple of.

    Returns:
        Width -> indices of its layers, in the order in which the widths come.
    """
    found: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        if width % multiple and width != dense:
            found.setdefault(width, []).append(index)
    return found


def named_layers(indices: list[int]) -> str:
    """The layers of these indices for a message: "layer 3", "layers 0-2,7"."""
    return f"layer {indices[0]}" if len(indices) == 1 else f"layers {format_ranges(indices)}"
