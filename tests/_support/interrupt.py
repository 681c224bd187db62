"""Trainings that end before their last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pyprune.config.train import TrainConfig
from pyprune.train import loop
from pyprune.train.schedule import learning_rate_factor


@contextmanager
def failing_step(number: int, error: BaseException | None, *, steps: int | None = None) -> Iterator[None]:
    """Let trainings fail at one step.

    Args:
        number: of the step, from 1.
        error: raised when the step begins; None = the step makes the weights too large for finite losses.
        steps: of the trainings that fail; None = all do.
    """

    def factor(step: int, config: TrainConfig) -> float:
        if step != number or steps not in (None, config.steps):
            return learning_rate_factor(step, config)
        if error is None:
            return 1e38
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate_factor", factor)
        yield
