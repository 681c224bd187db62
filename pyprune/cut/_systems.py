"""The modules of a step that are solved together, with what they read, so that solutions are judged by them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyprune.cut._fit import Projection, Tally
from pyprune.cut._least_squares import NormalEquations
from pyprune.cut._sides import Chunk, CutSide
from pyprune.cut._steps import Step
from pyprune.families.base import Block
from pyprune.probe.streams import listening

SMALLEST = 1e-12


@dataclass(frozen=True)
class Behind:
    """The cut model behind the writers of a step.

    Attributes:
        stream: the cut stream [B, T, H'].
        inputs: what each writer read, [B, T, in] or [B * T, in].
        written: what they wrote together, before a norm behind them, [B, T, H'].
    """

    stream: Tensor
    inputs: list[Tensor]
    written: Tensor


class Writers:
    """The writers of a step in the cut model. Only they change while they are solved for, so the rest of the layer runs
    once for each chunk whose inputs of the writers are held.

    Args:
        cut: the cut model.
        step: what is solved.
        layer: of the cut model.
        multiplier: what a block's output is multiplied by before it joins the stream.
        room: bytes of inputs to hold for the sequences that are solved on; those held back are always held, because
            they are looked at for every candidate.

    Attributes:
        projections: the writers.
        gain: weight of the norm behind them, float32 [H'], or None.
    """

    def __init__(self, cut: CutSide, step: Step, layer: nn.Module, multiplier: float, room: int) -> None:
        self.cut = cut
        self.step = step
        self.layer = layer
        self.multiplier = multiplier
        self.projections = cut.writers(step, layer)
        self.gain = cut.gain(step, layer)
        self._norm = cut.post_norm(step, layer)
        self._room = room
        self._inputs: dict[Chunk, list[Tensor]] = {}

    @property
    def held(self) -> list[Tensor]:
        """The inputs that are held."""
        return [x for inputs in self._inputs.values() for x in inputs]

    def behind(self, chunk: Chunk) -> Behind:
        """The cut model behind the writers as they are now; the chunk's stream stays where it is."""
        stream = cast(Tensor, chunk.cut)
        inputs = self._inputs.get(chunk)
        if inputs is None:
            return self._run(chunk, stream)
        written = self._sum([self.cut.runner.apply(p.module, x) for p, x in self._pairs(inputs)], stream)
        return Behind(self.joined(stream, written), inputs, written)

    def joined(self, stream: Tensor, written: Tensor) -> Tensor:
        """The stream [B, T, H'] after what the writers wrote has joined it."""
        if self._norm is not None:
            written = self.cut.runner.apply(self._norm, written)
        return stream + written * self.multiplier

    def _run(self, chunk: Chunk, stream: Tensor) -> Behind:
        with listening({p.name: p.module for p in self.projections}) as seen:
            out = self.cut.run(self.layer, self.step.part, stream)
            inputs = [seen[p.name][0] for p in self.projections]
            written = self._sum([seen[p.name][1] for p in self.projections], out)
        size = sum(x.nbytes for x in inputs)
        if chunk.held_back or size <= self._room:
            self._inputs[chunk] = inputs
            self._room -= 0 if chunk.held_back else size
        return Behind(out, inputs, written)

    def _pairs(self, inputs: Sequence[Tensor]) -> list[tuple[Projection, Tensor]]:
        return list(zip(self.projections, inputs, strict=True))

    @staticmethod
    def _sum(outputs: Sequence[Tensor], like: Tensor) -> Tensor:
        return reduce(torch.add, [y.reshape(like.shape) for y in outputs])


class Readers:
    """The readers of one block of a step (q, k, v; gate, up), which are to give the dense model's values from what the
    cut model gives them to read.

    Args:
        cut: the cut model.
        step: what is solved.
        layer: of the cut model.
        block: whose readers these are.
        projections: the readers.
        device: of the sums.
        judging: kinds of text that are held back.
    """

    def __init__(
        self,
        cut: CutSide,
        step: Step,
        layer: nn.Module,
        block: Block,
        projections: Sequence[Projection],
        device: torch.device,
        judging: Sequence[str],
    ) -> None:
        self.cut = cut
        self.step = step
        self.layer = layer
        self.block = block
        self.projections = projections
        self._judging = judging
        constant = all(p.has_bias for p in projections)
        outputs = sum(p.outputs for p in projections)
        self.equations = NormalEquations(projections[0].inputs, outputs, constant=constant, device=device)
        self._judges: list[tuple[str, Tensor, list[Tensor]]] = []

    @property
    def held(self) -> list[Tensor]:
        """Inputs and targets of the sequences held back."""
        return [tensor for _, x, targets in self._judges for tensor in (x, *targets)]

    def add(self, chunk: Chunk, wanted: Mapping[str, Tensor]) -> None:
        """Add a chunk to the equations, or keep it if it is held back.

        Args:
            chunk: its cut stream is in front of the step.
            wanted: name of a reader -> what it gives in the dense model, [tokens, dense out].
        """
        x = self._read(chunk)
        targets = [p.wanted(wanted[p.name].float()) for p in self.projections]
        if chunk.held_back:
            self._judges.append((chunk.kind, x, targets))
        else:
            self._add(x, targets)

    def add_judges(self) -> None:
        """Add the sequences held back."""
        for _, x, targets in self._judges:
            self._add(x, targets)
        self.equations.grown()

    def error(self) -> Tally:
        """Of the modules as they are, on the sequences held back; every module counts alike."""
        tally = Tally()
        for kind, x, targets in self._judges:
            pairs = zip(self._lacking(x, targets), targets, strict=True)
            shares = [r.square().sum() / t.square().sum().clamp(min=SMALLEST) for r, t in pairs]
            tally.add(kind, torch.stack(shares).mean() * len(x), torch.tensor(len(x)))
        return tally.over_processes(self._judging)

    def _add(self, x: Tensor, targets: Sequence[Tensor]) -> None:
        lacking = torch.cat(self._lacking(x, targets), dim=1)
        self.equations.add(self.projections[0].read(x), lacking, torch.ones(len(x), device=x.device))

    def _lacking(self, x: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
        """What the outputs lack, float32 [tokens, kept outputs] each."""
        apply = self.cut.runner.apply  # a norm may give another dtype than the weights have
        pairs = zip(self.projections, targets, strict=True)
        return [t - p.written(apply(p.module, x)).float() for p, t in pairs]

    def _read(self, chunk: Chunk) -> Tensor:
        """What the readers are given, [tokens, in]; the layer runs only as far as the first of them."""
        found: list[Tensor] = []

        def reached(module: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])
            raise _Reached

        handle = self.projections[0].module.register_forward_pre_hook(reached)
        try:
            with suppress(_Reached):
                self.cut.run(self.layer, self.step.part, cast(Tensor, chunk.cut))
        finally:
            handle.remove()
        return chunk.tokens(found[0])


class _Reached(Exception):
    """The layer has come to what was wanted."""
