r"""Optimal Brain Surgeon for heads and FFN channels: what is lost when they go and the others make up for it.

With x [in] the input of an output projection W [out, in] (o_proj, down_proj) and g [out] the gradient of a token's loss
with respect to what it writes, the loss without some inputs grows to second order by 1/2 E[(g^T dW x)^2], dW being the
change of W. Kronecker factors (Martens and Grosse 2015) take the mean apart: 1/2 tr(G dW H dW^T), H = E[x x^T] plus the
damping, G = E[g g^T]. Where the columns S go and the others are solved anew (as cut.reconstruct=least_squares does),
that is (Hassibi and Stork 1993 for one weight, van der Ouderaa et al., "The LLM Surgeon", 2024, for columns)

    cost(S) = 1/2 tr(G W_S ((H^-1)_SS)^-1 W_S^T)

Units go one at a time, the cheapest first, and W and H^-1 are updated after each. So a channel whose copy has gone is
dear, and costs are nats a token of all units that go together; those of different layers and axes compare and add up,
if what is lost in one layer does not depend on the others. A unit's score is its cost when its turn came, or that of
the dearest before it.
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
from pyprune.methods.score._gradients import own_values, take_gradients
from pyprune.methods.score._memory import measured
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
        ConfigError: the hidden axis is open, or the aggregation would change what a cost means.
        DataError: there is no calibration sample.
        ScoreError: the second moments of a module's input cannot be inverted.
    """
    _check(run)
    options, names = own_options(run.request, ObsOptions), run.output_projections()
    places = {f"{name}.weight": place for place, name in names.items()}
    largest = 0

    with measured(run) as account, _listening(run, names.values()) as found:

        def weigh(param: NamedParam, part: Tensor, last: bool) -> None:
            """Turn moments into costs as soon as they are whole; the gradient itself is not wanted."""
            nonlocal largest
            if not last or param.name not in places:
                return
            largest = max(largest, sum(moments.nbytes for moments in found.values()))
            moments = found.pop(param.name.removesuffix(".weight"))
            with torch.autocast(part.device.type, enabled=False):
                _add(run, *places[param.name], param.parameter.detach(), moments, options.damping)

        dtype = working_dtype(options.dtype, run.device)
        warn_of_slow_dtype(dtype, run.device)
        # A cache would hold the copies of all layers that have passed, and their weights, until the end.
        half = torch.autocast(run.device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)
        with half, products_in(dtype):
            report = take_gradients(run, own_values, weigh)
        account.gradients(report, copies=0)
        account.state += largest
    run.details |= {"tokens": run.samples.numel(), "loss": report.loss}
    run.note("Scores are nats a token: what the loss grows by when a unit goes and the others of its block are solved.")


def _add(run: Scoring, layer: int | None, axis: str, weight: Tensor, moments: _Moments, damping: float) -> None:
    dense = run.scope.dense
    predicted = run.samples.shape[0] * (run.samples.shape[1] - 1)
    inputs = moments.inputs / moments.tokens
    outputs = moments.outputs * (predicted**2 / moments.tokens)  # gradients were those of the mean loss
    grouped = axis == "heads" and run.scope.whole_groups
    heads = {"heads": dense.group_size if grouped else 1}.get(axis)
    size = heads * dense.head_dim if heads else 1
    costs = removal_costs(weight, inputs, outputs, size, damping=damping, of=f"{axis} of layer {layer}")
    # The query heads of a group go together, and a group counts their sum.
    run.add_units(layer, axis, costs.repeat_interleave(heads) / heads if heads else costs)


@torch.no_grad()
def removal_costs(
    weight: Tensor, inputs: Tensor, outputs: Tensor, size: int, *, damping: float, of: str = "units"
) -> Tensor:
    """What each unit costs when its turn comes, the cheapest first.

    Args:
        weight: W [out, in], any floating dtype; unit i owns the columns i * size to (i + 1) * size.
        inputs: H [in, in], second moments of the input.
        outputs: G [out, out], second moments of the gradient.
        size: columns of a unit; divides ``in``.
        damping: added to H, relative to the mean of its diagonal.
        of: what an error calls them.

    Returns:
        float64 [in / size], no cost below that of a unit that went earlier. The last unit is counted too.

    Raises:
        ScoreError: H is not positive definite with the damping, or something is not finite.
    """
    if not (torch.isfinite(weight).all() and torch.isfinite(outputs).all()):
        raise ScoreError(
            f"Weights or gradients of the {of} are not finite (pyprune eval says so of weights); use dtype float32."
        )
    dtype = torch.float64 if weight.shape[1] <= FLOAT64_INPUTS else torch.float32
    inverse = _inverse(inputs.double(), damping, of).to(dtype)
    # Rows are W's columns, seen through a root of G: written_S^T x has the square x_S^T W_S^T G W_S x_S.
    written = (_root(outputs.double()) @ weight.double()).T.to(dtype).contiguous()
    return _in_turn(written, inverse, size)


