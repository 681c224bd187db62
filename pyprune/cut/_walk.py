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
from pyprune.errors import UnsupportedModelError
from pyprune.families.base import Block
from pyprune.probe.streams import LayerRunner, Part, listening

_SMALLEST = 1e-12
_ADDITION_ERROR = 0.02
"""Largest relative difference between a stream and the sum of what was written to it that bfloat16 explains."""


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
        chunks: the text, with the dense stream that enters the first layer.
        ridges: candidates, relative to the mean diagonal.
        multiplier: what a block's output is multiplied by before it joins the stream (Granite).
        relative: whether a token's error counts relative to the size of its stream.
    """

    def __init__(
        self,
        dense: LayerRunner,
        cut: CutSide,
        chunks: Sequence[Chunk],
        *,
        ridges: Sequence[float],
        multiplier: float,
        relative: bool,
    ) -> None:
        self.dense = dense
        self.cut = cut
        self.chunks = chunks
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

    def advance_to_target(self, step: Step) -> None:
        """Take the dense stream past a step and the removed parts behind it: to what the step's writers solve for."""
        writer = self.cut.normed_writer(step)
        if writer is None:
            self.advance_dense([step.part, *step.absorbs])
            return
        with self.dense.layer(step.part.layer) as layer:
            for chunk in self.chunks:
                with listening({writer: layer.get_submodule(writer)}) as seen:
                    chunk.dense = self.dense.run(layer, step.part, chunk.dense)
                    written = chunk.tokens(seen[writer][1]).float()
                chunk.divisor = written.square().mean(-1, keepdim=True).sqrt().clamp(min=_SMALLEST)
        self.advance_dense(step.absorbs)

    def advance_cut(self, step: Step, layer: nn.Module) -> float:
        """Take the cut stream past a step; the relative error on the sequences that are solved on."""
        tally = Tally()
        for chunk in self.chunks:
            chunk.cut = self.cut.run(layer, step.part, cast(Tensor, chunk.cut))
            if not chunk.held_back:
                tally.add("used", *self._error(chunk, chunk.cut)[2:])
        return tally.overall()

    def solve_writers(self, step: Step, layer: nn.Module) -> None:
        """Solve the writers of a step for the dense stream where it stands now, and take the cut stream past it."""
        projections = self.cut.writers(step, layer)
        constant = any(p.has_bias for p in projections)
        equations = self._equations(sum(p.inputs for p in projections), projections[0].outputs, constant, projections)
        before = Tally()

        def gather(held_back: bool) -> None:
            for i, chunk in enumerate(chunk for chunk in self.chunks if chunk.held_back == held_back):
                self._gather(step, layer, projections, chunk, equations, before, check=not i)

        def error() -> Tally:
            tally = Tally()
            for chunk in self.chunks:
                if chunk.held_back:
                    out = self.cut.run(layer, step.part, cast(Tensor, chunk.cut))
                    tally.add(chunk.kind, *self._error(chunk, out)[2:])
            return tally

        gather(False)
        solutions = partial(joint_solutions, equations, projections)
        choice = choose(projections, solutions, self.ridges, error, partial(gather, True))
        if choice.ridge is not None:
            self.cut.solved(projections)
        after = self.advance_cut(step, layer)
        self.reports.append(Solved(step.part, step.writers, "writers", choice, (before.overall(), after)))

    def _gather(
        self,
        step: Step,
        layer: nn.Module,
        projections: Sequence[Projection],
        chunk: Chunk,
        equations: NormalEquations,
        before: Tally,
        *,
        check: bool,
    ) -> None:
        """Add a chunk to the equations: what the writers read, and what the stream lacks behind them."""
        stream = cast(Tensor, chunk.cut)
        with listening({p.name: p.module for p in projections}) as seen:
            out = self.cut.run(layer, step.part, stream)
            x = torch.cat([chunk.tokens(p.read(seen[p.name][0])) for p in projections], dim=1).float()
            written = sum(seen[p.name][1].reshape(out.shape).float() for p in projections)
        residual, weight, error, size = self._error(chunk, out)
        if not chunk.held_back:
            before.add("used", error, size)
        lacking = projections[0].written(residual)
        gain = self.cut.gain(step, layer)
        written = cast(Tensor, written)
        if gain is None:
            if check:
                self._check_addition(step, stream, out, written)
            equations.add(x, lacking / self.multiplier, weight * self.multiplier)
            return
        # The norm behind the writer takes y to gain * y / divisor. With the dense model's divisor, y should be
        # (t - h) / gain * divisor; what the dense writer itself wrote, where nothing is removed up to the next part.
        divisor = cast(Tensor, chunk.divisor)
        gain = projections[0].written(gain)
        target = projections[0].written(chunk.tokens(self.cut.target(chunk.dense) - stream.float()))
        target = torch.where(gain.abs() > _SMALLEST, target / gain, torch.zeros_like(target)) * divisor
        lacking = target - projections[0].written(chunk.tokens(written))
        equations.add(x, lacking, weight / divisor.squeeze(-1))

    def _check_addition(self, step: Step, stream: Tensor, out: Tensor, written: Tensor) -> None:
        """Refuse a layer that does something else with its writer's output than to add it to the stream."""
        expected = stream.float() + self.multiplier * written
        if float((out.float() - expected).norm()) > _ADDITION_ERROR * float(expected.norm()):
            raise UnsupportedModelError(
                f"{step.part} of this {self.dense.family.model_type!r} model does not add the output of its "
                "projections to the stream, so that they cannot be solved for. Cut it without reconstruction."
            )

    def solve_readers(self, step: Step, layer: nn.Module) -> None:
        """Solve the readers of a step to give the dense model's values from the cut stream."""
        for block, projections in zip(step.writers, self.cut.readers(step, layer), strict=True):
            self._solve_readers(step, layer, block, projections)

    def _solve_readers(self, step: Step, layer: nn.Module, block: Block, projections: Sequence[Projection]) -> None:
        constant = all(p.has_bias for p in projections)
        equations = self._equations(projections[0].inputs, sum(p.outputs for p in projections), constant, projections)
        judges: list[tuple[str, Tensor, list[Tensor]]] = []

        def add(x: Tensor, targets: Sequence[Tensor]) -> None:
            lacking = torch.cat(_lacking(projections, x, targets), dim=1)
            equations.add(projections[0].read(x), lacking, torch.ones(len(x), device=x.device))

        def add_judges() -> None:
            for _, x, targets in judges:
                add(x, targets)

        for chunk in self.chunks:
            x, targets = self._read(step, layer, projections, chunk)
            if chunk.held_back:
                judges.append((chunk.kind, x, targets))
            else:
                add(x, targets)
        self._count(equations, projections, [t for _, x, targets in judges for t in (x, *targets)])

        def error() -> Tally:
            tally = Tally()
            for kind, x, targets in judges:
                # Every module counts alike, whatever the size of its outputs.
                pairs = zip(_lacking(projections, x, targets), targets, strict=True)
                shares = [r.square().sum() / t.square().sum().clamp(min=_SMALLEST) for r, t in pairs]
                tally.add(kind, torch.stack(shares).mean() * len(x), torch.tensor(len(x)))
            return tally

        solutions = partial(parallel_solutions, equations, projections)
        choice = choose(projections, solutions, self.ridges, error, add_judges)
        if choice.ridge is not None:
            self.cut.solved(projections)
        self.reports.append(Solved(step.part, (block,), "readers", choice, None))

    def _read(
        self, step: Step, layer: nn.Module, projections: Sequence[Projection], chunk: Chunk
    ) -> tuple[Tensor, list[Tensor]]:
        """What the readers of the cut model are given [tokens, in], and what each should make of it, float32.

        Runs both models over the part; the streams stay where they are.
        """
        with self.dense.layer(step.part.layer) as dense:
            wanted = {p.name: dense.get_submodule(p.name) for p in projections}
            with listening(wanted) as seen:
                self.dense.run(dense, step.part, chunk.dense)
                targets = [p.wanted(chunk.tokens(seen[p.name][1]).float()) for p in projections]
        with listening({p.name: p.module for p in projections}) as seen:
            self.cut.run(layer, step.part, cast(Tensor, chunk.cut))
            return chunk.tokens(seen[projections[0].name][0]), targets

    def _error(self, chunk: Chunk, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the stream lacks [tokens, H'], the weight of each token, and the squared sums of error and target."""
        target = chunk.tokens(self.cut.target(chunk.dense))
        residual = target - chunk.tokens(out).float()
        if self.relative:
            weight = 1 / target.square().mean(-1).sqrt().clamp(min=_SMALLEST)
        else:
            weight = torch.ones(len(target), device=target.device)
        squares = weight.square()
        return (
            residual,
            weight,
            (residual.square().sum(-1) * squares).sum(dtype=torch.float64),
            (target.square().sum(-1) * squares).sum(dtype=torch.float64),
        )

    def _equations(
        self, inputs: int, outputs: int, constant: bool, projections: Sequence[Projection]
    ) -> NormalEquations:
        equations = NormalEquations(inputs, outputs, constant=constant, device=self.chunks[0].dense.device)
        self._count(equations, projections)
        return equations

    def _count(
        self, equations: NormalEquations, projections: Sequence[Projection], beside: Sequence[Tensor] = ()
    ) -> None:
        """Count what is held at a time."""
        held = sum(chunk.nbytes for chunk in self.chunks) + sum(p.nbytes for p in projections) + equations.nbytes
        self.extra_bytes = max(self.extra_bytes, held + sum(tensor.nbytes for tensor in beside))


def _lacking(projections: Sequence[Projection], x: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """What the outputs of modules that read x [tokens, in] lack, float32 [tokens, kept outputs] each."""
    return [t - p.written(p.module(x)).float() for p, t in zip(projections, targets, strict=True)]


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
