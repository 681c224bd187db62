"""Linear modules that are solved in closed form: their values before, a change of them, and which change is best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from pyprune.cut._least_squares import NormalEquations
from pyprune.runtime import processes


class Projection:
    """A linear module of which the kept rows and columns are solved for; everything else stays as it is.

    Args:
        name: inside its layer.
        module: the module; weight [out, in], any floating dtype.
        rows: outputs that stay, int64; None = all.
        columns: inputs that stay, int64; None = all.
        dense_rows: outputs of the dense module of this name that these are, int64; None = ``rows``.
        scale: what those are multiplied by to be this module's (see ``width_factor``).
    """

    def __init__(
        self,
        name: str,
        module: nn.Linear,
        rows: Tensor | None,
        columns: Tensor | None,
        *,
        dense_rows: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        self.dense_rows = rows if dense_rows is None else dense_rows
        self.scale = scale
        self.name = name
        self.module = module
        self.rows = rows
        self.columns = columns
        bias = cast("Tensor | None", module.bias)
        self._weight = module.weight.detach().clone()
        self._bias = None if bias is None else bias.detach().clone()

    @property
    def inputs(self) -> int:
        """Number of inputs that stay."""
        return self.module.in_features if self.columns is None else len(self.columns)

    @property
    def outputs(self) -> int:
        """Number of outputs that stay."""
        return self.module.out_features if self.rows is None else len(self.rows)

    @property
    def parameters(self) -> list[str]:
        """Names of what is solved for, inside the layer."""
        return [f"{self.name}.{part}" for part, _ in self.module.named_parameters()]

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias to solve for."""
        return self._bias is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the values that are kept beside the module's own."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def read(self, x: Tensor) -> Tensor:
        """The inputs that stay, of x [..., in]."""
        return x if self.columns is None else x.index_select(-1, self.columns)

    def written(self, y: Tensor) -> Tensor:
        """The outputs that stay, of y [..., out]."""
        return y if self.rows is None else y.index_select(-1, self.rows)

    def wanted(self, y: Tensor) -> Tensor:
        """What they are in the dense module, of its outputs y [..., dense out]."""
        kept = y if self.dense_rows is None else y.index_select(-1, self.dense_rows)
        return kept * self.scale

    def move(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the module to its values before plus a change, rounded once to its dtype.

        Args:
            weight: float [inputs, outputs].
            bias: float [outputs]; None leaves the bias as it was.
        """
        values = self._weight.to(weight.dtype, copy=True)
        values[self._kept()] += weight.T
        self.module.weight.copy_(values)
        if bias is not None and self._bias is not None:
            biases = self._bias.to(bias.dtype, copy=True)
            biases[slice(None) if self.rows is None else self.rows] += bias
            self.module.bias.copy_(biases)

    def _kept(self) -> tuple[Tensor | slice, Tensor | slice]:
        """What stays of the weight, as an index; a slice where everything does, which copies nothing."""
        rows = slice(None) if self.rows is None else self.rows
        if self.columns is None:
            return rows, slice(None)
        return rows if isinstance(rows, slice) else rows[:, None], self.columns

    def restore(self) -> None:
        """Set the module to its values before."""
        self.module.weight.copy_(self._weight)
        if self._bias is not None:
            self.module.bias.copy_(self._bias)

    def copy_to(self, other: nn.Linear) -> None:
        """Write what stays, as it is now, into a module of the same shape."""
        other.weight[self._kept()] = self.module.weight[self._kept()]
        if self._bias is not None:
            kept = slice(None) if self.rows is None else self.rows
            other.bias[kept] = self.module.bias[kept]


@dataclass
class Tally:
    """Squared error and squared size of what should be there, one sum for each kind of text.

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
        if not processes.divided():
            return self
        mine = [[sums.get(kind, 0.0) for kind in kinds] for sums in (self.error, self.size)]
        error, size = processes.summed_(torch.tensor(mine, dtype=torch.float64)).tolist()
        return Tally(dict(zip(kinds, error, strict=True)), dict(zip(kinds, size, strict=True)))

    def relative(self) -> dict[str, float]:
        """Relative error of each kind: the root of error / size."""
        return {kind: (self.error[kind] / self.size[kind]) ** 0.5 if self.size[kind] else 0.0 for kind in self.error}

    def overall(self) -> float:
        """The mean of the kinds' relative errors."""
        found = self.relative().values()
        return sum(found) / len(found) if found else 0.0


@dataclass(frozen=True)
class Choice:
    """The solution that was taken.

    Attributes:
        ridge: relative to the mean diagonal; None = the modules are left as they were.
        before: errors on the sequences held back, with the modules as they were.
        after: the same with the solution on the other sequences.
    """

    ridge: float | None
    before: Tally
    after: Tally


Solutions = Callable[[Sequence[float]], Iterator[tuple[float, Callable[[], None]]]]
"""(ridges) -> (ridge, a function that puts its solution into the modules) for each that has one."""


def choose(
    projections: Sequence[Projection],
    solutions: Solutions,
    ridges: Sequence[float],
    error: Callable[[], Tally],
    add_judges: Callable[[], None],
) -> Choice:
    """Try solutions one after the other, and keep the one with the smallest error on the sequences held back.

    The error of a solution is the mean over the kinds of text of its squared error relative to that of the modules as
    they were. A solution that makes any kind worse is not taken, so that leaving everything as it was can win. With the
    ridge that is best, the system is then solved on all sequences.

    Args:
        projections: what the solutions change.
        solutions: of the system as it stands.
        ridges: candidates.
        error: of the modules as they are, on the sequences held back.
        add_judges: adds the sequences held back to the system, with the modules as they were.
    """
    before = error()
    best: tuple[float, float, Tally] | None = None
    for ridge, apply in solutions(ridges):
        apply()
        found = error()
        score = _score(before, found)
        if score is not None and (best is None or score < best[0]):
            best = score, ridge, found
    for projection in projections:
        projection.restore()
    if best is None:
        return Choice(None, before, before)
    add_judges()
    for _, apply in solutions([best[1]]):
        apply()
    return Choice(best[1], before, best[2])


def _score(before: Tally, after: Tally) -> float | None:
    """Mean over the kinds of new squared error / old; None where one kind gets worse, or none better."""
    pairs = [(after.error[kind], error) for kind, error in before.error.items()]
    if not all(new <= old for new, old in pairs) or all(new == old for new, old in pairs):
        return None
    return sum(new / old if old else 1.0 for new, old in pairs) / len(pairs)


def joint_solutions(
    equations: NormalEquations, projections: Sequence[Projection], ridges: Sequence[float]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Solutions of projections whose outputs add up: their inputs stand side by side in one system.

    A constant is one bias for all of them; the first projection with a bias carries it.
    """
    carrier = next((projection for projection in projections if projection.has_bias), None)
    sizes = [projection.inputs for projection in projections]
    for ridge in ridges:
        found = equations.solve(ridge)
        if found is None:
            continue
        bias = found[-1] if equations.constant else None
        weights = found[: sum(sizes)].split(sizes)
        yield ridge, _mover([(p, w, bias if p is carrier else None) for p, w in zip(projections, weights, strict=True)])


def parallel_solutions(
    equations: NormalEquations, projections: Sequence[Projection], ridges: Sequence[float]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Solutions of projections that read the same input: their outputs stand side by side in one system."""
    inputs, sizes = projections[0].inputs, [projection.outputs for projection in projections]
    for ridge in ridges:
        found = equations.solve(ridge)
        if found is None:
            continue
        weights = found[:inputs].split(sizes, dim=1)
        biases = found[-1].split(sizes) if equations.constant else [None] * len(sizes)
        yield ridge, _mover(list(zip(projections, weights, biases, strict=True)))


def _mover(changes: list[tuple[Projection, Tensor, Tensor | None]]) -> Callable[[], None]:
    def apply() -> None:
        for projection, weight, bias in changes:
            projection.move(weight, bias)

    return apply
