"""Walk a dense model and its cut side by side over calibration text, and solve the writers to the cut stream.

Two streams and one layer at a time; see :mod:`pyprune.cut.reconstruct` for the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from pyprune.cut.experts import writers_of
from pyprune.cut.least_squares import BlockEquations, NormalEquations
from pyprune.cut.projections import (
    Choice,
    Gain,
    Projection,
    Solutions,
    Tally,
    best_solution,
    choose,
    joint_solutions,
    parallel_solutions,
    put_solution,
)
from pyprune.cut.sides import Chunk, CutSide
from pyprune.cut.steps import Step
from pyprune.cut.systems import SMALLEST, Readers, Writers
from pyprune.errors import UnsupportedModelError
from pyprune.families.base import Block
from pyprune.families.mixtures import experts_read
from pyprune.probe.streams import LayerRunner, Part, record_calls
from pyprune.runtime import processes

ROUNDS = 3
"""Most rounds of the writers and of the gain of the norm after them."""
GAIN_RIDGE = 0.01
"""Ridge of a gain's system, relative to the mean of its diagonal."""
SMALLEST_GAIN = 0.05
"""A writer's target is divided by the gain, and by no less than this share of the gains' mean size."""
USED = "used"
"""The kind under which the errors of the sequences that are solved on are summed."""


@dataclass(frozen=True)
class SolvedPart:
    """Result of one system. Errors are relative: ||target - stream|| / ||target||, over tokens.

    Attributes:
        layer: dense index.
        blocks: the blocks that were solved together.
        role: writers, with the error of the stream after them; or readers, with the error of their output.
        ridge: the chosen one (of the last round); None = the weights were kept, because no candidate was better.
        before: mean error over the kinds of text, on sequences held back, with the modules as they were; the parts
            before this one are already reconstructed.
        after: that error with the solution on the other sequences.
        kinds: (before, after) for each kind of text.
        used: (before, after) on the sequences that were solved on, all kinds together; None for readers.
        rounds: of the writers and the gain of the norm after them; 0 = the gain alone was solved; None = no norm
            follows, or its gain was kept as well.
    """

    layer: int
    blocks: tuple[str, ...]
    role: str
    ridge: float | None
    before: float
    after: float
    kinds: dict[str, tuple[float, float]]
    used: tuple[float, float] | None
    rounds: int | None = None

    @property
    def taken(self) -> bool:
        """Check whether anything was changed."""
        return self.ridge is not None or self.rounds is not None