def _in_turn(written: Tensor, inverse: Tensor, size: int) -> Tensor:
    """Costs [in / size], one unit after the other; ``written`` [in, out] is used up."""
    count = len(inverse) // size
    blocks = torch.stack([inverse[i : i + size, i : i + size] for i in range(0, len(inverse), size)])
    factors = torch.zeros_like(inverse)  # of what has been taken off the inverse: factors @ factors.T
    costs = torch.zeros(count, dtype=torch.float64, device=inverse.device)
    gone = torch.zeros(count, dtype=torch.bool, device=inverse.device)
    dearest = 0.0
    for step in range(count):
        within, own = _inverses(blocks), written.view(count, size, -1)
        solved = within * own if size == 1 else within @ own
        worth = (solved * own).sum((1, 2)) / 2
        unit = int(worth.masked_fill(gone, torch.inf).argmin())
        dearest = max(dearest, float(worth[unit]))
        costs[unit], gone[unit] = dearest, True
        mine, done = slice(unit * size, (unit + 1) * size), slice(0, step * size)
        column = inverse[:, mine] - factors[:, done] @ factors[mine, done].T
        written -= (column @ within[unit]) @ written[mine].clone()  # the others take over what they can
        lost = torch.linalg.solve_triangular(_lower(blocks[unit]), column.T, upper=False).T
        factors[:, step * size : (step + 1) * size] = lost
        parts = lost.view(count, size, size)
        blocks -= parts @ parts.transpose(1, 2)
        blocks[gone] = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
        written[mine] = 0
    return costs


def _inverse(moments: Tensor, damping: float, of: str) -> Tensor:
    """Of H with the damping."""
    added = damping * moments.diagonal().mean() * torch.eye(len(moments), device=moments.device)
    lower, failed = torch.linalg.cholesky_ex(moments + added)
    if failed or not torch.isfinite(lower).all():
        raise ScoreError(
            f"The second moments of what the {of} give cannot be inverted; give more text, or more damping than "
            f"{damping}."
        )
    return torch.cholesky_inverse(lower)


def _root(moments: Tensor) -> Tensor:
    """R with R^T R = G [out, out], which may lack rank: there are few tokens, or a channel has no gradient."""
    values, vectors = torch.linalg.eigh(moments)
    return cast(Tensor, values.clamp(min=0).sqrt()[:, None] * vectors.T)


def _lower(matrix: Tensor) -> Tensor:
    """Its Cholesky factor."""
    return matrix.sqrt() if matrix.numel() == 1 else torch.linalg.cholesky(matrix)


def _inverses(blocks: Tensor) -> Tensor:
    """[n, g, g]; LAPACK takes far longer for many single numbers."""
    return 1 / blocks if blocks.shape[1] == 1 else torch.linalg.inv(blocks)


@dataclass
class _Moments:
    """Sums over tokens: x x^T [in, in] and g g^T [out, out] of one module, float32."""

    inputs: Tensor
    outputs: Tensor
    tokens: int = 0

    @classmethod
    def of(cls, x: Tensor, output: Tensor) -> _Moments:
        """Zeros for a module that reads ``x`` [..., in] and writes ``output`` [..., out]."""
        inputs, outputs = (torch.zeros(n, n, device=x.device) for n in (x.shape[-1], output.shape[-1]))
        return cls(inputs, outputs)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.outputs.nbytes

    def add_inputs(self, x: Tensor) -> None:
        _add_values_(self.inputs, x)
        self.tokens += x.numel() // x.shape[-1]

    def add_gradient(self, grad: Tensor) -> None:
        _add_values_(self.outputs, grad)


def _add_values_(total: Tensor, values: Tensor) -> None:
    """Add v v^T of every token's v [n] to a total, float32 also where the model computes in bfloat16."""
    with torch.autocast(values.device.type, enabled=False):
        add_moments_(total, values.detach().flatten(0, -2).float())


@contextmanager
def _listening(run: Scoring, names: Iterable[str]) -> Iterator[dict[str, _Moments]]:
    """Moments of named modules; of each from the first run on that is differentiated until they are taken out."""
    found: dict[str, _Moments] = {}

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not output.requires_grad:  # layers may be run without a graph before
                return
            if name not in found:
                found[name] = _Moments.of(args[0], output)
            found[name].add_inputs(args[0])
            output.register_hook(found[name].add_gradient)

        return after

    with ExitStack() as stack:
        for name in names:
            stack.callback(run.module(name).register_forward_hook(hook(name)).remove)
        yield found


def _check(run: Scoring) -> None:
    score = run.score
    if "hidden" in score.axes:
        raise ConfigError(
            f"score.axes is {list(score.axes)}, but obs scores the inputs of o_proj and down_proj; use heads and ffn."
        )
    if score.aggregation != "sum":
        raise ConfigError(f"score.aggregation is {score.aggregation!r}, but the costs of obs add up; use sum.")
