"""Linear modules that are solved in closed form: their saved values, new ones, and the choice of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.cut.least_squares import BlockEquations, NormalEquations
from pyprune.runtime import processes


class Projection:
    """A linear module that is solved for.

    Args:
        name: inside its layer.
        module: the module; weight [out, in], any floating dtype.
        dense_rows: the kept outputs of the dense module of this name, int64; None = all.
        scale: factor from those outputs to this module's (see ``width_factor``).
    """

    def __init__(self, name: str, module: nn.Linear, *, dense_rows: Tensor | None = None, scale: float = 1.0) -> None:
        self.dense_rows = dense_rows
        self.scale = scale
        self.name = name
        self.module = module
        bias = cast("Tensor | None", module.bias)
        self.weight = module.weight.detach().clone()
        self.bias = None if bias is None else bias.detach().clone()

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    @property
    def parameters(self) -> list[str]:
        """Names, inside the layer, of the parameters that are solved for."""
        return [f"{self.name}.{part}" for part, _ in self.module.named_parameters()]

    @property
    def nbytes(self) -> int:
        """Bytes of the saved values."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def target(self, y: Tensor) -> Tensor:
        """Select and scale this module's outputs among the dense module's, y [..., dense out]: float32 [..., out]."""
        kept = y if self.dense_rows is None else y.index_select(-1, self.dense_rows)
        kept = kept.float()
        return kept if self.scale == 1.0 else kept * self.scale

    def put(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the module to new values, rounded once to its dtype.

        Args:
            weight: float [inputs, outputs].
            bias: float [outputs]; None = as it was before.
        """
        self.module.weight.copy_(weight.T)
        if bias is not None:
            self.module.bias.copy_(bias)

    def restore(self) -> None:
        """Set the module to its values before."""
        self.module.weight.copy_(self.weight)
        if self.bias is not None:
            self.module.bias.copy_(self.bias)


class ExpertProjection(Projection):
    """The down projection of one expert, among those of all experts of a layer.

    Args:
        name: of the module of the experts, inside its layer.
        experts: the module.
        expert: index in it.
    """

    def __init__(self, name: str, experts: Any, expert: int) -> None:
        self.name, self.module, self.expert = name, experts, expert
        self.dense_rows, self.scale, self.bias = None, 1.0, None
        self.weight = self.now.detach().clone()

    @property
    def now(self) -> Tensor:
        """The weight [out, in] as it is now, in the memory of the parameter."""
        weight: Tensor = cast(Any, self.module).down_proj.data[self.expert]
        return weight.T if self.module.is_transposed else weight

    @property
    @override
    def parameters(self) -> list[str]:
        return [f"{self.name}.down_proj"]

    @override
    def put(self, weight: Tensor, bias: Tensor | None) -> None:
        self.now.copy_(weight.T)

    @override
    def restore(self) -> None:
        self.now.copy_(self.weight)


class Gain:
    """The gain g of the norm after a writer, out = g * y / rms(y), which is solved for as well.

    Args:
        name: of the norm, inside its layer.
        module: the norm; its weight [H'], any floating dtype, stores g - offset.
        offset: 1 for norms that multiply by 1 + w, else 0.
    """

    def __init__(self, name: str, module: nn.Module, offset: float) -> None:
        self.parameters = [f"{name}.weight"]
        self.module = module
        self.offset = offset
        self.weight = cast(Tensor, module.weight).detach().clone()
        self.nbytes = self.weight.nbytes

    @property
    def values(self) -> Tensor:
        """The saved g, float32 [H']."""
        return self.weight.float() + self.offset

    def floored(self, share: float) -> Tensor:
        """Return g now, float32 [H'], each of at least this share of the mean size, with its sign."""
        values = cast(Tensor, self.module.weight).float() + self.offset
        smallest = (share * values.abs().mean()).clamp(min=1e-12)
        return values.abs().clamp(min=smallest).copysign(values)

    def divisor(self, y: Tensor) -> Tensor:
        """Return the number that the norm divides each token y [tokens, H'] by, [tokens, 1]."""
        epsilon: float = getattr(self.module, "eps" if hasattr(self.module, "eps") else "variance_epsilon")
        return (y.square().mean(-1, keepdim=True) + epsilon).sqrt()

    def put(self, values: Tensor) -> None:
        """Set g, float [H'], rounded once to the dtype of the weight."""
        cast(Tensor, self.module.weight).copy_(values - self.offset)

    def restore(self) -> None:
        """Set the norm to its saved values."""
        cast(Tensor, self.module.weight).copy_(self.weight)


@dataclass
class Tally:
    """Squared error and squared size of the target, one sum for each kind of text.

    Attributes:
        error: sum over tokens of the squared error.
        size: sum over tokens of the squared target.
    """

    error: dict[str, float] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, error: Tensor, size: Tensor) -> None:
        """Add the sums of a chunk (0-dimensional tensors)."""
        self.error[kind] = self.error.get(kind, 0.0) + float(error)
        self.size[kind] = self.size.get(kind, 0.0) + float(size)

    def over_processes(self, kinds: Sequence[str]) -> Tally:
        """The sums of all processes that share the sequences.

        Args:
            kinds: of the sequences of all processes, in an order that is theirs too.
        """
        if not processes.is_divided():
            return self
        mine = [[sums.get(kind, 0.0) for kind in kinds] for sums in (self.error, self.size)]
        error, size = processes.summed_(torch.tensor(mine, dtype=torch.float64)).tolist()
        return Tally(dict(zip(kinds, error, strict=True)), dict(zip(kinds, size, strict=True)))

    def relative(self) -> dict[str, float]:
        """Relative error of each kind: the root of error / size."""
        return {kind: (self.error[kind] / self.size[kind]) ** 0.5 if self.size[kind] else 0.0 for kind in self.error}

    def overall(self) -> float:
        """The mean of the kinds' relative errors."""
        errors = self.relative().values()
        return sum(errors) / len(errors) if errors else 0.0


@dataclass(frozen=True)
class Choice:
    """The solution that was taken.

    Attributes:
        ridge: relative to the mean diagonal; None = the modules are left as they were, or the gain alone is solved.
        before: errors on the sequences held back, with the modules as they were.
        after: errors on them, with the solution on the other sequences.
        rounds: of the writers and the gain of the norm after them; 0 = the gain alone; None = no gain is solved.
    """

    ridge: float | None
    before: Tally
    after: Tally
    rounds: int | None = None

    @property
    def taken(self) -> bool:
        """Check whether anything was changed."""
        return self.ridge is not None or self.rounds is not None


Solutions = Callable[[Sequence[float]], Iterator[tuple[float, Callable[[], None]]]]
"""(ridges) -> (ridge, a function that puts its solution into the modules) for each that has one."""


def choose(
    projections: Sequence[Projection],
    solutions: Solutions,
    ridges: Sequence[float],
    error: Callable[[], Tally],
    add_judges: Callable[[], None],
) -> Choice:
    """Try solutions from the largest ridge down, and keep the one with the smallest error on the sequences held back.

    The error of a solution is the mean over the kinds of text of its squared error relative to that of the modules as
    they were. A solution that makes any kind worse is not taken, so that leaving everything as it was can win. Once a
    ridge is worse than the best, smaller ones are not tried. With the best ridge, the system is then solved on all
    sequences.

    Args:
        projections: the modules that solutions change.
        solutions: of the system as it stands.
        ridges: candidates.
        error: of the modules as they are, on the sequences held back.
        add_judges: adds the sequences held back to the system.
    """
    before = error()
    best = best_solution(before, solutions, ridges, error)
    if best is None:
        for projection in projections:
            projection.restore()
        return Choice(None, before, before)
    add_judges()
    put_solution(solutions, best[1])
    return Choice(best[1], before, best[2])


def best_solution(
    before: Tally, solutions: Solutions, ridges: Sequence[float], error: Callable[[], Tally]
) -> tuple[float, float, Tally] | None:
    """Try solutions from the largest ridge down, until one is worse than the best before it.

    Returns:
        (:func:`mean_change`, ridge, errors) of the best; None = each makes a kind of text worse than ``before``.
    """
    best: tuple[float, float, Tally] | None = None
    for ridge, apply in solutions(sorted(ridges, reverse=True)):
        apply()
        after = error()
        score = mean_change(before, after)
        if score is not None and (best is None or score < best[0]):
            best = score, ridge, after
        elif best is not None:
            break
    return best


def put_solution(solutions: Solutions, ridge: float) -> None:
    """Put the solution with a ridge into the modules."""
    for _, apply in solutions([ridge]):
        apply()


def mean_change(before: Tally, after: Tally) -> float | None:
    """Return the mean over the kinds of new squared error / old; None if a kind gets worse, or none better."""
    pairs = [(after.error[kind], error) for kind, error in before.error.items()]
    if not all(new <= old for new, old in pairs) or all(new == old for new, old in pairs):
        return None
    return sum(new / old if old else 1.0 for new, old in pairs) / len(pairs)


def joint_start(projections: Sequence[Projection]) -> tuple[Tensor, bool]:
    """Weights [inputs (+ 1), outputs] of projections whose outputs add up: their inputs stand side by side.

    Returns:
        The weights, and whether the last row is a constant: one bias for all of them.
    """
    rows = [projection.weight.T for projection in projections]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    rows += [torch.stack(biases).sum(0, keepdim=True)] if biases else []
    return torch.cat(rows) if len(rows) > 1 else rows[0], bool(biases)


def parallel_start(projections: Sequence[Projection]) -> tuple[Tensor, bool]:
    """Weights [inputs (+ 1), outputs] of projections that read the same input: their outputs stand side by side.

    Returns:
        The weights, and whether the last row is a constant: the biases, where all of them have one.
    """
    biases = [projection.bias for projection in projections if projection.bias is not None]
    constant = len(biases) == len(projections)
    weight = torch.cat([projection.weight for projection in projections]).T
    return (torch.cat([weight, torch.cat(biases)[None]]) if constant else weight), constant


def joint_solutions(
    equations: NormalEquations | BlockEquations, projections: Sequence[Projection], ridges: Sequence[float]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Solutions of projections whose outputs add up (see :func:`joint_start`).

    The first projection with a bias carries the constant.
    """
    carrier, *others = [p for p in projections if p.bias is not None] or projections[:1]
    sizes = [projection.inputs for projection in projections]
    for ridge, solution in equations.solutions(ridges):
        fixed = [other.bias for other in others if other.bias is not None]
        bias = reduce(torch.sub, fixed, solution[-1]) if equations.constant else None
        pairs = zip(projections, solution[: sum(sizes)].split(sizes), strict=True)
        yield ridge, partial(_put_all, [(p, weight, bias if p is carrier else None) for p, weight in pairs])


def parallel_solutions(
    equations: NormalEquations, projections: Sequence[Projection], ridges: Sequence[float]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Solutions of projections that read the same input (see :func:`parallel_start`)."""
    inputs, sizes = projections[0].inputs, [projection.outputs for projection in projections]
    for ridge, solution in equations.solutions(ridges):
        weights = solution[:inputs].split(sizes, dim=1)
        biases = solution[-1].split(sizes) if equations.constant else [None] * len(sizes)
        yield ridge, partial(_put_all, list(zip(projections, weights, biases, strict=True)))


def _put_all(values: list[tuple[Projection, Tensor, Tensor | None]]) -> None:
    for projection, weight, bias in values:
        projection.put(weight, bias)
