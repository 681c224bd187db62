"""One-shot scores of layers (Kim et al., "Shortened LLaMA", section 3.1).

    ppl:          the loss of the model without the layer (its perplexity is exp of that and ranks alike)
    taylor_plus:  sum over the layer's weight matrices and their elements of |w g|, g the gradient of LM.

Taylor's score is small for the first layers, but the paper reports that their removal ruins the model. Its "+" keeps 4
layers at the beginning and 2 at the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.checkpoint.stored import StoredModel
from pyprune.config.score import ScoreConfig
from pyprune.config.train import micro_batch_for
from pyprune.families import NamedParam, check_table
from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers._units import Removal, json_scores, layer_runner, losses_without, micro_batches
from pyprune.methods.layers.shortened_llama import ShortenedLlamaOptions
from pyprune.methods.ratio import Unit
from pyprune.methods.score._gradients import GradientSum, take_gradients, unchanged_weights
from pyprune.methods.score.base import Scoring


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Score every open unit once and remove those of the smallest score."""
    options = own_options(request, ShortenedLlamaOptions)
    first, last = options.kept
    removal = Removal.of(request, options.unit, keep_first=first, keep_last=last)
    if options.form == "ppl":
        runner = layer_runner(model, run)
        batches = micro_batches(runner.model, samples, request.method)
        scores = losses_without(runner, batches, removal.unit, (), removal.open_layers, "Loss without each layer")
    else:
        check_table(request.family, "The form taylor_plus of shortened_llama")
        size = micro_batch_for(len(samples), samples.shape[1]) if samples.numel() else None
        found = taylor_scores(model, samples, request, removal.unit, batch_size=size, stored=run.stored)
        scores = {index: found[index] for index in removal.open_layers}
    return removal.decision(removal.smallest(scores), form=options.form, scores=json_scores(scores))


def taylor_scores(
    model: PreTrainedModel,
    samples: Tensor,
    request: PlanRequest,
    unit: Unit = "layer",
    *,
    batch_size: int | None = None,
    stored: StoredModel | None = None,
) -> dict[int, float]:
    """Return the sum of |w g| over the weight matrices of every layer, or of its attention or MLP.

    Args:
        model: a dense model; it comes back unchanged.
        samples: token ids, int64 [N, T].
        request: request of the model; its options of scores are not read.
        unit: the unit that is scored.
        batch_size: sequences in one forward and backward pass; None = all. With more than one pass the mean gradient of
            all layers is held, in float32; from disk that of one layer.
        stored: the files from which the weights are read, a layer at a time; None = they are in the model.

    Returns:
        Layer -> score.
    """
    scores: dict[int, float] = {}

    def add(param: NamedParam, gradient: Tensor) -> None:
        if param.parameter.dim() > 1 and param.layer is not None and unit in ("layer", param.row.block):
            value = float((gradient * param.parameter.detach()).abs().sum(dtype=torch.float64))
            scores[param.layer] = scores.get(param.layer, 0.0) + value

    # Heads and FFN channels own the matrices and biases of every layer's attention and MLP.
    run = Scoring.of(model, samples, replace(request, score=ScoreConfig(batch_size=batch_size)), stored=stored)
    take_gradients(run, unchanged_weights, GradientSum(add))
    return scores
