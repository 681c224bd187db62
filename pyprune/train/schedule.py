"""The learning rate over the steps of a training: linear warm-up, then the configured decay."""

from __future__ import annotations

import math

from pyprune.config.train import TrainConfig


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at ``step`` (from 1): linear warm-up, then the configured decay."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = (step - config.warmup_steps - 1) / max(1, config.steps - config.warmup_steps)
    return 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def warm_up_warnings(config: TrainConfig) -> list[str]:
    """Warn if the rate never falls."""
    if config.warmup_steps < config.steps:
        return []
    return [
        f"The warm-up of {config.warmup_steps} steps takes the whole run of {config.steps}: the learning rate rises to "
        "the end and never falls; lower warmup_steps."
    ]
