"""Inferred types in a real vLLM, as stock exports and with sizes per layer, as pyprune.families.engines has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pyprune.checkpoint.load import load_model
from pyprune.families import all_families
from pyprune.families.engines import MIXTURES, NEARLY, NOT_ON_CPU, PER_LAYER, REFUSED, STOCK, stock_obstacle
from tests._support.answers import log_probabilities, served_and_expected
from tests._support.served import NEW_TOKENS, REAL_VLLM, TOP, compare, prompts, run_program
from tests._support.stock import REFUSED_VALUES, write_mixture, write_per_layer, write_stock

pytestmark = REAL_VLLM

SERVED = sorted(STOCK - {*all_families()})
VARIANTS = [f"{name}-refused" for name in REFUSED_VALUES]
TRIED = sorted((*SERVED, *NEARLY, *REFUSED, *NOT_ON_CPU))
ALONE = ("kimi_linear",)
"""Types whose class in vLLM, once imported without Triton, makes every other model of the process fail."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@pytest.fixture(scope="module")
def served(root: Path) -> dict[str, Any]:
    """What vLLM makes of a stock export of each type, and of the variants that are refused beforehand."""
    for name in TRIED:
        write_stock(name, root / name, refused=name in REFUSED)
    for name, values in REFUSED_VALUES.items():
        write_stock(name, root / f"{name}-refused", refused=True, **values)
    together = [root / name for name in (*TRIED, *VARIANTS) if name not in ALONE]
    return ask(together) | ask([root / name for name in ALONE])


@pytest.fixture(scope="module")
def served_per_layer(root: Path) -> dict[str, Any]:
    """What vLLM makes of sizes that differ between layers."""
    for name in PER_LAYER:
        write_per_layer(name, root / f"{name}-per-layer")
    return ask([root / f"{name}-per-layer" for name in PER_LAYER])


@pytest.fixture(scope="module")
def served_mixtures(root: Path) -> dict[str, Any]:
    """What vLLM makes of mixtures whose layers have their own numbers of experts, and other sizes of their own."""
    for name in MIXTURES:
        write_mixture(name, root / f"{name}-experts")
    return ask([root / f"{name}-experts" for name in MIXTURES])


def ask(folders: Sequence[Path]) -> dict[str, Any]:
    """The answers to the prompts, or the error, by folder."""
    job = {"models": [], "damaged": [], "prompts": prompts(), "new_tokens": NEW_TOKENS, "top": TOP}
    replies: dict[str, Any] = run_program("vllm_child.py", job | {"attempted": list(map(str, folders))})
    return replies


def error(folder: Path, answers: Any) -> float:
    """The largest difference of a log probability from Transformers'; infinite where vLLM does not answer."""
    if isinstance(answers, str):
        return float("inf")
    model, _ = load_model(folder)
    worst = 0.0
    for prompt, answer in zip(prompts(), answers, strict=True):
        pair = served_and_expected(log_probabilities(model, [*prompt, *answer["tokens"]]), prompt, answer)
        worst = max(worst, float((pair[0] - pair[1]).abs().max()))
    return worst


def assert_served(folder: Path, served: dict[str, Any]) -> None:
    """Check that vLLM answered, and with Transformers' log-probabilities."""
    answers = served[str(folder)]
    assert not isinstance(answers, str), answers
    compare(folder, prompts(), answers)


@pytest.mark.parametrize("name", SERVED)
def test_served_log_probabilities_are_transformers(name: str, root: Path, served: dict[str, Any]) -> None:
    assert_served(root / name, served)


@pytest.mark.parametrize("name", PER_LAYER)
def test_sizes_per_layer_give_transformers_log_probabilities(
    name: str, root: Path, served_per_layer: dict[str, Any]
) -> None:
    assert_served(root / f"{name}-per-layer", served_per_layer)


@pytest.mark.parametrize("name", MIXTURES)
def test_numbers_of_experts_per_layer_give_transformers_log_probabilities(
    name: str, root: Path, served_mixtures: dict[str, Any]
) -> None:
    assert_served(root / f"{name}-experts", served_mixtures)


@pytest.mark.parametrize("name", sorted(NEARLY))
def test_log_probabilities_are_nearly_transformers(name: str, root: Path, served: dict[str, Any]) -> None:
    assert 1e-5 < error(root / name, served[str(root / name)]) < 0.01


@pytest.mark.parametrize("name", [*sorted((*REFUSED, *NOT_ON_CPU)), *VARIANTS])
def test_what_is_refused_is_not_served(name: str, root: Path, served: dict[str, Any]) -> None:
    assert error(root / name, served[str(root / name)]) > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_that_vllm_does_not_serve_is_refused_beforehand(
    name: str, root: Path, served: dict[str, Any]
) -> None:
    config = json.loads((root / name / "config.json").read_text())
    assert stock_obstacle(config)
