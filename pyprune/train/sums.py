"""Sums over the micro batches of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyprune.train.objective import LossTerms


@dataclass(frozen=True)
class Weight:
    """Weights of a micro batch's means in the means over its batch.

    Attributes:
        predicted: its share of the predicted tokens: the weight of losses.
        fed: its share of the tokens without padding: the weight of an activation penalty.
    """

    predicted: float
    fed: float


class Sums:
    """Sums over the micro batches of a step, on the device: they are read once a step.

    Attributes:
        lm: mean of -log p over the step's predicted tokens, nats.
        total: the minimised loss, without penalties.
        penalty: mean over the step's tokens of an activation penalty.
        parts: other terms, for the report.
    """

    def __init__(self) -> None:
        self.lm: Tensor | float = 0.0
        self.total: Tensor | float = 0.0
        self.penalty: Tensor | float = 0.0
        self.parts: dict[str, Tensor | float] = {}

    def add(self, terms: LossTerms, weight: Weight) -> Tensor:
        """Add a micro batch, and return its share of the loss, differentiable."""
        loss = terms.main_loss * weight.predicted
        self.lm = self.lm + terms.lm.detach() * weight.predicted
        self.total = self.total + loss.detach()
        for name, part in terms.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + part.detach() * weight.predicted
        if terms.penalty is None:
            return loss
        share = terms.penalty * weight.fed
        self.penalty = self.penalty + share.detach()
        return loss + share

    def total_loss(self) -> float:
        """Return a number that is finite if all sums are."""
        return float(self.lm + self.total + self.penalty)
