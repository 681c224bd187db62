"""The order in which a cut model writes to its stream, and the writer that replaces each removed part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyprune.families import Family
from pyprune.families.base import Block, is_mixture
from pyprune.plan import LayerPlan, PrunePlan
from pyprune.probe.streams import Part, parts_of


@dataclass(frozen=True)
class Step:
    """A part of a kept layer that still writes to the stream.

    Attributes:
        part: as it is in the dense model.
        cut_part: as it is in the cut model, where it may be the last one of its layer.
        writers: its blocks that the plan keeps.
        absorbs: removed parts between it and the next step, in order; its writers take over their output.
        exact: nothing is removed or read less up to here, so that the cut model's stream after it is the dense one's.
    """

    part: Part
    cut_part: Part
    writers: tuple[Block, ...]
    absorbs: tuple[Part, ...]
    exact: bool


def steps_of(family: Family, plan: PrunePlan, *, fewer_experts: bool = False) -> tuple[list[Step], list[Part]]:
    """Return the steps of a plan, and the removed parts before the first of them, which no writer can take over.

    Args:
        family: of the dense model.
        plan: the parts to keep.
        fewer_experts: whether tokens of the cut model read fewer experts than those of the dense one.
    """
    layers = {layer.index: layer for layer in plan.layers}
    kept: list[tuple[Part, tuple[Block, ...], list[Part]]] = []
    lost: list[Part] = []
    for index in range(plan.dense.num_layers):
        for part in parts_of(family, index, tuple(plan.dense.blocks(index))):
            writers = _writers(part, layers.get(index))
            if writers:
                kept.append((part, writers, []))
            else:
                (kept[-1][2] if kept else lost).append(part)
    steps: list[Step] = []
    last = {part.layer: part for part, _, _ in kept}
    exact = not lost and not plan.removed_hidden
    for part, writers, absorbs in kept:
        exact = exact and not absorbs and writers == part.blocks and _whole(part, layers[part.layer], plan)
        exact = exact and not (fewer_experts and "mlp" in writers and is_mixture(layers[part.layer].kind))
        cut_part = replace(part, ends=part is last[part.layer])
        steps.append(Step(part, cut_part, writers, tuple(absorbs), exact))
    return steps, lost


def _writers(part: Part, layer: LayerPlan | None) -> tuple[Block, ...]:
    if layer is None:
        return ()
    return tuple(block for block in part.blocks if layer.keeps(block))


def _whole(part: Part, layer: LayerPlan, plan: PrunePlan) -> bool:
    """Check whether the blocks of a part keep all their units."""
    return all(layer.is_whole(block, plan.dense) for block in part.blocks)
