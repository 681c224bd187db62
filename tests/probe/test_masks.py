"""Masks of attention that the layers of a windowed model are given when they run one by one."""

from __future__ import annotations

import pytest
import torch

from pyprune.families import family_for
from pyprune.probe.streams import LayerRunner
from tests._support.models import tiny_batch, tiny_model

WINDOW = 6


@pytest.mark.parametrize(("length", "masked"), [(WINDOW, False), (WINDOW + 1, True)])
def test_a_window_that_hides_nothing_needs_no_mask(length: int, masked: bool) -> None:
    """Every layer slides, so that Transformers makes a mask for both lengths."""
    model = tiny_model("mistral-window")
    layers = LayerRunner(model, family_for(model))
    ids = tiny_batch(0, 2, length)
    streams = [layers.embed(ids)]
    assert all((layers.keywords(i, streams[0])["attention_mask"] is not None) == masked for i in range(2))
    with torch.no_grad():
        layers.through_(streams)
        expected = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        torch.testing.assert_close(model.model.norm(streams[0]), expected[-1])


def test_eager_attention_keeps_its_mask() -> None:
    """It hides nothing of its own accord."""
    model = tiny_model("mistral-window")
    model.set_attn_implementation("eager")
    layers = LayerRunner(model, family_for(model))
    assert layers.keywords(0, layers.embed(tiny_batch(0, 2, WINDOW)))["attention_mask"] is not None
