"""The benchmark of the search: every shape is solved within its budgets, and what it took is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fit.solve import SHAPES, SyntheticCosts, main, synthetic
from pyprune.fit.choices import ChoiceOptions
from pyprune.fit.limits import Budget
from pyprune.fit.solve import SolveOptions, solve
from pyprune.runtime.records import RecordFile


def test_a_row_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "solve.jsonl"
    given = ["--shape", "smollm2-135m", "--budget", "parameters=80%", "--count", "2", "--jsonl", str(kept)]
    assert main(given) == 0
    (record,) = RecordFile(kept).of("solved").values()
    assert (record["shape"], record["budget"], record["solutions"]) == ("smollm2-135m", "parameters=80%", 2)
    assert record["wall s"] > 0
    assert "| smollm2-135m | parameters=80% |" in capsys.readouterr().out


@pytest.mark.parametrize("shape", SHAPES)
def test_solutions_keep_the_budget_and_leave_little_of_it(shape: str) -> None:
    sizes = SHAPES[shape]
    search, _ = synthetic(sizes, ChoiceOptions(head_counts=2, ffn_shares=(0.5,)), 0)
    costs, budget = SyntheticCosts(sizes), Budget.parse("parameters=80%")
    (found,) = solve(search, budget, costs, SolveOptions(solutions=1))
    (limit,) = budget.limits
    whole = costs.base(limit.quantity, sizes.hidden_size)
    whole += sum(costs.layer(limit.quantity, sizes.hidden_size, layer[0].widths) for layer in search.layers)
    assert 0.75 * whole < found.predicted[limit.quantity] <= 0.8 * whole
