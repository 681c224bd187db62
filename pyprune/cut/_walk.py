"""A dense model and its cut walk side by side over calibration text, and what writes to the cut stream is solved.

Two streams and one layer at a time; see :mod:`pyprune.cut.reconstruct` for what is solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pyprune.cut._fit import Choice, Projection, Tally, choose, joint_solutions, parallel_solutions
from pyprune.cut._least_squares import NormalEquations
from pyprune.cut._sides import Chunk, CutSide
from pyprune.cut._steps import Step
from pyprune.cut._systems import SMALLEST, Behind, Readers, Writers
from pyprune.errors import UnsupportedModelError
from pyprune.families.base import Block
from pyprune.probe.streams import LayerRunner, Part, listening

_USED = "used"
_ADDITION_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference between a stream and the sum of what was written to it that rounding explains; of half
types 0.02."""


@dataclass(frozen=True)
class Solved:
    """One system: what it was for, and what came out.

    Attributes:
        part: where in the dense model.
        blocks: whose modules were solved together.
        role: writers or readers.
        choice: the solution and the errors on the sequences held back.
        used: the same errors on the sequences that were solved on, before and after; None for readers.
    """

    part: Part
    blocks: tuple[Block, ...]
    role: str
    choice: Choice
    used: tuple[float, float] | None


