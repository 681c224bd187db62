"""axes.py: its table, its refusals, and that every comparison is a valid set of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.quality import axes
from bench.quality.scores_cases import PRUNING
from pyprune.run.recipe import build_config
from pyprune.runtime.records import append_jsonl


def row(seed: int | None, comparison: str, perplexity: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "row", "key": f"{comparison}{seed}", "scorer": "taylor:param_second", "seed": seed, "tokens": 8192,
        "comparison": comparison, "dtype": "bfloat16", "share_removed": 0.2, "removed": {"heads": 3, "ffn": 14000},
        "perplexity": {"ppl-128": perplexity, "ppl-2048": perplexity / 2}, **changes,
    }  # fmt: skip


def test_the_table_has_medians_and_each_seed_in_the_order_of_the_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "axes.jsonl"
    layer, raw = (axes.COMPARISONS[name][0] for name in ("layer", "none"))
    append_jsonl(records, [row(1, layer, 80.0), row(0, layer, 60.0), row(0, raw, 90.0, key="other")])
    assert axes.main(["--only-table", "--jsonl", str(records)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [raw, layer]
    assert "70.0 (60.0 / 80.0) | 35.0 (30.0 / 40.0)" in lines[1]


def test_a_table_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert axes.main(["--only-table", "--jsonl", str(tmp_path / "none.jsonl")]) == 2
    assert "No row is recorded" in capsys.readouterr().err


def test_an_unknown_comparison_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        axes.main(["--comparisons", "layr"])
    assert "Did you mean 'layer'" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(axes.COMPARISONS))
def test_every_comparison_is_a_valid_set_of_options(name: str) -> None:
    label, changes = axes.COMPARISONS[name]
    config = build_config(preset="taylor", options={**PRUNING, **changes})
    config.validate()
    assert label
