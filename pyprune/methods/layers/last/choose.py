"""The last layers, whatever they do (Gromov et al., "The Unreasonable Ineffectiveness of the Deeper Layers")."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers._units import Removal
from pyprune.methods.layers.last import LastOptions


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Remove the last units of layers that are not kept; ``samples`` may be empty."""
    options = own_options(request, LastOptions)
    removal = Removal.of(request, options.unit, keep_last=options.keep_last)
    return removal.decision(removal.open_layers[: -removal.count - 1 : -1])
