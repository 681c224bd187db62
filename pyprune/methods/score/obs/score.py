r"""Optimal Brain Surgeon for heads and FFN channels: the loss of a removal that the others compensate.

Let x [in] be the input of an output projection W [out, in] (o_proj, down_proj), and g [out] the gradient of a token's
loss in its output. To second order the loss grows by 1/2 E[(g^T dW x)^2], dW being the change of W. Kronecker factors
(Martens and Grosse 2015) split the mean: 1/2 tr(G dW H dW^T), with H = E[x x^T] plus the damping and G = E[g g^T]. If
the columns S are removed and the others are solved again (as cut.reconstruct=least_squares does), this is

    cost(S) = 1/2 tr(G W_S ((H^-1)_SS)^-1 W_S^T).

See Hassibi and Stork 1993 for one weight, and van der Ouderaa et al., "The LLM Surgeon", 2024, for columns. Units are
removed one at a time, the cheapest first, and W and H^-1 are updated after each. So once one of two duplicate channels
is removed, the other becomes expensive. Costs are nats a token of all units that are removed together. Those of
different layers and axes compare and add up if the loss of one layer does not depend on the others. The score of a unit
is its cost at its removal, or that of the most expensive unit before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyprune.errors import ConfigError, ScoreError
from pyprune.families import NamedParam
from pyprune.methods.base import own_options
from pyprune.methods.score._gradients import take_gradients, unchanged_weights
from pyprune.methods.score._memory import measure_memory
from pyprune.methods.score.base import Scoring
from pyprune.methods.score.obs import ObsOptions
from pyprune.probe.moments import add_moments_
from pyprune.runtime.device import warn_of_slow_dtype, working_dtype
from pyprune.runtime.products import products_in

FLOAT64_INPUTS = 1024
"""Modules of up to this many inputs are ordered in float64, wider ones in float32, a quarter of the time."""


def score(run: Scoring) -> None:
    """Add the cost of every open head and FFN channel, in nats a token.

    Raises:
        ConfigError: the hidden axis is open, or the aggregation would change the meaning of a cost.
        DataError: there is no calibration sample.
        ScoreError: the second moments of a module's input cannot be inverted.
    """
    options, names = own_options(run.request, ObsOptions), run.output_projections()
    if run.score.aggregation != "sum":
        raise ConfigError(f"score.aggregation is {run.score.aggregation!r}, but the costs of obs add up; use sum.")
    places = {f"{name}.weight": place for place, name in names.items()}
    largest = 0

    with measure_memory(run) as account, _record_moments(run, names.values()) as recorded:

        def weigh(param: NamedParam, part: Tensor, last: bool) -> None:
            """Turn moments into costs as soon as they are complete; the gradient itself is not used."""
            nonlocal largest
            if not last or param.name not in places:
                return
            largest = max(largest, sum(moments.nbytes for moments in recorded.values()))
            moments = recorded.pop(param.name.removesuffix(".weight"))
            with torch.autocast(part.device.type, enabled=False):
                _add(run, *places[param.name], param.parameter.detach(), moments, options.damping)

        dtype = working_dtype(options.dtype, run.device)
        warn_of_slow_dtype(dtype, run.device)
        # A cache would hold copies of the weights of all earlier layers until the end.
        half = torch.autocast(run.device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)
        with half, products_in(dtype):
            report = take_gradients(run, unchanged_weights, weigh)
        account.gradients(report, copies=0)
        account.state += largest
    run.details |= {"tokens": run.samples.numel(), "loss": report.loss}
    run.note(
        "Scores are nats a token: the growth of the loss if a unit is removed and the others of its block are solved "
        "again."
    )


def _add(run: Scoring, layer: int | None, axis: str, weight: Tensor, moments: _Moments, damping: float) -> None:
    dense = run.scope.dense
    predicted = run.samples.shape[0] * (run.samples.shape[1] - 1)
    inputs = moments.inputs / moments.tokens
    outputs = moments.outputs * (predicted**2 / moments.tokens)  # gradients were those of the mean loss
    grouped = axis == "heads" and run.scope.whole_groups
    heads = (run.scope.group_size(layer) if grouped else 1) if axis == "heads" else 0
    size = heads * dense.channels("query_heads", layer or 0) if heads else 1
    costs = removal_costs(weight, inputs, outputs, size, damping=damping, name=f"{axis} of layer {layer}")
    # The query heads of a group are removed together, and a group counts their sum.
    run.add_units(layer, axis, costs.repeat_interleave(heads) / heads if heads else costs)


@torch.no_grad()
def removal_costs(
    weight: Tensor, inputs: Tensor, outputs: Tensor, size: int, *, damping: float, name: str = "units"
) -> Tensor:
    """Return the cost of each unit at its removal, the cheapest first.

    Args:
        weight: W [out, in], any floating dtype; unit i owns the columns i * size to (i + 1) * size.
        inputs: H [in, in], second moments of the input.
        outputs: G [out, out], second moments of the gradient.
        size: columns of a unit; divides ``in``.
        damping: added to H, relative to the mean of its diagonal.
        name: name of the units in an error.

    Returns:
        float64 [in / size], no cost below that of a unit that was removed earlier. The last unit is counted too.

    Raises:
        ScoreError: H is not positive definite with the damping, or something is not finite.
    """
    if not (torch.isfinite(weight).all() and torch.isfinite(outputs).all()):
        raise ScoreError(
            f"Weights or gradients of the {name} are not finite (pyprune eval checks the weights); use dtype float32."
        )
    dtype = torch.float64 if weight.shape[1] <= FLOAT64_INPUTS else torch.float32
    inverse = _inverse(inputs.double(), damping, name).to(dtype)
    # Rows are W's columns times a root of G: written_S^T x has the square x_S^T W_S^T G W_S x_S.
    written = (_root(outputs.double()) @ weight.double()).T.to(dtype).contiguous()
    return _greedy_costs(written, inverse, size)


def _greedy_costs(written: Tensor, inverse: Tensor, size: int) -> Tensor:
    """Return costs [in / size], removing one unit after the other; ``written`` [in, out] is overwritten."""
    count = len(inverse) // size
    blocks = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, len(inverse), size)])
    factors = torch.zeros_like(inverse)  # factors @ factors.T has been subtracted from the inverse
    costs = torch.zeros(count, dtype=torch.float64, device=inverse.device)
    gone = torch.zeros(count, dtype=torch.bool, device=inverse.device)
    highest = 0.0
    for step in range(count):
        within, units = _inverses(blocks), written.view(count, size, -1)
        solved = within * units if size == 1 else within @ units
        cost = (solved * units).sum((1, 2)) / 2
        unit = int(cost.masked_fill(gone, torch.inf).argmin())
        highest = max(highest, float(cost[unit]))
        costs[unit], gone[unit] = highest, True
        mine, done = slice(unit * size, (unit + 1) * size), slice(0, step * size)
        column = inverse[:, mine] - factors[:, done] @ factors[mine, done].T
        written -= (column @ within[unit]) @ written[mine].clone()  # the others compensate
        lost = torch.linalg.solve_triangular(_lower(blocks[unit]), column.T, upper=False).T
        factors[:, step * size : (step + 1) * size] = lost
        parts = lost.view(count, size, size)
        blocks -= parts @ parts.transpose(1, 2)
        blocks[gone] = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
        written[mine] = 0
    return costs


def _inverse(moments: Tensor, damping: float, name: str) -> Tensor:
    """Return the inverse of H with the damping."""
    added = damping * moments.diagonal().mean() * torch.eye(len(moments), device=moments.device)
    lower, failed = torch.linalg.cholesky_ex(moments + added)
    if failed or not torch.isfinite(lower).all():
        raise ScoreError(
            f"The second moments of the {name} cannot be inverted; give more text, or more damping than {damping}."
        )
    return torch.cholesky_inverse(lower)


def _root(moments: Tensor) -> Tensor:
    """Return R with R^T R = G [out, out]; G may lack rank if tokens are few or a channel has no gradient."""
    values, vectors = torch.linalg.eigh(moments)
    return cast(Tensor, values.clamp(min=0).sqrt()[:, None] * vectors.T)


def _lower(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix."""
    return matrix.sqrt() if matrix.numel() == 1 else torch.linalg.cholesky(matrix)


