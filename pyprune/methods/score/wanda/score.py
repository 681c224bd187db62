"""Wanda, structured: the score of a weight is its size times the size of its input.

The element score is |W_ij| ||X_j||_2 (Sun et al., "A Simple and Effective Pruning Approach for Large Language
Models", equation 1), X_j being channel j of the module's input over all calibration tokens. The paper removes single
weights. Here a coupled structure sums its elements, and a group aggregates the structures that are removed together, as
for every score. A query head owns its rows of q_proj and its columns of o_proj; a KV group owns these and its rows of
k_proj and v_proj; an FFN channel owns its rows of gate and up and its column of down. ``matrices: output`` counts the
columns of the output projections alone, the form that FLAP's authors compare with as Wanda-sp.

Parameters that the paper does not have are scored by the same rule. A bias is multiplied with 1 at every token, so that
it counts |b| sqrt(tokens). On the hidden axis, a channel of a norm or an embedding counts the l2 norm of its output
(for a norm that is |w_j| times the norm of the normalised input). A head tied to the embedding is one tensor and counts
as the embedding. An expert's X are the tokens that are routed to it. One forward pass takes the norms; no activation is
kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyprune.families import NamedParam
from pyprune.methods.base import own_options
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.wanda import WandaOptions
from pyprune.probe.activations import Moments
from pyprune.probe.experts import ExpertNorms


@torch.no_grad()
def score(run: Scoring) -> None:
    """Add |W_ij| ||X_j||_2 of every open parameter.

    Raises:
        DataError: there is no calibration sample.
    """
    coupled = own_options(run.request, WandaOptions).matrices == "coupled"
    counted = [p for p in run.open_params if coupled or p.row.role == "writer"]
    modules = list(dict.fromkeys(_module(p) for p in counted))
    experts = {_module(p): ExpertNorms() for p in counted if len(p.row.axes) == 3}
    # A router multiplies like a linear module, whatever its class.
    products = {_module(p) for p in counted if p.row.role in ("reader", "writer", "head") and len(p.row.axes) == 2}
    linear = [name for name in modules if name in products and name not in experts]
    others = [name for name in modules if name not in products and name not in experts]
    with measure_memory(run) as account:
        moments = run.moments(inputs=linear, outputs=others, others=experts)
        account.state = sum(m.bytes for m in moments.values()) + sum(n.bytes for n in experts.values())
    for param in counted:
        module, name = run.model.get_submodule(_module(param)), _module(param)
        if name in experts:
            norms = experts[name].norms(param.name.rpartition(".")[2], module).to(_wide(param.parameter))
            run.add(param, norms.expand_as(param.parameter))
        else:
            _add(run, param, moments[name], multiplies=name in products)
    run.details["tokens"] = run.samples.numel()


def _add(run: Scoring, param: NamedParam, moments: Moments, *, multiplies: bool) -> None:
    if param.row.is_bias or param.row.role == "inner":
        # A bias is multiplied with 1 at every token, and so, on average of the squares, is the weight of a q/k norm.
        size, dtype = param.parameter.shape, _wide(param.parameter)
        run.add(param, moments.mean.new_full(size, math.sqrt(moments.count), dtype=dtype))
    elif multiplies:
        norms = moments.norm().to(_wide(param.parameter))
        run.add(param, norms.expand_as(param.parameter))
    else:
        norms = moments.norm(run.module_bias(_module(param)))
        run.add_units(None, "hidden", norms, part=_module(param))


def _module(param: NamedParam) -> str:
    return param.name.rpartition(".")[0]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
