"""FLAP: remove channels whose input barely fluctuates, because a bias can replace them (An et al. 2024).

Channel j of the input of an output projection (o_proj, down_proj) scores its weighted input feature variance

    S_j = 1/(N - 1) sum_n (X_nj - mean_j)^2 * ||W_:j||_2^2

over the N calibration tokens. It is the part of the loss of that channel that remains once its mean is compensated.
Layers and modules differ in scale. Each module's scores are therefore standardised, (S - mean) / standard deviation
over its channels, before they are compared globally (the paper's AL-AM; it does not change a local ranking). Units that
are removed together (``score.ffn_multiple``) count their mean. A query head is the mean of its standardised channels,
as in the authors' code, which keeps heads and FFN channels on one scale. The preset aggregates a KV group by the mean
of its query heads for the same reason. Their code squares S of the attention first; the paper and this module do not.

With ``cut.reconstruct: bias`` (the preset's) the cut adds the lost mean as a bias: :mod:`pyprune.cut.compensate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyprune.config.score import ScoreConfig
from pyprune.errors import ConfigError
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring


@torch.no_grad()
def score(run: Scoring) -> None:
    """Add the standardised fluctuation of every open head and FFN channel.

    Raises:
        ConfigError: the hidden axis is open, or the ranking would change the scale of standardised scores.
        DataError: there is no calibration sample.
    """
    names = run.output_projections()
    _check(run.score)
    run.scores.standardised = True
    with measure_memory(run) as account:
        moments = run.moments(inputs=names.values())
        account.state = sum(m.bytes for m in moments.values())
    for (layer, axis), name in names.items():
        channels = standardised_fluctuation(moments[name].variance, run.module_weight(name), masked=run.masked)
        size = run.scope.dense.channels("query_heads", layer or 0) if axis == "heads" else 1
        heads = channels.view(-1, size).mean(1)
        run.add_units(layer, axis, heads, part=name)
    run.details["tokens"] = run.samples.numel()


def standardised_fluctuation(variance: Tensor, weight: Tensor, *, masked: bool = False) -> Tensor:
    """Return (S - mean(S)) / std(S) with S_j = variance_j ||W_:j||^2.

    Args:
        variance: variance of the module's input channels, float64 [in].
        weight: weight of the module, [out, in].
        masked: leave channels without weights, which earlier rounds removed, out of mean and deviation (they score 0).

    Returns:
        float64 [in].
    """
    sizes = weight.double().square().sum(0)
    raw = variance * sizes
    alive = sizes > 0 if masked else torch.ones_like(sizes, dtype=torch.bool)
    counted = raw[alive]
    spread = float(counted.std()) if len(counted) > 1 else 0.0
    scores = (raw - counted.mean()) / (spread or 1.0)
    return torch.where(alive, scores, torch.zeros_like(scores))


def _check(score: ScoreConfig) -> None:
    if score.aggregation == "prod":
        raise ConfigError("score.aggregation is 'prod', but FLAP's standardised scores are negative too; use mean.")
    if score.normalise != "none":
        raise ConfigError(
            f"score.normalise is {score.normalise!r}, but FLAP standardises its scores itself; set it to none."
        )