def _inverses(blocks: Tensor) -> Tensor:
    """Return the inverses of matrices [n, g, g]; single numbers are divided, as LAPACK takes far longer for them."""
    return 1 / blocks if blocks.shape[1] == 1 else torch.linalg.inv(blocks)


@dataclass
class _Moments:
    """Sums over tokens: x x^T [in, in] and g g^T [out, out] of one module, float32."""

    inputs: Tensor
    outputs: Tensor
    tokens: int = 0

    @classmethod
    def of(cls, x: Tensor, output: Tensor) -> _Moments:
        """Return zeros for a module with input ``x`` [..., in] and output ``output`` [..., out]."""
        inputs, outputs = (torch.zeros(n, n, device=x.device) for n in (x.shape[-1], output.shape[-1]))
        return cls(inputs, outputs)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.outputs.nbytes

    def add_inputs(self, x: Tensor) -> None:
        add_values_(self.inputs, x)
        self.tokens += x.numel() // x.shape[-1]

    def add_gradient(self, grad: Tensor) -> None:
        add_values_(self.outputs, grad)


def add_values_(total: Tensor, values: Tensor) -> None:
    """Add v v^T of every token's v [n] to a total, float32 also where the model computes in bfloat16."""
    with torch.autocast(values.device.type, enabled=False):
        add_moments_(total, values.detach().flatten(0, -2).float())


@contextmanager
def _record_moments(run: Scoring, names: Iterable[str]) -> Iterator[dict[str, _Moments]]:
    """Record the moments of named modules in their differentiated runs, until the caller takes them out."""
    recorded: dict[str, _Moments] = {}

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not output.requires_grad:  # layers run without a graph before
                return
            if name not in recorded:
                recorded[name] = _Moments.of(args[0], output)
            recorded[name].add_inputs(args[0])
            output.register_hook(recorded[name].add_gradient)

        return after

    with ExitStack() as stack:
        for name in names:
            stack.callback(run.module(name).register_forward_hook(hook(name)).remove)
        yield recorded
