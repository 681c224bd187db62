"""The modules of a step that are solved together, with their inputs, by which alone solutions are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyprune.cut.least_squares import BlockEquations, NormalEquations
from pyprune.cut.projections import Gain, Projection, Tally, joint_start, parallel_start
from pyprune.cut.sides import Chunk, CutSide
from pyprune.cut.steps import Step
from pyprune.errors import UnsupportedModelError
from pyprune.families.base import Block
from pyprune.probe.streams import record_calls, replaced_forwards

SMALLEST = 1e-12
_ADDITION_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference between a stream and the sum of what was written to it that rounding explains; of half
types 0.02."""


class Writers:
    """The writers of a step in the cut model.

    Only they change while they are solved. So the rest of the layer runs once for each chunk whose inputs of the
    writers are held; the writers are applied once they are solved.

    Args:
        cut: the cut model.
        step: the step that is solved.
        layer: of the cut model.
        multiplier: factor on a block's output before it joins the stream.
        room: bytes of inputs to hold for the sequences that are solved on; those held back are always held, because
            they are looked at for every candidate.

    Attributes:
        projections: the writers.
        gain: of the norm after them, or None.
        scale: the layer multiplies the stream by it after them.
    """

    def __init__(self, cut: CutSide, step: Step, layer: nn.Module, multiplier: float, room: int) -> None:
        self.cut = cut
        self.step = step
        self.layer = layer
        self.multiplier = multiplier
        self.scale = cut.runner.scale(layer, step.cut_part)
        self.projections = cut.writers(step, layer)
        self.gain = cut.gain(step, layer)
        self._room = room
        self._checked = False
        self._inputs: dict[Chunk, list[Tensor]] = {}

    def equations(self, projections: Sequence[Projection]) -> NormalEquations | BlockEquations:
        """Return empty equations of the writers, whose solutions start from these saved values."""
        start, constant = joint_start(projections)
        return NormalEquations(start, constant=constant)

    def add_to(self, equations: Any, chunk: Chunk, target: Tensor, weight: Tensor | None) -> None:
        """Add a chunk to equations of :meth:`equations`.

        Args:
            equations: which these are.
            chunk: with the cut stream in front of the step.
            target: [tokens, H'], what the writers should write.
            weight: of each token's error, float32 [tokens]; None = all alike.
        """
        equations.add(torch.cat([chunk.tokens(x) for x in self.inputs(chunk)], 1), target, weight)

    @property
    def held(self) -> list[Tensor]:
        """The inputs that are held."""
        return [x for inputs in self._inputs.values() for x in inputs]

    @property
    def solved(self) -> list[Projection | Gain]:
        """The writers, and the gain of the norm after them last."""
        return [*self.projections, *([] if self.gain is None else [self.gain])]

    def save(self) -> list[Projection | Gain]:
        """Save the values of :attr:`solved` as they are now."""
        return type(self)(self.cut, self.step, self.layer, self.multiplier, 0).solved

    def inputs(self, chunk: Chunk) -> list[Tensor]:
        """Return the input of each writer, [B, T, in] or [B * T, in]; the chunk's stream is not advanced.

        The first call also applies the writers and checks that the layer adds their outputs to the stream.

        Raises:
            UnsupportedModelError: it does something else with them.
        """
        if chunk in self._inputs:
            return self._inputs[chunk]
        stream = cast(Tensor, chunk.cut)
        idle: Sequence[Projection] = self.projections if self._checked else ()
        forwards: dict[nn.Module, Callable[..., Any]] = {p.module: partial(zeros_of, p) for p in idle}
        with record_calls({p.name: p.module for p in self.projections}) as seen, replaced_forwards(forwards):
            out = self.cut.run(self.layer, self.step.cut_part, stream)
            inputs = [seen[p.name][0] for p in self.projections]
            if not self._checked:
                written = self._sum(stream, [seen[p.name][1] for p in self.projections])
                self._check_addition(out, self._add_to_stream(stream, written), written.dtype)
                self._checked = True
        size = sum(x.nbytes for x in inputs)
        if chunk.held_back or size <= self._room:
            self._inputs[chunk] = inputs
            self._room -= 0 if chunk.held_back else size
        return inputs

    def stream_after(self, chunk: Chunk) -> Tensor:
        """Return the cut stream [B, T, H'] after the writers as they are now; the chunk's stream is not advanced."""
        return self._add_to_stream(cast(Tensor, chunk.cut), self._written(chunk))

    def normalised(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return what the norm after the writers multiplies by its gain, float32 [tokens, H'], and its divisors."""
        y = chunk.tokens(self._written(chunk)).float()
        divisor = cast(Gain, self.gain).divisor(y)
        return y / divisor, divisor

    def _written(self, chunk: Chunk) -> Tensor:
        """Return the sum of the writers' outputs as they are now, [B, T, H']."""
        pairs = zip(self.projections, self.inputs(chunk), strict=True)
        return self._sum(cast(Tensor, chunk.cut), [self.cut.runner.apply(p.module, x) for p, x in pairs])

    @staticmethod
    def _sum(stream: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        return reduce(torch.add, [y.reshape(stream.shape) for y in outputs])

    def _add_to_stream(self, stream: Tensor, written: Tensor) -> Tensor:
        """Add the sum of the writers' outputs to the stream [B, T, H']."""
        if self.gain is not None:
            written = self.cut.runner.apply(self.gain.module, written)
        stream = stream + (written if self.multiplier == 1.0 else written * self.multiplier)
        return stream if self.scale == 1.0 else stream * self.scale

    def _check_addition(self, out: Tensor, expected: Tensor, written: torch.dtype) -> None:
        # Autocast rounds what is written; parallel blocks may be added to each other first, or to the stream.
        allowed = _ADDITION_ERROR.get(written, 0.02) * float(expected.float().norm())
        if float((out.float() - expected.float()).norm()) > allowed:
            raise UnsupportedModelError(
                f"{self.step.part} of this {self.cut.family.model_type!r} model does not add the output of its "
                "projections to the stream, so that they cannot be solved for. Cut it without reconstruction."
            )


def zeros_of(projection: Projection, x: Tensor) -> Tensor:
    """Return zeros in the shape of what a projection writes."""
    return x.new_zeros(*x.shape[:-1], projection.outputs)


@dataclass
class Readers:
    """The readers of one block of a step (q, k, v; gate, up), solved for the dense model's values of the cut stream.

    Args:
        cut: the cut model.
        step: the step that is solved.
        layer: of the cut model.
        block: whose readers these are.
        projections: the readers.
        judging: kinds of text that are held back.
    """

    cut: CutSide
    step: Step
    layer: nn.Module
    block: Block
    projections: Sequence[Projection]
    judging: Sequence[str]

    def __post_init__(self) -> None:
        start, constant = parallel_start(self.projections)
        self.equations = NormalEquations(start, constant=constant)
        self._judges: list[tuple[str, Tensor, list[Tensor]]] = []

    @property
    def held(self) -> list[Tensor]:
        """Inputs and targets of the sequences held back."""
        return [tensor for _, x, targets in self._judges for tensor in (x, *targets)]

    def add(self, chunk: Chunk, outputs: Mapping[str, Tensor]) -> None:
        """Add a chunk to the equations, or keep it if it is held back.

        Args:
            chunk: its cut stream is in front of the step.
            outputs: name of a reader -> its outputs in the dense model, [tokens, dense out].
        """
        x = self._read(chunk)
        targets = [p.target(outputs[p.name]) for p in self.projections]
        if chunk.held_back:
            self._judges.append((chunk.kind, x, targets))
        else:
            self._add(x, targets)

    def add_judges(self) -> None:
        """Add the sequences held back."""
        for _, x, targets in self._judges:
            self._add(x, targets)
        self.equations.forget_sums()

    def error(self) -> Tally:
        """Return the error of the modules as they are on the sequences held back; every module counts alike."""
        tally = Tally()
        for kind, x, targets in self._judges:
            pairs = zip(self._residuals(x, targets), targets, strict=True)
            shares = [r.square().sum() / t.square().sum().clamp(min=SMALLEST) for r, t in pairs]
            tally.add(kind, torch.stack(shares).mean() * len(x), torch.tensor(len(x)))
        return tally.over_processes(self.judging)

    def _add(self, x: Tensor, targets: Sequence[Tensor]) -> None:
        fixed = [] if self.equations.constant else [p.bias for p in self.projections]
        written = [t if bias is None else t - bias for t, bias in zip_longest(targets, fixed)]
        self.equations.add(x, torch.cat(written, dim=1))

    def _residuals(self, x: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
        """Return targets less outputs, float32 [tokens, outputs] each."""
        apply = self.cut.runner.apply  # a norm may give another dtype than the weights have
        pairs = zip(self.projections, targets, strict=True)
        return [t - apply(p.module, x).float() for p, t in pairs]

    def _read(self, chunk: Chunk) -> Tensor:
        """Return the input of the readers, [tokens, in]; the layer runs only as far as the first of them."""
        inputs: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs.append(args[0])
            raise _Reached

        handle = self.projections[0].module.register_forward_pre_hook(stop)
        try:
            with suppress(_Reached):
                self.cut.run(self.layer, self.step.cut_part, cast(Tensor, chunk.cut))
        finally:
            handle.remove()
        return chunk.tokens(inputs[0])


class _Reached(Exception):
    """Stops a layer at its first reader."""
