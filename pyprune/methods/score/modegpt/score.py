"""MoDeGPT: the ridge leverage of FFN channels (Lin et al. 2024, algorithm 1, the Nystrom approximation of an MLP).

With C = E[x x^T], x the input of down_proj [ffn], channel i scores [C (C + ridge mean(diag C) I)^-1]_ii, in [0, 1]. A
channel that the others span scores little. The paper then solves down_proj for the channels that stay, which is
``cut.reconstruct: least_squares`` here. Its ways for attention are not built.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from pyprune.config.train import micro_batch_for
from pyprune.errors import ConfigError
from pyprune.methods.base import own_options
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.modegpt import ModeGptOptions
from pyprune.probe.activations import frozen_eval
from pyprune.probe.moments import add_moments_
from pyprune.probe.streams import LayerRunner
from pyprune.runtime.progress import track


@torch.no_grad()
def score(run: Scoring) -> None:
    """Add the ridge leverage of every open FFN channel; one layer's second moments [ffn, ffn] are held at a time.

    Raises:
        ConfigError: an axis other than ffn is open.
    """
    if run.score.axes != ("ffn",):
        raise ConfigError(f"score.axes is {list(run.score.axes)}, but modegpt scores FFN channels alone; use [ffn].")
    ridge = own_options(run.request, ModeGptOptions).ridge
    names = {int(str(layer)): name for (layer, _), name in run.output_projections().items()}
    runner = LayerRunner.of(run.model) if run.layers is None else run.layers
    size = run.score.batch_size or micro_batch_for(len(run.samples), run.samples.shape[1])
    streams = [runner.embed(batch.to(run.device)) for batch in run.samples.split(size)]
    with frozen_eval(runner.model):
        for index in track(range(max(names) + 1), "second moments"):
            width = run.scope.units("ffn", index)
            moments = torch.zeros(width, width, device=run.device)
            with runner.layer(index) as layer, ExitStack() as hooks:
                if index in names:
                    add = partial(_add, moments)
                    hooks.callback(run.module(names[index]).register_forward_pre_hook(add).remove)
                runner.run_(layer, runner.whole_layer(index), streams)
            if index in names:
                run.add_units(index, "ffn", ridge_leverage(moments, ridge))
    run.details["tokens"] = run.samples.numel()


def _add(moments: Tensor, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    add_moments_(moments, args[0].flatten(0, -2).to(moments.dtype))


def ridge_leverage(moments: Tensor, ridge: float) -> Tensor:
    """Return the diagonal of C (C + ridge mean(diag C) I)^-1, float64 [n], of the sums C [n, n], any floating dtype."""
    wide = moments.double()
    penalty = ridge * wide.diagonal().mean()
    identity = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    inverse: Tensor = torch.linalg.inv(wide + penalty * identity)
    return 1 - penalty * inverse.diagonal()
