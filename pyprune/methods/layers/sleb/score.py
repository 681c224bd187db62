"""Greedy removal by the loss of the remaining model (Song et al., "SLEB", section 3, their third metric).

    round r:  remove  argmin over the remaining layers j of  LM(model without the layers removed so far and without j)

on the same calibration text in every round.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers._units import Removal, json_scores, layer_runner, losses_without, micro_batches
from pyprune.methods.layers.sleb import SlebOptions


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Remove one unit a round, the one without which the loss is smallest; ties by the smaller index."""
    options = own_options(request, SlebOptions)
    removal = Removal.of(request, options.unit, keep_first=options.keep_first, keep_last=options.keep_last)
    runner = layer_runner(model, run)
    batches = micro_batches(runner.model, samples, request.method)
    removed: list[int] = []
    rounds = []
    for number in range(1, removal.count + 1):
        rest = [index for index in removal.open_layers if index not in removed]
        losses = losses_without(runner, batches, removal.unit, removed, rest, f"Round {number} of {removal.count}")
        chosen = removal.smallest(losses, 1)[0]
        removed.append(chosen)
        rounds.append({"removed": chosen, "losses": json_scores(losses)})
    return removal.decision(removed, rounds=rounds)
