from __future__ import annotations

import pytest

from pyprune.errors import ConfigError
from pyprune.families import Family, count_parameters, family_for, parameter_shapes
from pyprune.methods.ratio import decide_hidden_count, decide_layer_count, floor_count, share_of_parameters
from pyprune.plan import PrunePlan
from tests._support.models import tiny_model

Case = tuple[Family, dict[str, tuple[int, ...]], PrunePlan, int]


@pytest.fixture(scope="module")
def case() -> Case:
    model = tiny_model("llama-head-dim")
    family = family_for(model)
    return family, parameter_shapes(model), family.plan(model.config), count_parameters(model)


@pytest.mark.parametrize(("ratio", "total", "count"), [(0.25, 30, 7), (0.29, 100, 29), (0.3, 10, 3), (0.999, 4, 3)])
def test_counts_are_the_floor(ratio: float, total: int, count: int) -> None:
    assert floor_count(ratio, total, "layers") == count


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_ratios_outside_the_open_interval_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="strictly between 0 and 1"):
        floor_count(ratio, 30, "layers")


def test_a_ratio_that_removes_nothing_says_the_smallest_that_does(case: Case) -> None:
    family, shapes, plan, _ = case
    with pytest.raises(ConfigError, match=r"smallest ratio that removes one is 0\.25"):
        decide_layer_count(family, shapes, plan, 0.2)


def test_layers_by_share_of_parameters(case: Case) -> None:
    family, shapes, plan, total = case
    one = share_of_parameters(family, shapes, plan.drop_layers([0]))
    assert decide_layer_count(family, shapes, plan, 2.5 * one, "parameters").count == 2
    decision = decide_layer_count(family, shapes, plan, one, "parameters")
    assert decision.count == 1
    assert f"{one:.2%}" in decision.notes[0]
    with pytest.raises(ConfigError, match="removes no layers"):
        decide_layer_count(family, shapes, plan, one / 2, "parameters")
    assert 0 < one * total == pytest.approx(round(one * total))


def test_hidden_rounding_keeps_more_and_is_reported(case: Case) -> None:
    family, shapes, plan, _ = case
    exact = decide_hidden_count(family, shapes, plan, 0.25, multiple=4)
    assert (exact.count, exact.notes) == (12, ())
    rounded = decide_hidden_count(family, shapes, plan, 0.25, multiple=8)
    assert rounded.count == 8
    assert "rounded from 36 up to 40, a multiple of 8: 8 channels go instead of 12" in rounded.notes[0]


def test_hidden_by_share_of_parameters(case: Case) -> None:
    family, shapes, plan, _ = case
    decision = decide_hidden_count(family, shapes, plan, 0.3, "parameters", multiple=8)
    assert share_of_parameters(family, shapes, plan.keep_hidden(range(48 - decision.count))) <= 0.3
    assert share_of_parameters(family, shapes, plan.keep_hidden(range(48 - decision.count - 8))) > 0.3


def test_what_cannot_be_rounded_to_a_legal_size_is_refused(case: Case) -> None:
    family, shapes, plan, _ = case
    with pytest.raises(ConfigError, match="nothing would go"):
        decide_hidden_count(family, shapes, plan, 0.1, multiple=16)
    with pytest.raises(ConfigError, match="no smaller size is legal"):
        decide_hidden_count(family, shapes, plan, 0.5, multiple=64)


def test_units_of_another_axis_are_refused(case: Case) -> None:
    family, shapes, plan, _ = case
    with pytest.raises(ConfigError, match="use layers or parameters"):
        decide_layer_count(family, shapes, plan, 0.5, "hidden")
    with pytest.raises(ConfigError, match="use hidden or parameters"):
        decide_hidden_count(family, shapes, plan, 0.5, "layers")
