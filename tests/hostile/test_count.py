"""How many hostile inputs a default run of the suite goes through."""

from __future__ import annotations

import pytest

from tests.hostile import (
    test_checkpoints,
    test_gguf,
    test_models,
    test_options,
    test_outputs,
    test_plans,
    test_text,
)

MODULES = (test_checkpoints, test_gguf, test_models, test_options, test_outputs, test_plans, test_text)


def test_hundreds_of_distinct_inputs_are_tried_by_default() -> None:
    tables = [
        (test, mark.args[1])
        for module in MODULES
        for test in vars(module).values()
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "parametrize" and mark.args[0] == "case"
    ]
    assert len(tables) >= len(MODULES)
    inputs = {
        (test.__module__, test.__name__, parameters.id)
        for test, cases in tables
        for parameters in cases
        if pytest.mark.fuzz.mark not in parameters.marks and pytest.mark.fuzz not in parameters.marks
    }
    assert len(inputs) >= 300
