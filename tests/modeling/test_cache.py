"""Generation from a model whose attention is skipped somewhere is looked at before it is trusted."""

from __future__ import annotations

import pytest
import torch

from pyprune.cut.compact import compact_
from pyprune.errors import UnsupportedModelError
from pyprune.families import family_for
from pyprune.modeling.layers import SkippedAttention
from tests._support.models import tiny_batch, tiny_model

IDS = tiny_batch(0, 2, 7)


def skipped_model() -> object:
    model = tiny_model("qwen3")
    compact_(model, family_for(model).plan(model.config).with_layer(0, query_heads=[], kv_heads=[]))
    model.generation_config.eos_token_id = None
    return model


def generate(model: object, **options: object) -> torch.Tensor:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_counts_right_is_looked_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = skipped_model().to(dtype)
    looked = []
    error = type(model).cache_error
    monkeypatch.setattr(type(model), "cache_error", lambda self: looked.append(error(self)) or looked[-1])
    first, second = generate(model), generate(model)
    assert torch.equal(first, second)
    assert len(looked) == 1
    assert looked[0] < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_cache_that_loses_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a release that hands the cache on in a way that the skipped attention does not know."""
    monkeypatch.setattr(
        SkippedAttention, "forward", lambda self, hidden_states, **_: (torch.zeros_like(hidden_states), None)
    )
    model = skipped_model()
    with pytest.raises(UnsupportedModelError, match=r"skipped in layers \[0\].*% off.*use_cache=False"):
        generate(model)
    assert generate(model, use_cache=False).shape == (2, 13)
