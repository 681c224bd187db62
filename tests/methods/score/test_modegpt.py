"""MoDeGPT's ridge leverage: a channel that others span scores little, and goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyprune.errors import ConfigError
from pyprune.methods.registry import preset
from pyprune.methods.score.modegpt.score import ridge_leverage, score
from pyprune.run.recipe import build_config
from tests._support.models import tiny_batch, tiny_model
from tests._support.scores import decision_of, scoring_of


def test_the_leverage_is_that_of_its_definition() -> None:
    x = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c = x.T @ x
    expected = (c @ torch.linalg.inv(c + 0.3 * c.diagonal().mean() * torch.eye(6, dtype=c.dtype))).diagonal()
    torch.testing.assert_close(ridge_leverage(c, 0.3), expected)
    torch.testing.assert_close(ridge_leverage(7 * c, 0.3), expected)


def test_copies_of_a_channel_share_its_leverage_and_go_first() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():  # channels 0 to 2 are the same, and so are their inputs of down_proj
        for projection in (model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj):
            projection.weight[1:3] = projection.weight[0]
    run = scoring_of(model, tiny_batch(6, 24), preset("modegpt-plain"))
    score(run)
    scores = run.scores.group_scores(1, "ffn")
    torch.testing.assert_close(scores[0], scores[1])
    assert scores[:3].max() < 0.6 * scores[3:].min()
    decision = decision_of(model, tiny_batch(6, 24), replace(preset("modegpt-plain"), ratio=0.1))
    assert {0, 1}.isdisjoint(decision.plan.layers[1].ffn) or {0, 2}.isdisjoint(decision.plan.layers[1].ffn)
    assert all(len(layer.query_heads) == 6 for layer in decision.plan.layers)


def test_other_axes_are_refused() -> None:
    opened = build_config(preset="modegpt", settings=["score.axes=[heads,ffn]", "ratio=0.1"])
    with pytest.raises(ConfigError, match="modegpt scores FFN channels alone"):
        score(scoring_of(tiny_model(), tiny_batch(), opened))
