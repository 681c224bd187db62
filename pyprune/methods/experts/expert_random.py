"""Random experts: the control that every choice of experts must beat. Seeded per layer; reads no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyprune.config.base import LARGEST_SEED, option
from pyprune.methods.base import NO_RUN, PlanRequest, RunOptions, own_options
from pyprune.methods.experts import RankedOptions, expert_method

if TYPE_CHECKING:
    from pyprune.methods.base import PlanDecision


@dataclass(frozen=True)
class ExpertRandomOptions(RankedOptions):
    """Options of random experts.

    Attributes:
        seed: of the choice.
    """

    seed: int = option(0, at_least=0, at_most=LARGEST_SEED)


def decide(model: Any, samples: Any, request: PlanRequest, run: RunOptions = NO_RUN, /) -> PlanDecision:
    """Remove experts by uniform scores; ``samples`` may be empty."""
    import torch

    from pyprune.methods.experts._choice import Choice

    seed, choice = own_options(request, ExpertRandomOptions).seed, Choice.of(model, request)
    generators = {layer: torch.Generator().manual_seed(seed * 1_000_003 + layer) for layer in choice.experts}
    scores = {
        layer: torch.rand(count, generator=generators[layer], dtype=torch.float64)
        for layer, count in choice.experts.items()
    }
    return choice.decision(scores)


METHOD = expert_method(
    "expert_random",
    "Random experts: the control that every choice of experts must beat.",
    decide,
    choice="25 % of the experts of every layer, drawn at random.",
    options=ExpertRandomOptions,
    reads_text=False,
)
