"""Latent attention (MLA): the channels that its matrices have for a head, and the tiny sizes that tell them apart.

Queries, and keys together with values, pass through latent ranks, which are the inside of the block. Each head has a
query, a key and a value of its own, so that it is its own KV head; all heads share the rotated channels of the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pyprune.families.base import Dimension
from pyprune.plan import HEAD_DIM

HEAD_FIELDS: Mapping[str, tuple[str, ...]] = {
    HEAD_DIM: ("v_head_dim",),
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "kv_head_dim": ("qk_nope_head_dim", "v_head_dim"),
}
"""Channels of a head -> the fields whose sum they are: what the output projection reads, the rows of a query, and the
rows that make a key and a value of the latent rank."""
_RANKS = {"q_lora_rank": 20, "kv_lora_rank": 14}
_INDEXER = {"index_n_heads": 5, "index_head_dim": 13, "index_topk": 6}
"""Sizes of the part that chooses which tokens a token attends to, where a type has one: fewer than tests have."""
_CHANNELS = {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 11}


def latent_channels(config: Any) -> int:
    """Return how many channels of a token a layer's cache holds, whatever its heads; 0 = keys and values of heads."""
    rank: int | None = getattr(config, "kv_lora_rank", None)
    return rank + config.qk_rope_head_dim + getattr(config, "index_head_dim", 0) if rank else 0


def tiny_latent_values(fields: Collection[str], heads: int) -> dict[str, Any]:
    """Return the values of tiny latent attention; {} for a type without it.

    Args:
        fields: of the configuration class.
        heads: of the tiny model.
    """
    if "kv_lora_rank" not in fields or not all(name in fields for name in _CHANNELS):
        return {}
    # All classes take the rotated channels for head_dim, some by another name.
    indexer = {name: n for name, n in _INDEXER.items() if name in fields}
    return _RANKS | _CHANNELS | indexer | {HEAD_DIM: _CHANNELS["qk_rope_head_dim"], "num_key_value_heads": heads}


def tiny_head_dims(heads: int) -> dict[int, str]:
    """Return size in tiny latent attention with this number of heads -> name of the channels of a head there."""
    return {heads * sum(_CHANNELS[one] for one in fields): name for name, fields in HEAD_FIELDS.items()}


def tiny_latent_widths(heads: int) -> dict[int, Dimension]:
    """Return size in tiny latent attention with this number of heads -> the axis that it counts."""
    axes = {size: "kv_heads" if name == "kv_head_dim" else "heads" for size, name in tiny_head_dims(heads).items()}
    ranks = (*_RANKS.values(), _RANKS["kv_lora_rank"] + _CHANNELS["qk_rope_head_dim"])
    count, channels, _ = _INDEXER.values()
    return {**axes, **dict.fromkeys((*ranks, count, channels, count * channels), "inner")}
