"""Training options that presets of several methods share. Plain data; importing this file imports no torch.

The papers name neither optimizer nor number of steps nor epochs; those constants are ours and marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyprune.config.cut import CutConfig, ReconstructConfig
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig

MIXTURE = DataConfig("mixture", samples=160, sequence_length=256)
"""The text of forms that train, and of those whose choice needs as much."""
LESS_TEXT = replace(MIXTURE, samples=64)
"""The text of forms that only choose and reconstruct: the first answer comes in minutes."""


def with_reconstruction(config: PruneConfig) -> PruneConfig:
    """Reconstruct the cut by least squares on the text of the method."""
    return replace(config, cut=CutConfig(reconstruct="least_squares", least_squares=ReconstructConfig(dtype="auto")))


def with_training(config: PruneConfig) -> PruneConfig:
    """Reconstruct the cut on a mixture of texts, then train all weights, half on text and half on the dense logits.

    Nothing is trained before the cut. All constants are ours.
    """
    return replace(
        with_reconstruction(config),
        data=MIXTURE,
        stages=StageConfig(before=(), after=("recover",)),
        recover=RecoverConfig(adapters="none", distill=DistillConfig(alpha=0.5), train=short_training()),
        finetune=short_training(),
    )


def make_forms(
    choose: Callable[[], PruneConfig], paper: Callable[[], PruneConfig] | None = None
) -> dict[str, Callable[[], PruneConfig]]:
    """Return the presets that every method has: NAME, NAME-plain, NAME-trained, and NAME-paper where it has one.

    Args:
        choose: makes the options that choose and cut, in the best form known; it neither reconstructs nor trains. Its
            docstring describes the choice.
        paper: makes the preset with the paper's constants.
    """
    name, choice = choose().method, str(choose.__doc__).splitlines()[0].rstrip(".")
    forms = {
        name: _describe(lambda: with_reconstruction(choose()), f"{choice}; reconstructed, not trained."),
        f"{name}-plain": _describe(choose, f"{choice}; neither reconstructed nor trained."),
        f"{name}-trained": _describe(
            lambda: with_training(choose()), f"{choice}; reconstructed, then trained on text and the dense logits."
        ),
    }
    return forms if paper is None else {**forms, f"{name}-paper": paper}


def _describe(make: Callable[[], PruneConfig], text: str) -> Callable[[], PruneConfig]:
    """Return a function that makes the same options and has this docstring."""

    def preset() -> PruneConfig:
        return make()

    preset.__doc__ = text
    return preset


def published_training(steps: int, validation_interval: int) -> TrainConfig:
    """Return the papers' constants: lr 2e-5, batch 64, patience 5, min delta 1e-4; AdamW and steps are ours."""
    return TrainConfig(
        learning_rate=2e-5,
        steps=steps,
        batch_size=64,
        dtype="auto",
        early_stop_patience=5,
        early_stop_min_delta=1e-4,
        validation_interval=validation_interval,
    )


def short_training() -> TrainConfig:
    """Return 20 steps of 8 x 256 tokens: a few minutes on two CPU cores for a 135M model (all constants ours)."""
    return TrainConfig(
        learning_rate=3e-4, steps=20, batch_size=8, micro_batch_size=8, warmup_steps=2, decay="cosine", dtype="auto"
    )


def published_recovery() -> RecoverConfig:
    """Return the papers' recovery: LoRA of rank 32 and alpha 10, with their training constants."""
    return RecoverConfig(rank=32, alpha=10.0, train=published_training(steps=40, validation_interval=4))
