"""Factors that keep a cut exact: of the residual stream, and of a projection that is normalised over its width."""

from __future__ import annotations

import math

from pyprune.families.base import Family, Row, axis_width, kept_indices
from pyprune.plan import LayerPlan, PrunePlan


def stream_factor(row: Row, family: Family, plan: PrunePlan, *, tied: bool) -> float:
    """Return the factor that slicing the hidden axis puts on a tensor (on 1 + w for unit-offset norms).

    See docs/reference/compaction.md: s = sqrt(d'/d) scales the residual stream.
    """
    s = stream_scale(family, plan, tied=tied)
    # Gemma multiplies the embedding by sqrt(hidden_size), which shrinks by s on its own.
    head_scale = s if tied and not family.scaled_embedding else 1.0
    match row.role:
        case "embedding":
            return 1.0 if family.scaled_embedding else s
        case "writer":
            return s
        case "reader":
            return 1 / s if family.reads_raw_stream(row) and not row.by_root else 1.0
        case "pre_norm":
            return 1.0 if row.is_bias else 1 / s
        case "head":
            return 1 / s if family.bare_head else 1.0
        case "final_norm":
            return (1.0 if row.is_bias else 1 / s) / head_scale
        case _:
            return 1.0


def width_factor(row: Row, layer: LayerPlan | None, plan: PrunePlan) -> float:
    """Return the factor that removing heads puts on a projection normalised over its width, and on that norm.

    Over n' of n channels the root mean square grows by sqrt(n/n'). The projection times t = sqrt(n'/n) takes that back,
    exactly, for any epsilon; the norm's weight times 1/t then keeps its output.
    """
    axis = row.dimensions[0][0]
    kept = kept_indices(axis, layer, plan) if row.width_norm else None
    if not kept or layer is None:
        return 1.0
    t = math.sqrt(len(kept) / axis_width(axis, plan.dense, layer.index))
    return t if row.width_norm == "input" else 1 / t


def stream_scale(family: Family, plan: PrunePlan, *, tied: bool) -> float:
    """Return the factor of a cut on the residual stream: s = sqrt(d'/d), or 1 if a virtual LayerNorm is used.

    Args:
        family: of the dense model.
        plan: the parts to keep.
        tied: the head shares the embedding's tensor.
    """
    virtual_norm = family.norm == "layer" and (tied or not family.gauge)
    return 1.0 if virtual_norm else math.sqrt(len(plan.hidden) / plan.dense.hidden_size)
