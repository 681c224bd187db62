"""How the energy of the residual stream is spread over its channels."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pyprune.config.train import micro_batch_for
from pyprune.errors import DataError
from pyprune.probe.activations import frozen_eval
from pyprune.probe.streams import LayerRunner


@torch.no_grad()
def stream_energy(model: PreTrainedModel | LayerRunner, samples: Tensor) -> Tensor:
    """Return the share of the stream's energy of every hidden channel, summed over all points between layers:

        E_j = sum over layers l of  sum_n x_l[n, j]^2 / sum_n |x_l[n]|^2.

    x_l is the stream [T, H] that enters layer l, and n runs over all tokens of the samples. The stream after the last
    layer, which only the final norm reads, does not count. Sums are float64. In addition to the model, memory holds one
    number for each layer and channel, and the activations of one batch (or the stream of all samples, if layers are
    read one at a time).

    Args:
        model: a dense model of a known family, which comes back unchanged; or a runner of its layers.
        samples: token ids, int64 [N, T].

    Returns:
        float64 [H] on the CPU; the shares at each point add up to 1, so that all of them add up to the number of layers
        (a point where the whole stream is zero adds nothing).

    Raises:
        DataError: there is no sample.
    """
    if not samples.numel():
        raise DataError("The energy of the stream is measured on calibration text; give samples.")
    runner = LayerRunner.of(model)
    energy = torch.zeros(len(runner.layers), int(runner.model.config.hidden_size), dtype=torch.float64)
    batches = samples.split(micro_batch_for(len(samples), samples.shape[1]))
    with frozen_eval(runner.model):
        for group in runner.batch_groups(batches):
            streams = [runner.embed(batch) for batch in group]
            for index in runner.points_(streams):
                for stream in streams:
                    energy[index] += stream.flatten(0, -2).double().square().sum(0).cpu()
    totals = energy.sum(1, keepdim=True)
    return (energy / torch.where(totals == 0, 1.0, totals)).sum(0)