class Walk:
    """Both models at the same point of the same text.

    Args:
        dense: the dense model.
        cut: the cut one.
        chunks: the text, with the dense stream that enters the first layer; of several processes the share of this one.
        ridges: candidates, relative to the mean diagonal.
        multiplier: what a block's output is multiplied by before it joins the stream (Granite).
        relative: whether a token's error counts relative to the size of its stream.
        judging: kinds of text that are held back in all processes; only looked at where several share the text.
    """

    held_bytes = 2**30
    """Most bytes of writers' inputs that are held, of one step, for the sequences that are solved on: the cut stream is
    then taken past the step without computing them again."""

    def __init__(
        self,
        dense: LayerRunner,
        cut: CutSide,
        chunks: Sequence[Chunk],
        *,
        ridges: Sequence[float],
        multiplier: float,
        relative: bool,
        judging: Sequence[str] = (),
    ) -> None:
        self.dense = dense
        self.cut = cut
        self.chunks = chunks
        self.judging = judging
        self.ridges = ridges
        self.multiplier = multiplier
        self.relative = relative
        self.extra_bytes = 0
        self.reports: list[Solved] = []

    def begin(self) -> None:
        """Start the cut stream."""
        for chunk in self.chunks:
            chunk.cut = self.cut.begin(chunk)

    def advance_dense(self, parts: Sequence[Part]) -> None:
        """Take the dense stream past parts of the dense model."""
        for part in parts:
            with self.dense.layer(part.layer) as layer:
                for chunk in self.chunks:
                    chunk.dense = self.dense.run(layer, part, chunk.dense)

    def advance_to_target(self, step: Step, solving: nn.Module | None = None) -> None:
        """Take the dense stream past a step and the removed parts behind it: to what the step's writers solve for.

        Args:
            step: where both streams stand.
            solving: the cut model's layer, whose readers are solved on the way to give the dense model's values from
                the cut stream; None = they stay as they are.
        """
        systems = [] if solving is None else self._readers(step, solving)
        writer = self.cut.normed_writer(step)
        names = [p.name for system in systems for p in system.projections] + ([writer] if writer else [])
        with self.dense.layer(step.part.layer) as layer:
            for chunk in self.chunks:
                with listening({name: layer.get_submodule(name) for name in names}) as seen:
                    chunk.dense = self.dense.run(layer, step.part, chunk.dense)
                    wanted = {name: chunk.tokens(output) for name, (_, output) in seen.items()}
                for system in systems:
                    system.add(chunk, wanted)
                if writer:
                    size = wanted[writer].float().square().mean(-1, keepdim=True)
                    chunk.divisor = size.sqrt().clamp(min=SMALLEST)
        self._count_readers(systems)
        for system in systems:
            self._solve_readers(step, system)
        self.advance_dense(step.absorbs)

    def advance_cut(self, step: Step, layer: nn.Module) -> None:
        """Take the cut stream past a step that nothing is solved in."""
        for chunk in self.chunks:
            chunk.cut = self.cut.run(layer, step.part, cast(Tensor, chunk.cut))

    def solve_writers(self, step: Step, layer: nn.Module) -> None:
        """Solve the writers of a step for the dense stream where it stands now, and take the cut stream past it."""
        writers = Writers(self.cut, step, layer, self.multiplier, self.held_bytes)
        projections = writers.projections
        constant = any(p.has_bias for p in projections)
        equations = self._equations(sum(p.inputs for p in projections), projections[0].outputs, constant)
        before = Tally()

        def gather(held_back: bool) -> None:
            for i, chunk in enumerate(chunk for chunk in self.chunks if chunk.held_back == held_back):
                self._gather(writers, chunk, equations, before, check=not i)
            equations.grown()

        def error() -> Tally:
            tally = Tally()
            for chunk in self.chunks:
                if chunk.held_back:
                    tally.add(chunk.kind, *self._error(chunk, writers.behind(chunk).stream)[2:])
            return tally.over_processes(self.judging)

        gather(False)
        solutions = partial(joint_solutions, equations, projections)
        choice = choose(projections, solutions, self.ridges, error, partial(gather, True))
        self._count(equations, projections, writers.held)
        if choice.ridge is not None:
            self.cut.solved(projections)
        after = self._advance_past(writers)
        used = before.over_processes([_USED]).overall(), after.over_processes([_USED]).overall()
        self.reports.append(Solved(step.part, step.writers, "writers", choice, used))

    def _advance_past(self, writers: Writers) -> Tally:
        """Take the cut stream past solved writers; the errors on the sequences that are solved on."""
        tally = Tally()
        for chunk in self.chunks:
            chunk.cut = writers.behind(chunk).stream
            if not chunk.held_back:
                tally.add(_USED, *self._error(chunk, chunk.cut)[2:])
        return tally

    def _gather(
        self, writers: Writers, chunk: Chunk, equations: NormalEquations, before: Tally, *, check: bool
    ) -> None:
        """Add a chunk to the equations: what the writers read, and what the stream lacks behind them."""
        stream, projections = cast(Tensor, chunk.cut), writers.projections
        behind = writers.behind(chunk)
        x = torch.cat([chunk.tokens(p.read(i)) for p, i in zip(projections, behind.inputs, strict=True)], 1).float()
        residual, weight, error, size = self._error(chunk, behind.stream)
        if check:
            self._check_addition(writers, stream, behind)
        if not chunk.held_back:
            before.add(_USED, error, size)
        if writers.gain is None:
            lacking = projections[0].written(residual)
            equations.add(x, lacking / self.multiplier, weight * self.multiplier)
            return
        # The norm behind the writer takes y to gain * y / divisor. With the dense model's divisor, y should be
        # (t - h) / gain * divisor; what the dense writer itself wrote, where nothing is removed up to the next part.
        divisor = cast(Tensor, chunk.divisor)
        gain = projections[0].written(writers.gain)
        target = projections[0].written(chunk.tokens(self.cut.target(chunk.dense) - stream.float()))
        target = torch.where(gain.abs() > SMALLEST, target / gain, torch.zeros_like(target)) * divisor
        lacking = target - projections[0].written(chunk.tokens(behind.written).float())
        equations.add(x, lacking, weight / divisor.squeeze(-1))

    def _check_addition(self, writers: Writers, stream: Tensor, behind: Behind) -> None:
        """Refuse a layer that does something else with its writer's output than to add it to the stream."""
        expected = writers.joined(stream, behind.written)
        # Autocast rounds what is written, the same way both times.
        allowed = _ADDITION_ERROR.get(behind.stream.dtype, 0.02) * float(expected.float().norm())
        if float((behind.stream.float() - expected.float()).norm()) > allowed:
            raise UnsupportedModelError(
                f"{writers.step.part} of this {self.dense.family.model_type!r} model does not add the output of its "
                "projections to the stream, so that they cannot be solved for. Cut it without reconstruction."
            )

    def _readers(self, step: Step, layer: nn.Module) -> list[Readers]:
        """One system for the readers of each block of a step."""
        device = self.chunks[0].dense.device
        groups = zip(step.writers, self.cut.readers(step, layer), strict=True)
        return [Readers(self.cut, step, layer, block, group, device, self.judging) for block, group in groups]

    def _count_readers(self, systems: Sequence[Readers]) -> None:
        """The systems of a step are filled side by side."""
        if systems:
            *others, last = systems
            beside = [t for s in systems for t in s.held] + [t for s in others for t in s.equations.tensors]
            self._count(last.equations, [p for s in systems for p in s.projections], beside)

    def _solve_readers(self, step: Step, system: Readers) -> None:
        solutions = partial(parallel_solutions, system.equations, system.projections)
        choice = choose(system.projections, solutions, self.ridges, system.error, system.add_judges)
        if choice.ridge is not None:
            self.cut.solved(system.projections)
        self.reports.append(Solved(step.part, (system.block,), "readers", choice, None))

    def _error(self, chunk: Chunk, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the stream lacks [tokens, H'], the weight of each token, and the squared sums of error and target."""
        target = chunk.tokens(self.cut.target(chunk.dense))
        residual = target - chunk.tokens(out).float()
        if self.relative:
            weight = 1 / target.square().mean(-1).sqrt().clamp(min=SMALLEST)
        else:
            weight = torch.ones(len(target), device=target.device)
        squares = weight.square()
        return (
            residual,
            weight,
            (residual.square().sum(-1) * squares).sum(dtype=torch.float64),
            (target.square().sum(-1) * squares).sum(dtype=torch.float64),
        )

    def _equations(self, inputs: int, outputs: int, constant: bool) -> NormalEquations:
        return NormalEquations(inputs, outputs, constant=constant, device=self.chunks[0].dense.device)

    def _count(self, equations: NormalEquations, projections: Sequence[Projection], beside: Sequence[Tensor]) -> None:
        """Count what is held at a time."""
        held = sum(chunk.nbytes for chunk in self.chunks) + sum(p.nbytes for p in projections) + equations.nbytes
        self.extra_bytes = max(self.extra_bytes, held + sum(tensor.nbytes for tensor in beside))


def chunks_of(
    ids: Tensor, real: Tensor, kinds: Sequence[str], share: float, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, str, bool]]:
    """Sequences in chunks of one kind each, which are held back or not.

    Of every kind every n-th sequence is held back, at least one where there are two.

    Yields:
        (ids, real, kind, held back).
    """
    for held_back in (False, True):
        for kind, rows in _rows(kinds).items():
            chosen = set(_spaced(rows, share))
            mine = torch.tensor([row for row in rows if (row in chosen) == held_back], dtype=torch.int64)
            for some in mine.split(batch_size):
                if len(some):
                    yield ids[some], real[some], kind, held_back


def _rows(kinds: Sequence[str]) -> Mapping[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, kind in enumerate(kinds):
        rows.setdefault(kind, []).append(row)
    return rows


def _spaced(rows: list[int], share: float) -> list[int]:
    """Evenly spaced rows, so that they are of all parts of a text."""
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    return [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]
