"""What the options of every method share. A method's own options are a subclass, next to the method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from pyprune.config.base import Config
from pyprune.config.train import TrainConfig


class Deciding(NamedTuple):
    """A training by which a method decides.

    Attributes:
        name: of its options among the method's own, which hold its ``batch_size``.
        train: how it trains, but for its steps and seed.
    """

    name: str
    train: TrainConfig


@dataclass(frozen=True)
class MethodOptions(Config):
    """The options that belong to one method; a method without any has this class itself.

    In a recipe and in a record they stand under the method's name (``elder: {schedule: anneal}``).
    """

    @property
    def regularising_options(self) -> tuple[str, ...]:
        """Names of those that nothing reads in a run without the stage ``regularise``."""
        return ()

    @property
    def reads_text(self) -> bool:
        """Whether the choice of what is removed reads calibration text with these options, in a method that can."""
        return True

    @property
    def training(self) -> TrainConfig | None:
        """How the stage "regularise" trains; None for a method that has none."""
        return None

    def with_training(self, train: TrainConfig) -> Self:
        """The same with other options of :attr:`training`, which stand under ``train``."""
        changed: dict[str, Any] = {"train": train}
        return replace(self, **changed)

    def deciding_training(self, sequence_length: int) -> Deciding | None:
        """The training by which the method decides what goes; None where it trains nothing for that.

        Several processes divide it where no device holds a whole model.

        Args:
            sequence_length: tokens of the text's sequences.
        """
        return None

    @property
    def idle(self) -> dict[str, str]:
        """Names of options that do nothing beside the values of others -> the option and the value that are why."""
        return {}

    @property
    def preserved_goal(self) -> float | None:
        """The share of |W| that regularisation may leave in what is removed before a warning; None = no goal."""
        return None
