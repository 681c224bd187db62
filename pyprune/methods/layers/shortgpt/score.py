"""Block influence: how far a layer turns the residual stream (Men et al., "ShortGPT", equation 1).

    BI_i = 1 - mean over samples and tokens of  x_i . x_{i+1} / (|x_i| |x_{i+1}|)

x_i is the stream that enters layer i and x_{i+1} the one that leaves it. For an attention or MLP block they are the
streams before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pyprune.methods.base import NO_RUN, PlanDecision, PlanRequest, RunOptions, own_options
from pyprune.methods.layers._units import Removal, json_scores, layer_runner, micro_batches
from pyprune.methods.layers.shortgpt import ShortGptOptions
from pyprune.methods.ratio import Unit
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner, Part
from pyprune.runtime.progress import track


def decide(model: PreTrainedModel, samples: Tensor, request: PlanRequest, run: RunOptions = NO_RUN) -> PlanDecision:
    """Remove the units of the smallest block influence, all at once."""
    options = own_options(request, ShortGptOptions)
    removal = Removal.of(request, options.unit, keep_first=options.keep_first, keep_last=options.keep_last)
    runner = layer_runner(model, run)
    influence = block_influence(runner, micro_batches(runner.model, samples, request.method), removal.unit)
    scores = {index: influence[index] for index in removal.open_layers}
    return removal.decision(removal.smallest(scores), block_influence=json_scores(scores))


@torch.no_grad()
def block_influence(runner: LayerRunner, batches: Sequence[Tensor], unit: Unit = "layer") -> tuple[float, ...]:
    """Return the block influence of every layer, or of every attention or MLP block; one forward pass.

    Args:
        runner: the layers of a causal LM, which comes back unchanged. On disk each layer is read once, and the streams
            of all batches are held.
        batches: token ids, int64 [B, T] each.
        unit: the unit that is measured.

    Returns:
        1 - cosine, in [0, 2], one number a layer.
    """
    cosines = [0.0] * len(runner.layers)
    groups = runner.batch_groups(batches)
    with frozen_eval(runner.model):
        streams: list[Tensor] = []
        for group, index in track([(g, i) for g in groups for i in range(len(cosines))], "Block influence"):
            streams = [runner.embed(batch) for batch in group] if index == 0 else streams
            with runner.layer(index) as layer:
                for number, stream in enumerate(streams):
                    before, after, streams[number] = _around(runner, layer, stream, index, unit)
                    turned = functional.cosine_similarity(before.double(), after.double(), dim=-1)
                    cosines[index] += float(turned.sum())
    tokens = sum(batch.numel() for batch in batches)
    return tuple(1 - total / tokens for total in cosines)


def _around(
    runner: LayerRunner, layer: nn.Module, stream: Tensor, index: int, unit: Unit
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the streams [B, T, H] before and after the unit of a layer, and the one that leaves the layer."""
    if unit == "layer":
        out = runner.run(layer, runner.whole_layer(index), stream)
        return stream, out, out
    first, *second = runner.parts(index)
    if not second:  # side by side: both blocks read and write the same stream
        alone = runner.run(layer, Part(index, (unit,)), stream)
        return stream, alone, runner.run(layer, first, stream)
    middle = runner.run(layer, first, stream)
    out = runner.run(layer, second[0], middle)
    return (stream, middle, out) if unit in first.blocks else (middle, out, out)
