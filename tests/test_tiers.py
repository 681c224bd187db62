"""The first tier leaves out what it says, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest

from tests._support.models import TINY
from tests._support.tiers import KINDS, first_tier, refuse_processes


def grid(*axes: list[object]) -> list[dict[str, list[object]]]:
    return [{str(i): [value] for i, value in enumerate(values)} for values in product(*axes)]


def test_two_axes_are_tried_whole() -> None:
    cases = grid([1, 2, 3], ["a", "b"])
    assert first_tier(cases) == set(range(6))


def test_of_three_axes_every_pair_of_values_is_tried_in_far_fewer_cases() -> None:
    axes: list[list[object]] = [list(range(8)), ["f32", "bf16", "f16"], ["l1", "l2"], ["python", "cpp", "triton"]]
    cases = grid(*axes)
    chosen = [cases[i] for i in first_tier(cases)]
    assert len(chosen) <= len(cases) / 4
    for one, two in ((a, b) for a in range(4) for b in range(a)):
        found = {(case[str(one)][0], case[str(two)][0]) for case in chosen}
        assert found == set(product(axes[one], axes[two]))


def test_every_model_is_cut_everywhere_at_once_and_every_kind_along_each_axis() -> None:
    axes: list[object] = ["layers", "hidden", "everything"]
    cases = grid(list(TINY), axes)
    chosen = {(case["0"][0], case["1"][0]) for case in (cases[i] for i in first_tier(cases))}
    assert {name for name, axis in chosen if axis == "everything"} == set(TINY)
    assert {name for name, axis in chosen if axis == "hidden"} == set(KINDS)
    assert set(KINDS) < set(TINY)


def test_values_of_one_list_of_rows_are_one_axis() -> None:
    rows: list[list[object]] = [["a", 1, True], ["a", 2, False], ["b", 1, True], ["b", 2, True]]
    assert first_tier([{"row": row} for row in rows]) == {0, 1, 2, 3}


def test_quick_refuses_a_process() -> None:
    with pytest.raises(RuntimeError, match="mark it `process`"):
        refuse_processes("subprocess.Popen", ("python",))
    refuse_processes("open", ("file",))
