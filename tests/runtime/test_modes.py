"""Evaluation mode ends with its block, module by module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyprune.runtime.modes import disable_dropout, evaluation_mode
from tests._support.models import tiny_batch, tiny_model


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
    with evaluation_mode(made):
        assert not any(modes(made))
        with evaluation_mode(made):
            pass
        assert not any(modes(made)), "an inner block ends in the mode of the outer one"
    assert modes(made) == before


def test_an_error_leaves_the_modes_as_they_were() -> None:
    made = model()
    before = modes(made)
    with pytest.raises(KeyboardInterrupt), evaluation_mode(made):
        raise KeyboardInterrupt
    assert modes(made) == before


def test_nothing_is_dropped_in_training_mode_and_as_much_as_before_afterwards() -> None:
    made = tiny_model("opt", dropout=0.5, layerdrop=0.5)
    made.add_module("more", nn.Dropout(0.25))
    made.train()
    batch = tiny_batch()
    with torch.no_grad():
        with disable_dropout(made):
            assert made.training
            still = made(batch).logits
            assert torch.equal(made(batch).logits, still)
        assert not torch.equal(made(batch).logits, still)
        assert torch.equal(made.eval()(batch).logits, still)
    assert (made.get_submodule("more").p, made.model.decoder.layerdrop) == (0.25, 0.5)
