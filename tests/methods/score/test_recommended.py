"""What a score removes by default: the same share of heads and FFN channels in every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyprune.methods.registry import preset, score_presets
from pyprune.run.recipe import build_config
from tests._support.models import tiny_batch, tiny_model
from tests._support.options import quick
from tests._support.scores import decision_of

RAW = ["taylor", "smoothgrad", "moreau", "moreau_gs", "moreau-converged", "loraprune", "wanda", "magnitude"]
"""Presets whose scores are sums that do not compare across axes."""
PAPERS = [name for name in RAW if name not in ("magnitude", "moreau-converged")]


@pytest.mark.parametrize("name", RAW)
def test_by_default_heads_and_channels_go_alike_in_every_layer(name: str) -> None:
    model = tiny_model("llama", num_key_value_heads=6)
    config = quick(replace(build_config(preset=name), ratio=0.3))
    decision = decision_of(model, tiny_batch(1, 8, 12), config)
    removed = decision.details["scores"]["removed_by_axis"]
    assert removed["heads"]["removed"] > 0
    assert removed["ffn"]["removed"] > 0
    assert len({layer.widths for layer in decision.plan.layers}) == 1, "the same count in every layer"
    assert len({layer.query_heads for layer in decision.plan.layers}) > 1, "and each layer's own weakest"
    assert not any("loses nothing" in text for text in decision.warnings)


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_presets_keep_the_one_order_and_differ_in_nothing_else(name: str) -> None:
    ours, papers = preset(name), preset(f"{name}-paper")
    assert (ours.score_options.ranking, papers.score_options.ranking) == ("local", "global")
    assert ours == replace(papers, score=replace(papers.score_options, ranking="local"))


def test_scores_that_do_compare_keep_the_one_order() -> None:
    """FLAP standardises by itself, as in its paper; obs counts nats; the control draws every score from one range."""
    found = {name for name in score_presets() if preset(name).score_options.ranking == "global"}
    assert found == {"flap", "obs", "random"}


def test_the_recovered_preset_takes_heads_too_reconstructs_and_trains_all_weights() -> None:
    found = preset("taylor-recovered")
    assert found.cut.reconstruct == "least_squares"
    assert found.stages.after == ("recover",)
    assert (found.recover.adapters, found.options.to_dict()["form"]) == ("none", "param_second")
    assert found.recover.distill is not None
    model = tiny_model("llama", num_key_value_heads=6, num_hidden_layers=6)
    decision = decision_of(model, tiny_batch(1, 8, 12), quick(replace(found, ratio=0.1)))
    removed = decision.details["scores"]["removed_by_axis"]
    assert removed["heads"]["removed"] > 0
    assert removed["ffn"]["removed"] > 0
    widths = [layer.widths for layer in decision.plan.layers]
    assert all(widths[i] == (6, 6, 40) for i in (0, 1, 4, 5)), "the first two layers and the last two stay whole"
