"""What readers older than Transformers 5 find in the config.json of a stock checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from pyprune.checkpoint.notation import older_entries
from pyprune.checkpoint.save import save_checkpoint
from tests._support.models import TINY, tiny_model

NEW = ("rope_parameters", "dtype")
OLD = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "torch_dtype")


def rotary(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


@pytest.mark.parametrize("name", sorted(set(TINY) - {"phi3-longrope"}))
def test_both_notations_say_the_same(name: str, tmp_path: Path) -> None:
    """Transformers reads the older one by its own conversion, as it reads what is on the hub."""
    model = tiny_model(name)
    folder = save_checkpoint(model, None, tmp_path / "out", plan=None, provenance={})
    written = json.loads((folder / "config.json").read_text())
    older = {key: value for key, value in written.items() if key not in NEW}
    newer = {key: value for key, value in written.items() if key not in OLD}
    read = [AutoConfig.for_model(**found) for found in (written, older, newer)]
    assert all(rotary(config) == rotary(model.config) for config in read)
    assert all(config.dtype == model.dtype for config in read)
    assert rotary(AutoConfig.from_pretrained(folder)) == rotary(model.config)


def test_the_scaling_of_llama_3_stands_where_older_readers_look() -> None:
    found = older_entries(tiny_model("llama3-rope").config.to_dict())
    assert found["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_phi_3_has_three_entries_or_none() -> None:
    config = tiny_model("phi3-longrope").config.to_dict()
    assert "rope_scaling" not in older_entries(config), "the attention factor has no place among them"
    del config["rope_parameters"]["attention_factor"]
    found = older_entries(config)
    assert set(found["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    assert found["original_max_position_embeddings"] == 4
    assert found["partial_rotary_factor"] == 0.75
