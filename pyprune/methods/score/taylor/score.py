"""LLM-Pruner's Taylor scores: the change of the loss to first or second order when a structure becomes zero.

With S = w g elementwise (Ma et al., "LLM-Pruner", section 3.2), vectorize is |sum S| over each channel of a matrix,
and param_first is sum |S|. The second-order forms are param_second, sum |w h w|, and param_mix, sum |S - w h w / 2|.
There h is the diagonal of the Fisher matrix: the mean over samples of the squared gradient of one sample. Gradients are
taken one layer at a time and dropped with the layer; the second-order forms run the layer once a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyprune.families import NamedParam
from pyprune.methods.base import own_options
from pyprune.methods.score._gradients import GradientReport, GradientSum, take_gradients, unchanged_weights
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.taylor import TaylorOptions


def score(run: Scoring) -> None:
    """Add the chosen form for every open parameter."""
    variant = own_options(run.request, TaylorOptions).form
    with measure_memory(run) as account:
        if variant in ("vectorize", "param_first"):
            add = GradientSum(lambda param, grad: run.add(param, grad, signed=variant == "vectorize"))
            report = take_gradients(run, unchanged_weights, add)
            account.gradients(report, copies=1 if report.passes > 1 else 0)
        else:
            report = _second_order(run, mixed=variant == "param_mix")
            account.gradients(report, copies=2 if report.passes > 1 else 0)
    run.details["loss"] = report.loss


def _second_order(run: Scoring, *, mixed: bool) -> GradientReport:
    count = len(run.samples)
    held: dict[str, tuple[Tensor, Tensor]] = {}

    def consume(param: NamedParam, part: Tensor, last: bool) -> None:
        # A part is the gradient of one sample over the number of samples.
        first, second = held.pop(param.name, (torch.zeros_like(part), torch.zeros_like(part)))
        first += part
        second.addcmul_(part, part, value=count)
        if not last:
            held[param.name] = first, second
            return
        curvature = second.mul_(run.weight(param).to(second.dtype))
        run.add(param, first.sub_(curvature, alpha=0.5) if mixed else curvature)

    return take_gradients(run, unchanged_weights, consume, per_sample=True)