@dataclass
class Walk:
    """Both models at the same point of the same text.

    Args:
        dense: the dense model.
        cut: the cut one.
        chunks: the text, with the dense stream that enters the first layer; of several processes the share of this one.
        ridges: candidates, relative to the mean diagonal.
        multiplier: factor on a block's output before it joins the stream (Granite).
        relative: whether a token's error counts relative to the size of its stream.
        judging: kinds of text that are held back in all processes; only used if several share the text.
        dense_experts: experts that a token of the dense model reads; None = as many as its configuration says.

    Attributes:
        extra_bytes: most memory held in addition to the models.
        reports: the solved systems.
        not_solved: parts with experts that could not be solved.
    """

    held_bytes = 2**30
    """Most bytes of one step's writers' inputs that are held for the sequences that are solved on, so that the cut
    stream passes the step without computing them again."""

    dense: LayerRunner
    cut: CutSide
    chunks: Sequence[Chunk]
    ridges: Sequence[float]
    multiplier: float
    relative: bool
    judging: Sequence[str] = ()
    dense_experts: int | None = None
    extra_bytes: int = 0
    reports: list[SolvedPart] = field(default_factory=list)
    not_solved: list[Part] = field(default_factory=list)

    def begin(self) -> None:
        """Start the cut stream."""
        for chunk in self.chunks:
            chunk.cut = self.cut.begin(chunk)

    def advance_dense(self, parts: Sequence[Part]) -> None:
        """Take the dense stream past parts of the dense model."""
        for part in parts:
            with self.dense.layer(part.layer) as layer:
                for chunk in self.chunks:
                    chunk.dense = self._run_dense(layer, part, chunk.dense)

    def _run_dense(self, layer: nn.Module, part: Part, stream: Tensor) -> Tensor:
        with experts_read(self.dense.model.config, layer, self.dense_experts):
            return self.dense.run(layer, part, stream)

    def advance_to_target(self, step: Step, solving: nn.Module | None = None) -> None:
        """Take the dense stream past a step and the removed parts after it, to the target of the step's writers.

        Args:
            step: where both streams stand.
            solving: the cut model's layer, whose readers are solved on the way to give the dense model's values from
                the cut stream; None = they are not solved.
        """
        systems: list[Readers] = []
        if solving is not None:
            groups = self.cut.readers(step, solving).items()
            systems = [Readers(self.cut, step, solving, block, group, self.judging) for block, group in groups]
        names = [p.name for system in systems for p in system.projections]
        with self.dense.layer(step.part.layer) as layer:
            for chunk in self.chunks:
                with record_calls({name: layer.get_submodule(name) for name in names}) as seen:
                    chunk.dense = self._run_dense(layer, step.part, chunk.dense)
                    outputs = {name: chunk.tokens(output) for name, (_, output) in seen.items()}
                for system in systems:
                    system.add(chunk, outputs)
        self._count_readers(systems)
        for system in systems:
            self._solve_readers(step, system)
        self.advance_dense(step.absorbs)

    def advance_cut(self, step: Step, layer: nn.Module) -> None:
        """Take the cut stream past a step in which nothing is solved."""
        for chunk in self.chunks:
            chunk.cut = self.cut.run(layer, step.cut_part, cast(Tensor, chunk.cut))

    def solve_writers(self, step: Step, layer: nn.Module) -> None:
        """Solve the writers of a step for the dense stream where it stands now, and take the cut stream past it."""
        try:
            writers = writers_of(self.cut, step, layer, self.multiplier, self.held_bytes)
            solve = self._solve_sum if writers.gain is None else self._solve_in_turns
            error, choice = solve(writers)
        except UnsupportedModelError:
            if not self.cut.is_mixture(step):
                raise
            self.not_solved.append(step.part)
            self.advance_cut(step, layer)
            return
        if choice.taken:
            self.cut.remember(writers.solved)
        after = self._advance_past(writers)
        before = Tally({USED: error}, after.size) if choice.taken else after
        self._report(step, step.writers, choice, (before.overall(), after.overall()))

    def _solve_sum(self, writers: Writers) -> tuple[float, Choice]:
        """Solve writers that add to the stream.

        Returns:
            Their squared error before, on the sequences that are solved on, and the choice.
        """
        projections = writers.projections
        equations = self._equations(writers, projections)
        error = equations.error()
        solutions = partial(joint_solutions, equations, projections)
        errors = partial(self._errors, writers, held_back=True)
        choice = choose(projections, solutions, self.ridges, errors, partial(self._gather, writers, equations, True))
        self._count(equations, projections, writers.held)
        return error, choice

    def _solve_in_turns(self, writers: Writers) -> tuple[float, Choice]:
        """Solve a writer and the gain of the norm after it in turns: the gain, then rounds of the writer and the gain.

        The pair with the least error on the sequences held back is kept, and its last round is solved on all sequences.

        Returns:
            The pair's squared error before, on the sequences that are solved on, and the choice.
        """
        error = self._errors(writers, held_back=False).error[USED]
        errors = partial(self._errors, writers, held_back=True)
        before = errors()
        best, choice = 1.0, Choice(None, before, before)
        start = now = writers.solved
        for rounds in range(ROUNDS + 1):
            solutions = self._round(writers, now, rounds)
            solution = best_solution(before, solutions, self.ridges if rounds else [0.0], errors)
            if solution is not None:
                score, ridge, after = solution
                put_solution(solutions, ridge)
                if score < best:
                    best, start, choice = score, now, Choice(ridge, before, after, rounds)
            elif rounds:
                break
            now = writers.save()
        for module in start:
            module.restore()
        if choice.rounds is not None and choice.ridge is not None:
            put_solution(self._round(writers, start, choice.rounds, everything=True), choice.ridge)
        return error, choice if choice.rounds else replace(choice, ridge=None)

    def _round(
        self, writers: Writers, start: Sequence[Projection | Gain], number: int, *, everything: bool = False
    ) -> Solutions:
        """Return the solutions of a round: of the writers (but in round 0), with the gain that belongs to each.

        Args:
            writers: with the parameters at the start of the round.
            start: these, saved.
            number: of the round.
            everything: whether the sequences held back are solved on as well.
        """
        projections = [module for module in start if isinstance(module, Projection)]
        solve_gain = partial(self._solve_gain, writers, cast(Gain, start[-1]), everything=everything)
        if not number:
            return lambda ridges: ((ridge, solve_gain) for ridge in ridges)
        equations = self._equations(writers, projections)
        if everything:
            self._gather(writers, equations, True)
        # The parameters are saved three times: before, at the start of the best round, and of this one.
        self._count(equations, 3 * [*projections], writers.held)

        def both(put_writers: Callable[[], None]) -> None:
            put_writers()
            solve_gain()

        return lambda ridges: ((r, partial(both, put)) for r, put in joint_solutions(equations, projections, ridges))

    def _solve_gain(self, writers: Writers, start: Gain, *, everything: bool) -> None:
        """Solve the gain for the writers as they are now: one equation for each channel."""
        sums = torch.zeros(2, len(start.weight), dtype=torch.float64, device=start.weight.device)
        for chunk in self.chunks:
            if everything or not chunk.held_back:
                residual, weight = self._residual(writers, chunk)
                normalised, _ = writers.normalised(chunk)
                if weight is not None:
                    residual, normalised = residual * weight[:, None], normalised * weight[:, None]
                sums += torch.stack([(normalised * t).sum(0, dtype=torch.float64) for t in (residual, normalised)])
        product, size = processes.summed_(sums) if processes.is_divided() else sums
        penalty = GAIN_RIDGE * size.mean().clamp(min=SMALLEST)
        start.put((product + penalty * start.values) / (size + penalty))

    def _equations(self, writers: Writers, projections: Sequence[Projection]) -> NormalEquations | BlockEquations:
        """Return the writers' equations on the sequences that are not held back."""
        equations = writers.equations(projections)
        self._gather(writers, equations, False)
        return equations

    def _errors(self, writers: Writers, *, held_back: bool) -> Tally:
        """Return the errors of the writers as they are, on the sequences held back or on the others."""
        tally = Tally()
        for chunk in self.chunks:
            if chunk.held_back == held_back:
                tally.add(chunk.kind if held_back else USED, *self._error(chunk, writers.stream_after(chunk)))
        return tally.over_processes(self.judging if held_back else [USED])

    def _advance_past(self, writers: Writers) -> Tally:
        """Take the cut stream past solved writers; return the errors on the sequences that are solved on."""
        tally = Tally()
        for chunk in self.chunks:
            chunk.cut = writers.stream_after(chunk)
            if not chunk.held_back:
                tally.add(USED, *self._error(chunk, chunk.cut))
        return tally.over_processes([USED])

    def _gather(self, writers: Writers, equations: NormalEquations | BlockEquations, held_back: bool) -> None:
        """Add the sequences held back, or the others, to the equations: the writers' inputs, and their targets."""
        for chunk in self.chunks:
            if chunk.held_back == held_back:
                target, weight = self._residual(writers, chunk)
                if writers.gain is not None:
                    # The norm takes y to gain * y / divisor, here with the divisor of the writers as they are.
                    _, divisor = writers.normalised(chunk)
                    target = target / writers.gain.floored(SMALLEST_GAIN) * divisor
                    weight = (1.0 if weight is None else weight) / divisor.squeeze(-1)
                writers.add_to(equations, chunk, target, weight)
        equations.forget_sums()

    def _residual(self, writers: Writers, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Return the output that a step's block lacks, float32 [tokens, H'], and the weight of each token's error."""
        target = chunk.tokens(self.cut.target(chunk.dense)) / writers.scale
        residual, weight = target - chunk.tokens(cast(Tensor, chunk.cut)), self._weight(target)
        if self.multiplier != 1.0:
            residual = residual / self.multiplier
            weight = torch.full_like(residual[:, 0], self.multiplier) if weight is None else weight * self.multiplier
        return residual, weight

    def _count_readers(self, systems: Sequence[Readers]) -> None:
        """Count the memory of a step's systems, which are filled at the same time."""
        if systems:
            *others, last = systems
            extra = [t for s in systems for t in s.held] + [t for s in others for t in s.equations.tensors]
            self._count(last.equations, [p for s in systems for p in s.projections], extra)

    def _solve_readers(self, step: Step, system: Readers) -> None:
        solutions = partial(parallel_solutions, system.equations, system.projections)
        choice = choose(system.projections, solutions, self.ridges, system.error, system.add_judges)
        if choice.ridge is not None:
            self.cut.remember(system.projections)
        self._report(step, (system.block,), choice, None)

    def _report(self, step: Step, blocks: tuple[Block, ...], choice: Choice, used: tuple[float, float] | None) -> None:
        before, after = choice.before.relative(), choice.after.relative()
        report = SolvedPart(
            layer=step.part.layer,
            blocks=blocks,
            role="readers" if used is None else "writers",
            ridge=choice.ridge,
            before=choice.before.overall(),
            after=choice.after.overall(),
            kinds={kind: (before[kind], after[kind]) for kind in before},
            used=used,
            rounds=choice.rounds,
        )
        self.reports.append(report)

    def _weight(self, target: Tensor) -> Tensor | None:
        """Return the weight of each token's error, float32 [tokens]; None = all alike."""
        return 1 / target.square().mean(-1).sqrt().clamp(min=SMALLEST) if self.relative else None

    def _error(self, chunk: Chunk, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted squared sums of a stream's error, and of its target."""
        target = chunk.tokens(self.cut.target(chunk.dense))
        residual, weight = target - chunk.tokens(out), self._weight(target)
        squares = [t.square().sum(-1) for t in (residual, target)]
        error, size = ((s if weight is None else s * weight.square()).sum(dtype=torch.float64) for s in squares)
        return error, size

    def _count(
        self, equations: NormalEquations | BlockEquations, projections: Sequence[Projection], extra: Sequence[Tensor]
    ) -> None:
        """Count the memory that is held at a time."""
        held = sum(chunk.nbytes for chunk in self.chunks) + sum(p.nbytes for p in projections) + equations.nbytes
        self.extra_bytes = max(self.extra_bytes, held + sum(tensor.nbytes for tensor in extra))


def chunks_of(
    ids: Tensor, real: Tensor, kinds: Sequence[str], share: float, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, str, bool]]:
    """Divide sequences into chunks of one kind each, which are held back or not.

    Of every kind, every n-th sequence is held back, and at least one of two.

    Yields:
        (ids, real, kind, held back).
    """
    for held_back in (False, True):
        for kind, rows in _rows(kinds).items():
            chosen = set(_pick_evenly(rows, share))
            mine = torch.tensor([row for row in rows if (row in chosen) == held_back], dtype=torch.int64)
            for batch in mine.split(batch_size):
                if len(batch):
                    yield ids[batch], real[batch], kind, held_back


def _rows(kinds: Sequence[str]) -> Mapping[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, kind in enumerate(kinds):
        rows.setdefault(kind, []).append(row)
    return rows


def _pick_evenly(rows: list[int], share: float) -> list[int]:
    """Choose evenly spaced rows, so that they come from all parts of a text."""
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    return [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]
