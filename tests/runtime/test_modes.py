"""Evaluation mode ends with its block, module by module."""

from __future__ import annotations

import pytest
from torch import nn

from pyprune.runtime.modes import evaluating


def model() -> nn.Sequential:
    """In training mode, but for one module inside."""
    made = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    made[1][0].eval()
    return made


def modes(of: nn.Module) -> list[bool]:
    return [module.training for module in of.modules()]


def test_every_module_evaluates_and_comes_back_to_its_own_mode() -> None:
    made = model()
    before = modes(made)
    assert len(set(before)) == 2
    with evaluating(made):
        assert not any(modes(made))
        with evaluating(made):
            pass
        assert not any(modes(made)), "an inner block ends in the mode of the outer one"
    assert modes(made) == before


def test_an_error_leaves_the_modes_as_they_were() -> None:
    made = model()
    before = modes(made)
    with pytest.raises(KeyboardInterrupt), evaluating(made):
        raise KeyboardInterrupt
    assert modes(made) == before
