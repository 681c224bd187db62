"""The bench of what is left of a training in bfloat16: every row, and that small changes are told from lost ones."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from bench.quality.rounding import TRAININGS, Bench, kept, recovery, roundings, table
from tests._support.models import tiny_batch, tiny_model


def test_the_rows_tell_what_each_way_to_write_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.__new__(Bench)
    bench.model = tiny_model("llama").to(torch.bfloat16).float()
    bench.options = Namespace(steps=3)
    bench.samples = tiny_batch(1, 24, 12)
    monkeypatch.setattr(Bench, "perplexity", lambda self, model: 7.0)
    rows = list(bench.rows())
    assert [row["training"] for row in rows] == ["none", *(name for name in TRAININGS for _ in roundings())]
    share = {(row["training"], row["written"]): row["kept"] for row in rows}
    for name in TRAININGS:
        assert share[name, "float32"] == pytest.approx(1)
        assert share[name, "bfloat16, as written"] > 0.5
    assert share["LoRA, 2e-5", "bfloat16, to nearest"] < 0.5
    assert "LoRA, 2e-5" in table(rows)


def test_what_is_kept_is_the_projection_on_the_change() -> None:
    before, after = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 1.0])}
    assert kept(before, after, {"w": torch.tensor([1.0, 0.0])}) == 0.5
    assert recovery("lora", 2e-5, 18).train.steps == 18
