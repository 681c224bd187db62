"""The base of the options of every method. A method's own options are a subclass, next to the method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from pyprune.config.base import Config
from pyprune.config.train import TrainConfig


class Deciding(NamedTuple):
    """A training by which a method decides.

    Attributes:
        name: name of its options among the method's own, which hold its ``batch_size``.
        train: its training options, except for its steps and seed.
    """

    name: str
    train: TrainConfig


@dataclass(frozen=True)
class MethodOptions(Config):
    """The options of one method; a method without any has this class itself.

    In a recipe and in a record they are stored under the method's name (``elder: {schedule: anneal}``).
    """

    @property
    def regularising_options(self) -> tuple[str, ...]:
        """Return the names of options that only the stage ``regularise`` reads."""
        return ()

    @property
    def reads_text(self) -> bool:
        """True if the decision reads calibration text with these options (in a method that can read text)."""
        return True

    @property
    def training(self) -> TrainConfig | None:
        """Return the training options of the stage "regularise"; None for a method without this stage."""
        return None

    def with_training(self, train: TrainConfig) -> Self:
        """Return a copy with other options of :attr:`training`, which are stored under ``train``."""
        changed: dict[str, Any] = {"train": train}
        return replace(self, **changed)

    def deciding_training(self, sequence_length: int) -> Deciding | None:
        """Return the training by which the method decides; None if it trains nothing for the decision.

        Several processes divide it if no device holds a whole model.

        Args:
            sequence_length: tokens of the text's sequences.
        """
        return None

    @property
    def idle(self) -> dict[str, str]:
        """Return options that the values of others switch off: name -> the option and the value that do it."""
        return {}

    @property
    def preserved_goal(self) -> float | None:
        """Return the share of |W| in the removed parts above which regularisation warns; None = no goal."""
        return None
