"""Add the notation of Transformers 4 to config.json, which older vLLM, TGI and conversion tools read.

Transformers 5 writes rotary embeddings as ``rope_parameters`` alone. Programs that do not know that entry silently take
a base of 10,000 and no scaling. The older entries are added to it; Transformers 5 reads the same from either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyprune.checkpoint.plausible import CONFIG
from pyprune.families import all_families

_FULL, _SLIDING = "full_attention", "sliding_attention"


def write_older_notation(folder: Path, dtype: str | None = None) -> None:
    """Add the older entries to config.json of a stock architecture; others are read with Transformers 5 alone.

    Args:
        folder: of a checkpoint that is being written.
        dtype: of the written weights, if they were converted; save_pretrained records that of the weights in memory.
    """
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is not None:
        config["dtype"] = dtype
    older = older_entries(config) if config["model_type"] in all_families() else {}
    path.write_text(json.dumps(config | older, indent=2) + "\n", encoding="utf-8")


def older_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of Transformers 4 for rotary embeddings and dtype, from config.json as plain data."""
    entries: dict[str, Any] = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    rotary = config.get("rope_parameters") or {}
    if _SLIDING in rotary:
        entries["rope_local_base_freq"] = rotary[_SLIDING]["rope_theta"]
        rotary = rotary[_FULL]
    if not rotary:
        return entries
    entries |= {name: rotary[name] for name in ("rope_theta", "partial_rotary_factor") if name in rotary}
    return entries | _rope_scaling(rotary, config["model_type"])


def _rope_scaling(rotary: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    scaling = {name: value for name, value in rotary.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") == "default":
        return {"rope_scaling": None}
    if model_type != "phi3":
        return {"rope_scaling": scaling}
    # Phi-3 of Transformers 4 takes these three alone, and the length of the first training from a separate entry.
    factors, original = ("short_factor", "long_factor"), "original_max_position_embeddings"
    if set(scaling) - {"rope_type", *factors, original}:
        return {}  # the older entry would hide the other values from Transformers 5, too
    three = {"type": scaling["rope_type"], **{name: scaling[name] for name in factors}}
    return {"rope_scaling": three} | {name: scaling[name] for name in (original,) if name in scaling}
