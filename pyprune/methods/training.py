"""Training options that presets of several methods share. Plain data; importing this file imports no torch.

The papers name neither optimizer nor number of steps nor epochs; those constants are ours and marked so.
"""

from __future__ import annotations

from dataclasses import replace

from pyprune.config.cut import CutConfig, ReconstructConfig
from pyprune.config.data import DataConfig
from pyprune.config.run import PruneConfig, StageConfig
from pyprune.config.train import DistillConfig, RecoverConfig, TrainConfig


def with_reconstruction(config: PruneConfig) -> PruneConfig:
    """Add the recommended stages around a choice of layers or hidden channels; nothing is trained before the cut.

    The cut is reconstructed by least squares on a mixture of texts. Then all weights are trained, half on the text and
    half on the dense model's logits (constants ours).
    """
    return replace(
        config,
        data=DataConfig("mixture", samples=160, sequence_length=256),
        stages=StageConfig(before=(), after=("recover",)),
        cut=CutConfig(reconstruct="least_squares", least_squares=ReconstructConfig(dtype="auto")),
        recover=RecoverConfig(adapters="none", distill=DistillConfig(alpha=0.5), train=short_training()),
        finetune=short_training(),
    )


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
