"""The reconstruction bench: copies with an untied head compute what the dense model does, and all rows are there."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from bench.quality import reconstruction
from bench.quality.reconstruction import Bench, Calibration, _hidden_choices, _untied, table
from tests._support.compare import assert_same_logits
from tests._support.models import tiny_batch, tiny_model

TEXT = Calibration("mixture", tiny_batch(1, 16, 32), ["prose", "code"] * 8)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "HIDDEN", 36)


def test_every_choice_of_hidden_channels_starts_from_the_same_function() -> None:
    model = tiny_model("llama-head-dim")
    dense = _untied(model)
    assert model.config.tie_word_embeddings
    assert not dense.config.tie_word_embeddings
    assert dense.lm_head.weight is not dense.model.embed_tokens.weight
    choices = list(_hidden_choices(dense, TEXT.ids))
    assert [name for name, _, _ in choices] == ["energy", "pca", "pca, tokens by energy"]
    with torch.no_grad():
        expected = model(TEXT.ids).logits
        for _, same, plan in choices:
            assert_same_logits(same(TEXT.ids).logits, expected, tolerance=3e-5)
            assert len(plan.hidden) == 36
    assert [plan.hidden == tuple(range(36)) for _, _, plan in choices] == [False, True, True]


def test_the_rows_of_a_case_with_an_untied_head(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.__new__(Bench)
    bench.model = tiny_model("llama-head-dim")
    bench.options = Namespace(case=["hidden-25-untied"], calibration=["mixture"], ridges=None, readers="auto")
    monkeypatch.setattr(Bench, "calibration", lambda self, name: TEXT)
    monkeypatch.setattr(Bench, "measure", lambda self, model: {"hidden": float(model.config.hidden_size)})
    rows = list(bench.rows())
    assert [row["perplexity"]["hidden"] for row in rows] == [48.0] + [36.0] * 6
    chosen = [f"{arm}, mixture" for arm in ("energy", "pca", "pca, tokens by energy")]
    arms = [f"{choice}: {how}" for how in ("cut", "reconstructed") for choice in chosen]
    assert [row["arm"] for row in rows] == ["dense", *arms]
    assert [row["solved"] > 0 for row in rows if "solved" in row] == [True] * 3
    assert all(arm in table(rows) for arm in arms)
