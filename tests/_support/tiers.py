"""The tiers of the suite: which tests `make quick`, `make test` and `make test-all` run.

A test belongs to the second tier when it is marked ``second``, or when it is a case of a large grid that the first tier
covers with fewer cases. Every case of every grid runs in `make test-all`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests._support.models import TINY

KINDS = ("llama", "qwen3", "opt", "phi", "gemma3", "phi3")
"""One tiny model for each kind of layer: plain, with normed heads, with learned positions and biases, with both blocks
side by side, with a norm after each block, and with fused projections."""

TESTS = Path(__file__).parents[1]
SECOND_FOLDERS = ("bench", "examples", "wheels")
"""Folders of tests whose programs run for minutes."""
QUICK_FOLDERS = (
    *("checkpoint", "config", "cut", "data", "families", "fit", "methods"),
    *("modeling", "ops", "probe", "quality", "runtime", "train"),
)
"""Folders of tests of the package itself, without its commands, whole runs and servers."""

Case = Mapping[str, Sequence[object]]
"""One case of a test function: axis -> its values, one for each parameter that a ``parametrize`` names."""


def first_tier(cases: Sequence[Case]) -> set[int]:
    """Choose the cases of one test function that the first tier runs, by their position.

    * Tiny models (:data:`tests._support.models.TINY`) and one other axis: every value for each of :data:`KINDS`, or of
      a grid that has no other models for the first of them, and the last value for every model. Grids name the plan
      that cuts every axis at once last.
    * Three or more axes: a covering array, in which any two values that meet in the grid meet in a case. Errors that
      need three particular values at once are left to the second tier.
    * Otherwise: all.

    Args:
        cases: all of them. A value is the same in two cases when it is the same object.
    """
    keys = [{axis: tuple(map(id, values)) for axis, values in case.items()} for case in cases]
    axes = [axis for axis in keys[0] if len({key[axis] for key in keys}) > 1]
    if len(axes) > 2:
        return _covering_array([{axis: key[axis] for axis in axes} for key in keys])
    models = next((axis for axis in axes if all(_is_tiny_model(case[axis]) for case in cases)), None)
    if models is None or len(axes) < 2:
        return set(range(len(cases)))
    [other] = set(axes) - {models}
    names = [case[models][0] for case in cases]
    whole = KINDS if set(names) - set(KINDS) else names[:1]
    return {i for i, name in enumerate(names) if name in whole or keys[i][other] == keys[-1][other]}


def _is_tiny_model(values: Sequence[object]) -> bool:
    return len(values) == 1 and isinstance(values[0], str) and values[0] in TINY


def _covering_array(cases: Sequence[Mapping[str, tuple[int, ...]]]) -> set[int]:
    """Choose cases, greedily and always the same, until every pair of values that any case has is in a chosen one."""
    pairs = [set(combinations(case.items(), 2)) for case in cases]
    left = set().union(*pairs)
    chosen: set[int] = set()
    while left:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def second_tier(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Find the tests that only `make test-all` runs."""
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        grids[_function(item)].append(item)
    found = {item for item in items if item.get_closest_marker("second") or _folder(item) in SECOND_FOLDERS}
    for grid in grids.values():
        chosen = first_tier([_case(item) for item in grid])
        found.update(item for i, item in enumerate(grid) if i not in chosen)
    return found


def _case(item: pytest.Item) -> Case:
    """A test's values by axis: of each ``parametrize``, and of each fixture with parameters."""
    left: dict[str, object] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    case: dict[str, Sequence[object]] = {}
    for mark in item.iter_markers("parametrize"):
        names = re.split(r"\s*,\s*", mark.args[0]) if isinstance(mark.args[0], str) else mark.args[0]
        case[",".join(names)] = [left.pop(name) for name in names]
    return case | {name: [value] for name, value in left.items()}


def beyond_quick(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Find the tests that `make quick` leaves out: it runs the last case of each test function of its folders."""
    last = {_function(item): item for item in items}
    return {
        item
        for item in items
        if item is not last[_function(item)] or item.get_closest_marker("process") or _folder(item) not in QUICK_FOLDERS
    }


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _folder(item: pytest.Item) -> str:
    """The folder below tests/ that a test lies in."""
    return item.path.relative_to(TESTS).parts[0]


def refuse_processes(event: str, args: tuple[Any, ...]) -> None:
    """Keep `make quick` quick, as an audit hook: a start of Python with torch takes seconds."""
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        raise RuntimeError(f"a test of `make quick` starts a process ({args[0]}): mark it `process`")
