from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyprune.config.run import PruneConfig
from pyprune.errors import ConfigError
from pyprune.families import count_parameters
from pyprune.methods.base import PlanRequest
from pyprune.methods.ratio import (
    decide_hidden_count,
    decide_layer_count,
    floor_count,
    share_of_parameters,
    sufficient_ratio,
)
from pyprune.plan import PrunePlan
from tests._support.models import tiny_model

MODEL = tiny_model("llama-head-dim")
PLAN = PlanRequest.of(MODEL, PruneConfig()).identity


def request_of(ratio: float, **options: Any) -> PlanRequest:
    return PlanRequest.of(MODEL, PruneConfig(ratio=ratio, **options))


def share(plan: PrunePlan) -> float:
    request = request_of(0.5)
    return share_of_parameters(request.family, request.shapes, plan)


@pytest.mark.parametrize(("ratio", "total", "count"), [(0.25, 30, 7), (0.29, 100, 29), (0.3, 10, 3), (0.999, 4, 3)])
def test_counts_are_the_floor(ratio: float, total: int, count: int) -> None:
    assert floor_count(ratio, total, "layers") == count


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_ratios_outside_the_open_interval_are_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="strictly between 0 and 1"):
        floor_count(ratio, 30, "layers")


def test_a_ratio_that_removes_nothing_says_the_smallest_that_does() -> None:
    with pytest.raises(ConfigError, match=r"smallest ratio that removes one is 0\.25"):
        decide_layer_count(request_of(0.2))


@pytest.mark.parametrize("total", [4, 12, 28, 30, 36, 576, 2048])
def test_the_ratio_that_is_advised_removes_one(total: int) -> None:
    with pytest.raises(ConfigError) as refused:
        floor_count(0.5 / total, total, "layers")
    advised = float(str(refused.value).rsplit(" ", 1)[1].rstrip("."))
    assert floor_count(advised, total, "layers") == 1


@pytest.mark.parametrize(("share", "text"), [(1 / 3, "0.3334"), (0.25, "0.25"), (0.0017361, "0.001737")])
def test_a_ratio_is_sufficient_for_its_share(share: float, text: str) -> None:
    assert sufficient_ratio(share) == text


def test_ratios_of_numpy_are_numbers() -> None:
    assert floor_count(np.float64(0.29), 100, "layers") == 29


def test_layers_by_share_of_parameters() -> None:
    total = count_parameters(MODEL)
    one = share(PLAN.drop_layers([0]))
    assert decide_layer_count(request_of(2.5 * one, ratio_of="parameters")).count == 2
    decision = decide_layer_count(request_of(one, ratio_of="parameters"))
    assert decision.count == 1
    assert f"{one:.2%}" in decision.notes[0]
    with pytest.raises(ConfigError, match="removes no layers"):
        decide_layer_count(request_of(one / 2, ratio_of="parameters"))
    assert 0 < one * total == pytest.approx(round(one * total))


def test_hidden_rounding_keeps_more_and_is_reported() -> None:
    exact = decide_hidden_count(request_of(0.25, hidden_multiple=4))
    assert (exact.count, exact.notes) == (12, ())
    rounded = decide_hidden_count(request_of(0.25, hidden_multiple=8))
    assert rounded.count == 8
    assert "rounded from 36 up to 40, a multiple of 8: 8 channels are removed instead of 12" in rounded.notes[0]


def test_hidden_by_share_of_parameters() -> None:
    decision = decide_hidden_count(request_of(0.3, ratio_of="parameters", hidden_multiple=8))
    assert share(PLAN.keep_hidden(range(48 - decision.count))) <= 0.3
    assert share(PLAN.keep_hidden(range(48 - decision.count - 8))) > 0.3


def test_what_cannot_be_rounded_to_a_legal_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would be removed"):
        decide_hidden_count(request_of(0.1, hidden_multiple=16))
    with pytest.raises(ConfigError, match="no smaller size is legal"):
        decide_hidden_count(request_of(0.5, hidden_multiple=64))


def test_units_of_another_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="use layers or parameters"):
        decide_layer_count(request_of(0.5, ratio_of="hidden"))
    with pytest.raises(ConfigError, match="use hidden or parameters"):
        decide_hidden_count(request_of(0.5, ratio_of="layers"))
