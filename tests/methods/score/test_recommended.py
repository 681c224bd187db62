"""The forms of a score: what each removes, and what it does after the cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyprune.families import family_for
from pyprune.methods.registry import preset, score_presets
from pyprune.run.recipe import build_config
from pyprune.run.stages import check_axes_open
from tests._support.inferred import tiny_inferred
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
def test_the_papers_presets_keep_the_one_order_of_all_layers(name: str) -> None:
    ours, papers = preset(name), preset(f"{name}-paper")
    assert (ours.score_options.ranking, papers.score_options.ranking) == ("local", "global")
    assert (ours.score_options.closed_ends, papers.score_options.closed_ends) == (2, 0)
    assert papers.cut.reconstruct == "none"


def test_the_control_keeps_the_one_order() -> None:
    """It draws every score from one range."""
    found = {name for name in score_presets() if preset(name).score_options.ranking == "global"}
    assert found == {"random"}


def ends_kept(layers: int, ratio: float, settings: tuple[str, ...] = ()) -> tuple[int, int]:
    """The layers that stay whole at the beginning and at the end of a cut by Taylor's score."""
    model = tiny_model("llama", num_key_value_heads=6, num_hidden_layers=layers)
    config = replace(build_config(preset="taylor-plain", settings=settings), ratio=ratio)
    decision = decision_of(model, tiny_batch(1, 8, 12), config)
    whole = [layer.widths == (6, 6, 40) for layer in decision.plan.layers]
    assert ("score.closed_ends" in " ".join(decision.notes)) == (not settings)
    return whole.index(False), whole[::-1].index(False)


def test_the_outer_layers_stay_whole_as_long_as_the_others_can_lose_the_goal() -> None:
    assert ends_kept(12, 0.1) == (2, 2)
    assert ends_kept(6, 0.1) == (1, 1), "one layer of six at each end"
    assert ends_kept(12, 0.45) == (1, 1), "with two the others would lose more than three quarters"
    assert ends_kept(12, 0.1, ("score.layers=[0,3,11]",)) == (0, 0), "named layers win"


@pytest.mark.parametrize(
    ("ratio", "settings", "opened"),
    [
        (0.2, (), False),
        (0.28, (), True),
        (0.28, ("score.further_axes=[]",), False),
        (0.28, ("score.axes=[ffn]",), False),
        (0.28, ("score.axes=[ffn]", "score.further_axes=[heads]"), True),
        (0.28, ("score.ffn=4",), False),
    ],
)
def test_obs_removes_heads_only_where_channels_do_not_suffice(
    ratio: float, settings: tuple[str, ...], opened: bool
) -> None:
    model = tiny_model("llama", num_key_value_heads=6, num_hidden_layers=12)
    decision = decision_of(
        model, tiny_batch(1, 8, 12), replace(build_config(preset="obs-plain", settings=settings), ratio=ratio)
    )
    fewer = {len(layer.query_heads) for layer in decision.plan.layers} != {6}
    noted = any("heads are open too" in note for note in decision.notes)
    assert (fewer, noted) == (opened, opened)
    assert any(len(layer.ffn) < 40 for layer in decision.plan.layers)


def test_a_closed_axis_is_not_opened() -> None:
    config = build_config(preset="obs")
    model = tiny_inferred("laguna")
    assert check_axes_open(tiny_model("llama"), config) == config
    assert "heads" in family_for(model).closed_axes(model.config)
    assert check_axes_open(model, config).score_options.further_axes == ()
