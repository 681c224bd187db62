"""The experts of a mixture as writers: a token's output is the sum over its experts of weight times expert.

With h_j the input of expert j's down projection and g_j its weight in the *cut* model, the writers of all kept experts
and of the shared ones are one system, whose inputs are g_j h_j side by side: zero where a token does not read j. What
else the block writes (biases, shared experts behind a gate of their own) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from pyprune.cut.least_squares import BlockEquations, NormalEquations, Part
from pyprune.cut.projections import ExpertProjection, Projection
from pyprune.cut.sides import Chunk, CutSide
from pyprune.cut.steps import Step
from pyprune.cut.systems import Writers, zeros_of
from pyprune.probe.experts import expert_biases, routed_inputs
from pyprune.probe.streams import record_calls, replaced_forwards

JOINT_INPUTS = 4096
"""Up to this many inputs of all writers of a step, one matrix holds the products of all pairs of them."""


class ExpertWriters(Writers):
    """The writers of a step whose block is a mixture of experts.

    Args:
        cut: as in :class:`Writers`.
        step: as in :class:`Writers`.
        layer: as in :class:`Writers`.
        multiplier: as in :class:`Writers`.
        room: as in :class:`Writers`.
    """

    def __init__(self, cut: CutSide, step: Step, layer: nn.Module, multiplier: float, room: int) -> None:
        super().__init__(cut, step, layer, multiplier, room)
        self._routed: dict[Chunk, tuple[list[Part], Tensor]] = {}
        self._experts: Any = next(p.module for p in self.projections if isinstance(p, ExpertProjection))
        self._shared = [p for p in self.projections if not isinstance(p, ExpertProjection)]
        self._blocks = [layer.get_submodule(name) for name in cut.family.block_modules("mlp", layer)]

    @property
    @override
    def held(self) -> list[Tensor]:
        return [t for parts, fixed in self._routed.values() for t in (fixed, *(x for _, x in parts))]

    @override
    def equations(self, projections: Sequence[Projection]) -> NormalEquations | BlockEquations:
        starts = [projection.weight.T for projection in projections]
        if sum(map(len, starts)) > JOINT_INPUTS:
            return BlockEquations(starts)
        return NormalEquations(torch.cat(starts), constant=False)

    @override
    def add_to(self, equations: Any, chunk: Chunk, target: Tensor, weight: Tensor | None) -> None:
        parts, fixed = self._inputs_of(chunk)
        target = target - chunk.tokens(fixed)
        parts = [chunk.places(rows, x) for rows, x in parts]
        if isinstance(equations, BlockEquations):
            equations.add(parts, target, weight)
            return
        sizes = [x.shape[1] for _, x in parts]
        dense = target.new_zeros(len(target), sum(sizes))
        for columns, (rows, x) in zip(dense.split(sizes, 1), parts, strict=True):
            columns[rows] = x.to(dense.dtype)
        equations.add(dense, target, weight)

    @override
    def _written(self, chunk: Chunk) -> Tensor:
        parts, fixed = self._inputs_of(chunk)
        written = fixed.flatten(0, -2).clone()
        for projection, (rows, x) in zip(self.projections, parts, strict=True):
            written.index_add_(0, rows, self._apply(projection, x).to(written.dtype))
        return written.view_as(fixed)

    def _apply(self, projection: Projection, x: Tensor) -> Tensor:
        """Return what a projection writes, without its bias, which is no part of its system."""
        now = projection.now if isinstance(projection, ExpertProjection) else projection.module.weight
        with self.cut.runner.autocast(x):
            return nn.functional.linear(x, now)

    def _inputs_of(self, chunk: Chunk) -> tuple[list[Part], Tensor]:
        """Return the inputs of every writer with the tokens that have them, and what else the block writes [B, T, H'].

        The first call also checks that the layer adds the sum of both to the stream.

        Raises:
            UnsupportedModelError: it does not.
        """
        if chunk in self._routed:
            return self._routed[chunk]
        stream = cast(Tensor, chunk.cut)
        idle: dict[nn.Module, Callable[..., Any]] = {p.module: partial(zeros_of, p) for p in self._shared}
        calls: list[tuple[Tensor, ...]] = []

        def read(*args: Tensor) -> Tensor:
            calls.append(args)
            return torch.zeros_like(args[0])

        with record_calls({p.name: p.module for p in self._shared}) as seen:
            with replaced_forwards({self._experts: read, **idle}):
                fixed = self._of_block(stream)
            shared = [seen[p.name][0].flatten(0, -2) for p in self._shared]
        with self.cut.runner.autocast(stream):
            inputs = dict(routed_inputs(self._experts, calls[0]))
            fixed = fixed + expert_biases(self._experts, calls[0]).view_as(fixed)
        for projection in self._shared:
            fixed = fixed if projection.bias is None else fixed + projection.bias
        everywhere = torch.arange(stream.shape[0] * stream.shape[1], device=stream.device)
        nowhere = everywhere[:0], stream.new_zeros(0, self.projections[0].inputs)
        order = iter(shared)
        found = [
            inputs.get(p.expert, nowhere) if isinstance(p, ExpertProjection) else (everywhere, next(order))
            for p in self.projections
        ]
        if not self._checked:
            self._routed[chunk] = found, fixed
            out = self.cut.run(self.layer, self.step.cut_part, stream)
            written = self._written(chunk)
            del self._routed[chunk]
            rounded = self._apply(self.projections[0], found[0][1]).dtype
            self._check_addition(out, self._add_to_stream(stream, written), rounded)
            self._checked = True
        size = sum(x.nbytes for _, x in found) + fixed.nbytes
        if chunk.held_back or size <= self._room:
            self._routed[chunk] = found, fixed
            self._room -= 0 if chunk.held_back else size
        return found, fixed

    def _of_block(self, stream: Tensor) -> Tensor:
        """Run the layer, and return what the modules of its MLP give together, [B, T, H']."""
        outputs: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if first.numel() == stream.numel():
                outputs.append(first.view_as(stream))

        handles = [block.register_forward_hook(keep) for block in self._blocks]
        try:
            self.cut.run(self.layer, self.step.cut_part, stream)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(outputs).sum(0)


def writers_of(cut: CutSide, step: Step, layer: nn.Module, multiplier: float, room: int) -> Writers:
    """Return the writers of a step; see :class:`Writers`.

    Raises:
        UnsupportedModelError: they are experts whose inputs cannot be read.
    """
    mixture = any(isinstance(p, ExpertProjection) for p in cut.writers(step, layer))
    return (ExpertWriters if mixture else Writers)(cut, step, layer, multiplier, room)
