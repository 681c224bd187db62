"""LoRAPrune: the Taylor score with a gradient that LoRA factors give for free (Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from pyprune.config.base import LARGEST_WEIGHT, option
from pyprune.config.method import MethodOptions
from pyprune.config.run import PruneConfig
from pyprune.config.train import LARGEST_RANK, TrainConfig
from pyprune.methods.score import equal_layer_forms, score_method, scoring_config


@dataclass(frozen=True)
class LoraPruneOptions(MethodOptions):
    """LoRAPrune (Zhang et al. 2023): importance from the weights and gradients of LoRA factors in training.

    Rank, alpha, dropout, learning rate and momentum are those of the authors' script and code. The number of steps and
    the batch are ours: they train for epochs on instructions, we read the calibration text. The gradient norm is not
    clipped, because that would weigh the steps' scores differently.

    Attributes:
        rank: LoRA rank.
        alpha: LoRA scale numerator (scale = alpha / rank).
        dropout: LoRA dropout probability.
        momentum: share of the earlier steps' importance that a step keeps, in [0, 1); 0 = the last step alone.
        train: the training loop's options; its seed also draws the factors.
    """

    rank: int = option(8, at_least=1, at_most=LARGEST_RANK)
    alpha: float = option(16.0, above=0, at_most=LARGEST_WEIGHT)
    dropout: float = option(0.05, at_least=0, below=1)
    momentum: float = option(0.9, at_least=0, below=1)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            learning_rate=1e-4, steps=32, batch_size=8, micro_batch_size=8, max_grad_norm=None
        )
    )

    @property
    @override
    def idle(self) -> dict[str, str]:
        kept = ("checkpoint_interval", "copies", "last_good_interval", "validation_interval", "early_stop_min_delta")
        return {f"train.{name}": "train, which keeps nothing and validates on nothing" for name in kept}

    @override
    def problems(self) -> Iterator[str]:
        if self.train.early_stop_patience is not None:
            yield "train.early_stop_patience is set, but scores are summed over all steps; set it to null."
        if self.train.memory == "lean":
            yield (
                "train.memory is 'lean', which would round the model's weights, but a score must not change them; "
                "set it to full."
            )


def _loraprune_paper() -> PruneConfig:
    """LoRAPrune's score with the authors' LoRA (r=8, alpha=16, lr 1e-4, momentum 0.9); 32 steps of 8 x 128 (ours)."""
    return scoring_config("loraprune", LoraPruneOptions(), samples=128)


METHOD = score_method(
    "loraprune",
    "LoRAPrune: Taylor scores with gradients read off LoRA factors.",
    f"{__name__}.score:score",
    holds="the LoRA factors of all open projections, which it trains",
    batches=False,
    options=LoraPruneOptions,
    presets=equal_layer_forms(_loraprune_paper),
)
